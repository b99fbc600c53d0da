"""Training, validation and test examples of a problem: short ones to learn from, longer ones to be judged by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from locant.lengthgen.arithmetic import ARITHMETIC
from locant.lengthgen.brackets import BRACKETS
from locant.lengthgen.commands import read_scan, write_scan
from locant.lengthgen.copying import copying
from locant.lengthgen.kinship import KINSHIP
from locant.lengthgen.pcfg import strings
from locant.lengthgen.problem import Example, Length, Problem, Raw, Scratchpad
from locant.lengthgen.reasoning import REASONING
from locant.lengthgen.symbols import pool


def problems(symbols: int = 100) -> dict[str, Problem]:
    """Every problem with a generator, by name; copying, reversing and PCFG draw from a pool of so many symbols.

    Raises: ValueError for a pool that cannot be had.
    """
    pool(symbols)
    every = (*copying(symbols), *ARITHMETIC, *REASONING, *BRACKETS, *KINSHIP, *strings(symbols))
    return {problem.name: problem for problem in every}


PROBLEMS = problems()
SCAN_RANGES = ((1, 25), (26, 48))  # actions


@dataclass(frozen=True)
class Split:
    """The three parts of a problem. Every length bin has equally many examples, as far as the problem has them."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def split_facts(split: Split) -> dict[str, Any]:
    """Numbers of examples, of test examples by length, and the share of prompts that training has, too."""
    seen = {example.prompt for example in split.train}
    parts = {"train": split.train, "validation": split.validation, "test": split.test}
    lengths = [bucket(example) for example in split.test]
    return {
        **{name: len(examples) for name, examples in parts.items()},
        "test_by_length": {str(length): lengths.count(length) for length in sorted(set(lengths))},
        "prompts_also_trained": {
            name: round(sum(example.prompt in seen for example in parts[name]) / len(parts[name]), 4)
            for name in ("validation", "test")
        },
    }


def bucket(example: Example) -> int:
    """The number an example is counted under: its length, or that of the longer operand."""
    return max(example.length) if isinstance(example.length, tuple) else example.length


def bins(problem: Problem, first: int, last: int, trained: int | None = None) -> tuple[Length, ...]:
    """Lengths from ``first`` to ``last``; pairs where a problem has two operands.

    With ``trained`` (the longest trained length) pairs go from the shortest length on, one operand at least beyond it.
    """
    if not problem.pairs:
        return tuple(range(first, last + 1))
    low = problem.shortest if trained is not None else first
    pairs = [(a, b) for a in range(low, last + 1) for b in range(low, last + 1)]
    return tuple(pair for pair in pairs if trained is None or max(pair) > trained)


def make_split(
    problem: Problem,
    num_train: int,
    num_validation: int,
    num_test: int,
    seed: int,
    *,
    train: tuple[int, int] | None = None,
    test: tuple[int, int] | None = None,
    scratchpad: Scratchpad | None = None,
) -> Split:
    """Draws a split. Training and validation come from the same lengths, test from longer ones.

    No validation example has the prompt of a training example, unless the problem has too few different ones.
    Raises: ValueError for ranges that are empty or overlap, counts below 1, lengths the generator cannot make.
    """
    train, test = train or problem.train, test or problem.test
    _check_ranges(problem.name, train, test)
    _check_counts(problem.name, num_train, num_validation, num_test)
    rng = np.random.default_rng(seed)
    short, long = bins(problem, *train), bins(problem, *test, trained=train[1])
    learned = _draw(problem, short, num_train + num_validation, rng, scratchpad)
    order = rng.permutation(len(learned))
    training = [learned[i] for i in order[:num_train]]
    seen = {example.prompt for example in training}
    rest = [learned[i] for i in order[num_train:]]
    unseen = [example for example in rest if example.prompt not in seen]
    validation = unseen if len(unseen) >= max(1, num_validation // 2) else rest
    return Split(tuple(training), tuple(validation), tuple(_draw(problem, long, num_test, rng, scratchpad)))


def _draw(
    problem: Problem, lengths: Sequence[Length], count: int, rng: np.random.Generator, scratchpad: Scratchpad | None
) -> list[Example]:
    """``count`` examples, spread evenly over the lengths."""
    order = (
        itertools.islice(itertools.cycle(lengths), count)
        if count >= len(lengths)
        else (lengths[i] for i in rng.choice(len(lengths), count, replace=False))
    )
    return [problem.make(length, rng, scratchpad) for length in order]


def split_rows(
    examples: Sequence[Example],
    num_train: int,
    num_validation: int,
    num_test: int,
    seed: int,
    *,
    train: tuple[int, int],
    test: tuple[int, int],
    name: str = "rows",
) -> Split:
    """A split of examples that are given (SCAN), by their lengths; at most as many as asked for.

    Raises: ValueError for ranges that are empty, overlap or hold no example, and counts below 1.
    """
    _check_ranges(name, train, test)
    _check_counts(name, num_train, num_validation, num_test)
    rng = np.random.default_rng(seed)

    def within(limits: tuple[int, int]) -> list[Example]:
        found = [example for example in examples if limits[0] <= bucket(example) <= limits[1]]
        if not found:
            raise ValueError(f"{name}: no example has a length from {limits[0]} to {limits[1]}; give another range")
        return [found[i] for i in rng.permutation(len(found))]

    short, long = within(train), within(test)
    kept = min(num_validation, max(1, len(short) // 10))
    return Split(tuple(short[kept : kept + num_train]), tuple(short[:kept]), tuple(long[:num_test]))


def scan_split(
    num_train: int,
    num_validation: int,
    num_test: int,
    seed: int,
    *,
    train: tuple[int, int] = SCAN_RANGES[0],
    test: tuple[int, int] = SCAN_RANGES[1],
    rows: Sequence[Raw] | None = None,
) -> Split:
    """The study's `mdlen` split of SCAN: both parts pooled, short commands to learn from, with a constant prompt."""
    examples = [write_scan(raw) for raw in (read_scan() if rows is None else rows)]
    return split_rows(examples, num_train, num_validation, num_test, seed, train=train, test=test, name="scan")


def _check_ranges(name: str, train: tuple[int, int], test: tuple[int, int]) -> None:
    for what, (first, last) in (("train", train), ("test", test)):
        if not 1 <= first <= last:
            raise ValueError(
                f"{name}: {what} lengths {first} to {last} are none; give a first of 1 or more, and a last"
            )
    if test[0] <= train[1]:
        raise ValueError(
            f"{name}: test lengths begin at {test[0]} but training reaches {train[1]}; begin at {train[1] + 1} or later"
        )


def _check_counts(name: str, *counts: int) -> None:
    if min(counts) < 1:
        raise ValueError(f"{name}: {counts} examples to train, validate and test were asked for, needed 1 or more each")
