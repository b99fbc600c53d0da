"""Terms that are a sum of biases, handed to PyTorch's scaled_dot_product_attention as one additive mask.

Where the positions are contiguous and a rule reads only the offset, a learned bias is laid out by diagonals (the
numbers of all offsets, then a relative shift) instead of a gather over pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from locant.backends.call import Backend, Call
from locant.terms import LowRankBias, Operands, PairBias, RelativeBias, RelativeKey, RelativeQuery, Rule

SERVED = (RelativeBias, PairBias, LowRankBias, RelativeQuery, RelativeKey)


def refuses(call: Call) -> str | None:
    """Why a call cannot be served."""
    for term in call.terms:
        if not isinstance(term, SERVED):
            return f"{type(term).__name__} does not lower to an additive mask"
    if call.dropout:
        return "its dropout has a random stream of its own, where all other backends share one hash"
    return "it does not return weights" if call.return_weights else None


def _offset_rows(rule: Rule, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Table row of every offset, from key 0 seen by the last query to the last key seen by query 0."""
    first = -(num_keys - 1)
    return rule.row(torch.arange(first, num_queries, device=device))


def _shift(wide: Tensor, num_keys: int) -> Tensor:
    """The relative shift, by pad, flatten and cut: out[.. i, j] = wide[.. i, j - i + I - 1], wide [.. I, I + J - 1]."""
    num_queries = wide.shape[-2]
    width = wide.shape[-1]
    flat = F.pad(wide, (0, 1)).flatten(-2)[..., num_queries - 1 :]
    flat = flat[..., : num_queries * width]
    return flat.unflatten(-1, (num_queries, width))[..., :num_keys]


def _diagonal(term: RelativeBias, operands: Operands) -> Tensor:
    """The bias of a rule that reads only the offset, on contiguous positions."""
    num_queries, num_keys = operands.positions.num_queries, operands.positions.num_keys
    rows = _offset_rows(term.rule, num_queries, num_keys, term.table.device)  # [I + J - 1]
    wide = term.table.to(operands.q.dtype)[:, rows][:, None].expand(-1, num_queries, -1)
    return operands.scaled(_shift(wide, num_keys)[None], term.scaled)


def bias(call: Call) -> Tensor | None:
    """The sum of all terms, [B|1 H|1 I J]; None without terms."""
    operands, total = call.operands, None
    for term in call.terms:
        if isinstance(term, RelativeBias) and operands.positions.contiguous and term.rule.offset_only:
            addend = _diagonal(term, operands)
        else:
            addend = term.apply(operands)  # pyright: ignore[reportAttributeAccessIssue]
        total = addend if total is None else total + addend
    return total


def run(call: Call) -> Tensor:
    """Output [B H I E]."""
    operands = call.operands
    q, scale = operands.q, operands.scale
    if isinstance(scale, Tensor):
        q, scale = operands.scaled(q, True), 1.0
    mask = bias(call)
    if mask is None and (call.allowed is None or call.plain_causal):
        return F.scaled_dot_product_attention(q, operands.k, operands.v, is_causal=call.plain_causal, scale=scale)
    some = None
    if call.allowed is not None:
        some = call.allowed.any(-1, keepdim=True)
        open_rows = call.allowed | ~some  # a query that sees nothing: finite here, zero below
        mask = open_rows if mask is None else mask.masked_fill(~open_rows, float("-inf"))
    assert mask is not None
    out = F.scaled_dot_product_attention(q, operands.k, operands.v, attn_mask=mask, scale=scale)
    return out if some is None else out.masked_fill(~some, 0.0)


BACKEND = Backend(refuses=refuses, run=run)
