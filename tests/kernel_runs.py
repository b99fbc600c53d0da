"""`python -m tests.kernel_runs BACKEND DEVICE TIER`: a backend against `reference` in output and every gradient.

A process of its own, without the annotation checker: kernels are compiled from their source, and Triton's interpreter
must be asked for before `triton` is imported. Every run prints one line; a run that raises is reported, and the next
one goes on. On the CPU `triton` is interpreted.

float32 is held to 2e-5 of the float64 result; half precision to twice the error of `reference` in that precision.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from locant import attention
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

B, H, D, E, QUERIES, KEYS = 2, 3, 20, 18, 19, 37
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def draw(*shape: int) -> Tensor:
    """Normal numbers from the process's generator, on the CPU whatever the default device."""
    return torch.randn(shape, dtype=torch.float64, device="cpu")


TERMS: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
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


# --- how attention is asked -------------------------------------------------------------------------------------------


def nothing(i: int, j: int) -> dict[str, Any]:
    return {}


def causal(i: int, j: int) -> dict[str, Any]:
    return {"causal": True}


def some_keys(i: int, j: int) -> dict[str, Any]:
    return {"mask": torch.rand(B, 1, 1, j, device="cpu") > 0.3, "dropout": 0.3}


def blind_rows(i: int, j: int) -> dict[str, Any]:
    """The first queries see nothing."""
    return {"mask": (torch.arange(i, device="cpu") > 5)[:, None].expand(i, j), "dropout": 0.5}


