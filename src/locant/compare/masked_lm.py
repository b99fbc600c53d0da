"""The task `mlm`: a small BERT that predicts masked tokens of windows of text."""

from __future__ import annotations

from pathlib import Path

from locant.compare.evaluate import Validation
from locant.compare.objective import OnStep
from locant.compare.recipe import Recipe
from locant.compare.text import PreparedText
from locant.compare.text_windows import TextTask, WindowTrial
from locant.training.mlm import EncodingChoice, LossPoint, TrainSettings, build_bert, train_mlm


class MaskedTrial(WindowTrial):
    """One BERT on windows of text."""

    causal = False

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        built = build_bert(recipe.model, len(text.tokenizer), recipe.train.length, choice, seed)
        scores = Validation(text.validation, text.tokenizer, recipe.evaluate, recipe.masking)
        super().__init__(recipe, choice, seed, text, built, scores)

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Masks and windows follow from the seed."""
        tokenizer, masking = self.text.tokenizer, self.recipe.masking
        return train_mlm(
            self.built, self.windows, tokenizer, settings, masking, self.seed, work_dir=work_dir, on_step=on_step
        )

    def infer(self) -> None:
        """The encoder alone, over one training batch."""
        self.built.model.bert(input_ids=self.first_windows())


class MaskedLM(TextTask):
    """Masked tokens."""

    name, unused, trial = "mlm", ("problems", "pairs", "finetune"), MaskedTrial
