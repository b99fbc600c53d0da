"""Dyck words: brackets that close in order, or each kind in an order of its own.

The study has builders for both (Dyck-4 with the bracket that may close at each place; Shuffle-4 with the last bracket
to be told) and no format, so the formats are ours. Words of a length are drawn uniformly; the builders draw from a
grammar. Length is counted in pairs of brackets, as no word has an odd number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from locant.lengthgen.problem import ALL, SEPARATOR, Example, Problem, Raw

PAIRS = ("()", "[]", "{}", "<>")
NONE = "0"  # nothing is open


def dyck_path(pairs: int, rng: np.random.Generator) -> list[bool]:
    """A balanced word of one kind of bracket, True where it opens; every such word is as likely as every other.

    By the cycle lemma: of the turns of ``pairs`` openings and one closing more, one alone is a balanced word and a
    closing.
    """
    steps = rng.permutation([1] * pairs + [-1] * (pairs + 1))
    turned = np.roll(steps, -1 - int(np.argmin(np.cumsum(steps))))
    return [step == 1 for step in turned[:-1].tolist()]


def nested(pairs: int, rng: np.random.Generator) -> Raw:
    """A Dyck word of four kinds; ``expected``: what would close the innermost open bracket, after each symbol."""
    word, expected, open_ = [], [], []
    for opens in dyck_path(pairs, rng):
        if opens:
            first, last = PAIRS[rng.integers(len(PAIRS))]
            word.append(first)
            open_.append(last)
        else:
            word.append(open_.pop())
        expected.append(open_[-1] if open_ else NONE)
    return {"word": word, "expected": expected, "cat": pairs}


def shuffled(pairs: int, rng: np.random.Generator) -> Raw:
    """Four Dyck words, one of each kind, mixed at random: brackets of different kinds may cross."""
    counts = np.bincount(rng.integers(len(PAIRS), size=pairs), minlength=len(PAIRS))
    words = [iter(dyck_path(int(count), rng)) for count in counts]
    order = rng.permutation(np.repeat(np.arange(len(PAIRS)), 2 * counts)).tolist()
    return {"word": [PAIRS[kind][not next(words[kind])] for kind in order], "cat": pairs}


def _spaced(symbols: Sequence[str]) -> str:
    return " ".join(symbols)


def write_expected(raw: Raw) -> Example:
    """`Stack: ( [ ] ) [SEP] ` -> `) ] ) 0`: what may close, after each symbol; 0 where nothing is open."""
    return Example(f"Stack: {_spaced(raw['word'])} {SEPARATOR}", _spaced(raw["expected"]), raw["cat"])


def write_last(raw: Raw) -> Example:
    """`Close: ( [ ) [SEP] ` -> `]`: the one bracket that is missing."""
    *shown, last = raw["word"]
    return Example(f"Close: {_spaced(shown)} {SEPARATOR}", last, raw["cat"])


BRACKETS = (
    Problem("dyck", nested, write_expected, "pairs of brackets", (2, 10), (11, 20), chosen=ALL),
    Problem("dyck_shuffle", shuffled, write_last, "pairs of brackets", (2, 10), (11, 20), chosen=ALL),
)
