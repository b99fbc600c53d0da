"""The Trainer of a fine-tuning run: the examples of a task, in the order that the seed gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from locant.finetune.batches import Feature, Schedule
from locant.finetune.problem import Problem
from locant.finetune.settings import FinetuneSettings
from locant.training.resumable import ResumableTrainer, resumable_trainer, shares


class FinetuneTrainer(ResumableTrainer):
    """Trains on the features of a task; the loss of a batch is a mean over its examples."""

    command = "finetune"


def make_trainer(
    model: nn.Module,
    problem: Problem,
    settings: FinetuneSettings,
    seed: int,
    folder: Path,
    report_to: Sequence[str] = (),
) -> FinetuneTrainer:
    """A Trainer for one seed, writing into ``folder``. Raises: ValueError where processes cannot share a batch."""
    steps = settings.steps(len(problem.train))
    share = shares(settings.batch_size, settings.accumulate, FinetuneTrainer.command)

    def collate(examples: Sequence[tuple[int, Feature]]) -> dict[str, Any]:
        features = [feature for _, feature in examples]
        return {**problem.batch(features), "example_ids": [feature.id for feature in features]}

    schedule = Schedule(problem.train, seed, steps, settings.batch_size)
    return resumable_trainer(
        FinetuneTrainer, model, schedule, collate, settings, seed, folder, steps=steps, share=share, report_to=report_to
    )
