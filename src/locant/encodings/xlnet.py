"""Dai et al. 2019 (Transformer-XL) and Yang et al. 2019 (XLNet), arXiv:1901.02860, section 3.3.

    e_ij = ((q_i + u) . k_j + (q_i + v) . W_R R(i - j)) / sqrt(D),
    R(p) = [sin(p w) | cos(p w)],   w_c = 10000^(-2c/M)

Note: ``biases=False`` drops u and v (Huang et al. 2020 found training unstable with them); ``layout="interleaved"``
orders the channels of R as other public code does; ``clamp`` limits |i - j| as ``clamp_len`` does.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import Clip, RelativeBias, RelativeQuery, Term


class XLNet(Encoding):
    """A sinusoid of the offset, projected for each layer, met by the query; one bias u for keys and one v for offsets.

    Shapes: projection [H D, M]; content_bias (u), position_bias (v) [H, D], started at 0.
    Acts on: q (q' = q + u) and logits, content-dependent, inside 1/sqrt(D).     Neutral at: all = 0.
    Past any length: defined (or clamped).     Cost: O(M H D (I+J)) once and O(B H I (I+J) D) for each layer.
    Terms see q' = q + u, so v reaches the offsets as the bias (v - u) . W_R R.
    Raises: ValueError for an unknown layout, or clamp < 1.
    """

    name = "xlnet"
    paper = Paper("1901.02860", "section 3.3", "Dai et al. 2019, Yang et al. 2019")
    properties = Properties(
        shift_invariant=True,
        symmetric=False,
        beyond_range="defined",
        layers="separate",
        neutral="projection = u = v = 0",
        content=True,
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        biases: bool = True,
        clamp: int | None = None,
        layout: Literal["halves", "interleaved"] = "halves",
    ) -> None:
        super().__init__()
        if layout not in ("halves", "interleaved"):
            raise ValueError(f"xlnet: unknown layout={layout!r}; choose 'halves' or 'interleaved'")
        if clamp is not None and clamp < 1:
            raise ValueError(f"xlnet: clamp={clamp} tells no offsets apart; give clamp >= 1, or None")
        self.num_heads, self.model_dim, self.clamp, self.layout = num_heads, model_dim, clamp, layout
        self.projection = draw(nn.Parameter(torch.empty(num_heads * head_dim, model_dim)))
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if biases else None
        self.position_bias = nn.Parameter(torch.zeros(num_heads, head_dim)) if biases else None

    def waves(self, span: int) -> Float[Tensor, "R M"]:
        """R(i - j) for offsets j - i = -span .. span, in float64."""
        device = self.projection.device
        channel = torch.arange(0, self.model_dim, 2, dtype=torch.float64, device=device)
        distance = -torch.arange(-span, span + 1, dtype=torch.float64, device=device)
        angle = distance[:, None] * 10000.0 ** (-channel / self.model_dim)
        if self.layout == "halves":
            return torch.cat((angle.sin(), angle.cos()), -1)[:, : self.model_dim]
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[:, : self.model_dim]

    def table(self, span: int) -> Float[Tensor, "H R D"]:
        """W_R R for every offset."""
        projected = self.waves(span).to(self.projection.dtype) @ self.projection.T
        return projected.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H2 J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H2 J D"]]:
        """q + u."""
        return (q if self.content_bias is None else q + self.content_bias[:, None].to(q.dtype)), k

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """q'.a + (v - u).a with a = W_R R(i - j)."""
        rule = Clip(max(positions.span, 1) if self.clamp is None else self.clamp)
        table = self.table(rule.clip)
        terms: tuple[Term, ...] = (RelativeQuery(table, rule),)
        if self.content_bias is not None and self.position_bias is not None:
            difference = self.position_bias - self.content_bias
            terms += (RelativeBias((table @ difference[..., None]).squeeze(-1), rule, scaled=True),)
        return terms

    def neutralize(self) -> None:
        """Projection = u = v = 0."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
