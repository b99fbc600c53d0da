"""How soon an encoding is where the baseline ends: steps and tokens to the baseline's final validation loss.

A run is there at the first step at which it was validated with a loss no higher than that with which the baseline's run
of the same seed ended. Between two validations nothing is known, so the numbers are late by up to one interval, for all
encodings alike. Only runs that were validated on their way count (`evaluate.points` of the recipe).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from locant.compare.results import CurvePoint, ResultTable, RunResult
from locant.compare.summary import Spread, spread


@dataclass(frozen=True)
class Pace:
    """One encoding, over the seeds that it and the baseline finished; the spreads are over the seeds that got there."""

    steps: Spread
    tokens: Spread
    share: Spread  # of the baseline's steps
    seeds: int
    interval: int  # steps between two validations

    @property
    def reached(self) -> int:
        """Seeds that got there."""
        return self.steps.n


def pace(table: ResultTable, encoding: str) -> Pace | None:
    """How soon this encoding is where the baseline ends; None where no run was validated on its way."""
    ends = {run.seed: course[-1] for run in table.of(table.baseline) if (course := _validated(run))}
    courses = {run.seed: course for run in table.of(encoding) if (course := _validated(run)) and run.seed in ends}
    if not courses:
        return None
    first = {seed: _first_below(course, ends[seed]) for seed, course in courses.items()}
    there = {seed: point for seed, point in first.items() if point is not None}
    return Pace(
        spread(float(point.step) for point in there.values()),
        spread(float(point.tokens) for point in there.values()),
        spread(point.step / ends[seed].step for seed, point in there.items()),
        len(courses),
        max(after.step - before.step for course in courses.values() for before, after in pairwise(course)),
    )


def _validated(run: RunResult) -> list[CurvePoint]:
    """The points of a finished run at which it was validated; [] where that is its end alone."""
    points = [point for point in run.curve if point.validation_loss is not None]
    return points if run.status == "done" and len(points) > 1 else []


def _first_below(course: list[CurvePoint], end: CurvePoint) -> CurvePoint | None:
    goal = end.validation_loss
    assert goal is not None
    return next(
        (point for point in course if point.validation_loss is not None and point.validation_loss <= goal), None
    )


def pace_text(found: Pace | None) -> str:
    """`400 ± 57 (40%)`, the share being that of the baseline's steps; with `1 of 2 seeds` where not all got there."""
    if found is None:
        return "-"
    if not found.reached:
        return "not reached"
    deviation = "" if found.steps.std is None else f" ± {found.steps.std:,.0f}"
    some = "" if found.reached == found.seeds else f", {found.reached} of {found.seeds} seeds"
    return f"{found.steps.mean:,.0f}{deviation} ({found.share.mean:.0%}){some}"
