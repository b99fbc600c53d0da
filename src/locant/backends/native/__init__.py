"""Attention with position terms in C++ for the CPU, compiled at first use and checked against `blocked` once.

Without a compiler, or where the check fails, one warning says so and the backend refuses every call.
"""

from __future__ import annotations

import ctypes
import math
import os
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locant.backends import blocked, dropout, operator
from locant.backends.call import Backend, Call, constant
from locant.backends.native import build, lower
from locant.backends.native.build import Unavailable
from locant.backends.operator import Kernel
from locant.positions import Positions
from locant.terms import (
    Clip,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
)

TABLES = ("query", "key", "gate", "value", "bias", "scales", "pair")
TOLERANCE = 1e-4  # of the self-check: rounding gives about 1e-5
_I64, _FOUR, _POINTER = ctypes.c_int64, ctypes.c_int64 * 4, ctypes.c_void_p


class Arguments(ctypes.Structure):
    """The C++ struct of the same name, field by field."""

    _fields_ = (
        *((name, _I64) for name in ("batch", "heads", "queries", "keys", "depth", "width", "causal", "left", "rows")),
        *((f"{name}_heads", _I64) for name in ("query", "key", "gate", "value", "bias", "scale")),
        ("mask_strides", _FOUR),
        ("pair_strides", _FOUR),
        *((name, _I64) for name in ("pair_groups_batch", "pair_groups_heads")),
        *((name, _I64) for name in ("seed", "threshold", "chunks", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "kept")),
        *((name, _POINTER) for name in ("q", "k", "v", *TABLES, "mask", "out", "lse", "dout", "dq", "dk", "dv")),
        *((f"d{name}", _POINTER) for name in TABLES),
    )


