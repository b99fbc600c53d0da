"""Scores of GLUE and SQuAD equal their definitions, written out here a second time without any library."""

from __future__ import annotations

import math
import random

import pytest

from locant.finetune.scores import (
    accuracy,
    accuracy_and_f1,
    answer_f1,
    correlations,
    exact_match,
    matthews,
    normalize_answer,
    squad_scores,
)

PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WORDS = [
    "The",
    "a",
    "an",
    "AN",
    "cat",
    "Cat's",
    "co-op",
    "the.",
    "--",
    "théâtre",
    "the",
    "U.S.",
    "1,000",
    "an-",
    "a\tb",
]


def words_of(text: str) -> list[str]:
    """The official normalization, letter by letter: lower case, no punctuation, no articles, split at blanks."""
    bare = "".join(letter for letter in text.lower() if letter not in PUNCTUATION)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def f1_of(prediction: str, reference: str) -> float:
    left, right = words_of(prediction), words_of(reference)
    rest, shared = list(right), 0
    for word in left:
        if word in rest:
            rest.remove(word)
            shared += 1
    return 2 * shared / (len(left) + len(right)) if shared else 0.0


def texts(draw: random.Random) -> str:
    return draw.choice([" ", "  ", "\n"]).join(draw.choice(WORDS) for _ in range(draw.randint(0, 6)))


def test_answers_are_compared_as_the_official_scorer_compares_them() -> None:
    draw = random.Random(1)
    exact = 0
    for _ in range(3000):
        one, other = texts(draw), texts(draw)
        assert normalize_answer(one).split() == words_of(one)
        assert exact_match(one, other) == float(words_of(one) == words_of(other))
        assert answer_f1(one, other) == pytest.approx(f1_of(one, other), abs=1e-12)
        exact += words_of(one) == words_of(other)
    assert exact > 20, "the texts must sometimes be equal"


@pytest.mark.parametrize(
    ("prediction", "reference", "exact", "f1"),
    [
        ("The Cat.", "cat", 1.0, 1.0),
        ("Saint Bernadette Soubirous", "Bernadette Soubirous", 0.0, 0.8),
        ("the", "an", 1.0, 0.0),  # nothing is left of both: equal texts without a shared word
        ("cat cat dog", "cat dog dog", 0.0, 2 / 3),
        ("theatre", "the atre", 0.0, 0.0),
    ],
)
def test_known_answers_have_their_score(prediction: str, reference: str, exact: float, f1: float) -> None:
    assert (exact_match(prediction, reference), answer_f1(prediction, reference)) == (exact, pytest.approx(f1))


def test_squad_takes_the_best_reference_and_counts_missing_answers_as_wrong() -> None:
    references = {"q1": ["cat", "a big cat"], "q2": ["blue"], "q3": ["red"]}
    found = squad_scores(references, {"q1": "big cat", "q2": "green", "other": "red"})
    assert found == {"f1": pytest.approx(100 / 3), "exact_match": pytest.approx(100 / 3)}
    assert list(found) == ["f1", "exact_match"], "the main score is first"


def confusion(labels: list[int], found: list[int]) -> tuple[int, int, int, int]:
    pairs = list(zip(labels, found, strict=True))
    return pairs.count((1, 1)), pairs.count((0, 0)), pairs.count((0, 1)), pairs.count((1, 0))


def ranks(values: list[float]) -> list[float]:
    """Equal values share the mean of their places."""
    return [sum(o < v for o in values) + (sum(o == v for o in values) + 1) / 2 for v in values]


def pearson(x: list[float], y: list[float]) -> float:
    n, mx, my = len(x), sum(x) / len(x), sum(y) / len(y)
    shared = sum((x[i] - mx) * (y[i] - my) for i in range(n))
    return shared / math.sqrt(sum((a - mx) ** 2 for a in x) * sum((b - my) ** 2 for b in y))


@pytest.mark.parametrize("seed", range(7))
def test_glue_scores_of_classes_equal_their_definitions(seed: int) -> None:
    draw = random.Random(seed)
    labels = [draw.randint(0, 1) for _ in range(37)]
    found = [label if draw.random() < 0.7 else draw.randint(0, 1) for label in labels]
    tp, tn, fp, fn = confusion(labels, found)
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(labels, found)["matthews"] == pytest.approx((tp * tn - fp * fn) / root, abs=1e-12)
    assert accuracy(labels, found) == {"accuracy": pytest.approx((tp + tn) / 37)}
    both = accuracy_and_f1(labels, found)
    assert both["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn)) and list(both) == ["f1", "accuracy"]


def test_scores_of_constant_predictions_are_defined_or_said_not_to_be() -> None:
    assert matthews([0, 1, 1], [1, 1, 1]) == {"matthews": 0.0, "accuracy": pytest.approx(2 / 3)}
    assert accuracy_and_f1([0, 1, 1], [0, 0, 0]) == {"f1": 0.0, "accuracy": pytest.approx(1 / 3)}
    assert correlations([0.5, 1.0, 2.0], [3.0, 3.0, 3.0]) == {"pearson": None, "spearman": None}
    assert correlations([1.0, 1.0], [0.0, 3.0]) == {"pearson": None, "spearman": None}


def test_glue_correlations_equal_their_definitions_with_ties() -> None:
    draw = random.Random(5)
    labels = [draw.choice([0.0, 1.25, 2.5, 3.0, 5.0]) for _ in range(29)]
    found = [round(label + draw.gauss(0, 1), 1) for label in labels]
    both = correlations(labels, found)
    assert both["pearson"] == pytest.approx(pearson(labels, found), abs=1e-12)
    assert both["spearman"] == pytest.approx(pearson(ranks(labels), ranks(found)), abs=1e-12)
