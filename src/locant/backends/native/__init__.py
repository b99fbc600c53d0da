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
    LowRankBias,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    WeightScale,
)

TABLES = ("query", "key", "gate", "value", "bias", "scales")  # laid out by offset, [1|H ..]
OF_PAIRS = ("pair", "factors")
LOW = ("low_query", "low_key")
TOLERANCE = 1e-4  # of the self-check: rounding gives about 1e-5
_I64, _THREE, _FOUR, _POINTER = ctypes.c_int64, ctypes.c_int64 * 3, ctypes.c_int64 * 4, ctypes.c_void_p


class Operand(ctypes.Structure):
    """The C++ struct of the same name, field by field."""

    _fields_ = (("data", _POINTER), ("strides", _THREE), ("half", _I64))


class Arguments(ctypes.Structure):
    """The C++ struct of the same name, field by field."""

    _fields_ = (
        *((name, _I64) for name in ("batch", "heads", "queries", "keys", "depth", "width", "rank", "causal")),
        *((name, _I64) for name in ("left", "rows", "lowest", "numbers")),
        *((f"{name}_heads", _I64) for name in TABLES),
        ("mask_strides", _FOUR),
        *((name, _I64) for name in ("query_step", "key_step", "slices_batch", "slices_heads")),
        *((name, _I64) for name in ("seed", "threshold", "chunks", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "kept", "pair_factor", "unused")),
        *((name, Operand) for name in ("q", "k", "v", *LOW, *OF_PAIRS)),
        *((name, _POINTER) for name in (*TABLES, "mask", "query_ids", "key_ids", "lse")),
        *((name, Operand) for name in ("out", "dout", "dq", "dk", "dv", *(f"d{name}" for name in (*LOW, *OF_PAIRS)))),
        *((f"d{name}", _POINTER) for name in TABLES),
    )


_forked: list[bool] = []  # a forked child lacks its parent's OpenMP threads, and would wait for them forever
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def _strides(tensor: Tensor) -> list[int]:
    """Strides with 0 on the axes along which the tensor is broadcast."""
    return [0 if extent == 1 else stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)]


class Given:
    """The arguments of one call, and the tensors that must outlive it."""

    def __init__(self, call: Call, seed: int, lowered: lower.Lowered) -> None:
        operands = call.operands
        batch, heads, queries, depth = operands.q.shape
        keys, width = operands.v.shape[2:]
        rank = lowered.tables["low_query"].shape[-1] if "low_query" in lowered.tables else 0
        causal = int(call.plain_causal)
        self.held: list[Tensor] = []
        self.arguments = given = Arguments(batch, heads, queries, keys, depth, width, rank, causal)
        given.left, given.rows, given.lowest, given.numbers = (
            lowered.left,
            lowered.rows,
            lowered.lowest,
            lowered.numbers,
        )
        given.scale, given.pair_factor, given.seed = operands.scale, lowered.pair_factor, seed
        given.threshold, given.kept = dropout.threshold(call.dropout), dropout.factor(call.dropout)
        for name in ("q", "k", "v"):
            self.operand(name, getattr(operands, name))
        for name, table in lowered.tables.items():
            if name in OF_PAIRS:
                self.operand(name, table.expand(*table.shape[:2], queries, keys))
            elif name in LOW:
                self.operand(name, table)
            else:
                setattr(given, f"{name}_heads", table.shape[0])
                self.pointer(name, table.contiguous())
        if lowered.ids:
            for name, ids in (("query", operands.positions.query), ("key", operands.positions.key)):
                setattr(given, f"{name}_step", ids.shape[-1] if ids.dim() == 2 and ids.shape[0] > 1 else 0)
                self.pointer(f"{name}_ids", ids.long().contiguous())
        if call.allowed is not None and not call.plain_causal:
            self.pointer("mask", call.allowed)
            given.mask_strides = _FOUR(*_strides(call.allowed))
        given.threads = 1 if _forked else torch.get_num_threads()
        self.divide(batch, heads)

    def divide(self, batch: int, heads: int) -> None:
        """Split the work for the threads: by slices [batch heads], and where these are few, by queries."""
        given = self.arguments
        given.slices_batch, given.slices_heads = batch, heads
        given.chunks = min(max(1, math.ceil(given.threads / (batch * heads))), math.ceil(given.queries / 64))

    def pointer(self, name: str, tensor: Tensor) -> Tensor:
        """Give a tensor whose layout is known."""
        self.held.append(tensor)
        setattr(self.arguments, name, tensor.data_ptr())
        return tensor

    def operand(self, name: str, tensor: Tensor) -> Tensor:
        """Give a tensor of four axes; only what the kernel cannot read is copied."""
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            tensor = tensor.float()
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        self.held.append(tensor)
        operand = Operand(tensor.data_ptr(), _THREE(*_strides(tensor)[:3]), int(tensor.dtype == torch.bfloat16))
        setattr(self.arguments, name, operand)
        return tensor


