"""Likhomanenko et al. 2021 (CAPE) for images, NeurIPS 2021, arXiv:2106.03143, section 3.2.

    x_t' = s x_t + [cos f, sin f],     f_k = pi 10^(k/(M/2 - 1)) (cos(k) x + sin(k) y),  k = 0 .. M/2 - 1
    (x, y) = (row, column) on a grid of step g from -1 to 1;     in training  (x, y) -> ((x, y) + Delta + g eps) lambda
    Delta ~ U(-a, a)^2,  log lambda ~ U(-log c, log c)  for each image;     eps ~ U(-b, b)^2  for each patch

s = 1, or sqrt(M) with ``scale_tokens=True`` (the paper). k is an angle in radians: directions that never repeat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locant.encoding import Paper, Properties
from locant.positions import Positions
from locant.transform import Transform, check_ranges, rows_of


@dataclass(frozen=True)
class Cape2dDraws:
    """One draw, last axis (x, y): Delta [B 1 2], g eps [B N 2], and lambda [B 1 1]."""

    global_shift: Float[Tensor, "B 1 2"]
    local_shift: Float[Tensor, "B N 2"]
    scale: Float[Tensor, "B 1 1"]


class Cape2d(Transform):
    """Waves in many directions over the plane of an image, shifted, jittered and scaled at random in training.

    Ids number the patches row by row, after ``prefix`` tokens that have no place (a [CLS]) and get nothing.
    Shapes: no parameters.     Acts on: input embedding.     Neutral at: nowhere.     Past the grid: refuses.
    Cost: O(B n M) sines, once, in float32 or wider.
    Raises: ValueError for an odd model_dim or one below 4, a grid below 1 x 1, ranges that cannot be drawn from; as
    `Transform`.
    """

    name = "cape_2d"
    paper = Paper("2106.03143", "section 3.2", "Likhomanenko et al. 2021")
    properties = Properties(
        shift_invariant=False, symmetric=True, beyond_range="raise", layers="shared", text=False, draws=True
    )

    def __init__(
        self,
        model_dim: int,
        height: int = 14,
        width: int = 14,
        prefix: int = 0,
        global_shift: float = 0.5,
        local_shift: float = 0.5,
        scaling: float = 1.4,
        scale_tokens: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        if model_dim < 4 or model_dim % 2:
            raise ValueError(f"cape_2d: model_dim={model_dim} has no pairs of sine and cosine; give an even width >= 4")
        if height < 1 or width < 1 or prefix < 0:
            raise ValueError(
                f"cape_2d: {height} x {width} patches after {prefix} tokens are no grid; give 1 x 1 or more"
            )
        check_ranges("cape_2d", global_shift, local_shift, scaling)
        self.model_dim, self.height, self.width, self.prefix = model_dim, height, width, prefix
        self.global_shift, self.local_shift, self.scaling = global_shift, local_shift, scaling
        self.token_factor = math.sqrt(model_dim) if scale_tokens else 1.0
        self.max_length = prefix + height * width

    def coordinates(self, positions: Positions) -> Float[Tensor, "... I 2"]:
        """(x, y) of every query's patch."""
        place = positions.query - self.prefix
        rows, columns = (
            torch.linspace(-1, 1, n, dtype=torch.float64, device=place.device) for n in (self.height, self.width)
        )
        return torch.stack((rows[(place // self.width).clamp(min=0)], columns[place % self.width]), -1)

    def steps(self, device: torch.device) -> Float[Tensor, "2"]:
        """The step of the grid in x and in y."""
        return torch.tensor([2 / max(n - 1, 1) for n in (self.height, self.width)], device=device)

    def sample(self, positions: Positions, generator: torch.Generator, own: torch.Generator) -> Cape2dDraws:
        """Delta, g eps and lambda."""
        rows, device = rows_of(positions, self.name), positions.query.device

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(shape, generator=generator) - 1

        shift, scale = self.global_shift * uniform(rows, 1, 2), (math.log(self.scaling) * uniform(rows, 1, 1)).exp()
        local = self.local_shift * uniform(rows, positions.num_queries, 2)
        return Cape2dDraws(shift.to(device), local.to(device) * self.steps(device), scale.to(device))

    def place(self, positions: Positions, draws: Cape2dDraws | None) -> Float[Tensor, "... I 2"]:
        """(x, y) as they are embedded."""
        found = self.coordinates(positions)
        return found if draws is None else (found + draws.global_shift + draws.local_shift) * draws.scale

    def prepare(self, positions: Positions) -> Positions:
        """The draw of the forward."""
        self.check_length(positions)
        return positions.share(self, self._drawn(positions)) if self.training else positions

    def waves(self, places: Float[Tensor, "... I 2"]) -> Float[Tensor, "... I M"]:
        """[cos f, sin f]."""
        half = self.model_dim // 2
        k = torch.arange(half, dtype=torch.float64, device=places.device)
        radius = math.pi * 10 ** (k / (half - 1))
        x, y = places.double().unbind(-1)
        phase = x[..., None] * (radius * k.cos()) + y[..., None] * (radius * k.sin())
        return torch.cat((phase.cos(), phase.sin()), -1)

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """s x + [cos f, sin f], for patches."""
        places = self.place(positions, positions.shared.get(self))
        patches = (positions.query >= self.prefix)[..., None]
        return x * self.token_factor + (self.waves(places) * patches).to(x.dtype)

    def neutralize(self) -> None:
        """There is no neutral value."""
        super(Transform, self).neutralize()
