"""The task `causal_lm`: a small GPT-2 that predicts every next token of windows of text, at longer windows, too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from locant.compare.evaluate import CausalValidation
from locant.compare.masked_lm import first_windows
from locant.compare.objective import OnStep, refuse_unused
from locant.compare.recipe import Recipe, check_windows
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.text import PreparedText, prepare_text, read_prepared
from locant.training.causal import WindowCollate, build_gpt2, train_causal
from locant.training.mlm import BuiltModel, EncodingChoice, LossPoint, TrainSettings, build_encoding

if TYPE_CHECKING:
    from locant.encoding import Stack


class CausalLM:
    """Windows of text; the first token of a window is predicted by none."""

    trained = "tokens"

    def check(self, recipe: Recipe) -> None:
        """Lengths must fit each other; masks and checkpoints belong to `mlm`."""
        refuse_unused(recipe, "causal_lm", ("problems", "masking"))
        refuse_checkpoints(recipe)
        check_windows(recipe)

    def trained_length(self, recipe: Recipe) -> int:
        """Tokens in a window."""
        return recipe.train.length

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """What `build_gpt2` would attach."""
        return build_encoding(choice, recipe.model, recipe.train.length, causal=True)

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> PreparedText:
        """Text, read and tokenized."""
        return prepare_text(recipe, folder, progress=progress)

    def read(self, recipe: Recipe, folder: Path) -> PreparedText:
        """The kept text."""
        return read_prepared(folder)

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: PreparedText) -> CausalTrial:
        """A GPT-2."""
        return CausalTrial(recipe, choice, seed, data)


class CausalTrial:
    """One GPT-2 on windows of text."""

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        from locant.data import make_windows

        train = recipe.train
        self.recipe, self.choice, self.seed = recipe, choice, seed
        self.built: BuiltModel = build_gpt2(recipe.model, len(text.tokenizer), train.length, choice, seed)
        self.windows = make_windows(text.train, train.length, text.tokenizer)
        self.validation = CausalValidation(text.validation, text.tokenizer, recipe.evaluate)
        self.tokens_per_step = train.batch_size * train.length
        self.tokens_per_pass = len(self.windows.ids[: train.batch_size]) * train.length

    @property
    def max_length(self) -> int | None:
        """The longest input that the encoding serves."""
        return build_encoding(self.choice, self.recipe.model, self.recipe.train.length, causal=True).max_length

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Windows follow from the seed."""
        return train_causal(
            self.built, self.windows, WindowCollate(), settings, self.seed, work_dir=work_dir, on_step=on_step
        )

    def infer(self) -> None:
        """The decoder alone, over one training batch."""
        ids = first_windows(self.windows, self.recipe, self.built.model)
        self.built.model.transformer(input_ids=ids, use_cache=False)

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
        """Not reached: recipes with checkpoints are refused."""
        raise NotImplementedError(f"causal_lm: models are not kept on their way (step {step})")


def refuse_checkpoints(recipe: Recipe) -> None:
    """Raise a ValueError where a recipe of another task than `mlm` asks for models on their way."""
    if recipe.train.checkpoints:
        raise ValueError(
            f"recipe: train.checkpoints = {recipe.train.checkpoints}, but task = {recipe.task!r} keeps no model on its "
            "way; write 0, or take task = 'mlm'"
        )
