"""One run of the grid: build, train, evaluate, keep. Called in a process of its own, see `locant.compare.worker`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from locant.compare.evaluate import Validation
from locant.compare.recipe import Recipe
from locant.compare.results import CurvePoint, RunResult
from locant.compare.text import PreparedText
from locant.data import make_windows
from locant.training.mlm import DivergedError, LossPoint, build_bert, build_encoding, train_mlm

Report = Callable[[dict[str, Any]], None]


def run_one(recipe: Recipe, label: str, seed: int, text: PreparedText, report: Report, work_dir: Any) -> RunResult:
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
    try:
        points = train_mlm(
            built, windows, text.tokenizer, train, recipe.masking, seed, work_dir=work_dir, on_step=_reporter(recipe, report)
        )
    except DivergedError as error:
        return RunResult(status="failed", reason=str(error), seconds=time.perf_counter() - start, **facts)
    report({"event": "evaluate"})
    validation = Validation(text.validation, text.tokenizer, recipe.evaluate, recipe.masking)
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


def _reporter(recipe: Recipe, report: Report) -> Callable[[int, float], bool]:
    """Reports progress a few times a second."""
    last = {"time": time.perf_counter(), "step": 0}

    def on_step(step: int, loss: float) -> bool:
        now = time.perf_counter()
        if now - last["time"] > 0.4 or step == recipe.train.steps:
            tokens = (step - last["step"]) * recipe.train.batch_size * recipe.train.length
            speed = tokens / max(now - last["time"], 1e-9)
            report({"event": "step", "step": step, "loss": loss, "tokens_per_second": speed})
            last.update(time=now, step=step)
        return False

    return on_step