_forked: list[bool] = []  # a forked child lacks its parent's OpenMP threads, and would wait for them forever
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def _strides(tensor: Tensor) -> Any:
    """Strides with 0 on the axes along which the tensor is broadcast."""
    return _FOUR(*(0 if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def _arguments(call: Call, seed: int, lowered: lower.Lowered) -> tuple[Arguments, dict[str, Tensor]]:
    """All that forward and backward have in common, and the tensors that must outlive the call."""
    operands, tables = call.operands, lowered.tables
    scale = operands.scale
    assert not isinstance(scale, Tensor)
    held = {name: getattr(operands, name).float().contiguous() for name in ("q", "k", "v")}
    batch, heads, queries, depth = held["q"].shape
    keys, width = held["v"].shape[2:]
    causal = int(call.plain_causal)
    given = Arguments(batch, heads, queries, keys, depth, width, causal, lowered.left, lowered.rows)
    given.scale, given.seed = scale, seed
    given.threshold, given.kept = dropout.threshold(call.dropout), dropout.factor(call.dropout)
    for name, tensor in {**held, **tables}.items():
        setattr(given, name, tensor.data_ptr())
        if name in tables and name != "pair":
            setattr(given, "scale_heads" if name == "scales" else f"{name}_heads", tensor.shape[0])
    groups = batch * heads
    if "pair" in tables:
        given.pair_strides = _strides(tables["pair"])
        given.pair_groups_batch, given.pair_groups_heads = tables["pair"].shape[:2]
        groups = given.pair_groups_batch * given.pair_groups_heads
    if call.allowed is not None and not call.plain_causal:
        given.mask, given.mask_strides = call.allowed.data_ptr(), _strides(call.allowed)
    given.threads = 1 if _forked else torch.get_num_threads()
    given.chunks = min(max(1, math.ceil(given.threads / groups)), math.ceil(queries / 64))
    return given, held | tables


class Native(Kernel):
    """The kernel: keeps the output and the logarithm of each row's sum."""

    keeps = True

    def forward(self, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        """Output [B H I E] and logarithms [B H I]."""
        given, held = _arguments(call, seed, lower.lower(call))
        q, v = held["q"], held["v"]
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
        given.out, given.lse = out.data_ptr(), lse.data_ptr()
        library().locant_forward(ctypes.byref(given))
        return out.to(call.operands.q.dtype), lse

    def backward(
        self, call: Call, seed: int, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q, k, v and of every table."""
        lowered = lower.lower(call)
        given, held = _arguments(call, seed, lowered)
        q, k, v = held["q"], held["k"], held["v"]
        out, dout = out.float().contiguous(), dout.float().contiguous()
        dq = torch.empty_like(q)
        dk, dv = k.new_empty(given.chunks, *k.shape), v.new_empty(given.chunks, *v.shape)
        given.out, given.lse, given.dout = out.data_ptr(), lse.data_ptr(), dout.data_ptr()
        given.dq, given.dk, given.dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        names = {piece.name for piece, want in zip(lowered.pieces, wanted[3:], strict=True) if want}
        sums: dict[str, Tensor] = {}
        for name, table in lowered.tables.items():
            if name == "pair" and name not in names:  # of the others the kernel wants all
                continue
            shape = table.shape if name == "pair" else (given.threads, *table.shape)
            sums[name] = table.new_zeros(shape)
            setattr(given, f"d{name}", sums[name].data_ptr())
        library().locant_backward(ctypes.byref(given))
        grads = {name: total if name == "pair" else total.sum(0) for name, total in sums.items() if name in names}
        return [dq, _joined(dk), _joined(dv), *lowered.raised(grads)]


def _joined(chunks: Tensor) -> Tensor:
    return chunks[0] if len(chunks) == 1 else chunks.sum(0)


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | str:
    """The library, built and checked; or why it cannot be had, with one warning."""
    try:
        path = build.build()
        library = build.load(path)
        if library.locant_arguments_size() != ctypes.sizeof(Arguments):
            raise Unavailable(f"{path.name} was built from another version of its source")
        _loaded.append(library)
        if not build.checked(path).exists():
            _check(path)
        return library
    except Unavailable as reason:
        _loaded.clear()
        why = str(reason)
    warnings.warn(f"native attention is switched off: {why}; the slower backends serve", RuntimeWarning, stacklevel=5)
    return why


_loaded: list[ctypes.CDLL] = []


def _check(path: Path) -> None:
    worst = self_check()
    if not worst < TOLERANCE:
        raise Unavailable(f"its results differ from the backend 'blocked' by {worst:.2g}")
    build.checked(path).touch()


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises: RuntimeError where there is none.
    """
    found = _loaded[0] if _loaded else _load()
    if isinstance(found, str):
        raise RuntimeError(f"backend 'native' cannot: {found}; use backend='auto' or 'blocked'")
    return found


def facts(*, compile_now: bool = False) -> dict[str, str | int]:
    """What is known of the kernel of this machine; with ``compile_now`` it is compiled and checked first.

    ``state``: ready, not built, not checked, or why it cannot be had.
    """
    found: dict[str, str | int] = {"state": "not built", "source": str(build.SOURCE)}
    try:
        command = build.compiler()
        path = build.library_path(command)
        found |= {"compiler": command, "library": str(path), "cpu": build.processor()}
    except Unavailable as reason:
        return {**found, "state": str(reason)}
    if compile_now:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what it would say is the state
            state = _missing() or "ready"
    elif not path.exists():
        return found
    else:
        state = "ready" if build.checked(path).exists() else "not checked"
    found["state"] = state
    if path.exists():
        found |= {"bytes": path.stat().st_size, "lanes": int(build.load(path).locant_lanes())}
    return found


def self_check() -> float:
    """The largest difference to `blocked` in outputs and gradients, relative to their size, over a few small calls."""
    worst = 0.0
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    for num_queries, num_keys, clip, causal in ((70, 70, 3, True), (33, 130, 200, False), (129, 257, 40, False)):
        q, k, v = draw(1, 2, num_queries, 20), draw(1, 2, num_keys, 20), draw(1, 2, num_keys, 12)
        vectors, numbers, rule = [draw(2, 2 * clip + 1, 20) for _ in range(3)], draw(2, 2 * clip + 1), Clip(clip)
        pair, values = draw(1, 2, num_queries, num_keys), draw(1, 2 * clip + 1, 12)
        positions = Positions.arange(num_queries, num_keys)
        for terms in (
            (RelativeQuery(vectors[0], rule), RelativeKey(vectors[1], rule), RelativeBias(numbers, rule)),
            (RelativeGate(vectors[2], rule), RelativeScale(numbers, rule), PairBias(pair), RelativeValue(values, rule)),
        ):
            allowed = torch.ones(num_queries, num_queries, dtype=torch.bool).tril()[None, None] if causal else None
            call = Call(Operands(q, k, v, positions, 0.25), terms, allowed, causal, 0.0, False)
            leaves = [q, k, v, *(t for term in terms for t in vars(term).values() if isinstance(t, Tensor))]
            with torch.enable_grad():
                pairs = zip(_results(run(call), leaves), _results(blocked.run(call), leaves), strict=True)
                worst = max(worst, *((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in pairs))
    return worst


def _results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def refuses(call: Call) -> str | None:
    """Why a call cannot be served; the first call that could be builds the kernel."""
    return operator.refuses() or lower.refuses(call) or _missing()


@constant
def _missing() -> str | None:
    """Why there is no kernel."""
    found = _load()
    return found if isinstance(found, str) else None


run = operator.register("native", Native())
BACKEND = Backend(refuses=refuses, run=run)
