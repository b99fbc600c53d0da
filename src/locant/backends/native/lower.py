"""Terms as the kernel takes them: numbers and vectors by offset, tensors of pairs, factors of pairs.

`lower` lays tables out by offset, `raised` brings the kernel's gradients back to the terms' tensors, through any rule.
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
from locant.backends.operator import tensors_of
from locant.positions import Positions
from locant.terms import (
    LowRankBias,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    WeightScale,
)

VECTORS = (RelativeQuery, RelativeKey, RelativeGate, RelativeValue)
BY_OFFSET = (RelativeBias, RelativeScale, *VECTORS)
SERVED = (*BY_OFFSET, PairBias, WeightScale, LowRankBias)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCTS = ("scales", "factors")  # what several terms of a kind are multiplied to; all others are added
FARTHEST = 1 << 16  # numbers are laid out for every offset that position ids can have


@dataclass(frozen=True)
class Piece:
    """One tensor's share of an input: ``number`` times its ``rows`` (None: all), in some ``columns`` of the input."""

    name: str
    number: float
    rows: Int[Tensor, "W"] | None
    tensor: Tensor
    columns: slice | None = None

    def laid_out(self) -> Tensor:
        """The share, in float32 where anything is changed."""
        if self.rows is None and self.number == 1:
            return self.tensor
        tensor = self.tensor if self.rows is None else self.tensor.index_select(1, self.rows)
        return tensor.float() if self.number == 1 else tensor.float() * self.number

    def raised(self, grad: Tensor) -> Tensor:
        """The gradient of the own tensor from that of the input."""
        if self.columns is not None:
            grad = grad[..., self.columns]
        if self.number != 1:
            grad = grad * self.number
        if self.rows is None:
            return grad.sum_to_size(self.tensor.shape)
        shape = (self.tensor.shape[0], *grad.shape[1:])
        own = grad.new_zeros(self.tensor.shape)
        return own.index_add_(1, self.rows, grad.sum_to_size(shape))


