"""Vaswani et al. 2017, sinusoidal absolute positions, arXiv:1706.03762, section 3.5.

    PE[p, 2c] = sin(p w_c),   PE[p, 2c+1] = cos(p w_c),   w_c = 10000^(-2c/M);   x_i = sqrt(M) w_i + PE[pos_i]

Note: the factor sqrt(M) on the tokens is ``scale_tokens`` (off: BERT-like hosts do not scale). The other public layout,
sines then cosines, is ``layout="halves"``; the other public frequency grid, exponent c/(M/2 - 1), is
``grid="inclusive"``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from locant.encoding import Encoding, Paper, Properties
from locant.positions import Positions


class Sinusoidal(Encoding):
    """A fixed wave for each pair of channels, added to the token embedding; defined for real and any large ids.

    Shapes: no parameters.     Acts on: input embedding.     Neutral at: nowhere.     Past any length: defined.
    Cost: O(n M) sines, once, in float32 or wider whatever the model's dtype (half precision merges positions).
    Raises: ValueError for an unknown layout or grid, model_dim < 1, base <= 0.
    """

    name = "sinusoidal"
    paper = Paper("1706.03762", "section 3.5", "Vaswani et al. 2017")
    properties = Properties(shift_invariant=False, symmetric=True, beyond_range="defined", layers="shared")

    def __init__(
        self,
        model_dim: int,
        base: float = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        grid: Literal["exclusive", "inclusive"] = "exclusive",
        scale_tokens: bool = False,
    ) -> None:
        super().__init__()
        if not base > 0:
            raise ValueError(f"sinusoidal: base={base} gives no wavelengths; give base > 0, such as 10000")
        if layout not in ("interleaved", "halves"):
            raise ValueError(f"sinusoidal: unknown layout={layout!r}; choose 'interleaved' or 'halves'")
        if grid not in ("exclusive", "inclusive"):
            raise ValueError(f"sinusoidal: unknown grid={grid!r}; choose 'exclusive' (2c/M) or 'inclusive' (c/(M/2-1))")
        if model_dim < 1:
            raise ValueError(f"sinusoidal: model_dim={model_dim} leaves no channels; give model_dim >= 1")
        self.model_dim, self.base, self.layout, self.grid = model_dim, base, layout, grid
        self.token_factor = math.sqrt(model_dim) if scale_tokens else 1.0

    def waves(self, ids: Shaped[Tensor, "... I"]) -> Float[Tensor, "... I M"]:
        """PE for any ids, in float64."""
        pairs = (self.model_dim + 1) // 2
        steps = self.model_dim / 2 if self.grid == "exclusive" else max(pairs - 1, 1)
        channel = torch.arange(pairs, dtype=torch.float64, device=ids.device)
        angle = ids[..., None].double() * self.base ** (-channel / steps)
        sin, cos = angle.sin(), angle.cos()
        joined = torch.stack((sin, cos), -1).flatten(-2) if self.layout == "interleaved" else torch.cat((sin, cos), -1)
        if self.layout == "halves" and self.model_dim % 2:
            joined = torch.cat((sin, cos[..., :-1]), -1)
        return joined[..., : self.model_dim]

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """x + PE[pos]."""
        return x * self.token_factor + self.waves(positions.query).to(x.dtype)
