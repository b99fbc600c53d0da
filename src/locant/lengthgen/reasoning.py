"""Sorting, and chains of variables (LEGO)."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from typing import Any

import numpy as np

from locant.lengthgen.problem import FIRST, WITHOUT_VARIABLE, Example, Problem, Raw, Scratchpad, Step, spaced
from locant.lengthgen.symbols import pool

RANKED = pool(50)  # in rank order
CALL = "The minimum of the unsorted portion"
VALUES = {"0": "-1", "1": "+1"}

# --- sorting ---


def symbols_to_sort(length: int, rng: np.random.Generator) -> Raw:
    """Symbols of a ranked pool; some may come twice."""
    ids = [int(i) for i in rng.integers(len(RANKED), size=length)]
    source, target = [RANKED[i] for i in ids], [RANKED[i] for i in sorted(ids)]
    return {"token_ids": ids, "src_seq": source, "tgt_seq": target, "cat": length}


def numbers_to_sort(length: int, rng: np.random.Generator) -> Raw:
    """Numbers from 10 to 9999."""
    numbers = [int(number) for number in rng.integers(10, 10_000, length)]
    return {"src_seq": numbers, "tgt_seq": sorted(numbers), "cat": length}


def _write_sorting(show: Callable[[Any], str], rank: Callable[[Any], int]) -> Callable[..., Example]:
    def write(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
        source = raw["src_seq"]
        answer = f"The sorted list is {_list(sorted(source, key=rank), show)}."
        target = answer if scratchpad is None else scratchpad.write(_selections(source, show, rank), answer)
        return Example(f"Sort the following list {_list(source, show)}. ", target, len(source))

    return write


def _list(items: list[Any], show: Callable[[Any], str]) -> str:
    return f"[ {', '.join(show(item) for item in items)} ]"


def _selections(items: list[Any], show: Callable[[Any], str], rank: Callable[[Any], int]) -> list[Step]:
    """Selection sort: the least of the rest changes places with the first of it."""
    rest, steps = list(items), []
    while rest:
        first, at = rest[0], min(range(len(rest)), key=lambda i: rank(rest[i]))
        least = rest[at]
        rest[at] = first
        rest = rest[1:]
        steps.append(Step(show(first), CALL, show(least), _list(rest, show)))
    return steps


# --- chains ---


def chain(length: int, rng: np.random.Generator, permuted: bool = False) -> Raw:
    """Variables that follow from one another; one of the later half is asked for. ``permuted`` shuffles the clauses."""
    names = [string.ascii_lowercase[i] for i in rng.choice(26, length, replace=False)]
    value = int(rng.integers(2))
    clauses, values = [f"{names[0]} = {VALUES[str(value)]}"], [[names[0], str(value)]]
    for before, name in itertools.pairwise(names):
        sign = "+-"[rng.integers(2)]
        value = value if sign == "+" else 1 - value
        clauses.append(f"{name} = {sign} {before}")
        values.append([name, str(value)])
    asked = int(rng.integers(length // 2, length))
    if permuted:
        clauses = [clauses[i] for i in rng.permutation(length)]
    return {"clauses": clauses, "truth_values": values, "query": names[asked], "cat": [length, asked]}


def write_chain(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`If a = -1, b = - a. Then, what is the value of b? ` -> `The answer is +1.`; steps follow the chain."""
    clauses, query = raw["clauses"], raw["query"]
    steps, value = _links(clauses, query)
    prompt = f"If {', '.join(clauses)}. Then, what is the value of {query}? "
    answer = f"The answer is {value}."
    target = answer if scratchpad is None else scratchpad.write(steps, answer)
    return Example(prompt, target, len(clauses))


def _links(clauses: list[str], query: str) -> tuple[list[Step], str]:
    """The steps from the variable with a value to the one asked for, and its value."""
    followed = {clause.rsplit(" ", 1)[1]: clause for clause in clauses}  # what a variable leads to
    clause = next(c for c in clauses if c.endswith("1"))
    rest, steps, value = list(clauses), [], ""
    while True:
        rest.remove(clause)
        name, stated = clause.split(" = ")
        computation = ""
        if " " in stated:
            sign = stated[0]
            computation = f"{stated} = {sign} {value}"
            value = value if sign == "+" else {"+1": "-1", "-1": "+1"}[value]
        else:
            value = stated
        steps.append(Step(name, computation, value, ", ".join(rest)))
        if name == query:
            return steps, value
        clause = followed[name]


REASONING = (
    Problem(
        "sort_single",
        symbols_to_sort,
        _write_sorting(str, RANKED.index),
        "items",
        (2, 8),
        (9, 16),
        scratchpad=WITHOUT_VARIABLE,
        chosen=FIRST,
    ),
    Problem(
        "sort_multi",
        numbers_to_sort,
        _write_sorting(spaced, int),
        "items",
        (2, 8),
        (9, 16),
        scratchpad=WITHOUT_VARIABLE,
        chosen=FIRST,
    ),
    Problem(
        "lego", chain, write_chain, "variables", (4, 8), (9, 16), longest=26, scratchpad=WITHOUT_VARIABLE, chosen=FIRST
    ),
    Problem(
        "lego_permuted",
        lambda length, rng: chain(length, rng, permuted=True),
        write_chain,
        "variables",
        (4, 8),
        (9, 16),
        longest=26,
        scratchpad=WITHOUT_VARIABLE,
        chosen=FIRST,
    ),
)
