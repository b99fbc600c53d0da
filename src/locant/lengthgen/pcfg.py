"""PCFG SET (Hupkes, Dankers, Mul & Bruni 2020, arXiv:1908.08351): functions of strings, one inside another.

Functions stand before their arguments, and a comma between two: `append reverse A1 B2 , C3 D4` is B2 A1 C3 D4. The
functions are those of the data set. Its examples, whose shapes follow the statistics of a natural language, are not
here: trees of a number of functions are drawn at random, and no function makes a string of more than `LONGEST` symbols.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import numpy as np

from locant.lengthgen.problem import SEPARATOR, Example, Problem, Raw

String = list[str]

UNARY: dict[str, Callable[[String], String]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[::-1],
    "shift": lambda x: x[1:] + x[:1],  # the first symbol goes to the end
    "swap_first_last": lambda x: x[-1:] + x[1:-1] + x[:1],
    "repeat": lambda x: x + x,
    "echo": lambda x: x + x[-1:],  # the last symbol once more
}
BINARY: dict[str, Callable[[String, String], String]] = {
    "append": lambda x, y: x + y,
    "prepend": lambda x, y: y + x,
    "remove_first": lambda x, y: y,
    "remove_second": lambda x, y: x,
}
ALPHABET = tuple(f"{letter}{number}" for number in range(1, 21) for letter in string.ascii_uppercase)
WIDTHS = (2, 5)  # least and most symbols of an argument
LONGEST = 40  # symbols of any value: `repeat` six times over would else make hundreds
DEEPEST = 200  # functions; each may stand in the one before


def functions(length: int, rng: np.random.Generator, symbols: Sequence[str]) -> Raw:
    """A tree of ``length`` functions over strings of these symbols, and its value."""
    source, target = _tree(length, rng, symbols)
    return {"source": " ".join(source), "target": " ".join(target), "category": length}


def _tree(count: int, rng: np.random.Generator, symbols: Sequence[str]) -> tuple[String, String]:
    """A tree as it is written, and its value."""
    if count == 0:
        drawn: list[int] = rng.integers(len(symbols), size=rng.integers(WIDTHS[0], WIDTHS[1] + 1)).tolist()
        value: String = [symbols[i] for i in drawn]
        return value, value
    binary = rng.random() < len(BINARY) / (len(UNARY) + len(BINARY))
    first = int(rng.integers(count)) if binary else count - 1
    shares = (first, count - 1 - first) if binary else (first,)
    parts = [_tree(share, rng, symbols) for share in shares]
    values = {
        name: function(*(value for _, value in parts)) for name, function in (BINARY if binary else UNARY).items()
    }
    fitting = [name for name, value in values.items() if len(value) <= LONGEST]
    name = fitting[rng.integers(len(fitting))]
    written = [name, *parts[0][0]] + ([",", *parts[1][0]] if binary else [])
    return written, values[name]


def write_pcfg(raw: Raw) -> Example:
    """`Solve: reverse A1 B2[SEP] ` -> `B2 A1`; the length is the number of functions, as the row states it."""
    return Example(f"Solve: {raw['source']}{SEPARATOR}", raw["target"], raw["category"])


def strings(size: int = 100) -> tuple[Problem, ...]:
    """The problem of this file, with the first ``size`` symbols of the data set's 520."""
    symbols = ALPHABET[:size]
    return (
        Problem(
            "pcfg",
            lambda length, rng: functions(length, rng, symbols),
            write_pcfg,
            "functions",
            (1, 8),
            (9, 35),
            longest=DEEPEST,
        ),
    )
