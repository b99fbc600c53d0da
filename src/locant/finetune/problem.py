"""What a task is to the machinery that trains and scores: features, batches, and the way from outputs to scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from locant.finetune.batches import Feature
from locant.finetune.scores import Scores
from locant.training.mlm import derived_seed

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """Scores and predictions of one dev set; ``baseline``: the scores without reading the input, {} where none is."""

    scores: Scores
    baseline: Scores
    predictions: Mapping[str, Any]  # by id of the example


@runtime_checkable
class Problem(Protocol):
    """A task, read and tokenized. The scores of each dev set begin with the main one."""

    auto: str  # the class of transformers that has its head
    config: dict[str, Any]  # what the model's config is told
    train: list[Feature]
    notices: list[str]

    def baselines(self) -> dict[str, Scores]:
        """The scores of each dev set without reading the input; {} where there are none."""
        ...

    def batch(self, features: Sequence[Feature]) -> dict[str, Any]:
        """What the model is called with."""
        ...

    def evaluate(self, model: Any, trainer: Any) -> dict[str, Scored]:
        """Every dev set by name. All processes call it together, and all get all."""
        ...


def subset(examples: Sequence[T], count: int, what: str) -> list[T]:
    """``count`` examples in their order (0: all), the same for every seed. Raises: ValueError where there are fewer."""
    if count > len(examples):
        raise ValueError(f"finetune: {what} = {count}, but there are {len(examples)}; give at most that, or 0 for all")
    return [examples[at] for at in sorted(shuffled(len(examples), what)[: count or len(examples)])]


def shuffled(count: int, what: str) -> list[int]:
    """An order of so many that depends on nothing but the name."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(derived_seed("subset", what))).tolist()
