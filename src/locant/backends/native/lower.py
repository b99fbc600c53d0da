"""Terms as the kernel takes them: numbers for every offset, vectors for the offsets of a band, a bias for every pair.

All of it is plain PyTorch under autograd, so the kernel's gradients flow back to the tables through any rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.backends.blocked.tile import Diagonals
from locant.backends.call import Call
from locant.terms import PairBias, RelativeBias, RelativeGate, RelativeKey, RelativeQuery, RelativeScale, RelativeValue

SERVED = (RelativeBias, RelativeScale, RelativeQuery, RelativeKey, RelativeGate, RelativeValue, PairBias)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTORS = (RelativeQuery, RelativeKey, RelativeGate, RelativeValue)


@dataclass(frozen=True)
class Lowered:
    """What the kernel reads besides q, k, v: tables [1|H R D|E] from offset ``left`` on, numbers [1|H I+J-1], pairs."""

    left: int
    rows: int
    query: Tensor | None = None
    key: Tensor | None = None
    gate: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    scales: Tensor | None = None
    pair: Tensor | None = None


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
    if torch.compiler.is_compiling():
        return "torch.compile cannot see into the kernel"
    if operands.q.numel() * operands.k.numel() * operands.v.numel() == 0:
        return "there is nothing to compute"
    if isinstance(operands.scale, Tensor) or operands.scale == 0:
        return "the scale must be one number other than 0"
    return "it does not return weights" if call.return_weights else None


def lower(call: Call) -> Lowered:
    """The sums and products of all terms of a kind."""
    positions, scale = call.operands.positions, call.operands.scale
    assert not isinstance(scale, Tensor)
    num_queries, num_keys = positions.num_queries, positions.num_keys
    terms: tuple[Any, ...] = call.terms
    diagonals = {
        term: Diagonals(term.rule, num_queries, num_keys, call.operands.q.device)
        for term in terms
        if not isinstance(term, PairBias)
    }
    bands = [diagonals[term] for term in terms if isinstance(term, VECTORS)]
    left = min((band.left for band in bands), default=0)
    right = max((band.right for band in bands), default=0)
    found: dict[str, Tensor] = {}
    for term in terms:
        name, number = _kind(term, float(scale))
        if isinstance(term, PairBias):
            tensor = term.tensor(positions)
        elif isinstance(term, VECTORS):
            band = diagonals[term]
            tensor = term.table.index_select(1, band.rows[left - band.first : right - band.first + 1])
        else:
            tensor = term.table[:, diagonals[term].rows]
        tensor = tensor.float() if number == 1 else tensor.float() * number
        if name in found:
            tensor = found[name] * tensor if name == "scales" else found[name] + tensor
        found[name] = tensor
    return Lowered(left, right - left + 1, **found)


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
