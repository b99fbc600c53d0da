"""Kinship chains, in the manner of CLUTRR (Sinha et al. 2019, arXiv:1908.06177): who is who to whom, by several facts.

A chain begins with one fact of a family, and each step puts two facts in the place of one, by way of a third person.
What was replaced, from the question down, is the backward proof: the scratchpad. Facts come in any order.

    x is R1 of z, z is R2 of y    =>    x is COMPOSED[R1][R2] of y

The table holds all that follows in every family where siblings have both parents in common, a couple has its children
in common, and people marry once. Sentences are worded as in the study's `bwd_short` data; people, families and table
are ours, and what has to be written is worded in one way alone (theirs varies, and so could not be matched exactly).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from locant.lengthgen.problem import ALL, SEPARATOR, Example, Problem, Raw, Scratchpad, Step

WORDS = {  # for a man, for a woman
    "parent": ("father", "mother"),
    "child": ("son", "daughter"),
    "sibling": ("brother", "sister"),
    "spouse": ("husband", "wife"),
    "grandparent": ("grandfather", "grandmother"),
    "grandchild": ("grandson", "granddaughter"),
    "pibling": ("uncle", "aunt"),  # by blood, as the next
    "nibling": ("nephew", "niece"),
    "parent_in_law": ("father-in-law", "mother-in-law"),
    "child_in_law": ("son-in-law", "daughter-in-law"),
    "sibling_in_law": ("brother-in-law", "sister-in-law"),
}
COMPOSED = {
    "parent": {
        "parent": "grandparent",
        "child": "spouse",
        "sibling": "parent",
        "spouse": "parent_in_law",
        "pibling": "grandparent",
    },
    "child": {
        "parent": "sibling",
        "child": "grandchild",
        "sibling": "nibling",
        "spouse": "child",
        "child_in_law": "grandchild",
    },
    "sibling": {
        "parent": "pibling",
        "child": "child",
        "sibling": "sibling",
        "spouse": "sibling_in_law",
        "grandchild": "grandchild",
        "nibling": "nibling",
    },
    "spouse": {
        "parent": "parent",
        "child": "child_in_law",
        "sibling": "sibling_in_law",
        "grandparent": "grandparent",
        "parent_in_law": "parent_in_law",
        "child_in_law": "child",
    },
    "grandparent": {"sibling": "grandparent"},
    "grandchild": {"spouse": "grandchild"},
    "pibling": {"sibling": "pibling"},
    "nibling": {"child": "grandchild"},
    "parent_in_law": {"parent": "grandparent", "spouse": "parent", "child_in_law": "spouse"},
    "child_in_law": {"spouse": "child_in_law"},
}
FACTS = ("{x} is the {r} of {y}", "{x} is a {r} to {y}", "{x} is {y} 's {r}", "{y} has a {r} who is {x}")
QUESTIONS = ("How is {y} related to {x} ?", "How are {y} and {x} related to each other ?")
GENERATIONS, CHILDREN = 4, 3  # of the family, and of each couple in it
NAMES = 30  # of people: ent_0 ...
LONGEST = 20  # facts


Pair = tuple[int, int]  # whoever stands first is somebody's relative; whoever stands second is that somebody


@dataclass(frozen=True)
class Family:
    """Who is what to whom; people are numbers. ``couples``: married people."""

    couples: tuple[Pair, ...]
    kin: dict[Pair, str]
    ways: dict[Pair, tuple[int, ...]]  # third people by way of whom a relation follows from two others


@functools.cache
def family() -> Family:
    """A couple and its descendants, all married but the last generation: 53 people."""
    born: dict[int, Pair] = {}
    couples, parents, people = [(0, 1)], [(0, 1)], 2
    for generation in range(2, GENERATIONS + 1):
        married = []
        for couple in parents:
            for _ in range(CHILDREN):
                born[people] = couple
                if generation < GENERATIONS:
                    married.append((people, people + 1))
                people += 1 + (generation < GENERATIONS)
        parents = married
        couples += married
    kin = {(x, y): kind for y in range(people) for kind, found in _relatives(y, born, couples) for x in found}
    ways = {(x, y): tuple(z for z in range(people) if _follows(kin, x, z, y)) for x, y in kin}
    return Family(tuple(couples), kin, ways)


def _relatives(person: int, born: dict[int, Pair], couples: list[Pair]) -> Iterator[tuple[str, set[int]]]:
    """The relatives of a person, by what they are."""

    def parents(people: set[int]) -> set[int]:
        return {parent for one in people for parent in born.get(one, ())}

    def children(people: set[int]) -> set[int]:
        return {child for child, couple in born.items() if people & {*couple}}

    def spouses(people: set[int]) -> set[int]:
        return {other for pair in couples for one, other in (pair, pair[::-1]) if one in people}

    def siblings(people: set[int]) -> set[int]:
        return {child for one in people for child in children(parents({one})) - {one}}

    me = {person}
    yield "parent", parents(me)
    yield "child", children(me)
    yield "sibling", siblings(me)
    yield "spouse", spouses(me)
    yield "grandparent", parents(parents(me))
    yield "grandchild", children(children(me))
    yield "pibling", siblings(parents(me))
    yield "nibling", children(siblings(me))
    yield "parent_in_law", parents(spouses(me))
    yield "child_in_law", spouses(children(me))
    yield "sibling_in_law", siblings(spouses(me)) | spouses(siblings(me))


def _follows(kin: dict[Pair, str], x: int, z: int, y: int) -> bool:
    """Whether what x is to y follows from what x is to z and z to y."""
    return (x, z) in kin and (z, y) in kin and COMPOSED.get(kin[x, z], {}).get(kin[z, y]) == kin[x, y]


def kinship(length: int, rng: np.random.Generator) -> Raw:
    """A question about two people, ``length`` facts that answer it, in any order, and the backward proof."""
    home = family()
    chain, splits = _chain(length, rng)
    women = {couple[i] for couple, i in zip(home.couples, rng.integers(2, size=len(home.couples)), strict=True)}
    married = {one for couple in home.couples for one in couple}
    women |= {one for one in chain if one not in married and rng.integers(2)}
    names = dict(zip(chain, (f"ent_{i}" for i in rng.choice(NAMES, length + 1, replace=False)), strict=True))

    def told(pair: Pair, wording: str = "{x} is the {r} of {y}") -> str:
        word = WORDS[home.kin[pair]][pair[0] in women]
        return wording.format(x=names[pair[0]], y=names[pair[1]], r=word)

    facts = [told(pair, FACTS[rng.integers(len(FACTS))]) for pair in itertools.pairwise(chain)]
    asked = QUESTIONS[rng.integers(len(QUESTIONS))].format(x=names[chain[0]], y=names[chain[-1]])
    steps = [f"since {told((x, z))} , and {told((z, y))} , then {told((x, y))}" for x, z, y in splits]
    story = " ".join(f"{facts[i]} ." for i in rng.permutation(length))
    source = f"{story} [query] {asked}"
    return {"source": source, "target": told((chain[0], chain[-1])), "scratchpad": steps, "category": length}


def _chain(length: int, rng: np.random.Generator) -> tuple[list[int], list[tuple[int, int, int]]]:
    """``length + 1`` different people, each a relative of the next; and the splits (x, z, y), outermost first."""
    home = family()
    while True:
        kind = tuple(WORDS)[rng.integers(len(WORDS))]
        pairs = [pair for pair in home.ways if home.kin[pair] == kind]
        chain, splits = list(pairs[rng.integers(len(pairs))]), {}
        while len(chain) <= length:
            free = [
                (at, z) for at, pair in enumerate(itertools.pairwise(chain)) for z in home.ways[pair] if z not in chain
            ]
            if not free:
                break
            at, z = free[rng.integers(len(free))]
            splits[chain[at], chain[at + 1]] = z
            chain.insert(at + 1, z)
        else:
            return chain, list(_proof(chain[0], chain[-1], splits))


def _proof(x: int, y: int, splits: dict[Pair, int]) -> Iterator[tuple[int, int, int]]:
    """The splits of a relation, then those of its two parts."""
    if (x, y) in splits:
        z = splits[x, y]
        yield x, z, y
        yield from _proof(x, z, splits)
        yield from _proof(z, y, splits)


def write_kinship(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`Solve: ent_3 is the son of ent_6 . ... [query] How ...[SEP] ` -> `The answer is ent_3 is the uncle of ent_1.`"""
    answer = f"The answer is {raw['target']}."
    steps = [Step(computation=text) for text in raw["scratchpad"]]
    target = answer if scratchpad is None else scratchpad.write(steps, answer)
    return Example(f"Solve: {raw['source']}{SEPARATOR}", target, raw["category"])


KINSHIP = (
    Problem(
        "kinship",
        kinship,
        write_kinship,
        "facts",
        (2, 6),
        (7, 10),
        shortest=2,
        longest=LONGEST,
        scratchpad=("computation",),
        chosen=ALL,
    ),
)
