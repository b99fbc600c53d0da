"""Which backend is fastest for which call, as measured: `speeds.json`, written by `locant bench attention --refresh`.

A call belongs to a family (what its dearest term asks for) and a pass (whether gradients are wanted). The file holds
milliseconds of every backend for each family and pass over lengths; between two measured lengths the nearer one, by
ratio, decides.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locant.backends.call import Call, constant
from locant.terms import (
    LogitMap,
    LowRankBias,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    Term,
    WeightScale,
)

FILE = Path(__file__).with_name("speeds.json")
# Dearest first: a call belongs to the first family of which it holds a term.
FAMILIES: dict[str, tuple[type[Term], ...]] = {
    "gates": (RelativeGate,),
    "vectors": (RelativeQuery, RelativeKey, RelativeValue),
    "scales": (RelativeScale,),
    "biases": (RelativeBias, PairBias, LowRankBias, WeightScale, LogitMap),
}
UNMEASURED = ("sdpa", "blocked", "reference")  # of a device kind that nobody measured


def family_of(call: Call) -> str:
    """The family of a call: gates, vectors, scales, biases, or plain."""
    kinds = {type(term) for term in call.terms}
    return next((name for name, those in FAMILIES.items() if kinds & set(those)), "plain")


def order(call: Call) -> tuple[str, ...]:
    """Backends for a call, fastest first; the last one can serve everything."""
    operands = call.operands
    length = operands.k.shape[2]
    name = "training" if torch.is_grad_enabled() and _wanted(call) else "inference"
    for limit, names in steps(operands.q.device.type, family_of(call), name):
        if limit is None or length <= limit:
            return names
    return UNMEASURED


def _wanted(call: Call) -> bool:
    """Whether a gradient may be wanted: of q, k, v, or of what a term holds (a frozen host learns its tables alone).

    A term that holds a function is not asked for its tensor, and counts.
    """
    held = [value for term in call.terms for value in vars(term).values()]
    held += [call.operands.q, call.operands.k, call.operands.v]
    return any(value.requires_grad if isinstance(value, Tensor) else callable(value) for value in held)


@constant  # not on the cached function: dynamo would look into that one
def steps(device: str, family: str, name: str) -> tuple[tuple[int | None, tuple[str, ...]], ...]:
    """(length up to which, backends in order), in rising lengths; the last has no limit."""
    return _ranked(device, family, name)


@lru_cache(maxsize=64)
def _ranked(device: str, family: str, name: str) -> tuple[tuple[int | None, tuple[str, ...]], ...]:
    by_length = read().get(device, {}).get("milliseconds", {}).get(f"{family}, {name}")
    if not by_length:
        return ((None, UNMEASURED),)
    lengths = sorted(int(length) for length in by_length)
    limits = [math.isqrt(a * b) for a, b in itertools.pairwise(lengths)]
    found = []
    for limit, length in zip([*limits, None], lengths, strict=True):
        measured = by_length[str(length)]
        ranked = sorted(measured, key=measured.__getitem__)
        found.append((limit, (*ranked, *(rest for rest in UNMEASURED if rest not in ranked))))
    return tuple(found)


@lru_cache(maxsize=1)
def read() -> dict[str, Any]:
    """The file: device kind to {made, milliseconds}; empty where there is none."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def write(device: str, made: dict[str, Any], milliseconds: dict[str, dict[str, dict[str, float]]]) -> Path:
    """Put the measurements of one device kind in place of its old ones; returns the file."""
    FILE.write_text(json.dumps({**read(), device: {"made": made, "milliseconds": milliseconds}}, indent=1) + "\n")
    read.cache_clear()
    _ranked.cache_clear()
    return FILE
