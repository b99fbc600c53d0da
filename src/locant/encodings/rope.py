"""Su et al. 2021 (RoFormer), rotary positions, arXiv:2104.09864, eq. 14 to 16.

    e_ij = (R_i q_i) . (R_j k_j) / sqrt(D),     R_p turns channel pair c by the angle p w_c,  w_c = base^(-2c/d)

Note: pairs are (c, c + d/2) with ``layout="halves"`` (Llama), (2c, 2c+1) with ``layout="interleaved"`` (RoFormer).
``factor`` divides the positions: longer input is read at the scale of the trained one (Chen et al. 2023,
arXiv:2306.15595, eq. 4).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from locant.encoding import Encoding, Paper, Properties
from locant.positions import Positions


class Rope(Encoding):
    """Queries and keys turned by an angle that grows with the position; only the offset is left in the product.

    Shapes: no parameters; the first ``rotary_dim`` (default all) of the D channels turn.     Acts on: q and k.
    Neutral at: nowhere (rotary_dim=0 is 'none').     Past any length: defined.     Cost: O(B H (I+J) D).
    Angles are computed in float64 whatever the model's dtype (half precision merges positions).
    Raises: ValueError if rotary_dim is odd, negative or above head_dim, base <= 0, factor <= 0, for an unknown layout.
    """

    name = "rope"
    paper = Paper("2104.09864", "eq. 14-16", "Su et al. 2021")
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared", content=True)

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        layout: Literal["halves", "interleaved"] = "halves",
        rotary_dim: int | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"rope: rotary_dim={rotary_dim} cannot be turned in pairs within head_dim={head_dim}; "
                f"give an even rotary_dim, 2 to {head_dim // 2 * 2}"
            )
        if not base > 0:
            raise ValueError(f"rope: base={base} gives no wavelengths; give base > 0, such as 10000")
        if layout not in ("halves", "interleaved"):
            raise ValueError(f"rope: unknown layout={layout!r}; choose 'halves' or 'interleaved'")
        if not factor > 0:
            raise ValueError(f"rope: factor={factor} leaves no order of positions; give factor > 0, such as 2.0")
        self.base, self.layout, self.rotary_dim, self.factor = base, layout, rotary_dim, factor

    def rotate(self, x: Float[Tensor, "B H N D"], ids: Shaped[Tensor, "... N"]) -> Float[Tensor, "B H N D"]:
        """R_p x for the position ids of x."""
        channel = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=ids.device)
        angle = ids[..., None].double() / self.factor * self.base ** (-channel / self.rotary_dim)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)  # [.. N d/2]
        if ids.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        turning, still = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        a, b = turning.chunk(2, -1) if self.layout == "halves" else (turning[..., 0::2], turning[..., 1::2])
        turned = a * cos - b * sin, a * sin + b * cos
        joined = torch.cat(turned, -1) if self.layout == "halves" else torch.stack(turned, -1).flatten(-2)
        return torch.cat((joined, still), -1)

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H2 J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H2 J D"]]:
        """R_i q, R_j k."""
        return self.rotate(q, positions.query), self.rotate(k, positions.key)
