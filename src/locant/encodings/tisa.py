"""Wennberg & Henter 2021 (TISA), translation-invariant self-attention, ACL 2021 (short papers), section 4.

    e_ij = q_i . k_j / sqrt(D) + f_h(j - i),     f_h(k) = sum_s a_sh exp(-|b_sh| (k - c_sh)^2)

Note: the public module returns f(i - j - 1); the paper's orientation is followed. c -> -1 - c converts
(``public_state``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import Clip, RelativeBias, Term


class Tisa(Encoding):
    """A few Gaussian kernels over the offset for each head: 3 S H numbers, defined at every length.

    Shapes: amplitude, sharpness, center [S, H].     Acts on: logits, content-free, unscaled (``scaled=True``: inside).
    Neutral at: amplitude = 0.     Far from every center f tends to 0.     Cost: O(S H (I+J)) exponentials for each
    layer. Raises: ValueError if kernels < 1.
    """

    name = "tisa"
    paper = Paper("ACL 2021.acl-short.18", "section 4", "Wennberg & Henter 2021")
    properties = Properties(
        shift_invariant=True, symmetric=False, beyond_range="defined", layers="separate", neutral="amplitude = 0"
    )

    def __init__(self, num_heads: int, kernels: int = 5, scaled: bool = False) -> None:
        super().__init__()
        if kernels < 1:
            raise ValueError(f"tisa: kernels={kernels} leaves no scoring function; give kernels >= 1 (or use 'none')")
        self.scaled = scaled
        self.amplitude = draw(nn.Parameter(torch.empty(kernels, num_heads)), std=0.01, mean=0.1)
        self.sharpness = draw(nn.Parameter(torch.empty(kernels, num_heads)), std=0.01, mean=0.1)
        self.center = draw(nn.Parameter(torch.empty(kernels, num_heads)), std=5.0)

    def scores(self, offset: Shaped[Tensor, "K"]) -> Float[Tensor, "H K"]:
        """f_h(k) for offsets k, in float32 or wider."""
        wide = self.amplitude.dtype if self.amplitude.dtype == torch.float64 else torch.float32
        a, b, c = (p.to(wide)[..., None] for p in (self.amplitude, self.sharpness, self.center))
        return (a * torch.exp(-b.abs() * (offset.to(wide) - c) ** 2)).sum(0)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """f(j - i)."""
        span = max(positions.span, 1)
        offset = torch.arange(-span, span + 1, device=self.center.device)
        return (RelativeBias(self.scores(offset), Clip(span), scaled=self.scaled),)

    def neutralize(self) -> None:
        """Amplitude = 0."""
        nn.init.zeros_(self.amplitude)

    @staticmethod
    def public_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of the public module (kernel_amplitudes, _sharpness, _offsets) as one of this class."""
        return {
            "amplitude": state["kernel_amplitudes"],
            "sharpness": state["kernel_sharpness"],
            "center": -1 - state["kernel_offsets"],
        }
