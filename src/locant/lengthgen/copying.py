"""Copying and reversing: the study's `copy`, `reverse`, `half copy` and `count`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from locant.lengthgen.problem import ALL, SEPARATOR, Example, Problem, Raw
from locant.lengthgen.symbols import ASCII, pool

NEXT = " [NEXT] "
TRAIN, TEST = (2, 20), (21, 40)


def _raw(length: int, source: str, target: str, **more: str) -> Raw:
    return {"repeat": length, **more, "src_seq": source, "tgt_seq": target, "cat": length}


def repeat_one(length: int, rng: np.random.Generator, times: int = 1) -> Raw:
    """One symbol, ``length`` times; the target repeats it ``times`` as often."""
    symbol = ASCII[rng.integers(len(ASCII))]
    return _raw(length, " ".join([symbol] * length), " ".join([symbol] * length * times), target_char=symbol)


def replace_one(length: int, rng: np.random.Generator) -> Raw:
    """One symbol, ``length`` times, to be replaced by another."""
    old, new = (ASCII[i] for i in rng.choice(len(ASCII), 2, replace=False))
    source, target = " ".join([old] * length), " ".join([new] * length)
    return _raw(length, source, target, source_char=old, target_char=new)


def draw(length: int, rng: np.random.Generator, size: int) -> list[str]:
    """Independent symbols of a pool."""
    symbols = pool(size)
    return [symbols[i] for i in rng.integers(len(symbols), size=length)]


def _arranged(arrange: Callable[[list[str]], str], size: int) -> Callable[[int, np.random.Generator], Raw]:
    def generate(length: int, rng: np.random.Generator) -> Raw:
        symbols = draw(length, rng, size)
        return _raw(length, " ".join(symbols), arrange(symbols))

    return generate


def forward(symbols: list[str]) -> str:
    """As they are."""
    return " ".join(symbols)


def backward(symbols: list[str]) -> str:
    """In reverse."""
    return " ".join(reversed(symbols))


def third_quarter(symbols: list[str]) -> str:
    """The symbols from the half to three quarters."""
    return " ".join(symbols[len(symbols) // 2 : len(symbols) * 3 // 4])


def distinct(length: int, rng: np.random.Generator) -> Raw:
    """Symbols that all differ, of which the third quarter is to be copied."""
    symbols = [ASCII[i] for i in rng.choice(len(ASCII), length, replace=False)]
    return _raw(length, " ".join(symbols), third_quarter(symbols))


def counted(length: int, rng: np.random.Generator) -> Raw:
    """Symbols, and how many there are, modulo 10."""
    symbols = draw(length, rng, 26)
    return {"repeat": length, "src_seq": " ".join(symbols), "answer": length % 10, "cat": length}


def write_copy(raw: Raw) -> Example:
    """`Copy: a a a [SEP] ` -> `a a a`."""
    return Example(f"Copy: {raw['src_seq']} {SEPARATOR}", raw["tgt_seq"], raw["cat"])


def write_replace(raw: Raw) -> Example:
    """`Replace x with y in x x x [SEP] ` -> `y y y`."""
    head = f"Replace {raw['source_char']} with {raw['target_char']} in"
    return Example(f"{head} {raw['src_seq']} {SEPARATOR}", raw["tgt_seq"], raw["cat"])


def write_reverse(raw: Raw) -> Example:
    """`Reverse: a b c [SEP] ` -> `c b a`."""
    return Example(f"Reverse: {raw['src_seq']} {SEPARATOR}", raw["tgt_seq"], raw["cat"])


def write_count(raw: Raw) -> Example:
    """`Count: a b c [SEP] ` -> `3`. (In the study this is a classification, without a separator.)"""
    return Example(f"Count: {raw['src_seq']} {SEPARATOR}", str(raw["answer"]), raw["cat"])


def _problem(name: str, generate: Callable[..., Raw], write: Callable[..., Example], **more: int) -> Problem:
    return Problem(name, generate, write, "symbols", TRAIN, TEST, **more)  # pyright: ignore[reportArgumentType]


def copying(size: int = 100) -> tuple[Problem, ...]:
    """The problems of this file; those with many symbols draw them from a pool of ``size``."""
    return (
        _problem("copy_rsc", repeat_one, write_copy),
        _problem("copy_rsc2x", lambda length, rng: repeat_one(length, rng, 2), write_copy),
        _problem("copy_rdc", replace_one, write_replace),
        _problem("copy_cmc", _arranged(forward, size), write_copy),
        _problem("copy_cmc2x", _arranged(lambda s: forward(s) + NEXT + forward(s), size), write_copy),
        _problem("reverse_mc", _arranged(backward, size), write_reverse),
        _problem("reverse_mc2x", _arranged(lambda s: backward(s) + NEXT + backward(s), size), write_reverse),
        _problem("reverse_mcrv", _arranged(lambda s: backward(s) + NEXT + forward(s), size), write_reverse),
        Problem(
            "copy_half", distinct, write_copy, "symbols", (4, 20), (21, 40), shortest=4, longest=len(ASCII), chosen=ALL
        ),
        Problem("count", counted, write_count, "symbols", (4, 20), (21, 40), chosen=ALL),
    )
