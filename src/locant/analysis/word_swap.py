"""Does word order matter to a classifier of pairs? Word-swap probes of Chen et al. 2023; the exact recipes are ours.

Shuffle-x: one contiguous window of x words of the hypothesis, drawn at random, is put into another order; the label
stays. Shuffle-SR: the hypothesis is the premise with its two roles exchanged (given as spans), and contradicts it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Pair = tuple[str, str]
Predict = Callable[[list[Pair]], Sequence[int]]  # (premise, hypothesis) pairs -> label ids


@dataclass(frozen=True)
class Labeled:
    """A sentence pair with its label."""

    premise: str
    hypothesis: str
    label: int


@dataclass(frozen=True)
class Roles:
    """A sentence with the word spans [start, stop) of its two role fillers."""

    words: tuple[str, ...]
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class Swap:
    """Accuracy on changed pairs; ``change`` is against the same pairs unchanged. None where no pair was left."""

    name: str
    accuracy: float | None
    change: float | None
    n: int
    skipped: int


def shuffle_window(words: Sequence[str], x: int, generator: random.Random) -> list[str] | None:
    """The words with one window of x put into another order; None for a sentence shorter than x, or x equal words.

    Raises: ValueError for x < 2.
    """
    if x < 2:
        raise ValueError(f"word swap: a window of x={x} words has no other order; give x >= 2")
    if len(words) < x:
        return None
    start = generator.randrange(len(words) - x + 1)
    window = list(words[start : start + x])
    if len(set(window)) < 2:
        return None
    order = list(window)
    while order == window:
        generator.shuffle(order)
    return [*words[:start], *order, *words[start + x :]]


def swap_roles(sentence: Roles) -> list[str]:
    """The sentence with its two role fillers exchanged.

    Raises: ValueError for spans that are empty, overlap or leave the sentence.
    """
    (a, b), (c, d) = sorted((sentence.first, sentence.second))
    if not 0 <= a < b <= c < d <= len(sentence.words):
        raise ValueError(
            f"word swap: the spans {sentence.first} and {sentence.second} do not fit a sentence of "
            f"{len(sentence.words)} words; give two [start, stop) that do not overlap"
        )
    w = sentence.words
    return [*w[:a], *w[c:d], *w[b:c], *w[a:b], *w[d:]]


def shuffle_probes(
    predict: Predict, pairs: Sequence[Labeled], sizes: Sequence[int] = (3, 4, 5, 6), seed: int = 0
) -> tuple[Swap, ...]:
    """Shuffle-x for each size; sentences shorter than x are skipped and counted.

    Raises: ValueError for no pairs.
    """
    if not pairs:
        raise ValueError("word swap: got 0 pairs; give labeled sentence pairs")
    found = []
    for x in sizes:
        generator = random.Random(f"{seed} {x}")
        changed = [(pair, shuffle_window(pair.hypothesis.split(), x, generator)) for pair in pairs]
        kept = [(pair, " ".join(words)) for pair, words in changed if words is not None]
        before = _accuracy(predict, [(p.premise, p.hypothesis) for p, _ in kept], [p.label for p, _ in kept])
        after = _accuracy(predict, [(p.premise, text) for p, text in kept], [p.label for p, _ in kept])
        change = None if before is None or after is None else after - before
        found.append(Swap(f"shuffle_{x}", after, change, len(kept), len(pairs) - len(kept)))
    return tuple(found)


def role_probe(predict: Predict, sentences: Sequence[Roles], contradiction: int, entailment: int) -> Swap:
    """Shuffle-SR: accuracy on (sentence, sentence with its roles exchanged), which contradict.

    ``change`` is against the accuracy on (sentence, the same sentence), which entails. Raises: ValueError for no
    sentences, or spans that do not fit.
    """
    if not sentences:
        raise ValueError("word swap: got 0 sentences; give sentences with the spans of their two roles")
    premises = [" ".join(s.words) for s in sentences]
    swapped = [" ".join(swap_roles(s)) for s in sentences]
    before = _accuracy(predict, list(zip(premises, premises, strict=True)), [entailment] * len(premises))
    after = _accuracy(predict, list(zip(premises, swapped, strict=True)), [contradiction] * len(premises))
    assert before is not None and after is not None
    return Swap("shuffle_sr", after, after - before, len(premises), 0)


def _accuracy(predict: Predict, pairs: list[Pair], labels: list[int]) -> float | None:
    if not pairs:
        return None
    given = list(predict(pairs))
    if len(given) != len(pairs):
        raise ValueError(f"word swap: predict returned {len(given)} labels for {len(pairs)} pairs; give one for each")
    return sum(int(a) == b for a, b in zip(given, labels, strict=True)) / len(labels)
