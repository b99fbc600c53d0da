"""Backends: one call, several ways to compute it. A backend names no encoding; it says which terms it can serve."""

from __future__ import annotations

from locant.backends import blocked, native, reference, sdpa
from locant.backends.call import Backend, Call
from locant.terms import RelativeGate, RelativeKey, RelativeQuery, RelativeScale

BACKENDS: dict[str, Backend] = {
    "reference": reference.BACKEND,
    "sdpa": sdpa.BACKEND,
    "blocked": blocked.BACKEND,
    "native": native.BACKEND,
}
LONG = 256  # keys from which tiles pay for content-dependent terms (measured on a CPU, see benchmarks/)
LONG_GATES = 64  # the same for vector gates, whose literal form costs B H I J D


def preference(call: Call) -> tuple[str, ...]:
    """What `auto` tries, fastest first for the call's terms and length; the last one can serve everything."""
    kinds = {type(term) for term in call.terms}
    if not kinds & {RelativeScale, RelativeGate, RelativeQuery, RelativeKey}:
        return ("sdpa", "blocked", "reference")
    long = LONG_GATES if RelativeGate in kinds else LONG
    return ("blocked", "reference") if call.operands.k.shape[2] >= long else ("reference",)


__all__ = ["BACKENDS", "Backend", "Call", "preference"]
