"""The task `mlm`: a small BERT that predicts masked tokens of windows of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.compare.evaluate import Validation
from locant.compare.objective import OnStep, refuse_unused
from locant.compare.recipe import Recipe, check_windows
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.text import PreparedText, prepare_text, read_prepared
from locant.training.mlm import (
    BuiltModel,
    EncodingChoice,
    LossPoint,
    TrainSettings,
    build_bert,
    build_encoding,
    train_mlm,
)

if TYPE_CHECKING:
    from locant.encoding import Stack


class MaskedLM:
    """Windows of text, cut from documents that validation shares none of."""

    trained = "tokens"

    def check(self, recipe: Recipe) -> None:
        """Lengths must fit each other."""
        refuse_unused(recipe, "mlm", ("problems",))
        check_windows(recipe)

    def trained_length(self, recipe: Recipe) -> int:
        """Tokens in a window."""
        return recipe.train.length

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """What `build_bert` would attach."""
        return build_encoding(choice, recipe.model, recipe.train.length)

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> PreparedText:
        """Text, read and tokenized."""
        return prepare_text(recipe, folder, progress=progress)

    def read(self, recipe: Recipe, folder: Path) -> PreparedText:
        """The kept text."""
        return read_prepared(folder)

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: PreparedText) -> MaskedTrial:
        """A BERT."""
        return MaskedTrial(recipe, choice, seed, data)


class MaskedTrial:
    """One BERT on windows of text."""

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        from locant.data import make_windows

        train = recipe.train
        self.recipe, self.choice, self.seed, self.text = recipe, choice, seed, text
        self.built: BuiltModel = build_bert(recipe.model, len(text.tokenizer), train.length, choice, seed)
        self.windows = make_windows(text.train, train.length, text.tokenizer)
        self.validation = Validation(text.validation, text.tokenizer, recipe.evaluate, recipe.masking)
        self.tokens_per_step = train.batch_size * train.length
        self.tokens_per_pass = len(self.windows.ids[: train.batch_size]) * train.length

    @property
    def max_length(self) -> int | None:
        """The longest input that the encoding serves."""
        return build_encoding(self.choice, self.recipe.model, self.recipe.train.length).max_length

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Masks and windows follow from the seed."""
        tokenizer, masking = self.text.tokenizer, self.recipe.masking
        return train_mlm(
            self.built, self.windows, tokenizer, settings, masking, self.seed, work_dir=work_dir, on_step=on_step
        )

    def infer(self) -> None:
        """The encoder alone, over one training batch."""
        self.built.model.bert(input_ids=first_windows(self.windows, self.recipe, self.built.model))

    def validation_loss(self) -> float:
        """At the trained length."""
        return self.validation.score(self.built.model, self.recipe.train.length)[0]

    def by_length(self) -> tuple[LengthScore, ...]:
        """Windows of 1, 2 and 4 times the trained length, or those of the recipe."""
        return self.validation.by_length(self.built.model, self.recipe.train.length, self.max_length)

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """At the trained length."""
        return self.validation.by_shift(self.built.model, self.recipe.train.length, self.max_length)

    def keep(self, run: Path, step: int, loss: float) -> None:
        """Model and tokenizer, as a folder that loads."""
        from locant.hf import course

        milestone = course.Milestone(step, step * self.tokens_per_step, loss)
        course.keep(run, self.built.model, self.text.tokenizer, milestone)


def first_windows(windows: Any, recipe: Recipe, model: Any) -> Any:
    """Ids of one training batch, on the model's device."""
    import torch

    device = next(model.parameters()).device
    return torch.as_tensor(windows.ids[: recipe.train.batch_size].astype("int64"), device=device)
