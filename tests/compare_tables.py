"""Invented result tables for the tests of statistics, plots and report. Never results of anything."""

from __future__ import annotations

import math
import random

from locant.compare.results import CurvePoint, LengthScore, ResultTable, RunResult, ShiftScore, Speed

# label: (final loss, rise at 2x, rise at 4x, shift change, speed against none, extra parameters)
PROFILES = {
    "none": (3.92, 0.01, 0.03, 0.0, 1.00, 0),
    "absolute": (3.70, None, None, 0.42, 0.99, 2048),
    "sinusoidal": (3.66, 0.61, 1.34, 0.23, 0.99, 0),
    "shaw": (2.53, 0.05, 0.16, 0.0, 0.71, 2064),
    "xlnet": (2.57, 0.12, 0.41, 0.0, 0.48, 16640),
    "huang_m1": (2.66, 0.05, 0.13, 0.0, 0.80, 33),
    "huang_m2": (2.63, 0.05, 0.15, 0.0, 0.79, 33),
    "huang_m3": (2.52, 0.06, 0.18, 0.0, 0.67, 2112),
    "huang_m4": (2.49, 0.05, 0.15, 0.0, 0.62, 2112),
    "t5": (2.51, 0.03, 0.09, 0.0, 0.90, 128),
    "bert_r": (2.55, 0.07, 0.22, 0.0, 0.85, 4160),
    "bert_ad": (2.98, 0.11, 0.37, 0.0, 0.88, 520),
    "tisa": (2.50, 0.02, 0.05, 0.0, 0.82, 120),
    "tupe_a": (3.41, None, None, 0.31, 0.93, 10240),
    "tupe_r": (2.48, None, None, 0.12, 0.86, 10368),
    "deberta": (2.56, 0.09, 0.29, 0.0, 0.44, 8256),
    "alibi": (2.60, 0.00, -0.02, 0.0, 0.95, 0),
    "rope": (2.58, 0.21, 0.93, 0.0, 0.89, 0),
    "huang_m4 clip=8": (2.54, 0.02, 0.06, 0.0, 0.66, 1088),
    "tupe_r untied": (2.485, None, None, 0.12, 0.85, 10496),
}
QUICKSTART = ("none", "absolute", "huang_m4", "tisa", "tupe_r")


def make_table(labels=QUICKSTART, seeds=(0, 1), *, deviation=0.012, broken=(), trained=32) -> ResultTable:
    """A table whose runs look like a small comparison; `broken` are (label, seed) that failed."""
    runs = [_run(label, seed, deviation, trained, (label, seed) in broken) for label in labels for seed in seeds]
    speeds = {label: _speed(label) for label in labels}
    return ResultTable(
        recipe={
            "name": "invented",
            "text": {"source": "docs", "vocabulary": 4096},
            "model": {"layers": 2, "width": 64, "heads": 4},
            "train": {"steps": 1500, "batch": 64, "length": trained, "learning_rate": 0.002},
            "encodings": list(labels),
        },
        baseline="none",
        trained_length=trained,
        runs=tuple(runs),
        speeds=speeds,
        environment={
            "hardware": {"cpu": "Invented CPU, 2 cores", "memory_gb": 7.7, "gpu": None},
            "versions": {"locant": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11.7"},
            "commit": "0123abcd",
            "command": "locant compare recipes/invented.toml",
            "date": "2000-01-01T00:00:00Z",
        },
    )


def _run(label: str, seed: int, deviation: float, trained: int, fails: bool) -> RunResult:
    final, double, fourfold, shift, _, extra = PROFILES[label]
    chance = random.Random(f"{label} {seed}")
    final += random.Random(seed).gauss(0, deviation) + chance.gauss(0, deviation)  # one part shared by all encodings
    curve = tuple(_point(step, final, chance, trained) for step in range(0, 601 if fails else 1501, 50))
    options = {"clip": 8} if "clip" in label else {}
    if fails:
        return RunResult(label, options, seed, "failed", "loss was nan at step 612", curve)
    lengths = [LengthScore(trained, 1, final, _accuracy(final))]
    for factor, rise in ((2, double), (4, fourfold)):
        loss = None if rise is None else final + rise
        reason = None if loss is not None else f"its table has {trained} rows"
        lengths.append(LengthScore(trained * factor, factor, loss, loss and _accuracy(loss), reason))
    shifts = tuple(_shift(label, final, shift, by, trained) for by in (0, 8, 32, 128))
    return RunResult(label, options, seed, "done", None, curve, tuple(lengths), shifts, extra, 412_032 + extra, 61.5)


def _point(step: int, final: float, chance: random.Random, trained: int) -> CurvePoint:
    loss = final + (8.3 - final) * math.exp(-step / 260) + (0.25 if final < 3 else 0.1) * math.exp(-step / 700)
    validation = loss if step % 250 == 0 else None
    return CurvePoint(step, step * 64 * trained, step * 0.04, loss + chance.gauss(0, 0.05), validation)


def _shift(label: str, final: float, change: float, by: int, trained: int) -> ShiftScore:
    if label.startswith(("absolute", "tupe")) and by >= trained:
        return ShiftScore(by, None, f"its table has {trained} rows")
    return ShiftScore(by, final + change * min(1.0, by / 32))


def _accuracy(loss: float) -> float:
    return math.exp(-loss / 2.9) * 0.9


def _speed(label: str) -> Speed:
    share = PROFILES[label][4]
    return Speed(52_300 * share, 171_000 * share, 402 / share**0.3, 288 / share**0.2)
