"""The literal equation, in any dtype: every other backend is measured against this one."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.backends import dropout
from locant.backends.call import Backend, Call
from locant.terms import LogitMap, RelativeGate, RelativeScale, RelativeValue, WeightScale


def logits(call: Call) -> Tensor:
    """[B H I J] before mask and softmax."""
    operands = call.operands
    content = operands.scaled(operands.q, True) @ operands.k.transpose(-1, -2)
    gates = [term for term in call.terms if isinstance(term, RelativeGate)]
    if len(gates) > 1:
        raise ValueError(f"attention: got {len(gates)} vector gates, but one product can be gated once; compose fewer")
    for term in [*gates, *(t for t in call.terms if isinstance(t, RelativeScale))]:
        content = term.apply(operands, content)
    bias = torch.zeros((), dtype=content.dtype, device=content.device)
    for term in call.terms:
        if term.stage != "logits":
            continue
        addend = term.apply(operands)  # pyright: ignore[reportAttributeAccessIssue]
        if term.scaled:  # pyright: ignore[reportAttributeAccessIssue]
            content = content + addend
        else:
            bias = bias + addend
    maps = [term for term in call.terms if isinstance(term, LogitMap)]
    for term in maps:
        content, bias = term.apply(operands, content, bias, call.allowed), torch.zeros_like(bias)
    return content + bias


def run(call: Call) -> Tensor | tuple[Tensor, Tensor]:
    """Output [B H I E], and the weights where asked for."""
    scores = logits(call)
    if call.allowed is not None:
        scores = scores.masked_fill(~call.allowed, float("-inf"))
        some = call.allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~some, 0.0)  # a query that sees nothing: finite here, zero below
        weights = scores.softmax(-1).masked_fill(~some, 0.0)
    else:
        weights = scores.softmax(-1)
    for term in call.terms:
        if isinstance(term, WeightScale):
            weights = term.apply(call.operands, weights)
    dropped = weights * _kept(call, weights) if call.dropout else weights
    out = dropped @ call.operands.v
    for term in call.terms:
        if isinstance(term, RelativeValue):
            out = out + term.apply(call.operands, dropped)
    return (out, weights) if call.return_weights else out


def _kept(call: Call, weights: Tensor) -> Tensor:
    """What dropout multiplies the weights by."""
    groups = torch.arange(weights.shape[0] * weights.shape[1], device=weights.device)
    queries = torch.arange(weights.shape[2], device=weights.device)
    seed = dropout.draw_seed(call.dropout)
    return dropout.kept(seed, call.dropout, groups, queries, weights.shape[3], weights.dtype).view(weights.shape)


BACKEND = Backend(refuses=lambda call: None, run=run)
