"""Timing that a busy machine cannot bend: variants take turns, and what counts is the ratio within a turn.

Peak memory is measured in a fresh process each, since memory once taken is not given back; a GPU's allocator tells it.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINE = "plain sdpa"
WARM_UP = 2  # turns that do not count


@dataclass(frozen=True)
class Timing:
    """Quartiles (lower, median, upper) of the milliseconds, and of the ratio to the baseline of the same turn."""

    milliseconds: tuple[float, float, float]
    ratio: tuple[float, float, float]
    repeats: int


def take_turns(
    variants: Mapping[str, Callable[[], Any]],
    repeats: int,
    on_turn: Callable[[], None] = lambda: None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of each variant, turn by turn; `on_turn` is called after each turn."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + WARM_UP):
        for name, function in variants.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            if turn >= WARM_UP:
                found[name].append(1e3 * (time.perf_counter() - start))
        on_turn()
    return found


def synchronizer(device: str) -> Callable[[], None]:
    """What waits until a device has done its work; a CPU has when a call returns."""
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return torch.cuda.synchronize


def summarize(milliseconds: Mapping[str, list[float]], baseline: str = BASELINE) -> dict[str, Timing]:
    """Quartiles of each variant, against the baseline among them."""
    base = milliseconds[baseline]
    return {
        name: Timing(quartiles(values), quartiles(a / b for a, b in zip(values, base, strict=True)), len(values))
        for name, values in milliseconds.items()
    }


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value three times that."""
    values = list(values)
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return round(low, 4), round(middle, 4), round(high, 4)


# --- memory ----------------------------------------------------------------------------------------------------------


def fresh_peak(kind: str, facts: Mapping[str, Any], threads: int) -> float | None:
    """Peak megabytes that `peak_of` finds in a process of its own; None where the system does not tell (not Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, "-m", "locant.bench.peak", kind, json.dumps(dict(facts))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(
            f"bench: the process that measures memory ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return round(float(done.stdout.strip().splitlines()[-1]), 1)


def peak_of(function: Callable[[], Any]) -> float:
    """Megabytes that a call takes beyond what this process has in use before it, at most (Linux)."""
    _release()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    function()
    return (_resident("VmHWM") - before) / 1024


def device_peak(function: Callable[[], Any]) -> float:
    """Megabytes that a call takes of a GPU beyond what is in use before it, at most."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _release() -> None:
    """Gives freed memory back to the system, so that a call which takes it again is seen to (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    """Kilobytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
