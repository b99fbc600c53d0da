"""What the tasks over running text share: windows of one length, cut from documents that validation shares none of."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from locant.compare.evaluate import CausalValidation, Validation
from locant.compare.objective import choose_family, refuse_unused
from locant.compare.recipe import Recipe, check_windows
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.text import PreparedText, prepare_text, read_prepared
from locant.compare.words import Words
from locant.data.tokenizer import special_id
from locant.training.hosts import FAMILIES, build_encoding, build_host, hidden_states
from locant.training.mlm import BuiltModel, EncodingChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from locant.encoding import Stack
    from locant.training.hosts import Shape


class TextTask:
    """A row for windows of text; a task says which hosts fit it, which tables mean nothing to it, and its trial."""

    name: ClassVar[str]
    objective: ClassVar[str]  # of the hosts that can be trained on it, as `locant.training.hosts` calls it
    unused: ClassVar[tuple[str, ...]]
    trial: ClassVar[Any]  # a subclass of `WindowTrial`

    def words(self, recipe: dict[str, Any]) -> Words:
        """Those of language modeling."""
        return Words()

    def check(self, recipe: Recipe) -> None:
        """Lengths must fit each other."""
        refuse_unused(recipe, self.name, self.unused)
        choose_family(recipe, self.name, self.objective)
        check_windows(recipe)

    def trained_length(self, recipe: Recipe) -> int:
        """Tokens in a window."""
        return recipe.train.length

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """What a trial would attach."""
        return self.trial.stack(recipe, choice)

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> PreparedText:
        """Text, read and tokenized."""
        return prepare_text(recipe, folder, progress=progress)

    def read(self, recipe: Recipe, folder: Path) -> PreparedText:
        """The kept text."""
        return read_prepared(folder)


def build_model(
    recipe: Recipe, objective: str, tokenizer: PreTrainedTokenizerFast, choice: EncodingChoice, seed: int
) -> BuiltModel:
    """The recipe's host with the encoding attached; host weights depend on the seed alone."""
    family = choose_family(recipe, recipe.task, objective)
    return build_host(FAMILIES[family], model_shape(recipe, family, tokenizer), choice, seed)


def model_shape(recipe: Recipe, family: str, tokenizer: PreTrainedTokenizerFast) -> Shape:
    """The shape of the recipe's host for a tokenizer, with as many positions as the trained length, or as it says."""
    pad = special_id(tokenizer, "pad_token")
    return recipe.model.shape(family, len(tokenizer), recipe.train.length, pad)


class WindowTrial:
    """One model on windows of text; a task gives the model, its validation, and how it is trained and timed."""

    causal: ClassVar[bool]

    def __init__(
        self,
        recipe: Recipe,
        choice: EncodingChoice,
        seed: int,
        text: PreparedText,
        built: BuiltModel,
        scores: Validation | CausalValidation,
    ) -> None:
        from locant.data import make_windows

        train = recipe.train
        self.recipe, self.choice, self.seed, self.text = recipe, choice, seed, text
        self.built, self.scores, self.steps = built, scores, train.steps
        self.tokenizer = text.tokenizer
        self.windows = make_windows(text.train, train.length, text.tokenizer)
        self.tokens_per_step = train.batch_size * train.length
        self.tokens_per_pass = len(self.windows.ids[: train.batch_size]) * train.length

    @classmethod
    def stack(cls, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """The encoding objects of such a trial."""
        return build_encoding(choice, recipe.model, recipe.train.length, causal=cls.causal)

    def infer(self) -> None:
        """The layers alone, over one training batch."""
        hidden_states(self.built.model, self.first_windows(), {"use_cache": False} if self.causal else {})

    @property
    def max_length(self) -> int | None:
        """The longest input that the encoding serves."""
        return self.stack(self.recipe, self.choice).max_length

    def first_windows(self) -> Any:
        """Ids of one training batch, on the model's device."""
        import torch

        device = next(self.built.model.parameters()).device
        return torch.as_tensor(self.windows.ids[: self.recipe.train.batch_size].astype("int64"), device=device)

    def validation_loss(self) -> float:
        """At the trained length."""
        return self.scores.score(self.built.model, self.recipe.train.length)[0]

    def by_length(self) -> tuple[LengthScore, ...]:
        """Windows of 1, 2 and 4 times the trained length, or those of the recipe."""
        return self.scores.by_length(self.built.model, self.recipe.train.length, self.max_length)

    def further_scores(self) -> dict[str, float | None]:
        """None."""
        return {}

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """At the trained length."""
        return self.scores.by_shift(self.built.model, self.recipe.train.length, self.max_length)
