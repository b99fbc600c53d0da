"""Statistics of a result table: one row for each encoding, over its seeds.

The rule for a difference between two encodings (for the baseline column and every sentence of the conclusions): runs
are paired by seed, since one seed fixes data order, masks and shared initial weights. Over the n seeds that both
finished, with paired differences of mean m and standard deviation s,

    interval    = m -+ t(0.975, n - 1) * s / sqrt(n)
    seed spread = the larger of the two encodings' own standard deviations over seeds

    clear:    |m| > seed spread and the interval excludes zero
    leaning:  |m| > seed spread but the interval reaches zero (with n = 2, t is 12.7: it is wide by nature)
    level:    |m| <= seed spread
    unknown:  n < 2

Only runs with status "done" and a defined number enter; how many entered is always beside the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from locant.compare.results import ResultTable, RunResult, Speed

CLEAR, LEANING, LEVEL, UNKNOWN = "clear", "leaning", "level", "unknown"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; `std` is None below two values, `mean` below one."""

    mean: float | None
    std: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """Loss of one encoding minus that of another, paired by seed; negative is better. See the module for the rule."""

    mean: float | None
    std: float | None  # of the paired differences
    n: int  # seeds that both finished
    low: float | None  # 95% t interval of the mean
    high: float | None
    seed_spread: float | None
    verdict: str  # "clear" | "leaning" | "level" | "unknown"


@dataclass(frozen=True)
class LengthSummary:
    """One encoding at one window length; `difference` is None for the baseline itself."""

    length: int
    factor: float  # length / trained length
    loss: Spread
    accuracy: Spread
    difference: Difference | None
    reason: str | None  # why runs have no number here


@dataclass(frozen=True)
class ShiftSummary:
    """One encoding with all position ids shifted; `change` is the loss minus that at shift 0, seed by seed."""

    shift: int
    loss: Spread
    change: Spread
    reason: str | None


@dataclass(frozen=True)
class Row:
    """What one encoding did, over its seeds."""

    encoding: str
    options: dict[str, Any]
    rank: int | None  # by mean loss at the trained length; None without a finished run
    is_baseline: bool
    planned: int
    done: int
    failed: tuple[str, ...]  # "seed 3: why", both failed and missing runs
    lengths: tuple[LengthSummary, ...]
    shifts: tuple[ShiftSummary, ...]
    max_shift_change: float | None  # largest absolute change over seeds and shifts
    speed: Speed | None
    extra_parameters: int | None
    total_parameters: int | None
    scores: dict[str, Spread] = field(default_factory=dict)  # besides accuracy, by name

    @property
    def trained(self) -> LengthSummary | None:
        """The summary at the trained length."""
        return next((summary for summary in self.lengths if summary.factor == 1), None)

    @property
    def loss(self) -> float | None:
        """Mean validation loss at the trained length."""
        return self.trained.loss.mean if self.trained else None


