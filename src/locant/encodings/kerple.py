"""Chi et al. 2022 (KERPLE), kernelized relative positions, arXiv:2205.09821, section 4.

    log:    e_ij = q_i . k_j / sqrt(D) - r1_h log(1 + r2_h |j - i|),     r1, r2 > 0
    power:  e_ij = q_i . k_j / sqrt(D) - r1_h |j - i|^r2_h,              r1 > 0,  0 < r2 <= 2

Note: the public code clamps both numbers at 0.01 in place on every forward, out of sight of autograd. Here they are the
softplus of free parameters (2 sigmoid for the exponent); ``positivity="clamp"`` clamps in the graph: a number below
0.01 acts as 0.01 and has no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import Term, offset_bias

LEAST = 0.01


class Kerple(Encoding):
    """A penalty that grows with the logarithm (or a power) of the distance, at two learned rates for each head.

    Shapes: r1, r2 [H] (r1 ~ U(0, 2), r2 ~ U(0, 1) at the start).     Acts on: logits, content-free, unscaled.
    Neutral at: nowhere (r1 -> 0).     Past any length: defined.     Cost: O(H (I+J)) for each layer.
    Raises: ValueError for an unknown form or positivity, num_heads < 1.
    """

    name = "kerple"
    paper = Paper("2205.09821", "section 4", "Chi et al. 2022")
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="separate")

    def __init__(
        self,
        num_heads: int,
        form: Literal["log", "power"] = "log",
        positivity: Literal["softplus", "clamp"] = "softplus",
    ) -> None:
        super().__init__()
        if form not in ("log", "power"):
            raise ValueError(f"kerple: unknown form={form!r}; choose 'log' or 'power'")
        if positivity not in ("softplus", "clamp"):
            raise ValueError(f"kerple: unknown positivity={positivity!r}; choose 'softplus' or 'clamp'")
        if num_heads < 1:
            raise ValueError(f"kerple: num_heads={num_heads} leaves nothing to learn; give >= 1")
        self.form, self.positivity = form, positivity
        self.r1 = nn.Parameter(torch.empty(num_heads))
        self.r2 = nn.Parameter(torch.empty(num_heads))
        with torch.no_grad():
            self.set_rates(self.r1.uniform_(0, 2), self.r2.uniform_(0, 1))

    @torch.no_grad()
    def set_rates(self, r1: Float[Tensor, "H"], r2: Float[Tensor, "H"]) -> None:
        """Set the parameters such that `rates` gives these numbers, or 0.01 where they are smaller."""
        r1, r2 = r1.clamp(min=LEAST), r2.clamp(min=LEAST)
        if self.positivity == "softplus":
            r1 = r1.expm1().log()
            r2 = r2.expm1().log() if self.form == "log" else (r2 / 2).logit(1e-6)
        self.r1.copy_(r1)
        self.r2.copy_(r2)

    def rates(self) -> tuple[Float[Tensor, "H"], Float[Tensor, "H"]]:
        """r1 and r2, in float32 or wider."""
        wide = torch.promote_types(self.r1.dtype, torch.float32)
        r1, r2 = self.r1.to(wide), self.r2.to(wide)
        if self.positivity == "clamp":
            return r1.clamp(min=LEAST), r2.clamp(LEAST, 2 if self.form == "power" else None)
        return F.softplus(r1), F.softplus(r2) if self.form == "log" else 2 * r2.sigmoid()

    def penalties(self, offset: Shaped[Tensor, "..."]) -> Float[Tensor, "H ..."]:
        """What is added to the logits at an offset."""
        r1, r2 = (rate.view(-1, *[1] * offset.dim()) for rate in self.rates())
        distance = offset.abs().to(r1.dtype)
        return -r1 * (torch.log1p(r2 * distance) if self.form == "log" else distance**r2)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """-r1 log(1 + r2 |j - i|)."""
        return (offset_bias(self.penalties, positions),)
