"""Measures what `backend="auto"` goes by: every backend on every family of terms, over lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from locant.attention import attention
from locant.backends import BACKENDS, speeds
from locant.bench.timing import quartiles, synchronizer, take_turns
from locant.positions import Positions
from locant.terms import Clip, RelativeBias, RelativeGate, RelativeKey, RelativeQuery, RelativeScale, Term

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
TOKENS = 2048  # of a batch, where one sequence is not longer
HEADS, HEAD_DIM, CLIP = 8, 64, 64
PASSES = ("inference", "training")
FAMILY_PASSES = len(PASSES) * (1 + len(speeds.FAMILIES))
LITERAL = 1024  # the longest sequence on which the reference, with its pairs in memory, is tried
LITERAL_GATES = 128  # the same for gates, whose literal form has a number for each pair and channel


def _terms(family: str, device: str) -> tuple[Term, ...]:
    def table(*shape: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(shape, device=device)).requires_grad_()

    rule, rows = Clip(CLIP), 2 * CLIP + 1
    vectors = (1, rows, HEAD_DIM)
    return {
        "plain": (),
        "biases": (RelativeBias(table(HEADS, rows), rule),),
        "scales": (RelativeScale(table(HEADS, rows), rule),),
        "vectors": (RelativeQuery(table(*vectors), rule), RelativeKey(table(*vectors), rule)),
        "gates": (RelativeGate(table(*vectors), rule),),
    }[family]


def refresh(
    device: str = "cpu",
    repeats: int = 9,
    lengths: tuple[int, ...] = LENGTHS,
    backends: tuple[str, ...] = tuple(BACKENDS),
    on_length: Callable[[str], None] = lambda what: None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by "family, pass", length and backend; the medians of interleaved runs."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for family in ("plain", *reversed(speeds.FAMILIES)):
        for name in PASSES:
            rows: dict[str, dict[str, float]] = {}
            for length in lengths:
                on_length(f"{family}, {name}, length {length}")
                rows[str(length)] = _at(family, name == "training", length, device, repeats, backends)
            found[f"{family}, {name}"] = rows
    return found


def _at(
    family: str, training: bool, length: int, device: str, repeats: int, backends: tuple[str, ...]
) -> dict[str, float]:
    batch, terms = max(1, TOKENS // length), _terms(family, device)
    q, k, v = (torch.randn(batch, HEADS, length, HEAD_DIM, device=device).requires_grad_() for _ in range(3))
    leaves = [q, k, v, *(term.table for term in terms)]  # pyright: ignore[reportAttributeAccessIssue]
    positions, dout = Positions.arange(length, device=device), torch.randn_like(q)

    def run(backend: str) -> Any:
        if training:
            return torch.autograd.grad(attention(q, k, v, terms, positions, backend=backend), leaves, dout)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            return attention(q, k, v, terms, positions, backend=backend)

    variants: dict[str, Callable[[], Any]] = {}
    for backend in backends:
        if backend == "reference" and length > (LITERAL_GATES if family == "gates" else LITERAL):
            continue
        try:
            run(backend)
        except ValueError:  # it does not know these terms
            continue
        variants[backend] = lambda name=backend: run(name)
    turns = take_turns(variants, repeats, synchronize=synchronizer(device))
    return {backend: round(quartiles(values)[1], 4) for backend, values in turns.items()}
