"""Terms as the kernels take them: tables laid out by offset, from the last offset that all farther ones share.

On counted positions an offset is a diagonal. With explicit ids it is read from the ids, and a rule must say how far it
reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locant.backends.call import Call
from locant.terms import (
    Clip,
    Distance,
    LogBucket,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    Rule,
    SignedLogBucket,
)

NAMES: dict[type, str] = {
    RelativeBias: "bias",
    RelativeScale: "scales",
    RelativeGate: "gate",
    RelativeQuery: "query",
    RelativeKey: "key",
    RelativeValue: "value",
    PairBias: "pair",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 128  # of q, k and v: the tiles of a backward pass must fit into the memory of a multiprocessor


def refuses(call: Call) -> str | None:
    """Why terms, dtype or layout cannot be served, wherever it runs."""
    operands, positions = call.operands, call.operands.positions
    for term in call.terms:
        if type(term) not in NAMES:
            return f"its kernels do not know {type(term).__name__}"
    why = next((why for term in call.terms if (why := _place_refuses(term, call)) is not None), None)
    if why is not None:
        return why
    if sum(isinstance(term, RelativeGate) for term in call.terms) > 1:
        return "one product can be gated once, and there are several vector gates"
    dtypes = {operands.q.dtype, operands.k.dtype, operands.v.dtype}
    if len(dtypes) > 1 or operands.q.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 or float16, not in {', '.join(sorted(map(str, dtypes)))}"
    if max(operands.q.shape[3], operands.v.shape[3]) > WIDEST:
        return f"heads are {operands.q.shape[3]} and {operands.v.shape[3]} wide, and its tiles hold {WIDEST}"
    if operands.q.numel() * operands.k.numel() * operands.v.numel() == 0:
        return "there is nothing to compute"
    if operands.q.shape[2] * operands.k.shape[2] >= 1 << 31:
        return f"{operands.q.shape[2]} queries and {operands.k.shape[2]} keys are more pairs than its pointers count"
    if isinstance(operands.scale, Tensor):
        return "the scale must be one number"
    by_offset = any(not isinstance(term, PairBias) for term in call.terms)
    if by_offset and not positions.contiguous and torch.are_deterministic_algorithms_enabled():
        return (
            "table gradients of explicit ids are added atomically, in any order, and deterministic ones are asked for"
        )
    return "it does not return weights" if call.return_weights else None


def _place_refuses(term: Any, call: Call) -> str | None:
    """Why a term cannot be laid out by offset."""
    if isinstance(term, PairBias):
        return None
    name, positions = type(term).__name__, call.operands.positions
    if not term.rule.offset_only:
        return f"{name} needs a rule that reads only the offset"
    if positions.contiguous:
        return None
    if positions.continuous or isinstance(term, RelativeGate):
        return f"{name} needs {'integer ids' if positions.continuous else 'counted positions'}"
    return None if reach(term.rule) is not None else f"{name} has a rule of which nobody knows how far it reaches"


def reach(rule: Rule) -> int | None:
    """A distance beyond which all offsets to one side share a row; None where that is not known."""
    if isinstance(rule, Clip):
        return rule.clip + (rule.outside == "zero")
    if isinstance(rule, Distance):
        return rule.clip
    if isinstance(rule, LogBucket):
        return rule.max_distance
    if not isinstance(rule, SignedLogBucket):
        return None
    middle = rule.size // 2
    if rule.max_distance is None or middle < 2:
        return rule.size
    # middle + log(x / middle) / log((max_distance - 1) / middle) (middle - 1) = size, and some more for rounding
    return 2 + math.ceil(middle * ((rule.max_distance - 1) / middle) ** ((rule.size - middle) / (middle - 1)))


@dataclass(frozen=True)
class Share:
    """What one term gives to a table: ``number`` times the rows of its own, in the order of offsets."""

    name: str
    number: float
    rows: Int[Tensor, "W"] | None  # None: a bias of pairs, which has no rows
    own: Tensor

    def laid_out(self) -> Tensor:
        """The share, in float32; a bias of pairs as it is where nothing multiplies it."""
        if self.rows is None:
            return self.own if self.number == 1 else self.own.float() * self.number
        return self.own.index_select(1, self.rows).float() * self.number

    def raised(self, grad: Tensor) -> Tensor:
        """The gradient of the term's own table from that of the whole."""
        grad = grad * self.number
        if self.rows is None:
            return grad.sum_to_size(self.own.shape)
        grad = grad.sum_to_size(self.own.shape[0], *grad.shape[1:])
        return grad.new_zeros(self.own.shape).index_add_(1, self.rows, grad)


