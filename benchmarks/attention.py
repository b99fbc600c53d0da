"""Time and memory of attention with position terms, against plain SDPA without positions in the same run.

    python benchmarks/attention.py [--backends blocked,native] [--cases ...] [--length 512] [--json FILE]

Variants run interleaved, one repeat of each in turn, so that a busy neighbor slows all of them alike. What counts is
the median of the ratio to plain SDPA of the same turn, with its quartiles. Peak memory is measured in a fresh process
each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import locant
from locant.attention import attention
from locant.encoding import Layer
from locant.positions import Positions

CASES: dict[str, tuple[str, dict]] = {  # what is shown: (encoding, options)
    "plain": ("none", {}),
    "m4": ("huang_m4", {}),
    "m4 clip 64": ("huang_m4", {"clip": 64}),
    "m4 clip 32": ("huang_m4", {"clip": 32}),
    "shaw": ("shaw", {}),
    "shaw clip 64": ("shaw", {"clip": 64}),
    "shaw values clip 64": ("shaw", {"clip": 64, "values": True}),
    "t5": ("t5", {}),
    "tisa": ("tisa", {}),
    "alibi": ("alibi", {}),
    "m1": ("huang_m1", {}),
    "m2": ("huang_m2", {}),
    "tupe_a": ("tupe_a", {}),
    "tupe_r": ("tupe_r", {}),
    "m3 clip 64": ("huang_m3", {"clip": 64}),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="blocked,native", help="which backends, by commas")
    parser.add_argument("--cases", default=",".join(CASES), help="which cases, by commas")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32", "bfloat16", "float16"))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--measure-memory", metavar="CASE/BACKEND/PASS", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases.split(",") if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; choose from {', '.join(CASES)}")
    return options


def variant(case: str, backend: str, sizes: argparse.Namespace) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A function that runs one forward, and the tensors whose gradients a training step would want."""
    torch.manual_seed(0)
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
    dtype = getattr(torch, sizes.dtype)
    q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))
    if backend == "plain sdpa":
        plain = torch.nn.functional.scaled_dot_product_attention
        return lambda: plain(q, k, v, is_causal=sizes.causal), [q, k, v]
    name, options = CASES[case]
    encoding = locant.load(
        name,
        num_heads=sizes.heads,
        head_dim=sizes.head_dim,
        model_dim=sizes.heads * sizes.head_dim,
        max_length=sizes.length,
        **options,
    )
    # What all layers share is not one layer's work: it is prepared once, and enters as a leaf with a gradient.
    positions = encoding.prepare(Positions.arange(sizes.length))
    shared = {owner: value.detach() for owner, value in positions.shared.items()}
    leaves = [value.clone().requires_grad_() for value in shared.values()]
    fixed = replace(positions, shared=shared)
    training = replace(positions, shared=dict(zip(shared, leaves, strict=True)))

    def forward() -> Tensor:
        here = training if torch.is_grad_enabled() else fixed
        terms = encoding.terms(here, Layer(q, k))
        factor = encoding.logit_factor
        return attention(q, k, v, terms, here, logit_factor=factor, causal=sizes.causal, backend=backend)

    return forward, [q, k, v, *(leaves or encoding.parameters())]


def run(forward: Callable[[], Tensor], leaves: list[Tensor], backward: bool, dout: Tensor) -> None:
    if backward:
        torch.autograd.grad(forward(), leaves, dout)
        return
    with torch.no_grad():
        forward()


def timed(variants: dict[str, tuple[Callable[[], Tensor], list[Tensor]]], backward: bool, repeats: int) -> dict:
    """Milliseconds of each variant, turn by turn."""
    some, _ = next(iter(variants.values()))
    with torch.no_grad():
        dout = torch.randn_like(some())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 2):
        for name, (forward, leaves) in variants.items():
            start = time.perf_counter()
            run(forward, leaves, backward, dout)
            if turn >= 2:
                seconds[name].append(1e3 * (time.perf_counter() - start))
    return seconds


def quartiles(values: list[float]) -> list[float]:
    return [round(x, 4) for x in statistics.quantiles(values, n=4)]


def summarize(seconds: dict[str, list[float]]) -> dict[str, dict]:
    plain = seconds["plain sdpa"]
    return {
        name: {
            "milliseconds": quartiles(values),
            "ratio": quartiles([a / b for a, b in zip(values, plain, strict=True)]),
        }
        for name, values in seconds.items()
    }


def peak(case: str, backend: str, backward: bool, sizes: argparse.Namespace) -> float:
    """Peak memory in MB beyond what stood before the first call, in a fresh process (Linux)."""
    which = f"{case}/{backend}/{int(backward)}"
    names = ("batch", "heads", "length", "head-dim", "dtype")
    arguments = [f"--{name}={getattr(sizes, name.replace('-', '_'))}" for name in names]
    causal = ["--causal"] if sizes.causal else []
    command = [sys.executable, __file__, "--measure-memory", which, *arguments, *causal]
    environment = {**os.environ, "OMP_NUM_THREADS": str(sizes.threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.strip().splitlines()[-1])


def measure_memory(which: str, sizes: argparse.Namespace) -> None:
    case, backend, backward = which.split("/")
    forward, leaves = variant(case, backend, sizes)
    dout = torch.randn(sizes.batch, sizes.heads, sizes.length, sizes.head_dim, dtype=leaves[0].dtype)
    if backend != "plain sdpa":  # loading a library is not the call's work
        tiny = torch.zeros(1, 1, 1, 1)
        attention(tiny, tiny, tiny, backend=backend)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    run(forward, leaves, bool(int(backward)), dout)
    print((resident("VmHWM") - before) / 1024)


def resident(field: str) -> int:
    """Kilobytes of this process: VmRSS now, VmHWM at most (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def hardware() -> dict[str, object]:
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def main() -> None:
    sizes = parse()
    torch.set_num_threads(sizes.threads)
    if sizes.measure_memory:
        return measure_memory(sizes.measure_memory, sizes)
    shape = {k: v for k, v in vars(sizes).items() if k not in ("json", "measure_memory")}
    results: dict[str, object] = {"hardware": hardware(), "sizes": shape, "cases": {}}
    print(f"{'case':<22}{'backend':<12}{'forward':>22}{'forward + backward':>24}{'MB fwd':>9}{'MB f+b':>9}")
    for case in sizes.cases.split(","):
        variants = {"plain sdpa": variant(case, "plain sdpa", sizes)}
        for backend in sizes.backends.split(","):
            forward, leaves = variant(case, backend, sizes)
            try:
                with torch.no_grad():
                    forward()
            except ValueError as reason:
                print(f"{case:<22}{backend:<12}  cannot: {reason}")
                continue
            variants[backend] = (forward, leaves)
        passes = [summarize(timed(variants, backward, sizes.repeats)) for backward in (False, True)]
        rows = {}
        for backend in variants:
            memory = [None if sizes.no_memory else round(peak(case, backend, b, sizes), 1) for b in (False, True)]
            rows[backend] = {"forward": passes[0][backend], "forward_backward": passes[1][backend], "peak_mb": memory}
            texts = ["{1:.2f} ({0:.2f} .. {2:.2f})".format(*p[backend]["ratio"]) for p in passes]
            shown = ["-" if m is None else f"{m:.0f}" for m in memory]
            print(f"{case:<22}{backend:<12}{texts[0]:>22}{texts[1]:>24}{shown[0]:>9}{shown[1]:>9}", flush=True)
        results["cases"][case] = rows  # pyright: ignore[reportIndexIssue]
    if sizes.json:
        sizes.json.parent.mkdir(parents=True, exist_ok=True)
        sizes.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
