"""The task `electra` of `locant compare`: encodings x seeds by replaced-token detection (Clark et al. 2020).

Generator and discriminator get the encoding each, with position parameters of their own, and share the token embeddings
(TUPE, appendix C). What is scored is the discriminator, on validation text that its own generator filled in. So losses
of two encodings are not about one text: a generator that guesses well leaves less to find, and what it replaced is
harder to tell. Its accuracy therefore stands beside, and how far the loss is below what the share of replaced tokens
alone would give.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.compare.evaluate import MASK_SEED, EvaluateSettings, Validation
from locant.compare.objective import OnStep
from locant.compare.recipe import Recipe
from locant.compare.text import PreparedText
from locant.compare.text_windows import TextTask, WindowTrial, model_shape
from locant.compare.words import Words
from locant.data import MaskingConfig, Vocabulary
from locant.pretrain.objectives import Electra, ReplacedBatch, build_electra, counts
from locant.training.mlm import EncodingChoice, LossPoint, TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from locant.data import TokenStream


class WholeElectra(Electra):
    """ELECTRA's loss where a batch is a whole step."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, draws: Tensor, attention_mask: Any = None
    ) -> dict[str, Tensor]:
        """``loss`` and its parts, means over the batch."""
        positions = {} if attention_mask is None else {"attention_mask": attention_mask}
        total = counts({"input_ids": input_ids, "labels": labels, **positions})
        return super().forward(input_ids, labels, draws, total, **positions)


class NumberedBatch(ReplacedBatch):
    """Windows with masks and draws, named by their numbers, as the Trainer of a comparison has them."""

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        return {**super().__call__(examples), "example_ids": torch.tensor([e["example_id"] for e in examples])}


class ReplacedValidation(Validation):
    """Validation text in which the trial's own generator filled masked tokens in; the draws never change."""

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: PreTrainedTokenizerFast,
        settings: EvaluateSettings,
        masking: MaskingConfig,
        objective: Electra,
    ) -> None:
        super().__init__(stream, tokenizer, settings, masking)
        self.objective = objective
        self.collate = NumberedBatch(Vocabulary.from_tokenizer(tokenizer), MASK_SEED, masking)

    def score(self, model: Any, length: int, shift: int | None = None) -> tuple[float, float]:
        """Mean loss (nats) and accuracy of the discriminator over all tokens in windows of this length."""
        self.counted = Counter[str]()
        generator = self.objective.generator
        was_training = generator.training
        generator.eval()
        try:
            self.loss, accuracy = super().score(model, length, shift)
        finally:
            generator.train(was_training)
        return self.loss, accuracy

    def predict(
        self, model: Any, batch: dict[str, Any], position_ids: Any
    ) -> tuple[Float[Tensor, "N 2"], Int[Tensor, "N"]]:
        """Logits of the two answers, the text's and replaced, and which is right."""
        given = {"attention_mask": batch.get("attention_mask"), "position_ids": position_ids}
        positions = {name: value for name, value in given.items() if value is not None}
        (logits, targets), told, replaced = self.objective.judge(
            batch["input_ids"], batch["labels"], batch["draws"], positions
        )
        said = told > 0
        self.counted.update(
            guessed=int((logits.argmax(-1) == targets).sum()),
            masked=targets.numel(),
            found=int((said & replaced).sum()),
            said=int(said.sum()),
            replaced=int(replaced.sum()),
            tokens=told.numel(),
        )
        return torch.stack((torch.zeros_like(told), told), -1), replaced.long()

    def more(self) -> dict[str, float | None]:
        """Of the windows that were scored last: what tells more than the loss, whose floor the generator sets.

        F1 of what is called replaced; the share of the entropy of "replaced or not" that the loss is below, for one who
        only knows how much is replaced; the generator's accuracy.
        """
        of = self.counted
        share = of["replaced"] / of["tokens"]
        entropy = -sum(p * math.log(p) for p in (share, 1 - share) if p)
        called = of["said"] + of["replaced"]
        return {
            "replaced_f1": 2 * of["found"] / called if called else None,
            "entropy_explained": 1 - self.loss / entropy if entropy else None,
            "generator_accuracy": of["guessed"] / of["masked"],
        }


class ReplacedTrial(WindowTrial):
    """One generator and one discriminator on windows of text; the discriminator is the model."""

    causal = False

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        shape = model_shape(recipe, "electra", text.tokenizer)
        self.objective, built = build_electra(recipe.electra, shape, choice, seed, WholeElectra)
        held, settings = text.validation, recipe.evaluate
        self.replaced = ReplacedValidation(held, text.tokenizer, settings, recipe.masking, self.objective)
        super().__init__(recipe, choice, seed, text, built, self.replaced)

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Masks, draws and windows follow from the seed."""
        from locant.training.trainer import train

        collate = NumberedBatch(Vocabulary.from_tokenizer(self.tokenizer), self.seed, self.recipe.masking)
        return train(
            self.objective, self.windows, collate, self.built, settings, self.seed, work_dir=work_dir, on_step=on_step
        )

    def further_scores(self) -> dict[str, float | None]:
        """At the trained length."""
        self.validation_loss()
        return self.replaced.more()


class ReplacedTokens(TextTask):
    """Replaced tokens."""

    name, objective, trial = "electra", "electra", ReplacedTrial
    unused = ("problems", "pairs", "finetune")

    def words(self, recipe: dict[str, Any]) -> Words:
        """Losses are of the discriminator, over all tokens; that of training has the generator's beside."""
        weight = recipe["electra"]["discriminator_weight"]
        return Words(
            measure="validation loss of the discriminator",
            unit="nats per token",
            training=f"nats: generator per predicted token + {weight:g} x discriminator per token",
        )