@dataclass(frozen=True)
class Lowered:
    """What the kernel reads besides q, k, v.

    ``tables``: query, key, gate [1|H R D] and value [1|H R E] from offset ``left`` on; bias and scales [1|H N], one
    number for each offset from ``lowest`` on; pair (times ``pair_factor``) and factors [B|1 H|1 I J]; low_query
    [B H I F] and low_key [B H J F]. ``pieces``: which tensors they are sums or products of. ``ids``: whether offsets
    are read from ids.
    """

    left: int
    rows: int
    lowest: int
    numbers: int
    ids: bool
    pair_factor: float
    pieces: tuple[Piece, ...]
    tables: dict[str, Tensor]

    def raised(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """The gradient of every term's tensors from those of ``tables``; None where there is none."""
        return [
            piece.raised(grads[piece.name] * self._others(index) if piece.name in PRODUCTS else grads[piece.name])
            if piece.name in grads
            else None
            for index, piece in enumerate(self.pieces)
        ]

    def _others(self, index: int) -> Tensor | float:
        """The product of the other factors of a kind."""
        name = self.pieces[index].name
        others = [piece.laid_out() for at, piece in enumerate(self.pieces) if piece.name == name and at != index]
        return math.prod(others, start=1.0)


def refuses(call: Call) -> str | None:
    """Why terms, dtype or layout cannot be served."""
    operands = call.operands
    for term in call.terms:
        why = _refuses_term(term, operands.positions)
        if why is not None:
            return why
    if sum(isinstance(term, RelativeGate) for term in call.terms) > 1:
        return "one product can be gated once, and there are several vector gates"
    if operands.q.device.type != "cpu" or operands.q.dtype not in DTYPES:
        return f"it computes in float32 on the CPU, which does not serve {operands.q.dtype} on {operands.q.device.type}"
    if operands.q.numel() * operands.k.numel() * operands.v.numel() == 0:
        return "there is nothing to compute"
    if isinstance(operands.scale, Tensor) or operands.scale == 0:
        return "the scale must be one number other than 0"
    return "it does not return weights" if call.return_weights else None


def _refuses_term(term: object, positions: Positions) -> str | None:
    if not isinstance(term, SERVED):
        return f"the kernel does not know {type(term).__name__}"
    if not isinstance(term, BY_OFFSET):
        return None
    if not term.rule.offset_only:
        return f"{type(term).__name__} needs a rule that reads only the offset, not {type(term.rule).__name__}"
    if positions.contiguous:
        return None
    if positions.continuous:
        return f"{type(term).__name__} needs integer position ids, not {positions.query.dtype}"
    if positions.span > FARTHEST:
        return f"position ids lie up to {positions.span} apart, and it lays tables out for offsets up to {FARTHEST}"
    return None


def lower(call: Call) -> Lowered:
    """The sums and products of all terms of a kind."""
    positions, scale = call.operands.positions, call.operands.scale
    assert not isinstance(scale, Tensor)
    terms: tuple[Any, ...] = call.terms
    by_offset = {index: term for index, term in enumerate(terms) if isinstance(term, BY_OFFSET)}
    ids = bool(by_offset) and not positions.contiguous
    lowest, highest = _reach(positions) if ids else (1 - positions.num_keys, positions.num_queries - 1)
    device = call.operands.q.device
    diagonals = {index: Diagonals(term.rule, lowest, highest, device) for index, term in by_offset.items()}
    bands = [diagonals[index] for index, term in by_offset.items() if isinstance(term, VECTORS)]
    left = min((band.left for band in bands), default=0)
    right = max((band.right for band in bands), default=0)
    pieces: list[Piece] = []
    for index, term in enumerate(terms):
        name, number = _kind(term, float(scale))
        if index in by_offset:
            rows = diagonals[index].rows
            part = rows[left - lowest : right - lowest + 1] if isinstance(term, VECTORS) else rows
            pieces.append(Piece(name, number, part, term.table))
        elif isinstance(term, LowRankBias):
            pieces.extend(_low(term, number, pieces))
        else:
            pieces.append(Piece(name, number, None, tensors_of(term, positions)[0]))
    tables, pair_factor = _joined(pieces, call)
    return Lowered(left, right - left + 1, lowest, highest - lowest + 1, ids, pair_factor, tuple(pieces), tables)


def _reach(positions: Positions) -> tuple[int, int]:
    """The least and the greatest offset of these ids."""
    (first, last), (low, high) = (ids.aminmax() for ids in (positions.query, positions.key))
    return int(low) - int(last), int(high) - int(first)


def _low(term: LowRankBias, number: float, before: list[Piece]) -> tuple[Piece, Piece]:
    start = max((piece.columns.stop for piece in before if piece.columns), default=0)
    columns = slice(start, start + term.query.shape[-1])
    return Piece("low_query", number, None, term.query, columns), Piece("low_key", 1.0, None, term.key, columns)


def _joined(pieces: list[Piece], call: Call) -> tuple[dict[str, Tensor], float]:
    """One tensor for each kind, and what the one of pairs is still to be multiplied by: alone, it is not copied."""
    batch, heads = call.operands.q.shape[:2]
    lengths = {"low_query": call.operands.q.shape[2], "low_key": call.operands.k.shape[2]}
    tables, pair_factor = {}, 1.0
    for name in dict.fromkeys(piece.name for piece in pieces):
        those = [piece for piece in pieces if piece.name == name]
        if name == "pair" and len(those) == 1:
            tables[name], pair_factor = those[0].tensor, those[0].number
        elif name in lengths:
            parts = [piece.laid_out().expand(batch, heads, lengths[name], -1) for piece in those]
            tables[name] = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        else:
            first, *rest = (piece.laid_out() for piece in those)
            for other in rest:
                first = first * other if name in PRODUCTS else first + other
            tables[name] = first
    return tables, pair_factor


def _kind(term: object, scale: float) -> tuple[str, float]:
    """Which input of the kernel a term belongs to, and what its table is multiplied by."""
    if isinstance(term, RelativeGate | RelativeValue):
        return "gate" if isinstance(term, RelativeGate) else "value", 1.0
    if isinstance(term, RelativeScale | WeightScale):
        return "scales" if isinstance(term, RelativeScale) else "factors", 1.0
    if isinstance(term, RelativeQuery):  # the kernel multiplies q by the scale
        return "query", 1.0 if term.scaled else 1 / scale
    if isinstance(term, RelativeKey):
        return "key", scale if term.scaled else 1.0
    assert isinstance(term, RelativeBias | PairBias | LowRankBias)
    name = "low" if isinstance(term, LowRankBias) else "pair" if isinstance(term, PairBias) else "bias"
    return name, scale if term.scaled else 1.0
