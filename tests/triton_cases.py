"""`python -m tests.triton_cases`: Triton's kernels, interpreted on the CPU, against `reference`.

A process of its own: Triton's interpreter must be asked for before `triton` is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from locant.attention import attention
from locant.positions import Positions
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
    SignedLogBucket,
)

B, H, D, E, QUERIES, KEYS = 2, 3, 20, 12, 19, 37


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def interpret() -> None:
    """Small tiles, so that short input has many; the language is patched once and not at every nested call."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    from locant.backends import triton

    patched: set[str] = set()

    def call(function, *arguments, **options):
        module = function.fn.__module__
        if module.startswith("triton") and module not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(module)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
    triton.tiles = lambda dtype, width, gated: triton.Tiles(32, 16, 16, 4, 1)


TERMS: dict[str, Callable[[int, int], tuple]] = {
    "none": lambda i, j: (),
    "bias": lambda i, j: (RelativeBias(draw(H, 8), LogBucket(8, 30)), RelativeBias(draw(1, 5), Clip(2), scaled=True)),
    "scales": lambda i, j: (RelativeScale(draw(H, 4), Distance(3)), RelativeScale(draw(1, 7), Clip(3))),
    "query, no clip": lambda i, j: (RelativeQuery(draw(H, 601, D), Clip(300), scaled=False),),
    "query and key": lambda i, j: (
        RelativeQuery(draw(1, 13, D), Clip(6)),
        RelativeKey(draw(H, 80, D), SignedLogBucket(40, 90, flip=True)),
        RelativeKey(draw(1, 12, D), Clip(5, "zero"), scaled=False),
    ),
    "gate": lambda i, j: (RelativeGate(draw(1, 9, D), Clip(4)), RelativeBias(draw(H, 7), Clip(3))),
    "values": lambda i, j: (RelativeQuery(draw(H, 9, D), Clip(4)), RelativeValue(draw(1, 7, E), Clip(3))),
    "pairs": lambda i, j: (PairBias(draw(H, i, j)), PairBias(draw(B, 1, i, j), scaled=True)),
}


def packed(i: int, j: int) -> dict:
    documents = torch.tensor([[0] * 14 + [1] * 20 + [2] * (j - 34), [5] * j])
    return {"positions": Positions.packed(documents), "causal": True}


# Name of the terms, queries, keys, and the other arguments of the call.
RUNS: list[tuple[str, int, int, Callable[[int, int], dict]]] = [
    *((name, QUERIES, KEYS, lambda i, j: {}) for name in TERMS),
    ("query and key", KEYS, KEYS, lambda i, j: {"causal": True}),
    ("bias", KEYS, KEYS, lambda i, j: {"causal": True}),
    ("query and key", QUERIES, KEYS, lambda i, j: {"mask": torch.rand(B, 1, 1, j) > 0.3, "dropout": 0.3}),
    ("values", QUERIES, KEYS, lambda i, j: {"mask": (torch.arange(i) > 5)[:, None].expand(i, j), "dropout": 0.5}),
    ("query and key", KEYS, KEYS, packed),
    ("scales", KEYS, KEYS, packed),
    ("none", 1, 1, lambda i, j: {}),
    ("query and key", 1, KEYS, lambda i, j: {}),
]


def outcomes(backend: str, tensors: list[Tensor], terms: tuple, options: dict, dtype: torch.dtype) -> list[Tensor]:
    """Output and every gradient, computed in ``dtype`` from the same numbers and the same dropout."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    parts = []
    for term in terms:
        fields = dict(vars(term))
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = value.to(dtype).requires_grad_()
                leaves.append(fields[name])
        parts.append(type(term)(**fields))
    torch.manual_seed(3)
    out = attention(*leaves[:3], tuple(parts), backend=backend, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out.double() * weight).sum(), leaves)]


def main() -> int:
    interpret()
    bad = 0
    for index, (name, i, j, options) in enumerate(RUNS):
        torch.manual_seed(index)
        tensors, terms, given = [draw(B, H, i, D), draw(B, H, j, D), draw(B, H, j, E)], TERMS[name](i, j), options(i, j)
        got = outcomes("triton", tensors, terms, given, torch.float32)
        want = outcomes("reference", tensors, terms, given, torch.float64)
        error = max(
            ((a - b).abs().max() / (1 + b.abs().max())).item() if a.isfinite().all() else float("inf")
            for a, b in zip(got, want, strict=True)
        )
        bad += not error < 2e-5
        print(f"{name}, {i} x {j}, {sorted(given)}: {error:.1e}", flush=True)
    print(f"{len(RUNS)} runs, {bad} differ")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