@dataclass(frozen=True)
class Tables:
    """A call's tables by offset ``low`` .. ``high``, and the terms that share in them.

    ``whole``: bias, scales [1|H W]; gate, query, key, value [1|H W D]; pair [B|1 H|1 I J]; those that there are.
    """

    low: int
    high: int
    shares: tuple[Share, ...]
    whole: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Columns: at least two, so that the ends differ."""
        return self.high - self.low + 1

    def raised(self, grads: dict[str, Tensor]) -> list[Tensor | None]:
        """The gradient of every term's own table from those of ``whole``; None where there is none."""
        return [
            share.raised(grads[share.name] * self._others(index)) if share.name in grads else None
            for index, share in enumerate(self.shares)
        ]

    def _others(self, index: int) -> Tensor | float:
        """The product of the other factors, for one of several scales."""
        if self.shares[index].name != "scales":
            return 1.0
        others = (share for at, share in enumerate(self.shares) if share.name == "scales" and at != index)
        return math.prod((share.laid_out() for share in others), start=1.0)


def lower(call: Call) -> Tables:
    """The sums and products of all terms of a kind."""
    terms: tuple[Any, ...] = call.terms
    ends = [_ends(term.rule, call) for term in terms if not isinstance(term, PairBias)]
    low = min((end[0] for end in ends), default=0)
    high = max(max((end[1] for end in ends), default=0), low + 1)
    offsets = torch.arange(low, high + 1)  # on the CPU, as where the ends were found
    shares, whole = [], {}
    for term in terms:
        name = NAMES[type(term)]
        number = float(call.operands.scale) if getattr(term, "scaled", False) else 1.0  # pyright: ignore[reportArgumentType]
        if isinstance(term, PairBias):
            share = Share(name, number, None, term.tensor(call.operands.positions))
        else:
            share = Share(name, number, term.rule.row(offsets).to(term.table.device), term.table)
        shares.append(share)
        laid_out = share.laid_out()
        if name in whole:
            laid_out = whole[name] * laid_out if name == "scales" else whole[name] + laid_out
        whole[name] = laid_out
    return Tables(low, high, tuple(shares), whole)


def widest(call: Call) -> int:
    """At most so many columns, from rules and lengths alone: no table is read, so this can be traced."""
    queries, keys = call.operands.q.shape[2], call.operands.k.shape[2]
    rules: list[Rule] = [term.rule for term in call.terms if not isinstance(term, PairBias)]  # pyright: ignore[reportAttributeAccessIssue]
    width = 2
    for rule in rules:
        far = reach(rule)
        columns = queries + keys if far is None else 2 * far + 1
        if call.operands.positions.contiguous:
            columns = min(columns, queries + keys)
        width = max(width, columns)
    return width


def _ends(rule: Rule, call: Call) -> tuple[int, int]:
    """Offsets beyond which all rows are that of the end."""
    operands = call.operands
    if operands.positions.contiguous:
        first, last = 1 - operands.k.shape[2], operands.q.shape[2] - 1
        rows = rule.row(torch.arange(first, last + 1))
        changes = (rows[1:] != rows[:-1]).nonzero().flatten().tolist() or [0]
        return first + changes[0], first + changes[-1] + (len(rows) > 1)
    far = reach(rule)
    assert far is not None
    return -far, far
