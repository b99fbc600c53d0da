"""The best span of a window, among all of them: start and end logit together, up to so many tokens long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.finetune.squad import Question
from locant.finetune.windows import Window


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end`` (included) of a window, and the sum of their logits."""

    score: float
    start: int
    end: int


def best_spans(
    start: Float[Tensor, "B I"], end: Float[Tensor, "B I"], bounds: Int[Tensor, "B 2"], max_answer: int
) -> list[Span]:
    """For each row the span i..j of the largest start_i + end_j, where first <= i <= j <= last and j - i < max_answer.

    ``bounds`` holds first and last token of the context. Of equal ones the earliest, then the shortest.
    """
    count = start.shape[1]
    place = torch.arange(count, device=start.device)
    outside = (place < bounds[:, :1]) | (place > bounds[:, 1:])  # [B I]
    starts = start.float().masked_fill(outside, -torch.inf)
    ends = end.float().masked_fill(outside, -torch.inf)
    width = min(max_answer, count)
    ahead = torch.nn.functional.pad(ends, (0, width - 1), value=-torch.inf).unfold(1, width, 1)  # [B I W]
    scores, best = (starts[:, :, None] + ahead).flatten(1).max(1)
    found = zip(scores.tolist(), best.tolist(), strict=True)
    return [Span(score, at // width, at // width + at % width) for score, at in found]


def answers_of(questions: Sequence[Question], windows: Sequence[Window], spans: Mapping[int, Span]) -> dict[str, str]:
    """The text of the best span of every question over all of its windows, by question id; ``spans`` by window."""
    best: dict[int, tuple[Span, Window]] = {}
    for number, window in enumerate(windows):
        span = spans[number]
        if window.question not in best or span.score > best[window.question][0].score:
            best[window.question] = (span, window)
    answers = {}
    for number, (span, window) in best.items():
        begin, end = window.offsets[span.start][0], window.offsets[span.end][1]
        answers[questions[number].id] = questions[number].context[begin:end]
    return answers