def spread(values: Iterable[float | None]) -> Spread:
    """Mean, sample deviation and count of the values that are defined and finite."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    mean = statistics.fmean(kept) if kept else None
    return Spread(mean, statistics.stdev(kept) if len(kept) > 1 else None, len(kept))


def t_critical(degrees: int, confidence: float = 0.95) -> float:
    """Two-sided quantile of Student's t for whole degrees of freedom, e.g. 12.706 at 1. Raises: ValueError below 1."""
    if degrees < 1:
        raise ValueError(f"t_critical: degrees={degrees}, needed at least 1; two seeds give one degree")
    low, high = 0.0, math.pi / 2
    for _ in range(80):  # bisection over the angle atan(t / sqrt(degrees)), where the tail is not steep
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, degrees) < confidence else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _t_inside(angle: float, degrees: int) -> float:
    """P(|T| < t) with angle = atan(t / sqrt(degrees)): the finite sum for whole degrees of freedom."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = degrees % 2
    if degrees == 1:
        return 2 * angle / math.pi
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def compare(table: ResultTable, first: str, second: str, length: int | None = None) -> Difference:
    """Loss of `first` minus loss of `second` at a length (default: the trained one), by the rule of this module."""
    length = table.trained_length if length is None else length
    left, right = _losses(table, first, length), _losses(table, second, length)
    seeds = sorted(set(left) & set(right))
    paired = spread(left[seed] - right[seed] for seed in seeds)
    if paired.mean is None or paired.std is None:
        return Difference(paired.mean, None, paired.n, None, None, None, UNKNOWN)
    half = t_critical(paired.n - 1) * paired.std / math.sqrt(paired.n)
    low, high = paired.mean - half, paired.mean + half
    seed_spread = max(statistics.stdev(side[seed] for seed in seeds) for side in (left, right))
    verdict = LEVEL
    if abs(paired.mean) > seed_spread:
        verdict = CLEAR if low > 0 or high < 0 else LEANING
    return Difference(paired.mean, paired.std, paired.n, low, high, seed_spread, verdict)


def summarise(table: ResultTable) -> tuple[Row, ...]:
    """One row for each encoding, best mean loss at the trained length first, those without a number last."""
    rows = [_row(table, encoding) for encoding in table.encodings]
    return tuple(sorted(rows, key=lambda row: (row.rank is None, row.rank or 0)))


def _done(table: ResultTable, encoding: str) -> list[RunResult]:
    return [run for run in table.of(encoding) if run.status == "done"]


def _losses(table: ResultTable, encoding: str, length: int) -> dict[int, float]:
    """Defined losses by seed."""
    return {
        run.seed: score.loss
        for run in _done(table, encoding)
        for score in run.lengths
        if score.length == length and score.loss is not None
    }


def _row(table: ResultTable, encoding: str) -> Row:
    runs, done = table.of(encoding), _done(table, encoding)
    changes = [abs(change) for run in done for change in _changes(run).values()]
    return Row(
        encoding=encoding,
        options=runs[0].options,
        rank=_rank(table, encoding),
        is_baseline=encoding == table.baseline,
        planned=len(runs),
        done=len(done),
        failed=tuple(f"seed {run.seed}: {run.reason or run.status}" for run in runs if run.status != "done"),
        lengths=_length_summaries(table, encoding, done),
        shifts=_shift_summaries(done),
        max_shift_change=max(changes, default=None),
        speed=table.speeds.get(encoding),
        extra_parameters=next((run.extra_parameters for run in done if run.extra_parameters is not None), None),
        total_parameters=next((run.total_parameters for run in done if run.total_parameters is not None), None),
        scores={
            name: spread(run.scores.get(name) for run in done)
            for name in dict.fromkeys(name for run in done for name in run.scores)
        },
    )


def _rank(table: ResultTable, encoding: str) -> int | None:
    """1 + how many encodings have a lower mean loss at the trained length; equal means share a rank."""
    means = {other: spread(_losses(table, other, table.trained_length).values()).mean for other in table.encodings}
    own = means[encoding]
    return None if own is None else 1 + sum(mean < own for mean in means.values() if mean is not None)


def _length_summaries(table: ResultTable, encoding: str, done: list[RunResult]) -> tuple[LengthSummary, ...]:
    summaries = []
    for length in sorted({score.length for run in done for score in run.lengths}):
        scores = [score for run in done for score in run.lengths if score.length == length]
        summaries.append(
            LengthSummary(
                length=length,
                factor=length / table.trained_length,
                loss=spread(score.loss for score in scores),
                accuracy=spread(score.accuracy for score in scores),
                difference=None if encoding == table.baseline else compare(table, encoding, table.baseline, length),
                reason=_reasons(score.reason for score in scores),
            )
        )
    return tuple(summaries)


def _shift_summaries(done: list[RunResult]) -> tuple[ShiftSummary, ...]:
    summaries = []
    for shift in sorted({score.shift for run in done for score in run.shifts}):
        scores = [score for run in done for score in run.shifts if score.shift == shift]
        changes = [_changes(run).get(shift, None if shift else _change_at_zero(run)) for run in done]
        summaries.append(
            ShiftSummary(
                shift,
                loss=spread(score.loss for score in scores),
                change=spread(changes),
                reason=_reasons(score.reason for score in scores),
            )
        )
    return tuple(summaries)


def _changes(run: RunResult) -> dict[int, float]:
    """Loss at each shift minus that at shift 0, for one run; empty where shift 0 is undefined."""
    losses = {score.shift: score.loss for score in run.shifts if score.loss is not None}
    return {shift: loss - losses[0] for shift, loss in losses.items() if shift} if 0 in losses else {}


def _change_at_zero(run: RunResult) -> float | None:
    return 0.0 if any(score.shift == 0 and score.loss is not None for score in run.shifts) else None


def _reasons(reasons: Iterable[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None
