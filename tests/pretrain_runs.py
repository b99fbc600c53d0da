"""Pre-training small enough for a test: models of two layers and width 24, on made-up documents."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from locant.pretrain.recipe import PretrainRecipe, read_recipe
from locant.training.log import JsonLines

WORDS = ("sea", "boat", "cold", "the", "was", "who", "rowed", "home", "dark", "fish", "of", "in", "rowing", "boats")
HOST: dict[str, Any] = {"num_layers": 2, "model_dim": 24, "num_heads": 3, "hidden_dim": 37, "init_std": 0.2}
TRAIN: dict[str, Any] = {
    "batch_size": 8,
    "learning_rate": 3e-3,
    "device": "cpu",
    "save_every": 2,
    "validate_every": 3,
    "validation_tokens": 150,
    "peak_tflops": 0.01,
}
STAGES = [{"length": 9, "steps": 5}, {"length": 17, "steps": 4, "batch_size": 4}]


def write_text(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """A jsonl file of documents of 3 to 40 words; each word is likely to be followed by its neighbor in WORDS."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        at, words = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(3, 40)):
            at = (at + (1 if draw.random() < 0.8 else draw.randrange(len(WORDS)))) % len(WORDS)
            words.append(WORDS[at])
        lines.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table(path: Path, /, **tables: Any) -> dict[str, Any]:
    """A parsed recipe; dicts are merged into its tables, other values take their place."""
    base: dict[str, Any] = {
        "encoding": "huang_m4",
        "host": HOST,
        "text": {"text": str(path), "validation_fraction": 0.2},
        "tokenizer": {"vocab_size": 60},
        "train": TRAIN,
        "curriculum": STAGES,
    }
    for name, value in tables.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) and name != "encoding" else value
    return base


def recipe(path: Path, /, *overrides: str, **tables: Any) -> PretrainRecipe:
    """The same, read."""
    return read_recipe(table(path, **tables), overrides)


def toml(path: Path, /, **tables: Any) -> str:
    """The text of a recipe file, from what `table` takes."""
    return "\n".join(f"{key} = {_value(value)}" for key, value in table(path, **tables).items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def lines(out: Path, *events: str) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    times = ("seconds", "tokens_per_second", "mfu")
    read = JsonLines(out / "log.jsonl")._lines()
    return [{k: v for k, v in line.items() if k not in times} for line in read if line["event"] in events]


def weights(out: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """What a run left."""
    return load_file(out / name / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Losses, validation and weights are equal, bit for bit."""
    assert lines(one, "step", "validation") == lines(other, "step", "validation")
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
