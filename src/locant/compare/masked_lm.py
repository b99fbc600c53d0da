"""The task `mlm`: a small BERT, RoBERTa or ALBERT that predicts masked tokens of windows of text."""

from __future__ import annotations

from pathlib import Path

from locant.compare.evaluate import Validation
from locant.compare.objective import OnStep
from locant.compare.recipe import Recipe
from locant.compare.text import PreparedText
from locant.compare.text_windows import TextTask, WindowTrial, build_model
from locant.training.mlm import EncodingChoice, LossPoint, TrainSettings


class MaskedTrial(WindowTrial):
    """One encoder on windows of text."""

    causal = False

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        built = build_model(recipe, MaskedLM.objective, text.tokenizer, choice, seed)
        scores = Validation(text.validation, text.tokenizer, recipe.evaluate, recipe.masking)
        super().__init__(recipe, choice, seed, text, built, scores)

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Masks and windows follow from the seed."""
        from locant.data import MlmCollator, Vocabulary
        from locant.training.trainer import Collate, MlmObjective, train

        vocabulary = Vocabulary.from_tokenizer(self.text.tokenizer)
        collate = Collate(MlmCollator(vocabulary, self.seed, self.recipe.masking))
        objective = MlmObjective(self.built.model)
        return train(
            objective, self.windows, collate, self.built, settings, self.seed, work_dir=work_dir, on_step=on_step
        )


class MaskedLM(TextTask):
    """Masked tokens."""

    name, objective, trial = "mlm", "mlm", MaskedTrial
    unused = ("problems", "pairs", "finetune", "electra")
