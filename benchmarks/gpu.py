"""What positions cost on a GPU: `make bench-gpu` measures the table of docs/backends.md in about eight minutes.

bfloat16, 16384 tokens in 12 heads of width 64, lengths 512, 2048 and 8192; `flex`, `triton` and `sdpa` against plain
SDPA without positions in the same turn. Each case runs in a process of its own, so that one that fails (or loses the
GPU) costs no other; what fails stands in the results with its reason. First all cases are run once, several at a time,
which compiles their kernels into caches on disk; then they are timed one by one, until the time given is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from locant.bench.attention import PASSES, Row, Sizes, measure
from locant.bench.timing import BASELINE
from locant.compare.environment import environment

# Those of the table first: what the time does not reach is left out.
CASES = (
    "m4 clip 64", "shaw clip 64", "m4", "shaw", "alibi", "t5", "none", "m3 clip 64", "m1", "tisa", "m4 clip 32",
    "shaw values clip 64", "m2", "tupe_a", "tupe_r",
)  # fmt: skip
BACKENDS = ("flex", "triton", "sdpa")
WARM = 2  # repeats of the run that compiles


def sizes(length: int, given: argparse.Namespace) -> Sizes:
    batch = max(1, given.tokens // length)
    return Sizes(batch, given.heads, length, given.head_dim, given.dtype, device=given.device)


def rows_of(case: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One case at every length, in this process."""
    found: list[Row] = []
    for length in given.lengths:
        shape = sizes(length, given)
        try:
            found += measure([case], BACKENDS, shape, repeats=given.repeats, memory=given.device == "cuda")
        except Exception as reason:  # the baseline itself failed: the other lengths are still measured
            found.append(Row(case, BASELINE, length, cannot=f"{type(reason).__name__}: {reason}"))
    return [dataclasses.asdict(row) for row in found]


def in_its_process(case: str, repeats: int, given: argparse.Namespace, timeout: float) -> list[dict[str, Any]]:
    """The same in a process of its own; one that ends otherwise is a row with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        options = ["--lengths", *map(str, given.lengths), "--tokens", given.tokens, "--heads", given.heads]
        options += [
            "--head-dim",
            given.head_dim,
            "--dtype",
            given.dtype,
            "--device",
            given.device,
            "--repeats",
            repeats,
        ]
        command = [sys.executable, __file__, "--case", case, "--json", path, *options]
        try:
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
            why = f"its process ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            why = f"not done in {timeout:.0f} seconds"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return [dataclasses.asdict(Row(case, BASELINE, length, cannot=why)) for length in given.lengths]


def measure_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles everything, several cases at a time; then times case by case until the time is over."""
    end = time.monotonic() + given.seconds
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda case: in_its_process(case, WARM, given, given.seconds / 2), given.cases))
    print(f"compiled after {given.seconds - (end - time.monotonic()):.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    for case in given.cases:
        left = end - time.monotonic()
        if left <= 0:
            why = f"not measured: {given.seconds} seconds were over"
            rows = [dataclasses.asdict(Row(case, BASELINE, length, cannot=why)) for length in given.lengths]
        else:
            rows = in_its_process(case, given.repeats, given, left)
        for row in rows:
            print(line(row), flush=True)
        found += rows
    return found


def line(row: dict[str, Any]) -> str:
    start = f"{row['case']:<22}{row['length']:>6}  {row['backend']:<12}"
    if row["cannot"]:
        return f"{start}cannot: {row['cannot']}"
    cells = []
    for name in PASSES:
        (low, middle, high), peak = row["timings"][name]["ratio"], row["peak_mb"][name]
        milliseconds = row["timings"][name]["milliseconds"][1]
        cells.append(f"{f'{middle:.2f} ({low:.2f} .. {high:.2f})':>24}{milliseconds:>9.3f} ms{peak or 0:>7.0f} MB")
    return start + "".join(cells)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=450, help="no case is started later")
    parser.add_argument("--workers", type=int, default=6, help="cases compiled at a time")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--case", help="measure this one in this process, and write its rows alone")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.case:
        given.json.write_text(json.dumps(rows_of(given.case, given)), encoding="utf-8")
        return
    rows = measure_all(given)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {length: dataclasses.asdict(sizes(length, given)) for length in given.lengths}
        results = {"made": environment("python benchmarks/gpu.py"), "sizes": facts, "rows": rows}
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"results: {given.json}")


if __name__ == "__main__":
    main()
