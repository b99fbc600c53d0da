"""`python -m tests.kernel_compile WIDTH DTYPE`: Triton's kernels compiled for a GPU (sm_90) where there is none.

Every kind of term is asked forward and backward, in heads of a width; launches compile and do not run. For each it
prints the kernels, the seconds and the most shared memory among them.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import torch
import triton as language  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

from locant.backends import BACKENDS, Backend, triton
from locant.backends.triton import lower
from tests import kernel_runs
from tests.kernel_runs import KEYS, TERMS, Question, Run, causal, packed, some_keys

SHARED = 227 << 10  # bytes that a program may have on sm_90


class Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def runs(dtype: str) -> list[Run]:
    """Every kind of term, and what changes the kernels around them: causality, a mask with dropout, explicit ids."""
    return [
        *(Run(name, 48, 80, dtype=dtype) for name in TERMS),
        Run("query and key", KEYS, KEYS, causal, dtype),
        Run("query and key", 48, 80, some_keys, dtype),
        Run("query and key", KEYS, KEYS, packed, dtype),
        Run("scales", KEYS, KEYS, packed, dtype),
    ]


def main(width: str, dtype: str) -> int:
    """Compiles, prints, counts what does not compile or needs too much memory."""
    language.runtime.driver.set_active(Driver())
    kernel_runs.D = kernel_runs.E = int(width)
    made: list[Any] = []
    triton.start = lambda kernel, programs, *given, **constants: made.append(
        kernel.warmup(*given, grid=(programs,), **constants)
    )
    triton.product_dtype = lambda q: q.dtype
    BACKENDS["triton"] = Backend(lower.refuses, triton.run)
    bad = 0
    for run in runs(dtype):
        made.clear()
        start = time.perf_counter()
        question = Question(run, 0, "cpu")
        try:
            question.answer("triton", question.dtype)
        except Exception:
            bad += 1
            print(f"RAISES {run}: {traceback.format_exc(limit=-3)}", flush=True)
            continue
        shared = max(kernel.metadata.shared for kernel in made)
        bad += shared > SHARED
        names = " ".join(kernel.metadata.name for kernel in made)
        seconds = time.perf_counter() - start
        print(
            f"{'ok' if shared <= SHARED else 'TOO LARGE'} {run}: {names}, {seconds:.1f} s, {shared} B shared",
            flush=True,
        )
    print(f"{len(runs(dtype))} runs, {bad} do not compile")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
