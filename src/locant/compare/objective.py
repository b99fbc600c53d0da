"""What the runs of a comparison train and how they are scored: the `task` of a recipe. All else is shared machinery.

A task makes data once for all runs, and from it a `Trial` for each encoding and seed: a built model that can be
trained, scored and timed. Grid, resuming, measurement, tables and report know trials and no task.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from locant.compare.fields import near
from locant.compare.words import Words

if TYPE_CHECKING:
    from locant.compare.recipe import Recipe
    from locant.compare.results import LengthScore, ResultTable, ShiftScore
    from locant.encoding import Stack
    from locant.training.mlm import BuiltModel, EncodingChoice, LossPoint, TrainSettings

OnStep = Callable[[int, float], bool | None]


@runtime_checkable
class Data(Protocol):
    """What a task made once for all runs; ``facts`` is written into the result table."""

    @property
    def facts(self) -> dict[str, Any]:
        """What was read or drawn, in numbers."""
        ...


@runtime_checkable
class Trial(Protocol):
    """One encoding from one seed: the model, its training and its scores."""

    built: BuiltModel
    steps: int  # of its training
    tokenizer: Any  # is kept beside the model, by its `save_pretrained(folder)`
    tokens_per_step: int  # read in a training step, about
    tokens_per_pass: int  # read by `infer`

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Trains in place; see `locant.training`."""
        ...

    def infer(self) -> None:
        """One forward pass over a batch, without the vocabulary head: for timing."""
        ...

    def validation_loss(self) -> float:
        """Validation loss at the trained length, nats per predicted token."""
        ...

    def by_length(self) -> tuple[LengthScore, ...]:
        """Loss and accuracy at each length, the trained one among them."""
        ...

    def further_scores(self) -> dict[str, float | None]:
        """What else a model is scored by, by name, of 1; {} where accuracy is all. Called after `by_length`."""
        ...

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """Loss with all position ids shifted; empty where that has no meaning."""
        ...


@runtime_checkable
class Objective(Protocol):
    """One task, as a row: what it needs of a recipe, its data, its trials."""

    def words(self, recipe: dict[str, Any]) -> Words:
        """How readers call what runs of a recipe (as a dict) measure."""
        ...

    def check(self, recipe: Recipe) -> None:
        """Checks what one table of the recipe alone cannot know. Raises: ValueError."""
        ...

    def trained_length(self, recipe: Recipe) -> int:
        """The length that runs are trained at, and ranked at."""
        ...

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """The encoding objects that a trial would attach."""
        ...

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> Data:
        """Reads the kept data of an output folder, or makes it there whole. Raises: ValueError."""
        ...

    def read(self, recipe: Recipe, folder: Path) -> Data:
        """What `prepare` kept."""
        ...

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: Any) -> Trial:
        """A fresh model with its data."""
        ...


# By task, where its row is. Rows are imported when they are asked for, and with them the libraries that they need;
# those of `finetune` and `electra` live with what they train, which is built on this folder.
ROWS = {
    "mlm": "locant.compare.masked_lm:MaskedLM",
    "causal_lm": "locant.compare.causal_lm:CausalLM",
    "length_generalization": "locant.compare.problems:LengthGeneralization",
    "translation": "locant.compare.translation:Translation",
    "finetune": "locant.finetune.comparison:FineTuning",
    "electra": "locant.pretrain.comparison:ReplacedTokens",
}
TASKS = tuple(ROWS)


def find_objective(task: str) -> Objective:
    """The row of a task. Raises: ValueError for one that does not exist."""
    if task not in ROWS:
        raise ValueError(f"recipe: task = {task!r} is not a task; {near(task, TASKS)}")
    module, _, name = ROWS[task].partition(":")
    return getattr(importlib.import_module(module), name)()


def words_of(table: ResultTable) -> Words:
    """How readers call what the runs of a result table measured."""
    return find_objective(table.recipe.get("task", TASKS[0])).words(table.recipe)


def refuse_unused(recipe: Recipe, task: str, tables: tuple[str, ...]) -> None:
    """Raise a ValueError for a table that was changed but means nothing to the task."""
    fresh = type(recipe)(recipe.encodings)
    for name in tables:
        came, default = getattr(recipe, name), getattr(fresh, name)
        if came != default:
            changed = next(key for key, value in vars(came).items() if value != getattr(default, key))
            raise ValueError(
                f"recipe: {name}.{changed} = {getattr(came, changed)!r} has no meaning for task = {task!r}; drop it"
            )


def choose_family(recipe: Recipe, task: str, objective: str) -> str:
    """The family of hosts that a recipe trains; ``objective``: what it must be made for, "" where it is not to choose.

    Raises: ValueError for a family of another kind, and for a width of embeddings that it does not have.
    """
    from locant.training.hosts import FAMILIES, check_embedding

    fit = [name for name, row in FAMILIES.items() if row.objective == objective]
    for name in () if fit else ("family", "embedding_dim"):
        if value := getattr(recipe.model, name):
            raise ValueError(f"recipe: model.{name} = {value!r} has no meaning for task = {task!r}; drop it")
    family = recipe.model.family or next(iter(fit), "")
    if fit and family not in fit:
        raise ValueError(
            f"recipe: model.family = {family!r} cannot be trained by task = {task!r}; choose one of "
            f"{', '.join(map(repr, fit))}"
        )
    if fit:
        check_embedding(family, recipe.model.embedding_dim, "recipe: model.")
    return family


def refuse_windows(recipe: Recipe, task: str, instead: str) -> None:
    """Raise a ValueError where a recipe sets windows of text, for a task that has none; ``instead``: what to write."""
    from dataclasses import replace

    kept = replace(recipe, evaluate=replace(recipe.evaluate, batch_tokens=type(recipe.evaluate).batch_tokens))
    refuse_unused(kept, task, ("evaluate",))
    if recipe.train.length != type(recipe.train).length:
        raise ValueError(
            f"recipe: train.length = {recipe.train.length} has no meaning for task = {task!r}; write {instead}"
        )
