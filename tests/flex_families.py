"""`python -m tests.flex_families DEVICE`: `flex` compiles once for a family, while lengths and batches vary.

A second compile of a family is an error. On the CPU its graph is run step by step; on a GPU it is compiled to kernels.
"""

from __future__ import annotations

import sys

import torch
import torch._dynamo
from torch import Tensor

from locant import attention
from locant.backends import BACKENDS, Backend, Call, flex
from locant.terms import Clip, RelativeBias, RelativeQuery
from tests.kernel_runs import prepare

HEADS = 7  # no two sizes are equal: torch takes such for the same size
LENGTHS = {"above one tile": (140, 150, 290, 517), "within one tile": (60, 61, 97)}


def main(device: str) -> None:
    """Runs every family forward and backward, compares the output with `reference`, counts."""
    prepare("flex", device)
    torch._dynamo.config.error_on_recompile = True  # pyright: ignore[reportPrivateImportUsage]
    seen: set[flex.Family] = set()
    calls = 0
    run = BACKENDS["flex"].run

    def counted(call: Call) -> Tensor | tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        seen.add(flex.prepare(call)[1])
        return run(call)

    BACKENDS["flex"] = Backend(BACKENDS["flex"].refuses, counted)
    torch.set_default_device(device)
    for terms, causal in ((False, False), (True, False), (True, True)):
        for what, lengths in LENGTHS.items():
            for index, length in enumerate(lengths):
                torch.manual_seed(length)
                q, k, v = (torch.randn(11 + index % 2, HEADS, length, 16, requires_grad=True) for _ in range(3))
                tables = [torch.randn(1, 17, 16, requires_grad=True), torch.randn(HEADS, 17, requires_grad=True)]
                parts = (RelativeQuery(tables[0], Clip(8)), RelativeBias(tables[1], Clip(8))) if terms else ()
                out = attention(q, k, v, parts, causal=causal, backend="flex")
                want = attention(q, k, v, parts, causal=causal, backend="reference")
                torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
                torch.autograd.grad(out.square().sum(), [q, k, v, *(tables if terms else [])])
            print(f"terms {terms}, causal {causal}, {what}: {len(seen)} families", flush=True)
    print(f"{calls} calls, {len(seen)} families, no compile twice")


if __name__ == "__main__":
    main(*sys.argv[1:])
