"""Who checks which library and class (set A) or kind (set B), and what is skipped until which issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.golden.cases import Case, Comparison

Check = Callable[[Case], Iterator[Comparison]]

CHECKS: dict[tuple[str, str], Check] = {}
OUT_OF_REACH: dict[tuple[str, str], tuple[str, ...]] = {}

LATER = ("attentions.[1-9]*", "last_hidden_state*")  # what layers after the first return

_FIELD = "comes with the issue on the rest of the field"
SKIPPED: dict[tuple[str, str], str] = {}


def check(library: str, name: str, out_of_reach: tuple[str, ...] = ()) -> Callable[[Check], Check]:
    """Register who checks a class or kind. ``out_of_reach``: outputs (fnmatch) that the check need not compare."""

    def register(function: Check) -> Check:
        key = (library, name)
        assert key not in CHECKS, f"two checks for {key}"
        CHECKS[key], OUT_OF_REACH[key] = function, out_of_reach
        return function

    return register


def skip_reason(case: Case) -> str | None:
    """Why a case is skipped; None where it is checked."""
    if case.key[0] == "C" and case.key not in CHECKS:
        return f"golden: set C ({case.key[1]}) {_FIELD}"
    return SKIPPED.get(case.key)


def find_check(case: Case) -> Check:
    """The check of a case.

    Raises: LookupError where nobody knows its class or kind.
    """
    if case.key not in CHECKS:
        known = "\n  ".join(sorted(" | ".join(key) for key in CHECKS))
        raise LookupError(f"golden: nobody checks {' | '.join(case.key)} ({case.id}); known are\n  {known}")
    return CHECKS[case.key]
