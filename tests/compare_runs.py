"""Comparisons small enough for a test: a few thousand words of made-up text, a model of width 8, three steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

WORDS = "the sea was dark and cold when old men rowed home with fish in small boats under grey skies again".split()


def write_text(path: Path, num_words: int = 4000, seed: int = 0) -> Path:
    """Sentences of 5 to 9 words in several paragraphs."""
    generator = numpy.random.default_rng(seed)
    words = generator.choice(WORDS, num_words)
    lines, start = [], 0
    while start < num_words:
        end = start + int(generator.integers(5, 10))
        lines.append(" ".join(words[start:end]) + ".")
        start = end
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def table(text: Path, **changes: Any) -> dict[str, Any]:
    """A recipe as parsed TOML; `changes` replace tables key by key."""
    body: dict[str, Any] = {
        "encodings": ["none", "absolute"],
        "seeds": [1],
        "text": {"text": str(text)},
        "tokenizer": {"vocab_size": 60},
        "model": {"num_layers": 1, "model_dim": 8, "num_heads": 2, "dropout": 0.0},
        "train": {"length": 9, "steps": 3, "batch_size": 5, "device": "cpu", "curve_points": 3},
        "evaluate": {"shifts": [0, 4], "tokens": 300, "batch_tokens": 100, "validation_fraction": 0.2},
        "measure": {"rounds": 0},
    }
    for key, value in changes.items():
        body[key] = {**body.get(key, {}), **value} if isinstance(value, dict) else value
    return body


def toml(body: dict[str, Any]) -> str:
    """TOML text of such a table."""

    def value(item: Any) -> str:
        if isinstance(item, bool):
            return str(item).lower()
        if isinstance(item, list):
            return "[" + ", ".join(value(one) for one in item) + "]"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(one)}" for key, one in item.items()) + "}"
        return f'"{item}"' if isinstance(item, str) else str(item)

    top = [f"{key} = {value(item)}" for key, item in body.items() if not isinstance(item, dict)]
    for key, item in body.items():
        if isinstance(item, dict):
            top += [f"\n[{key}]", *(f"{inner} = {value(one)}" for inner, one in item.items())]
    return "\n".join(top) + "\n"
