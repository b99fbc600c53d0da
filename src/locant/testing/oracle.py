"""The oracle: attention by scalar loops in float64 over a case's own equations. It calls nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy


def _ids(ids: Any, batch: int) -> list[list[int]]:
    rows = ids.tolist()
    return rows if ids.dim() == 2 and len(rows) == batch else [rows[0] if ids.dim() == 2 else rows] * batch


def attend(
    logit: Callable[..., Any] | None,
    row: Callable[..., Any] | None,
    value: Callable[..., Any] | None,
    p: Mapping[str, Any],
    q: Any,
    k: Any,
    v: Any,
    query: Any,
    key: Any,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """Softmax-weighted sum of values [B H I D] for tensors q, k, v, position ids query and key.

    ``logit`` is the equation of one pair, or ``row`` that of all heads and keys of one query.
    """
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    query_ids, key_ids = _ids(query, batch), _ids(key, batch)
    q, k, v = (t.detach().double().numpy() for t in (q, k, v))
    allowed = numpy.ones((batch, heads, num_queries, num_keys), dtype=bool)
    if mask is not None:
        allowed &= mask.numpy()
    if causal:
        allowed &= numpy.tri(num_queries, num_keys, num_keys - num_queries, dtype=bool)
    out = numpy.zeros((batch, heads, num_queries, v.shape[-1]))
    for b, h, t in numpy.ndindex(batch, heads, num_queries):
        i = query_ids[b][t]
        seen = [s for s in range(num_keys) if allowed[b, h, t, s]]
        if not seen:
            continue
        if row is not None:
            lines = row(p, q[b, :, t], k[b], i, numpy.array(key_ids[b]), allowed[b, :, t])
            logits = [float(lines[h, s]) for s in seen]
        else:
            assert logit is not None
            logits = [float(logit(p, q[b, h, t], k[b, h, s], i, key_ids[b][s], h)) for s in seen]
        top = max(logits)
        powers = [math.exp(x - top) for x in logits]
        for s, power in zip(seen, powers, strict=True):
            given = v[b, h, s] if value is None else value(p, v[b, h, s], i, key_ids[b][s], h)
            out[b, h, t] += power / sum(powers) * given
    return out


def embed(
    equation: Callable[..., Any] | None,
    row: Callable[..., Any] | None,
    p: Mapping[str, Any],
    x: Any,
    ids: Any,
    length: int,
) -> Any:
    """The vectors of all tokens [B N M] for tensor x and position ids.

    ``equation`` is that of one token, or ``row`` that of all tokens of one sequence.
    """
    rows = _ids(ids, x.shape[0])
    out = x.detach().double().numpy().copy()
    if row is not None:
        return numpy.stack([row(p, out[b].copy(), rows[b], length) for b in range(len(out))])
    if equation is not None:
        for b, t in numpy.ndindex(*out.shape[:2]):
            out[b, t] = equation(p, out[b, t].copy(), rows[b][t], length)
    return out
