"""The task `causal_lm`: a small GPT-2 that predicts every next token of windows of text, at longer windows, too."""

from __future__ import annotations

from pathlib import Path

from locant.compare.evaluate import CausalValidation
from locant.compare.objective import OnStep
from locant.compare.recipe import Recipe
from locant.compare.text import PreparedText
from locant.compare.text_windows import TextTask, WindowTrial, build_model
from locant.training.causal import WindowCollate, make_objective
from locant.training.mlm import EncodingChoice, LossPoint, TrainSettings


class CausalTrial(WindowTrial):
    """One GPT-2 on windows of text."""

    causal = True

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, text: PreparedText) -> None:
        built = build_model(recipe, CausalLM.objective, text.tokenizer, choice, seed)
        scores = CausalValidation(text.validation, text.tokenizer, recipe.evaluate)
        super().__init__(recipe, choice, seed, text, built, scores)

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Windows follow from the seed."""
        from locant.training.trainer import train

        objective, collate = make_objective(self.built.model), WindowCollate()
        return train(
            objective, self.windows, collate, self.built, settings, self.seed, work_dir=work_dir, on_step=on_step
        )


class CausalLM(TextTask):
    """Next tokens; [CLS] and the [SEP] that closes a window are predicted by none. Masks mean nothing here."""

    name, objective, trial = "causal_lm", "causal", CausalTrial
    unused = ("problems", "pairs", "masking", "finetune", "electra")
