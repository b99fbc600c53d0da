"""Pieces of the public classes in plain PyTorch, and the comparison of attention itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

import locant
from locant.terms import Term
from tests.golden.cases import ATOL, RTOL, Case, Comparison

E = TypeVar("E", bound=locant.Encoding)

NOTHING = locant.load("none")
Counts = Callable[[int, int], locant.Positions]  # (queries, keys) -> positions, the queries being the last keys


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The layer ``name`` of a state dict, with bias where it has one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def layer_norm(weights: Mapping[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """The LayerNorm ``name`` of a state dict."""
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights.get(f"{name}.bias"), eps)


def rms_norm(weights: Mapping[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    """The norm without mean and bias ``name`` of a state dict."""
    return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """[B N (H D)] as [B H N D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[B H N D] as [B N (H D)]."""
    return x.transpose(1, 2).flatten(-2)


def with_state(encoding: E, **tensors: Tensor) -> E:
    """The encoding with exactly these parameters; names use two underscores for a dot."""
    encoding.load_state_dict({name.replace("__", "."): t for name, t in tensors.items()}, strict=True)
    return encoding


def keys_allowed(case: Case, name: str = "attention_mask") -> Tensor | None:
    """A 0/1 padding mask as True = may attend, [B 1 1 J]."""
    return case.inputs[name].bool()[:, None, None] if name in case.inputs else None


def counted(case: Case) -> Counts:
    """Position ids as transformers counts them: as given, or else from 0."""
    given = case.inputs.get("position_ids")
    if given is None:
        return locant.Positions.arange
    return lambda queries, keys: locant.Positions.from_ids(given[:, keys - queries : keys], given[:, :keys])


def run_attention(
    encoding: locant.Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    positions: locant.Positions,
    backend: str,
    extra: tuple[Term, ...] = (),
    project: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Tensor:
    """What locant computes for q, k, v: the output, with ``return_weights`` the weights.

    Without v the values are unit vectors, so that every backend's output is its weights.
    """
    positions = encoding.prepare(positions)
    q, k = encoding.query_key(q, k, positions)
    if v is None:
        v = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:3], -1)
    terms = encoding.terms(positions, locant.Layer(q, k, **(project or {}))) + extra
    out = locant.attention(q, k, v, terms, positions, logit_factor=encoding.logit_factor, backend=backend, **arguments)
    return out[1] if isinstance(out, tuple) else out


def compare_weights(
    name: str,
    expected: Tensor,
    encoding: locant.Encoding,
    q: Tensor,
    k: Tensor,
    *,
    count: Counts | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    rows: Tensor | None = None,
    atol: float = ATOL,
    **arguments: Any,
) -> Iterator[Comparison]:
    """Attention weights in every backend, and token by token where attention is causal.

    ``rows`` [B I]: the queries to compare (default all). Other arguments go to `run_attention`.
    """
    count = locant.Positions.arange if count is None else count
    chosen = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if rows is None else rows.bool()
    num_queries, num_keys = q.shape[2], k.shape[2]
    given: dict[str, Any] = dict(mask=mask, causal=causal, **arguments)
    for backend in ("reference", "auto"):
        weights = run_attention(encoding, q, k, positions=count(num_queries, num_keys), backend=backend, **given)
        yield pick(name, f"by {backend}", weights, expected, chosen, atol)
    if not causal:
        return
    for step in range(num_queries):
        cached = num_keys - num_queries + step + 1
        given["mask"] = None if mask is None else mask[..., :cached]
        row, past = slice(step, step + 1), k[:, :, :cached]
        weights = run_attention(encoding, q[:, :, row], past, positions=count(1, cached), backend="auto", **given)
        part = f"token {step} with a cache of {cached}"
        yield pick(name, part, weights, expected[:, :, row, :cached], chosen[:, row], atol)


def pick(name: str, part: str, actual: Tensor, expected: Tensor, rows: Tensor, atol: float) -> Comparison:
    """The comparison of chosen queries of [B H I J]."""
    label = f"{name} ({part})"
    return Comparison(label, actual.transpose(1, 2)[rows], expected.transpose(1, 2)[rows], atol, RTOL)