def _dtype(tensor: Tensor) -> torch.dtype:
    """In which the kernel writes what belongs to a tensor."""
    return torch.bfloat16 if tensor.dtype == torch.bfloat16 else torch.float32


class Native(Kernel):
    """The kernel: keeps the output and the logarithm of each row's sum."""

    keeps = True

    def forward(self, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        """Output [B H I E] and logarithms [B H I]."""
        given = Given(call, seed, lower.lower(call))
        q, v = call.operands.q, call.operands.v
        out = given.operand("out", q.new_empty(*q.shape[:3], v.shape[3], dtype=_dtype(q)))
        lse = given.pointer("lse", q.new_empty(q.shape[:3], dtype=torch.float32))
        library().locant_forward(ctypes.byref(given.arguments))
        return out.to(q.dtype), lse

    def backward(
        self, call: Call, seed: int, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q, k, v and of every term's tensors."""
        lowered = lower.lower(call)
        given = Given(call, seed, lowered)
        names = {piece.name for piece, want in zip(lowered.pieces, wanted[3:], strict=True) if want}
        of_pairs = [lowered.tables[name].shape for name in OF_PAIRS if name in names]
        given.divide(*(min(sizes) for sizes in zip(call.operands.q.shape[:2], *of_pairs, strict=False)))
        given.operand("out", out)
        given.pointer("lse", lse)
        given.operand("dout", dout)
        q, k, v = call.operands.q, call.operands.k, call.operands.v
        dq = given.operand("dq", q.new_empty(q.shape, dtype=_dtype(q)))
        dk, dv = (_chunked(given, name, tensor) for name, tensor in (("dk", k), ("dv", v)))
        sums = {name: _sum(given, name, table) for name, table in lowered.tables.items() if _needed(name, names)}
        library().locant_backward(ctypes.byref(given.arguments))
        grads = {name: total for name, total in sums.items() if name in names}
        for name in names - {"low_query", *OF_PAIRS}:  # one sum for each thread, or each chunk of queries
            grads[name] = _joined(grads[name])
        return [dq, _joined(dk), _joined(dv), *lowered.raised(grads)]


def _needed(name: str, names: set[str]) -> bool:
    """Whether the kernel wants a place for a gradient: those of pairs only where somebody else does."""
    return name in names or name not in OF_PAIRS


def _sum(given: Given, name: str, table: Tensor) -> Tensor:
    """Where the gradient of an input is summed."""
    if name == "low_key":
        return _chunked(given, "dlow_key", table)
    if name == "low_query":
        return given.operand("dlow_query", table.new_empty(table.shape, dtype=torch.float32))
    arguments = given.arguments
    if name in OF_PAIRS:
        shape = (*table.shape[:2], arguments.queries, arguments.keys)
        return given.operand(f"d{name}", table.new_zeros(shape, dtype=torch.float32))
    return given.pointer(f"d{name}", table.new_zeros(arguments.threads, *table.shape))


def _chunked(given: Given, name: str, tensor: Tensor) -> Tensor:
    """A place for a gradient by keys, to which each chunk of queries adds: [chunks B H J ..]."""
    chunks = given.arguments.chunks
    dtype = _dtype(tensor) if chunks == 1 else torch.float32
    made = tensor.new_empty(chunks, *tensor.shape, dtype=dtype)
    given.operand(name, made.flatten(0, 1))
    return made


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
        low, factors = (draw(1, 2, num_queries, 3), draw(1, 2, num_keys, 3)), draw(1, 1, num_queries, num_keys)
        gaps = torch.arange(num_keys) * 9 // 8
        steady, uneven = Positions.arange(num_queries, num_keys), Positions.from_ids(gaps[-num_queries:], gaps)
        for positions, terms in (
            (steady, (RelativeQuery(vectors[0], rule), RelativeKey(vectors[1], rule), RelativeBias(numbers, rule))),
            (uneven, (RelativeQuery(vectors[0], rule), RelativeKey(vectors[1], rule), RelativeBias(numbers, rule))),
            (steady, (RelativeGate(vectors[2], rule), RelativeScale(numbers, rule), RelativeValue(values, rule))),
            (steady, (PairBias(pair), LowRankBias(*low), WeightScale(factors))),
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