def blind_batch(i: int, j: int) -> dict[str, Any]:
    """One batch row sees nothing, the other half."""
    return {
        "mask": torch.stack((torch.arange(j, device="cpu") < j // 2, torch.zeros(j, dtype=torch.bool)))[:, None, None]
    }


def packed(i: int, j: int) -> dict[str, Any]:
    documents = torch.tensor([[0] * 14 + [1] * 20 + [2] * (j - 34), [5] * j], device="cpu")
    return {"positions": Positions.packed(documents), "causal": True}


def left_padded(i: int, j: int) -> dict[str, Any]:
    real = torch.arange(j, device="cpu") >= torch.tensor([[5], [0]], device="cpu")
    return {"positions": Positions.from_mask(real, i), "mask": real[:, None, None], "causal": True}


@dataclass(frozen=True)
class Run:
    """One call: terms by name, lengths, how attention is asked, precision; ``slow`` ones wait for the slow tier."""

    terms: str
    queries: int = QUERIES
    keys: int = KEYS
    ask: Callable[[int, int], dict[str, Any]] = nothing
    dtype: str = "float32"
    slow: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.terms}, {self.queries} x {self.keys}, {self.ask.__name__}, {self.dtype}"


LATER = {"gate", "values"}  # the dearest to interpret, each with a shorter run of its own in the default tier
RUNS: list[Run] = [
    *(Run(name, slow=name in LATER) for name in TERMS),
    Run("gate", 7, 11),
    Run("values", 7, 11),
    Run("none", 1, 1),
    Run("query and key", 1, KEYS),
    Run("bias", KEYS, KEYS, causal),
    Run("query and key", KEYS, KEYS, causal, slow=True),
    Run("query and key", QUERIES, KEYS, some_keys),
    Run("values", QUERIES, KEYS, blind_rows, slow=True),
    Run("values", 7, 11, blind_rows),
    Run("bias", 7, 11, blind_batch),
    Run("query and key", KEYS, KEYS, packed, slow=True),
    Run("scales", KEYS, KEYS, packed),
    Run("query and key", 9, 13, left_padded),
    Run("bias", KEYS, KEYS, left_padded, slow=True),
    Run("query and key", 7, 11, dtype="bfloat16"),
    Run("gate", 7, 11, dtype="bfloat16"),
    Run("scales", 7, 11, causal, dtype="float16"),
]
RUNS += [
    replace(run, dtype=dtype, slow=True)
    for dtype in ("bfloat16", "float16")
    for run in RUNS
    if run.dtype == "float32" and replace(run, dtype=dtype) not in RUNS
]


# --- comparison -------------------------------------------------------------------------------------------------------


def moved(value: Any, device: str) -> Any:
    """An argument of the call, with its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Positions):
        return replace(value, **{n: t.to(device) for n, t in vars(value).items() if isinstance(t, Tensor)})
    return value


class Question:
    """The numbers of one run, the same for every backend and precision."""

    def __init__(self, run: Run, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        i, j = run.queries, run.keys
        self.operands = [draw(B, H, i, D).to(device), draw(B, H, j, D).to(device), draw(B, H, j, E).to(device)]
        self.terms = [
            replace(term, **{n: t.to(device) for n, t in vars(term).items() if isinstance(t, Tensor)})
            for term in TERMS[run.terms](i, j)
        ]
        self.options = {name: moved(value, device) for name, value in run.ask(i, j).items()}
        # What the precision of the run can hold: the rounded numbers, exactly.
        self.dtype = DTYPES[run.dtype]

    def answer(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        """Output and every gradient, computed in ``dtype`` from the same numbers and the same dropout."""
        leaves = [self._leaf(tensor, dtype) for tensor in self.operands]
        parts = []
        for term in self.terms:
            fields = dict(vars(term))
            for name, value in fields.items():
                if isinstance(value, Tensor):
                    fields[name] = self._leaf(value, dtype)
                    leaves.append(fields[name])
            parts.append(type(term)(**fields))
        torch.manual_seed(3)
        out = attention(*leaves[:3], tuple(parts), backend=backend, **self.options)
        assert isinstance(out, Tensor)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out)
        return [out, *torch.autograd.grad((out.double() * weight).sum(), leaves)]

    def _leaf(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(self.dtype).to(dtype, copy=True).requires_grad_()


def error(have: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference beside the largest number of each tensor; infinite where something is not finite."""
    pairs = zip(have, want, strict=True)
    return max(
        ((a.double() - b).abs().max() / (1 + b.abs().max())).item() if a.isfinite().all() else float("inf")
        for a, b in pairs
    )


def compare(run: Run, backend: str, device: str, seed: int) -> tuple[float, float]:
    """The error of a backend in a run, and what is allowed."""
    question = Question(run, seed, device)
    truth = question.answer("reference", torch.float64)
    have = error(question.answer(backend, question.dtype), truth)
    if question.dtype == torch.float32:
        return have, 2e-5
    literal = error(question.answer("reference", question.dtype), truth)
    return have, 2 * literal + 2 * torch.finfo(question.dtype).eps


def deterministic(backend: str, device: str) -> str:
    """Under deterministic algorithms, counted and explicit ids: equal twice, to the bit, or refused by that reason."""
    found = []
    for run in (Run("query and key"), Run("query and key", KEYS, KEYS, packed)):
        question = Question(run, 0, device)
        try:
            answers = [question.answer(backend, torch.float32) for _ in range(2)]
        except ValueError as reason:
            found.append("refused" if "deterministic" in str(reason) else str(reason))
            continue
        found.append("equal" if all(map(torch.equal, *answers)) else "unequal")
    return ", ".join(found)


def served(backend: str, run: Run) -> bool:
    """Whether the backend claims the run: a score function knows neither channels, nor values, nor dropout."""
    return backend != "flex" or (run.terms not in ("gate", "values") and run.ask is not some_keys)


def runs_of(backend: str, tier: str) -> Iterator[tuple[int, Run]]:
    """The runs of a tier (default, slow, all) that the backend claims, and their seeds."""
    for seed, run in enumerate(RUNS):
        if served(backend, run) and tier in ("all", "slow" if run.slow else "default"):
            yield seed, run


def interpret() -> None:
    """Triton on the CPU: small tiles, so that short input has many; the language is patched once, not at every call."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    from locant.backends import triton

    patched: set[str] = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:
        module = function.fn.__module__
        if module.startswith("triton") and module not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(module)
        return function.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
    triton.tiles = lambda dtype, width, gated: triton.Tiles(32, 16, 16, 4, 1)


def unfused() -> None:
    """FlexAttention on the CPU, backward too: traced and differentiated as for a GPU, and then run step by step."""
    from torch.nn.attention import flex_attention

    from locant.backends import BACKENDS, Backend, Call, flex

    flex_attention._validate_device = lambda query, key, value: None  # it refuses a backward pass on the CPU

    def run(call: Call) -> Tensor:
        arguments, family = flex.prepare(call)
        return flex.compiled(family, "aot_eager")(*arguments)

    BACKENDS["flex"] = Backend(flex.terms_refused, run)


def prepare(backend: str, device: str) -> None:
    """Backends for GPUs, made to run where there is none."""
    if device == "cpu":
        {"triton": interpret, "flex": unfused}[backend]()


def main(backend: str, device: str, tier: str) -> int:
    """Runs, prints, counts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it torch refuses deterministic products on a GPU
    prepare(backend, device)
    bad = total = 0
    for seed, run in runs_of(backend, tier):
        total += 1
        try:
            have, allowed = compare(run, backend, device, seed)
        except Exception:
            bad += 1
            print(f"RAISES {run}: {traceback.format_exc(limit=-4)}", flush=True)
            continue
        bad += not have <= allowed
        print(f"{'ok' if have <= allowed else 'DIFFERS'} {run}: {have:.1e} of {allowed:.1e}", flush=True)
    torch.use_deterministic_algorithms(True)
    print(f"deterministic: {deterministic(backend, device)}")
    print(f"{total} runs, {bad} differ")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
