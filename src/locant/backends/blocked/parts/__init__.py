"""Each term as seen by one tile: what it does to the tile's logits, weights or output, and the way back.

The package's `PARTS` names the class for each term. A part that is built on diagonals (contiguous positions, a rule
that reads only the offset) has a twin that gathers, for any ids and any rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from locant.backends.blocked.tile import Diagonals, Group, Scratch, Tile
from locant.positions import Positions

Stage = Literal["gate", "scale", "logits", "weights", "value"]


@dataclass(frozen=True)
class Setting:
    """What all tiles of one call have in common. ``scale`` is 1 where it is a number for each query instead."""

    positions: Positions
    block: int
    scale: float
    like: Tensor

    def diagonals(self, rule: Any) -> Diagonals:
        """The rule's rows by offset, on contiguous positions."""
        return Diagonals(rule, 1 - self.positions.num_keys, self.positions.num_queries - 1, self.like.device)


class Part:
    """One term in the loop over tiles. ``grads`` has one sum for each tensor (None where none is wanted)."""

    stage: ClassVar[Stage] = "logits"

    def __init__(self, term: Any, tensors: list[Tensor], grads: list[Tensor | None], setting: Setting) -> None:
        self.term, self.tensors, self.grads, self.setting = term, tensors, grads, setting
        scaled = getattr(term, "scaled", False)
        self.scaled, self.number = scaled, setting.scale if scaled else 1.0
        self.setup()

    def setup(self) -> None:
        """Prepare what all tiles share."""

    def open_heads(self, heads: slice, scratch: Scratch) -> None:
        """A group of heads begins; all batch rows follow."""

    def close_heads(self, heads: slice) -> None:
        """A group of heads ends (backward only)."""

    def open(self, group: Group) -> None:
        """One batch row of a group of heads begins."""

    def close(self, group: Group) -> None:
        """One batch row of a group of heads ends (backward only)."""

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """Change logits or weights (``pairs`` [G I J]) or, from weights, ``out`` [G I E]."""
        raise NotImplementedError

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """Sum own gradients; change ``grad`` [G I J] where the part stands between it and what comes before."""
        raise NotImplementedError

    def rows_scaled(self, tile: Tile, pairs: Tensor) -> Tensor:
        """``pairs`` times each query's scale, where the term is inside the scale and that is not one number."""
        return pairs * tile.row_scale if self.scaled and tile.row_scale is not None else pairs


def of_heads(table: Tensor, heads: slice) -> Tensor:
    """The part of a table [H|1 ..] that serves some heads."""
    return table[heads] if table.shape[0] > 1 else table


def add_rows(grad: Tensor | None, heads: slice, rows: Tensor, part: Tensor) -> None:
    """grad[heads, rows] += part [G|1 rows ..], summed over the group where the heads share one table."""
    assert grad is not None
    target = of_heads(grad, heads)
    target.index_add_(1, rows, part.sum(0, keepdim=True) if target.shape[0] < part.shape[0] else part)


def products_of(x: Float[Tensor, "G N D"], table: Float[Tensor, "H W D"]) -> Float[Tensor, "G N W"]:
    """x . table for every row; one product for the whole group where heads share the table."""
    return x @ (table[0] if table.shape[0] == 1 else table).transpose(-1, -2)


def table_products(y: Float[Tensor, "G N W"], x: Float[Tensor, "G N D"], shared: bool) -> Float[Tensor, "G2 W D"]:
    """The gradient of `products_of` for its table."""
    if shared:
        return (y.flatten(0, 1).T @ x.flatten(0, 1))[None]
    return y.transpose(-1, -2) @ x
