"""SQuAD as a problem: windows of paragraphs to spans of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from locant.data.tokenizer import special_id
from locant.finetune.batches import Feature, collate, predict
from locant.finetune.problem import Scored, subset
from locant.finetune.scores import Scores, squad_scores
from locant.finetune.settings import SquadSettings
from locant.finetune.spans import Span, answers_of, best_spans
from locant.finetune.squad import Question
from locant.finetune.windows import Window, make_windows


class Reading:
    """Start and end of the answer by two logits for each token; the best span over all windows of a question counts."""

    auto = "AutoModelForQuestionAnswering"
    config: dict[str, Any] = {}  # noqa: RUF012  a model with this head needs none

    def __init__(
        self,
        train: Sequence[Question],
        dev: dict[str, Sequence[Question]],
        tokenizer: PreTrainedTokenizerFast,
        settings: SquadSettings,
        length: int,
        with_types: bool,
    ) -> None:
        self.tokenizer, self.settings, self.with_types = tokenizer, settings, with_types
        sizes = settings.windows(length)
        asked = subset(train, settings.train_examples, "train_examples")
        windows, self.notices = make_windows(asked, tokenizer, sizes, training=True, what="training")
        self.train = _features(asked, windows, training=True)
        if not self.train:
            raise ValueError(
                f"squad: none of the {len(asked)} answers can be trained on ({'; '.join(self.notices)}); give a larger "
                "length, or a tokenizer that knows the text"
            )
        self.dev = {name: subset(questions, settings.dev_examples, "dev_examples") for name, questions in dev.items()}
        self._windows: dict[str, list[Window]] = {}
        for name, questions in self.dev.items():
            self._windows[name], told = make_windows(questions, tokenizer, sizes, training=False, what=name)
            self.notices += told

    def baselines(self) -> dict[str, Scores]:
        """There is no answer that fits all questions."""
        return {name: {} for name in self.dev}

    def batch(self, features: Sequence[Feature]) -> dict[str, Any]:
        """Padded ids with the tokens of the answers."""
        return collate(features, special_id(self.tokenizer, "pad_token"), self.with_types)

    def evaluate(self, model: Any, trainer: Any) -> dict[str, Scored]:
        """F1 and exact match in percent."""
        return {name: self._scored(name, model, trainer) for name in self.dev}

    def _scored(self, name: str, model: Any, trainer: Any) -> Scored:
        questions, windows = self.dev[name], self._windows[name]

        def read(numbers: Sequence[int], output: Any) -> list[Span]:
            bounds = torch.tensor([[windows[n].first, windows[n].last] for n in numbers])
            start, end = output.start_logits, output.end_logits
            return best_spans(start, end, bounds.to(start.device), self.settings.max_answer)

        features = _features(questions, windows, training=False)
        spans = predict(model, features, self.batch, self.settings.eval_batch_size, read, trainer)
        answers = answers_of(questions, windows, spans)
        references = {q.id: [answer.text for answer in q.answers] for q in questions}
        return Scored(squad_scores(references, answers), {}, answers)


def _features(questions: Sequence[Question], windows: Sequence[Window], *, training: bool) -> list[Feature]:
    """One feature for each window; without ``training`` it has no targets."""
    return [
        Feature(
            questions[window.question].id,
            window.input_ids,
            window.token_type_ids,
            {"start_positions": window.start, "end_positions": window.end} if training else {},
        )
        for window in windows
    ]
