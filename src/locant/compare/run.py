"""One task of a comparison: a training run (build, train, evaluate) or a round of measurement, kept when finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.compare.environment import environment
from locant.compare.evaluate import Validation
from locant.compare.folder import OutputFolder, unwritable
from locant.compare.measure import measure
from locant.compare.recipe import Recipe
from locant.compare.results import CurvePoint, RunResult
from locant.compare.text import PreparedText, read_prepared
from locant.data import make_windows
from locant.hf import course
from locant.training.mlm import BuiltModel, DivergedError, LossPoint, build_bert, build_encoding, train_mlm

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

    text = read_prepared(folder.text)
    if task.seed is not None:
        result = run_one(folder.recipe, task.label, task.seed, text, report, work_dir)
        folder.write_run(result, {**environment(command), "threads": torch.get_num_threads()})
        report({"event": "done"} if result.status == "done" else {"event": "failed", "message": result.reason})
    elif task.round is not None:
        folder.write_speed(task.label, task.round, measure(folder.recipe, task.label, text, work_dir))
        report({"event": "done"})


def error_event(error: BaseException) -> dict[str, Any]:
    """The event for a task that raised: an output that cannot be written concerns all tasks, anything else this one."""
    message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    return {"event": "error", "kind": "output" if isinstance(error, OSError) else "run", "message": message}


def run_one(recipe: Recipe, label: str, seed: int, text: PreparedText, report: Report, work_dir: Path) -> RunResult:
    """Trains and evaluates one encoding from one seed. A loss that is not finite is a result: status "failed"."""
    start = time.perf_counter()
    choice, train = recipe.choice(label), recipe.train
    built = build_bert(recipe.model, len(text.tokenizer), train.length, choice, seed)
    facts: dict[str, Any] = {
        "encoding": label,
        "options": choice.options,
        "seed": seed,
        "extra_parameters": built.extra_parameters,
        "total_parameters": built.total_parameters,
    }
    windows = make_windows(text.train, train.length, text.tokenizer)
    validation = Validation(text.validation, text.tokenizer, recipe.evaluate, recipe.masking)
    keep = _keeper(recipe, built, text, validation, work_dir)
    keep(0)
    try:
        points = train_mlm(
            built,
            windows,
            text.tokenizer,
            train,
            recipe.masking,
            seed,
            work_dir=work_dir,
            on_step=_reporter(recipe, report, keep),
        )
    except DivergedError as error:
        return RunResult(status="failed", reason=str(error), seconds=time.perf_counter() - start, **facts)
    report({"event": "evaluate"})
    max_length = build_encoding(choice, recipe.model, train.length).max_length
    lengths = validation.by_length(built.model, train.length, max_length)
    shifts = validation.by_shift(built.model, train.length, max_length)
    at_trained = next(score.loss for score in lengths if score.factor == 1)
    return RunResult(
        status="done",
        curve=_curve(points, at_trained),
        lengths=lengths,
        shifts=shifts,
        seconds=time.perf_counter() - start,
        **facts,
    )


def _curve(points: tuple[LossPoint, ...], validation_loss: float | None) -> tuple[CurvePoint, ...]:
    last = len(points) - 1
    return tuple(
        CurvePoint(point.step, point.tokens, point.seconds, point.loss, validation_loss if index == last else None)
        for index, point in enumerate(points)
    )


def _keeper(
    recipe: Recipe, built: BuiltModel, text: PreparedText, validation: Validation, work_dir: Path
) -> Callable[[int], None]:
    """Keeps the model, with its validation loss, at the steps that the recipe asks for. Raises: OSError."""
    model, train = built.model, recipe.train
    course.forget(work_dir)

    def keep(step: int) -> None:
        if step not in train.checkpoint_steps:
            return
        was_training = model.training
        loss, _ = validation.score(model, train.length)
        model.train(was_training)
        try:
            milestone = course.Milestone(step, step * train.batch_size * train.length, loss)
            course.keep(work_dir, model, text.tokenizer, milestone)
        except OSError as error:
            raise unwritable(work_dir / course.FOLDER, error) from error

    return keep


def _reporter(recipe: Recipe, report: Report, keep: Callable[[int], None]) -> Callable[[int, float], bool]:
    """Reports progress a few times a second, and keeps the model where that is due."""
    last = {"time": time.perf_counter(), "step": 0}

    def on_step(step: int, loss: float) -> bool:
        now = time.perf_counter()
        if now - last["time"] > 0.4 or step == recipe.train.steps:
            tokens = (step - last["step"]) * recipe.train.batch_size * recipe.train.length
            speed = tokens / max(now - last["time"], 1e-9)
            report({"event": "step", "step": step, "loss": loss, "tokens_per_second": speed})
            last.update(time=now, step=step)
        keep(step)
        return False

    return on_step
