"""Training and validation curves, read back from what runs leave: log.jsonl, or the run.json of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from locant.compare.objective import TASKS, find_objective
from locant.training.folder import read_whole

LOG, RESULT = "log.jsonl", "run.json"


@dataclass(frozen=True)
class Curve:
    """One line: losses of one run. ``group``: what it is a run of; curves of a group look alike.

    ``measure``: what the losses are, with their unit; only those of one measure can be held against each other.
    ``validation``: whether the losses are of held-out text. ``tokens``, ``seconds``: since the start of training, NaN
    where a log does not tell; pauses between an interruption and its resumption do not count.
    """

    group: str
    run: str
    validation: bool
    steps: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    measure: str = "Loss (nats)"


@dataclass(frozen=True)
class Read:
    """The curves of a folder, and what a reader must be told about them."""

    curves: tuple[Curve, ...]
    notices: tuple[str, ...] = ()


def read_runs(folders: Sequence[Path]) -> Read:
    """The curves of several output folders; where there are several, their names stand before those of the curves.

    Raises: as `read_curves`.
    """
    found = [read_curves(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    curves = []
    for name, one in zip(names, found, strict=True):
        several = len({curve.group for curve in one.curves}) > 1
        for curve in one.curves:
            group = f"{name}: {curve.group}" if several and len(folders) > 1 else curve.group if several else name
            curves.append(replace(curve, group=group))
    return Read(tuple(curves), tuple(notice for one in found for notice in one.notices))


def read_curves(folder: Path) -> Read:
    """The curves of one output folder of `locant compare`, `finetune` or `pretrain`, or of one run in it.

    Raises: FileNotFoundError where it holds neither a log nor a finished run; ValueError for a line or a file that is
    none of ours, naming it. A last line that was cut off, as a kill leaves it, is left out with a notice.
    """
    logs = [folder / LOG] if (folder / LOG).is_file() else sorted(folder.glob(f"runs/*/{LOG}"))
    if logs and not _is_comparison(folder):
        read = [_from_log(log, folder.resolve().name) for log in logs]
    else:
        results = [folder / RESULT] if (folder / RESULT).is_file() else sorted(folder.glob(f"runs/*/{RESULT}"))
        read = [_from_result(result) for result in results]
    curves = tuple(curve for one in read for curve in one.curves if curve.steps)
    if not curves:
        raise FileNotFoundError(
            f"plot: {str(folder)!r} has no {LOG} with a step and no finished run with a curve ({RESULT}), neither in "
            "itself nor in runs/*; give the output folder of locant compare, finetune or pretrain"
        )
    return Read(curves, tuple(notice for one in read for notice in one.notices))


def _is_comparison(folder: Path) -> bool:
    """Whether a folder is that of `locant compare`, whose runs are told apart by their results, logs or not."""
    recipe = (read_whole(folder / "recipe.json") or {}).get("recipe")
    return isinstance(recipe, dict) and "encodings" in recipe


def _measures(recipe: dict[str, Any]) -> tuple[str, str]:
    """What training and validation of a comparison measure: two things for some tasks."""
    words = find_objective(recipe.get("task", TASKS[0])).words(recipe)
    if words.training == words.per:
        return Curve.measure, Curve.measure
    held = f"{words.measure[0].upper()}{words.measure[1:]}"
    return f"Training loss ({words.training})", f"{held} ({words.unit})"


def _from_result(file: Path) -> Read:
    """A finished run of a comparison."""
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        label, seed = body["result"]["encoding"], body["result"]["seed"]
        points = body["result"]["curve"]
        curves = []
        for key, measure in zip(("train_loss", "validation_loss"), _measures(body["recipe"]), strict=True):
            rows = [(p["step"], float(p["tokens"]), p["seconds"], p[key]) for p in points if p[key] is not None]
            curves.append(_curve(label, f"seed {seed}", key == "validation_loss", rows, measure))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"plot: {file} is no whole run.json of locant compare ({type(error).__name__}: {error}); run it again"
        ) from error
    return Read(tuple(curves))


def _from_log(file: Path, group: str) -> Read:
    lines, notices = _lines(file)
    trained: list[tuple[int, float, float, float]] = []
    held: list[tuple[int, float, float, float]] = []
    before = last = 0.0  # seconds until the last interruption, and since
    for number, line in lines:
        if line.get("event") not in ("step", "validation"):
            continue
        step, loss = _whole(file, number, line, "step"), _number(file, number, line, "loss")
        if line["event"] == "step":
            seconds = _number(file, number, line, "seconds")
            before += last if seconds < last else 0.0
            last = seconds
            trained.append((step, _number(file, number, line, "tokens"), before + last, loss))
        else:
            told = _number(file, number, line, "tokens") if "tokens" in line else math.nan
            tokens = trained[-1][1] if "tokens" not in line and trained else told
            held.append((step, tokens if step else 0.0, before + last, loss))
    curves = (_curve(group, file.parent.name, False, trained), _curve(group, file.parent.name, True, held))
    return Read(curves, notices)


def _lines(file: Path) -> tuple[list[tuple[int, dict[str, Any]]], tuple[str, ...]]:
    """Numbered lines, and the notice where the last one was cut off."""
    texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    found = []
    for number, text in enumerate(texts, start=1):
        if not text:
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("no object")
        except ValueError as error:
            if number == len(texts):  # no newline behind it
                return found, (f"{file}: line {number} was cut off while it was written, and is left out",)
            raise ValueError(
                f"plot: {file}, line {number} is no line of a log ({text[:40]!r}); delete the line, or give another "
                "folder"
            ) from error
        found.append((number, line))
    return found, ()


def _number(file: Path, number: int, line: dict[str, Any], name: str) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"plot: {file}, line {number} has {name} = {value!r}, needed a number; give the folder of a run that "
            "locant logged"
        )
    return float(value)


def _whole(file: Path, number: int, line: dict[str, Any], name: str) -> int:
    value = _number(file, number, line, name)
    if not value.is_integer():
        raise ValueError(
            f"plot: {file}, line {number} has {name} = {value!r}, needed a whole number; give the folder of a run that "
            "locant logged"
        )
    return int(value)


def _curve(
    group: str,
    run: str,
    validation: bool,
    rows: Iterable[tuple[int, float, float, float]],
    measure: str = Curve.measure,
) -> Curve:
    rows = [row for row in rows if math.isfinite(row[3])]
    steps = tuple(row[0] for row in rows)
    tokens, seconds, losses = (tuple(float(row[at]) for row in rows) for at in (1, 2, 3))
    return Curve(str(group), run, validation, steps, tokens, seconds, losses, measure)
