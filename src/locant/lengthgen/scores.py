"""Scores: exact match of the final answer by length, and reciprocal ranks over problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from locant.lengthgen.symbols import split

_FINAL = re.compile(r"\bThus\s*,\s*")


@dataclass(frozen=True)
class Bucket:
    """Exact match of the examples of one length."""

    length: int
    exact_match: float
    num_examples: int


def final_answer(text: str) -> tuple[str, ...]:
    """The symbols of an answer, without the scratchpad in front of it; white space does not count."""
    return tuple(split(_FINAL.split(text)[-1]))


def is_right(prediction: str, target: str) -> bool:
    """Whether the final answers agree, symbol by symbol; the scratchpad does not count."""
    return final_answer(prediction) == final_answer(target)


def by_length(lengths: Sequence[int], right: Sequence[bool]) -> tuple[Bucket, ...]:
    """Exact match for each length, shortest first.

    Raises: ValueError where lengths and judgements differ in number, or there are none.
    """
    if len(lengths) != len(right) or not lengths:
        raise ValueError(f"by_length: {len(lengths)} lengths for {len(right)} judgements, needed one each, and some")
    groups: dict[int, list[bool]] = {}
    for length, one in zip(lengths, right, strict=True):
        groups.setdefault(length, []).append(one)
    return tuple(Bucket(n, sum(groups[n]) / len(groups[n]), len(groups[n])) for n in sorted(groups))


def overall(buckets: Iterable[Bucket]) -> float:
    """Exact match over all examples (the study's `acc_overall`: a micro average).

    Raises: ValueError without any.
    """
    found = list(buckets)
    total = sum(bucket.num_examples for bucket in found)
    if not total:
        raise ValueError(f"overall: {len(found)} buckets hold {total} examples, needed at least one")
    return sum(bucket.exact_match * bucket.num_examples for bucket in found) / total


def edit_distance(prediction: str, target: str) -> int:
    """How many symbols of the final answer must be inserted, dropped or changed."""
    given, wanted = final_answer(prediction), final_answer(target)
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(given, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Rank of each name by its score, 1 for the highest; equal scores share the mean of their ranks."""
    ordered = sorted(scores.values(), reverse=True)
    mean = {value: ordered.index(value) + (ordered.count(value) + 1) / 2 for value in set(ordered)}
    return {name: mean[value] for name, value in scores.items()}


def mean_reciprocal_rank(problems: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over problems of 1 / rank, for each name: 1 is the best everywhere.

    Raises: ValueError without problems, or where they do not all score the same names.
    """
    names = {frozenset(scores) for scores in problems.values()}
    if len(names) != 1:
        raise ValueError(
            f"mean_reciprocal_rank: {len(problems)} problems score {len(names)} different sets of names, needed one; "
            "leave out what was not scored everywhere"
        )
    ranked = [ranks(scores) for scores in problems.values()]
    return {name: sum(1 / one[name] for one in ranked) / len(ranked) for name in sorted(next(iter(names)))}
