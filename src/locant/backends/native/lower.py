"""Terms as the kernel takes them: numbers for every offset, vectors for the offsets of a band, a bias for every pair.

`lower` lays tables out by offset, `raised` brings the kernel's gradients back to the tables, through any rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locant.backends.blocked.tile import Diagonals
from locant.backends.call import Call
from locant.terms import PairBias, RelativeBias, RelativeGate, RelativeKey, RelativeQuery, RelativeScale, RelativeValue

SERVED = (RelativeBias, RelativeScale, RelativeQuery, RelativeKey, RelativeGate, RelativeValue, PairBias)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTORS = (RelativeQuery, RelativeKey, RelativeGate, RelativeValue)


@dataclass(frozen=True)
class Piece:
    """One term's share of a table: ``number`` times the rows ``rows`` of its own (all of it, for a bias of pairs)."""

    name: str
    number: float
    rows: Int[Tensor, "W"] | None
    table: Tensor

    def laid_out(self) -> Tensor:
        """The share, in float32."""
        tensor = self.table if self.rows is None else self.table.index_select(1, self.rows)
        return tensor.float() if self.number == 1 else tensor.float() * self.number

    def raised(self, grad: Tensor) -> Tensor:
        """The gradient of the term's own table from that of the share."""
        grad = grad * self.number
        if self.rows is None:
            return grad.sum_to_size(self.table.shape)
        shape = (self.table.shape[0], *grad.shape[1:])
        own = grad.new_zeros(self.table.shape)
        return own.index_add_(1, self.rows, grad.sum_to_size(shape))


@dataclass(frozen=True)
class Lowered:
    """What the kernel reads besides q, k, v.

    ``tables``: query, key, gate [1|H R D] and value [1|H R E] from offset ``left`` on; bias and scales [1|H I+J-1], one
    number for each offset; pair [B|1 H|1 I J]. ``pieces``: which terms they are sums (scales: products) of.
    """

    left: int
    rows: int
    pieces: tuple[Piece, ...]
    tables: dict[str, Tensor]

    def raised(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """The gradient of every term's own table from those of ``tables``; None where there is none."""
        return [
            piece.raised(grads[piece.name] * self._others(index)) if piece.name in grads else None
            for index, piece in enumerate(self.pieces)
        ]

    def _others(self, index: int) -> Tensor | float:
        """The product of the other factors, for one of several scales."""
        if self.pieces[index].name != "scales":
            return 1.0
        others = [piece.laid_out() for at, piece in enumerate(self.pieces) if piece.name == "scales" and at != index]
        return math.prod(others, start=1.0)


def refuses(call: Call) -> str | None:
    """Why terms, dtype or layout cannot be served."""
    operands = call.operands
    for term in call.terms:
        if not isinstance(term, SERVED):
            return f"the kernel does not know {type(term).__name__}"
        if not isinstance(term, PairBias) and not (operands.positions.contiguous and term.rule.offset_only):
            return f"{type(term).__name__} needs contiguous positions and a rule that reads only the offset"
    if sum(isinstance(term, RelativeGate) for term in call.terms) > 1:
        return "one product can be gated once, and there are several vector gates"
    if operands.q.device.type != "cpu" or operands.q.dtype not in DTYPES:
        return f"it computes in float32 on the CPU, which does not serve {operands.q.dtype} on {operands.q.device.type}"
    if operands.q.numel() * operands.k.numel() * operands.v.numel() == 0:
        return "there is nothing to compute"
    if isinstance(operands.scale, Tensor) or operands.scale == 0:
        return "the scale must be one number other than 0"
    return "it does not return weights" if call.return_weights else None


def lower(call: Call) -> Lowered:
    """The sums and products of all terms of a kind."""
    positions, scale = call.operands.positions, call.operands.scale
    assert not isinstance(scale, Tensor)
    terms: tuple[Any, ...] = call.terms
    size = (positions.num_queries, positions.num_keys)
    diagonals = {
        index: Diagonals(term.rule, *size, call.operands.q.device)
        for index, term in enumerate(terms)
        if not isinstance(term, PairBias)
    }
    bands = [diagonals[index] for index, term in enumerate(terms) if isinstance(term, VECTORS)]
    left = min((band.left for band in bands), default=0)
    right = max((band.right for band in bands), default=0)
    pieces, tables = [], {}
    for index, term in enumerate(terms):
        name, number = _kind(term, float(scale))
        if isinstance(term, PairBias):
            piece = Piece(name, number, None, term.tensor(positions))
        else:
            rows, first = diagonals[index].rows, diagonals[index].first
            part = rows[left - first : right - first + 1] if isinstance(term, VECTORS) else rows
            piece = Piece(name, number, part, term.table)
        pieces.append(piece)
        tensor = piece.laid_out()
        if name in tables:
            tensor = tables[name] * tensor if name == "scales" else tables[name] + tensor
        tables[name] = tensor.contiguous()
    return Lowered(left, right - left + 1, tuple(pieces), tables)


def _kind(term: object, scale: float) -> tuple[str, float]:
    """Which input of the kernel a term belongs to, and what its table is multiplied by."""
    if isinstance(term, RelativeGate | RelativeValue):
        return "gate" if isinstance(term, RelativeGate) else "value", 1.0
    if isinstance(term, RelativeScale):
        return "scales", 1.0
    if isinstance(term, RelativeQuery):  # the kernel multiplies q by the scale
        return "query", 1.0 if term.scaled else 1 / scale
    if isinstance(term, RelativeKey):
        return "key", scale if term.scaled else 1.0
    assert isinstance(term, RelativeBias | PairBias)
    return ("pair" if isinstance(term, PairBias) else "bias"), scale if term.scaled else 1.0
