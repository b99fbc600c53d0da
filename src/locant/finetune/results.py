"""What a fine-tuning call found: one result for each seed, to JSON and CSV and back, and as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.compare.summary import Spread, spread
from locant.compare.tables import align, as_csv, spread_text
from locant.finetune.scores import Scores
from locant.finetune.statistics import ALPHA, POWER, Gap, gap

FORMAT = "locant.finetune.results"
ABSENT = "-"


@dataclass(frozen=True)
class SeedResult:
    """One seed: scores of each dev set by name; ``reason`` says why there are none."""

    seed: int
    scores: dict[str, Scores]
    steps: int
    final_loss: float | None  # mean training loss of the last tenth of the steps
    tokens_per_second: float | None
    seconds: float | None  # of training, since it was last taken up
    reason: str | None = None


@dataclass(frozen=True)
class Outcome:
    """All seeds of one model on one task. ``baseline``: the scores of the most frequent class, {} where none is."""

    task: str
    label: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    examples: dict[str, int]  # training examples, questions or windows, and those of each dev set
    parameters: dict[str, int]  # of the model, and of its encodings
    baseline: dict[str, Scores]
    notices: tuple[str, ...]
    runs: tuple[SeedResult, ...]

    def spreads(self) -> dict[tuple[str, str], Spread]:
        """Over the seeds that have all scores, by dev set and score; undefined as soon as one value is."""
        done = [run for run in self.runs if run.reason is None]
        names = [(dev, score) for dev, scores in done[0].scores.items() for score in scores] if done else []
        found = {}
        for dev, score in names:
            values = [run.scores[dev][score] for run in done]
            found[dev, score] = spread(values if None not in values else [])
        return found

    def against_baseline(self) -> dict[tuple[str, str], Gap | None]:
        """How far each mean is from the most frequent class."""
        return {
            (dev, score): gap(found, level)
            for (dev, score), found in self.spreads().items()
            if (level := self.baseline.get(dev, {}).get(score)) is not None
        }

    def against(self, other: Outcome) -> dict[tuple[str, str], Gap | None]:
        """How far each mean is from that of another model. Raises: ValueError for another task or other dev sets."""
        if (
            other.task != self.task
            or other.examples.keys() != self.examples.keys()
            or any(other.examples[name] != count for name, count in self.examples.items() if name != "train")
        ):
            raise ValueError(
                f"finetune: results of {other.task} on {_counts(other.examples)} cannot be held against {self.task} on "
                f"{_counts(self.examples)}; give --against the folder of the same task and dev sets"
            )
        theirs = other.spreads()
        return {key: gap(found, theirs[key]) for key, found in self.spreads().items() if key in theirs}

    def to_json(self) -> str:
        """The whole outcome, with the statistics over seeds beside the values."""
        body = {"format": FORMAT, **dataclasses.asdict(self), "summary": self._summary()}
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"

    def _summary(self) -> list[dict[str, Any]]:
        level = self.against_baseline()
        rows = []
        for (dev, score), found in self.spreads().items():
            apart = level.get((dev, score))
            base = None if apart is None else dataclasses.asdict(apart)
            rows.append({"dev": dev, "score": score, **dataclasses.asdict(found), "against_majority": base})
        return rows

    def to_csv(self) -> str:
        """A line for each seed, dev set and score."""
        rows = [
            (self.task, self.label, run.seed, dev, score, value, run.reason)
            for run in self.runs
            for dev, scores in (run.scores or {"": {"": None}}).items()
            for score, value in scores.items()
        ]
        return as_csv(("task", "model", "seed", "dev", "score", "value", "reason"), rows)


def read_outcome(folder: Path) -> Outcome:
    """What an earlier call left in its output folder. Raises: FileNotFoundError; ValueError for other files."""
    file = folder / "results.json" if folder.is_dir() else folder
    if not file.is_file():
        raise FileNotFoundError(f"finetune: no {str(file)!r}; give the output folder of a finished locant finetune")
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        if body.pop("format") != FORMAT:
            raise KeyError("format")
        body.pop("summary")
        runs = tuple(SeedResult(**run) for run in body.pop("runs"))
        return Outcome(**{**body, "notices": tuple(body["notices"])}, runs=runs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"finetune: {file} is no whole result of locant finetune ({type(error).__name__}: {error}); run it again"
        ) from error


def to_text(outcome: Outcome, others: tuple[Outcome, ...] = ()) -> str:
    """Scores with mean, deviation and all values; the majority line; differences, and the seeds they take."""
    scale = scale_of(outcome.task)
    done = [run for run in outcome.runs if run.reason is None]
    head = f"{outcome.task}: {outcome.label}, {len(done)} of {len(outcome.runs)} seeds, {_counts(outcome.examples)}"
    lines = [head, ""]
    rows = []
    for (dev, score), found in outcome.spreads().items():
        values = ", ".join(value_text(run.scores[dev][score], scale) for run in done)
        level = outcome.baseline.get(dev, {}).get(score)
        rows.append((dev, score, spread_text(found, 2, scale), value_text(level, scale), values))
    lines += align(("dev set", "score", "mean ± deviation", "majority", "each seed"), rows, 2) if rows else []
    apart = differences_text(outcome, others)
    lines += ["", *apart] if apart else []
    lines += ["", *(f"seed {run.seed}: {run.reason}" for run in outcome.runs if run.reason)]
    lines += [f"note: {notice}" for notice in outcome.notices]
    return "\n".join(lines).rstrip() + "\n"


def scale_of(task: str) -> float:
    """What scores are multiplied by to be shown in percent: those of SQuAD are percent."""
    return 1.0 if task == "squad" else 100.0


def differences_text(outcome: Outcome, others: Sequence[Outcome] = ()) -> list[str]:
    """A line for each score against the majority class, and against each other outcome."""
    compared = [("the majority class", outcome.against_baseline())] if outcome.against_baseline() else []
    compared += [(other.label, outcome.against(other)) for other in others]
    scale = scale_of(outcome.task)
    return [
        f"{dev} {score} against {name}: {_gap(found, scale)}"
        for name, gaps in compared
        for (dev, score), found in gaps.items()
    ]


def _gap(found: Gap | None, scale: float) -> str:
    if found is None:
        return "undefined"
    apart = f"{scale * found.difference:+.2f}"
    if found.low is None or found.high is None:
        return f"{apart}; from one seed, so whether it is chance is unknown"
    verdict = "shown" if found.shown else "not shown"
    more = "no number of" if found.seeds_needed is None else f"{found.seeds_needed}"
    return (
        f"{apart} (95% interval {scale * found.low:+.2f} to {scale * found.high:+.2f}), {verdict}; a difference of "
        f"this size takes {more} seeds (level {ALPHA:g}, power {POWER:g})"
    )


def value_text(value: float | None, scale: float) -> str:
    """A score with two digits; ABSENT where it is undefined."""
    return ABSENT if value is None else f"{scale * value:.2f}"


def _counts(examples: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in examples.items())
