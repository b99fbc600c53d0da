"""Sun et al. 2023 (xPos), a length-extrapolatable Transformer, ACL 2023, arXiv:2212.10554, eq. 19.

    e_ij = (z^i R_i q_i) . (z^-j R_j k_j) / sqrt(D),     R_p turns channel pair c by p w_c,  w_c = 10000^(-2c/D)
    z_c = ((2c/D + 0.4) / 1.4)^(1/base)    for pair c = 0 .. D/2 - 1

so that the product is that of rotary positions, times z_c^(i-j) for each pair of channels: a decay over the distance.
Note: pairs are neighbors, (2c, 2c + 1), as in the authors' code. Powers are taken about the middle of the ids, which
cancels; so does any shift of them.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from locant.encoding import Encoding, Paper, Properties
from locant.positions import Positions


class Xpos(Encoding):
    """Rotary positions whose channels fade with the distance, fast channels first.

    Shapes: no parameters.     Acts on: q and k.     Neutral at: nowhere.     Past any length: defined, as far as powers
    fit the dtype of q.     Cost: O(B H (I+J) D).
    Under a causal mask alone: a later key would gain where an earlier one fades.
    Raises: ValueError if head_dim is odd, base <= 0 or gamma <= 0, for an unknown layout; for ids so far apart that the
    powers leave the range of q's dtype.
    """

    name = "xpos"
    paper = Paper("2212.10554", "eq. 19", "Sun et al. 2023")
    properties = Properties(
        shift_invariant=True,
        symmetric=False,
        beyond_range="defined",
        layers="shared",
        content=True,
        bidirectional=False,
    )

    def __init__(
        self,
        head_dim: int,
        base: float = 512.0,
        gamma: float = 0.4,
        layout: Literal["interleaved", "halves"] = "interleaved",
    ) -> None:
        super().__init__()
        if head_dim % 2 or head_dim < 2:
            raise ValueError(f"xpos: head_dim={head_dim} cannot be turned in pairs; give an even width")
        if not (base > 0 and gamma > 0):
            raise ValueError(f"xpos: base={base} and gamma={gamma} give no decay; give base > 0 and gamma > 0")
        if layout not in ("interleaved", "halves"):
            raise ValueError(f"xpos: unknown layout={layout!r}; choose 'interleaved' or 'halves'")
        self.head_dim, self.base, self.gamma, self.layout = head_dim, base, gamma, layout

    def turn(
        self, x: Float[Tensor, "B H N D"], ids: Shaped[Tensor, "... N"], center: Shaped[Tensor, "... 1"], power: int
    ) -> Float[Tensor, "B H N D"]:
        """z^(power (p - center)) R_p x, with angles and powers in float64."""
        share = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=ids.device) / self.head_dim
        angle = ids[..., None].double() * 10000.0**-share
        fade = torch.log((share + self.gamma) / (1 + self.gamma)) / self.base
        size = (power * (ids - center)[..., None].double() * fade).exp()
        cos, sin = ((f(angle) * size).to(x.dtype) for f in (torch.cos, torch.sin))  # [.. N D/2]
        if ids.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x.chunk(2, -1) if self.layout == "halves" else (x[..., 0::2], x[..., 1::2])
        turned = a * cos - b * sin, a * sin + b * cos
        return torch.cat(turned, -1) if self.layout == "halves" else torch.stack(turned, -1).flatten(-2)

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H2 J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H2 J D"]]:
        """z^i R_i q, z^-j R_j k."""
        if not positions.num_keys:  # no center of nothing
            return q, k
        self._check_span(positions, q.dtype)
        low, high = positions.key.amin(-1, keepdim=True), positions.key.amax(-1, keepdim=True)
        center = (low + high) / 2
        return self.turn(q, positions.query, center, 1), self.turn(k, positions.key, center, -1)

    def _check_span(self, positions: Positions, dtype: torch.dtype) -> None:
        """Half of the span lies on each side of the center; some room is left for q and k themselves."""
        steepest = -math.log(self.gamma / (1 + self.gamma)) / self.base
        room = math.log(torch.finfo(dtype).max) - 2
        if positions.span / 2 * steepest > room:
            raise ValueError(
                f"xpos: offsets reach {positions.span}, over which {dtype} cannot hold the decay of the fastest "
                f"channel (it holds {int(2 * room / steepest)}); give a larger base than {self.base:g}"
            )
