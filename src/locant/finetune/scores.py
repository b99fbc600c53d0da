"""Scores as the official scorers of GLUE and SQuAD 1.1 define them; nothing is fetched.

SQuAD: an answer is compared with every reference answer after normalization (lower case; without ASCII punctuation;
without the words a, an, the; one blank between words), and the best value counts. Exact match: equal texts. F1: the
harmonic mean of precision and recall over the words of both, as multisets. Both are means over all questions, in
percent; a question without a prediction scores 0.

GLUE: scikit-learn's and scipy's functions. A number that is undefined (a correlation with a constant) is None.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Scores = dict[str, float | None]
Numbers = Sequence[int | float]  # classes, or what a regression task predicts
GlueMetric = Callable[[Numbers, Numbers], Scores]  # (labels, predictions)

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """The text that is compared: see the module."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, reference: str) -> float:
    """1.0 where both are the same answer, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


def answer_f1(prediction: str, reference: str) -> float:
    """Overlap of the words of two answers, from 0.0 to 1.0."""
    predicted, wanted = (Counter(normalize_answer(text).split()) for text in (prediction, reference))
    shared = (predicted & wanted).total()
    if not shared:
        return 0.0
    precision, recall = shared / predicted.total(), shared / wanted.total()
    return 2 * precision * recall / (precision + recall)


def squad_scores(references: Mapping[str, Iterable[str]], predictions: Mapping[str, str]) -> Scores:
    """``f1`` and ``exact_match`` in percent over all questions of ``references`` (answers by question id)."""
    exact = overlap = 0.0
    for question, answers in references.items():
        if question in predictions:
            exact += max(exact_match(predictions[question], answer) for answer in answers)
            overlap += max(answer_f1(predictions[question], answer) for answer in answers)
    count = len(references)
    return {"f1": 100 * overlap / count, "exact_match": 100 * exact / count}


def accuracy(labels: Numbers, predictions: Numbers) -> Scores:
    """Share of right classes."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": float(accuracy_score(labels, predictions))}


def accuracy_and_f1(labels: Numbers, predictions: Numbers) -> Scores:
    """F1 of class 1 (a paraphrase, a duplicate), and accuracy."""
    from sklearn.metrics import f1_score

    f1 = float(f1_score(labels, predictions, zero_division=0.0))  # pyright: ignore[reportArgumentType]
    return {"f1": f1, **accuracy(labels, predictions)}


def matthews(labels: Numbers, predictions: Numbers) -> Scores:
    """Matthews correlation; 0 where one side is constant."""
    from sklearn.metrics import matthews_corrcoef

    return {"matthews": float(matthews_corrcoef(labels, predictions)), **accuracy(labels, predictions)}


def correlations(labels: Numbers, predictions: Numbers) -> Scores:
    """Pearson and Spearman correlation; None where one side is constant."""
    from scipy.stats import pearsonr, spearmanr

    if len(set(labels)) < 2 or len(set(predictions)) < 2:
        return {"pearson": None, "spearman": None}
    pearson: Any = pearsonr(labels, predictions)[0]
    spearman: Any = spearmanr(labels, predictions)[0]
    return {"pearson": _finite(float(pearson)), "spearman": _finite(float(spearman))}


# The first score of each metric, by which models are ranked.
MAIN: dict[GlueMetric, str] = {
    accuracy: "accuracy",
    accuracy_and_f1: "f1",
    matthews: "matthews",
    correlations: "pearson",
}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
