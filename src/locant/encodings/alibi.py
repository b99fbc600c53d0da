"""Press, Smith & Lewis 2022 (ALiBi), attention with linear biases, arXiv:2108.12409, section 3.

    e_ij = q_i . k_j / sqrt(D) - m_h |j - i|,     m_h = 2^(-8h/H), h = 1 .. H

Note: the paper is causal (j <= i); the same form with |j - i| serves encoders. A number of heads that is no power of
two takes the slopes of the power below, then every second slope of the power above.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import Term, offset_bias


def slopes(num_heads: int, exponent: float = 8.0) -> list[float]:
    """m_h for each head: positive numbers, subtracted times the distance."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-exponent * (h + 1) / power) for h in range(power)]
    if power == num_heads:
        return first
    return first + slopes(2 * power, exponent)[0::2][: num_heads - power]


class Alibi(Encoding):
    """A penalty that grows with the distance, with a fixed slope for each head.

    Shapes: no parameters (``trainable``: slope [H]).     Acts on: logits, content-free, unscaled.
    Neutral at: slope = 0 (``trainable`` only, and not ``asymmetric``).     Past any length: linear.
    Cost: O(H (I+J)) for each layer.
    ``asymmetric``: the first half of the heads looks left only, the second half right only (an extension for encoders).
    Raises: ValueError if num_heads < 1, or an odd number of heads with ``asymmetric``.
    """

    name = "alibi"
    paper = Paper("2108.12409", "section 3", "Press et al. 2022")
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared")

    def __init__(
        self, num_heads: int, exponent: float = 8.0, trainable: bool = False, asymmetric: bool = False
    ) -> None:
        super().__init__()
        if num_heads < 1 or (asymmetric and num_heads % 2):
            raise ValueError(
                f"alibi: num_heads={num_heads} cannot be served; give >= 1, and an even number if asymmetric"
            )
        self.num_heads, self.exponent, self.asymmetric = num_heads, exponent, asymmetric
        self.slope = nn.Parameter(torch.tensor(slopes(num_heads, exponent))) if trainable else None
        if asymmetric or trainable:
            self.properties = Properties(
                True, not asymmetric, "defined", "shared", neutral=None if asymmetric else "slope = 0"
            )

    def penalties(self, offset: Shaped[Tensor, "..."]) -> Float[Tensor, "H ..."]:
        """-m_h |k| for offsets k; in asymmetric heads far more on the side a head does not look at."""
        if self.slope is None:
            slope = torch.tensor(slopes(self.num_heads, self.exponent), dtype=torch.float64, device=offset.device)
        else:
            slope = self.slope
        heads = (-1, *[1] * offset.dim())
        bias = -slope.view(heads) * offset.abs().to(slope.dtype)
        if self.asymmetric:
            left = torch.arange(self.num_heads, device=offset.device) < self.num_heads // 2
            unseen = torch.where(left.view(heads), offset > 0, offset < 0)
            bias = bias.masked_fill(unseen, -1e4)
        return bias

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """-m |j - i|."""
        return (offset_bias(self.penalties, positions),)

    def neutralize(self) -> None:
        """Slope = 0."""
        if self.slope is None or self.asymmetric:
            return super().neutralize()
        nn.init.zeros_(self.slope)
