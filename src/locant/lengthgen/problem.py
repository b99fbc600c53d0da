"""What a problem of the length-generalization study is: a generator, a format, and how long its examples are.

Kazemnejad, Padhi, Natesan Ramamurthy, Das & Reddy 2023, arXiv:2305.19466; formats as McGill-NLP/length-generalization
writes them. A generator is a pure function ``(length, rng) -> raw``; a format turns the raw example into a prompt and a
target, with or without a scratchpad. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SEPARATOR = "[SEP] "
OPENING, STEP, CLOSING = "Thinking step by step:  ", " # ", " . Thus,  "

Raw = Mapping[str, Any]
Length = int | tuple[int, int]  # a pair for problems with two operands


@dataclass(frozen=True)
class Example:
    """What the model reads, and what it has to write."""

    prompt: str
    target: str
    length: Length = 0


@dataclass(frozen=True)
class Scratchpad:
    """Which of the five components each step of a scratchpad shows, in this order."""

    input: bool = True  # what the step reads
    computation: bool = True
    output: bool = True
    variable: bool = True  # intermediate variable, where the problem has one
    remaining: bool = True  # what is still to be read

    def write(self, steps: Sequence[Step], answer: str) -> str:
        """The target with its steps in front. Every shown component is followed by one space, as in the study."""
        return OPENING + STEP.join(self._step(step) for step in steps) + CLOSING + answer

    def _step(self, step: Step) -> str:
        shown = (
            (self.input, step.input, "in {}"),
            (self.computation, step.computation, "comp {}"),
            (self.output, step.output, "out {}"),
            (self.variable, step.variable, "[ {} ]"),
            (self.remaining, step.remaining, "re {}"),
        )
        return "".join(f"{form.format(part)} " for wanted, part, form in shown if wanted and part is not None)


@dataclass(frozen=True)
class Step:
    """One step of a computation, component by component; None for what a problem does not have."""

    input: str | None = None
    computation: str | None = None
    output: str | None = None
    remaining: str | None = None
    variable: str | None = None


FIRST, ALL = "the first trained length; the others are the study's", "all of them"  # may have been chosen here
COMPONENTS = ("input", "computation", "output", "variable", "remaining")
WITHOUT_VARIABLE = ("input", "computation", "output", "remaining")

# The configurations of the study: none (None), all, computation and output alone, and all but one.
SCRATCHPADS: dict[str, Scratchpad | None] = {
    "plain": None,
    "full": Scratchpad(),
    "computation_output_only": Scratchpad(input=False, variable=False, remaining=False),
    "no_input": Scratchpad(input=False),
    "no_computation": Scratchpad(computation=False),
    "no_output": Scratchpad(output=False),
    "no_variable": Scratchpad(variable=False),
    "no_remaining": Scratchpad(remaining=False),
}


@dataclass(frozen=True)
class Problem:
    """One row of the study: ``generate`` makes raw examples of a length, ``format`` writes them.

    ``unit``: what is counted as length. ``train``, ``test``: first and last length, as recorded or chosen (see the
    guide). ``longest``: the largest length the generator can make, None where there is no limit. ``scratchpad``:
    the components that its steps have, none where the format takes no scratchpad. ``pairs``: lengths are pairs of
    numbers of digits. ``chosen``: what of the two ranges is not recorded for the study and was chosen here.
    """

    name: str
    generate: Callable[[Any, np.random.Generator], Raw]
    format: Callable[..., Example]
    unit: str
    train: tuple[int, int]
    test: tuple[int, int]
    shortest: int = 1
    longest: int | None = None
    scratchpad: tuple[str, ...] = ()
    pairs: bool = False
    chosen: str = ""

    def make(self, length: Length, rng: np.random.Generator, scratchpad: Scratchpad | None = None) -> Example:
        """A formatted example of this length.

        Raises: ValueError for a length that the generator cannot make, a scratchpad where the problem has none.
        """
        self.check(length)
        self.check_scratchpad(scratchpad)
        raw = self.generate(length, rng)
        return self.format(raw, scratchpad) if self.scratchpad else self.format(raw)

    def check_scratchpad(self, scratchpad: Scratchpad | None) -> None:
        """Raise a ValueError for a scratchpad where the problem has none, or nothing of what is to be shown."""
        if scratchpad is None:
            return
        if not self.scratchpad:
            raise ValueError(f"{self.name}: a scratchpad was asked for but its steps are not defined; take 'plain'")
        if not any(getattr(scratchpad, component) for component in self.scratchpad):
            raise ValueError(
                f"{self.name}: a scratchpad without {' and '.join(self.scratchpad)} was asked for, but its steps have "
                "nothing else; show that, or take 'plain'"
            )

    def check(self, length: Length) -> None:
        """Raise a ValueError for a length that the generator cannot make."""
        parts = length if isinstance(length, tuple) else (length,)
        if self.pairs != isinstance(length, tuple):
            needed = "a pair (digits of the first, digits of the second)" if self.pairs else "one number"
            raise ValueError(f"{self.name}: length = {length!r}, needed {needed}")
        low, high = min(parts), max(parts)
        if low < self.shortest:
            raise ValueError(f"{self.name}: length = {length!r} {self.unit}, needed at least {self.shortest}")
        if self.longest is not None and high > self.longest:
            raise ValueError(
                f"{self.name}: length = {length!r} {self.unit}, but its generator can make at most {self.longest}; "
                "give a shorter one"
            )


def spaced(number: int) -> str:
    """Digits and sign apart: -12 is `- 1 2`."""
    return " ".join(str(number))
