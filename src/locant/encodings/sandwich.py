"""Chi et al. 2023 (Sandwich), receptive field alignment, ACL 2023, arXiv:2212.10356, section 5.

    e_ij = q_i . k_j / sqrt(D) + (g(j - i) - E/2) H / (8h),  h = 1 .. H,    g(r) = sum_{c=1}^{E/2} cos(r 10000^(-2c/E))

g is the product of two sinusoidal position vectors of width E. Note: whether a head's number 8h/H divides or multiplies
(``ratio="multiply"``) is not certain from the text; the one public fragment divides. ``first=0`` sums from c = 0 to
E/2 - 1, the grid of the sinusoid of Vaswani et al.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import Term, offset_bias


class Sandwich(Encoding):
    """A fixed penalty that is the inner product of sinusoids: slow waves over a logarithmic decay.

    Shapes: no parameters.     Acts on: logits, content-free, unscaled.     Neutral at: nowhere.
    Past any length: defined, it goes on in waves.     Cost: O(E H (I+J)), for each layer.
    Raises: ValueError for an odd width, num_heads < 1, an unknown ratio or first.
    """

    name = "sandwich"
    paper = Paper("2212.10356", "section 5", "Chi et al. 2023")
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared")

    def __init__(
        self, num_heads: int, width: int = 128, ratio: Literal["divide", "multiply"] = "divide", first: int = 1
    ) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"sandwich: width={width} has no pairs of sine and cosine; give an even width >= 2")
        if num_heads < 1:
            raise ValueError(f"sandwich: num_heads={num_heads} cannot be served; give >= 1")
        if ratio not in ("divide", "multiply"):
            raise ValueError(f"sandwich: unknown ratio={ratio!r}; choose 'divide' or 'multiply'")
        if first not in (0, 1):
            raise ValueError(f"sandwich: first={first} is no start of the sum; choose 0 or 1")
        self.num_heads, self.width, self.ratio, self.first = num_heads, width, ratio, first

    def product(self, offset: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        """g(r), in float64."""
        channel = torch.arange(self.first, self.width // 2 + self.first, device=offset.device).double()
        return (offset[..., None].double() * 10000.0 ** (-2 * channel / self.width)).cos().sum(-1)

    def penalties(self, offset: Shaped[Tensor, "..."]) -> Float[Tensor, "H ..."]:
        """What is added to the logits at an offset."""
        head = torch.arange(1, self.num_heads + 1, device=offset.device).double() * (8 / self.num_heads)
        head = (1 / head if self.ratio == "divide" else head).view(-1, *[1] * offset.dim())
        return head * (self.product(offset) - self.width / 2)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """(g(j - i) - E/2) H / (8h)."""
        return (offset_bias(self.penalties, positions),)
