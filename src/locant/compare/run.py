"""One task of a comparison: a training run (build, train, evaluate) or a round of measurement, kept when finished."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.compare.environment import environment
from locant.compare.folder import OutputFolder
from locant.compare.measure import measure
from locant.compare.objective import Data, Trial, find_objective
from locant.compare.recipe import Recipe
from locant.compare.results import CurvePoint, RunResult
from locant.hf import course
from locant.training.folder import unwritable
from locant.training.mlm import DivergedError, LossPoint

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Task:
    """One training run (kind "train", a seed) or one round of measurement (kind "measure", a round)."""

    kind: str
    label: str
    seed: int | None = None
    round: int | None = None

    @property
    def title(self) -> str:
        """Words for a progress bar."""
        return f"{self.label} seed {self.seed}" if self.kind == "train" else f"{self.label} speed"


def work_dir_of(folder: OutputFolder, task: Task) -> Path:
    """Where the log of a task goes; made where it is missing."""
    path = folder.path / "speed" if task.seed is None else folder.run_dir(task.label, task.seed)
    path.mkdir(parents=True, exist_ok=True)
    return path


def perform(task: Task, folder: OutputFolder, work_dir: Path, report: Report, command: str = "") -> None:
    """Does one task and keeps its result; reports "done", or "failed" for a run whose loss diverged.

    Raises: OSError where the result cannot be written; whatever else the run raises.
    """
    import torch

    data = find_objective(folder.recipe.task).read(folder.recipe, folder.text)
    if task.seed is not None:
        result = run_one(folder.recipe, task.label, task.seed, data, report, work_dir)
        folder.write_run(result, {**environment(command), "threads": torch.get_num_threads()})
        report({"event": "done"} if result.status == "done" else {"event": "failed", "message": result.reason})
    elif task.round is not None:
        folder.write_speed(task.label, task.round, measure(folder.recipe, task.label, data, work_dir))
        report({"event": "done"})


def error_event(error: BaseException) -> dict[str, Any]:
    """The event for a task that raised: an output that cannot be written concerns all tasks, anything else this one."""
    message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    return {"event": "error", "kind": "output" if isinstance(error, OSError) else "run", "message": message}


def run_one(recipe: Recipe, label: str, seed: int, data: Data, report: Report, work_dir: Path) -> RunResult:
    """Trains and evaluates one encoding from one seed. A loss that is not finite is a result: status "failed"."""
    start = time.perf_counter()
    choice = recipe.choice(label)
    trial = find_objective(recipe.task).trial(recipe, choice, seed, data)
    facts: dict[str, Any] = {
        "encoding": label,
        "options": choice.options,
        "seed": seed,
        "extra_parameters": trial.built.extra_parameters,
        "total_parameters": trial.built.total_parameters,
    }
    keep = _keeper(recipe, trial, work_dir)
    keep(0)
    due, validated = _validation_steps(recipe), dict[int, float]()

    def between(step: int) -> None:
        keep(step)
        if step in due:
            validated[step] = _in_training(trial)

    try:
        points = trial.train(recipe.train, work_dir, _reporter(trial, report, between))
        report({"event": "evaluate"})
        lengths = trial.by_length()
    except DivergedError as error:
        return RunResult(status="failed", reason=str(error), seconds=time.perf_counter() - start, **facts)
    at_trained = next(score.loss for score in lengths if score.factor == 1)
    return RunResult(
        status="done",
        scores=trial.further_scores(),
        curve=_curve(points, {**validated, **{point.step: at_trained for point in points[-1:]}}),
        lengths=lengths,
        shifts=trial.by_shift(),
        seconds=time.perf_counter() - start,
        **facts,
    )


def _curve(points: tuple[LossPoint, ...], validated: Mapping[int, float | None]) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(point.step, point.tokens, point.seconds, point.loss, validated.get(point.step)) for point in points
    )


def _validation_steps(recipe: Recipe) -> set[int]:
    """The steps before the last at which a run is validated; all of them are steps of the loss curve."""
    count, steps = recipe.evaluate.points, recipe.train.steps
    return {math.ceil(at * steps / count) for at in range(1, count)}


def _in_training(trial: Trial) -> float:
    """Validation loss of a model that is being trained, and goes on as if nothing had been."""
    was_training = trial.built.model.training
    loss = trial.validation_loss()
    trial.built.model.train(was_training)
    return loss


def _keeper(recipe: Recipe, trial: Trial, work_dir: Path) -> Callable[[int], None]:
    """Keeps the model, with its validation loss, at the steps that the recipe asks for. Raises: OSError."""
    course.forget(work_dir)

    def keep(step: int) -> None:
        if step not in recipe.train.checkpoint_steps:
            return
        try:
            milestone = course.Milestone(step, step * trial.tokens_per_step, _in_training(trial))
            course.keep(work_dir, trial.built.model, trial.tokenizer, milestone)
        except OSError as error:
            raise unwritable(work_dir / course.FOLDER, error) from error

    return keep


def _reporter(trial: Trial, report: Report, between: Callable[[int], None]) -> Callable[[int, float], bool]:
    """Reports progress a few times a second, and does between two steps what is due there."""
    last = {"time": time.perf_counter(), "step": 0}

    def on_step(step: int, loss: float) -> bool:
        now = time.perf_counter()
        if now - last["time"] > 0.4 or step == trial.steps:
            tokens = (step - last["step"]) * trial.tokens_per_step
            speed = tokens / max(now - last["time"], 1e-9)
            report({"event": "step", "step": step, "steps": trial.steps, "loss": loss, "tokens_per_second": speed})
            last.update(time=now, step=step)
        between(step)
        return False

    return on_step
