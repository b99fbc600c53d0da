"""Speed and memory of one encoding, measured in a process of its own, beside no other run.

Training is timed step by step inside the same Trainer that trains the runs; inference is the encoder's forward pass on
the same batches, without the vocabulary head, which all encodings share. A peak is the process's highest resident
memory on a CPU, and what torch allocated at most on a GPU.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from locant.compare.objective import Data, Trial, find_objective
from locant.compare.results import Speed

if TYPE_CHECKING:
    from locant.compare.recipe import Recipe

MIN_REPEATS = 5


@dataclass(frozen=True)
class MeasureSettings:
    """How long speed is measured; encodings take turns in every round."""

    rounds: int = 3  # fresh processes for each encoding; the median counts. 0: no speed measurement
    seconds: float = 3.0  # of training steps, and the same of inference, in each round
    threads: int = 0  # 0: all cores

    def __post_init__(self) -> None:
        if self.rounds < 0:
            raise ValueError(f"rounds = {self.rounds}, needed 0 (no measurement) or more")
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds = {self.seconds}, needed a number above 0 and up to 3600")
        if self.threads < 0:
            raise ValueError(f"threads = {self.threads}, needed 0 (all cores) or more")


def measure(recipe: Recipe, label: str, data: Data, work_dir: Path) -> Speed:
    """One round for one encoding; call it in a fresh process."""
    import torch

    trial = find_objective(recipe.task).trial(recipe, recipe.choice(label), recipe.seeds[0], data)
    model = trial.built.model
    if recipe.train.device == "auto" and torch.cuda.is_available():
        model.to(device="cuda")
    device = next(model.parameters()).device
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            trial.infer()
        if device.type == "cuda":
            torch.cuda.synchronize()

    _reset_peak(device.type)
    inference = _median_seconds(forward, recipe.measure.seconds)
    inference_peak = _peak_mb(device.type)
    _reset_peak(device.type)
    training = _median_train_seconds(recipe, trial, work_dir)
    speeds = (trial.tokens_per_step / training, trial.tokens_per_pass / inference)
    return Speed(*speeds, _peak_mb(device.type), inference_peak)


def _median_train_seconds(recipe: Recipe, trial: Trial, work_dir: Path) -> float:
    stamps = [time.perf_counter()]

    def on_step(step: int, loss: float) -> bool:
        stamps.append(time.perf_counter())
        return step >= MIN_REPEATS + 2 and stamps[-1] - stamps[0] >= recipe.measure.seconds

    settings = replace(recipe.train, steps=1_000_000, warmup_fraction=0.0, curve_points=1, checkpoints=0)
    trial.train(settings, work_dir, on_step)
    seconds = [after - before for before, after in itertools.pairwise(stamps)]
    return statistics.median(seconds[2:])  # the first two steps fill caches


def _median_seconds(call: Callable[[], None], seconds: float) -> float:
    call()
    call()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < MIN_REPEATS or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def _reset_peak(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak_mb(device: str) -> float | None:
    """Highest memory so far in MB (10^6 bytes); None where the system does not tell."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def median_speed(rounds: Sequence[Speed]) -> Speed:
    """The median of each number over rounds, and the rounds themselves: how far they spread is how much it is worth."""

    def values(name: str) -> tuple[float, ...]:
        return tuple(value for speed in rounds if (value := getattr(speed, name)) is not None)

    def median(name: str) -> float | None:
        return statistics.median(values(name)) if values(name) else None

    reasons = [speed.reason for speed in rounds if speed.reason]
    return Speed(
        median("train_tokens_per_second"),
        median("inference_tokens_per_second"),
        median("train_peak_mb"),
        median("inference_peak_mb"),
        reasons[0] if reasons else None,
        values("train_tokens_per_second"),
        values("inference_tokens_per_second"),
    )
