"""A saved model with its tokenizer, ready to be analyzed. Nothing is downloaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from locant.analysis.model import read_model
from locant.analysis.protocols import free_memory
from locant.hf.lengths import load_with_head
from locant.hf.weights import weight_files

VOCABULARIES = ("tokenizer*", "vocab*", "*.model")  # what a tokenizer is made of; without, transformers makes up one
USUAL = 128  # tokens of a window where the model has room for them


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, the name it goes by, and the longest window it serves (None: no limit)."""

    model: nn.Module
    tokenizer: Any
    name: str
    longest: int | None

    @property
    def identity(self) -> dict[str, Any]:
        """Name and number of parameters: what tells whose analysis a folder holds."""
        return {"name": self.name, "parameters": sum(p.numel() for p in self.model.parameters())}


def load_model(source: str | os.PathLike[str]) -> Loaded:
    """A model from a folder, or by its id from the hub's cache, attached encodings included.

    Raises: ValueError where there is none, where it has no tokenizer, or where its weights exceed the free memory.
    """
    from transformers import AutoTokenizer

    folder = _folder(source)
    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        raise ValueError(f"analyze: {str(folder)!r} holds no tokenizer; save the model's tokenizer beside it")
    _check_size(folder)
    try:
        model, _ = load_with_head(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"analyze: {str(source)!r} does not load: {' '.join(str(error).split())[:300]}") from error
    name = Path(source).name or folder.resolve().name
    return Loaded(model, tokenizer, name, read_model(model).trained_length)


def common_length(loaded: list[Loaded]) -> int:
    """The window that all of them serve: 128 tokens, or what the shortest table has."""
    return min([USUAL, *(one.longest for one in loaded if one.longest is not None)])


def _folder(source: str | os.PathLike[str]) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return folder
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"analyze: {str(source)!r} holds {found}, needed a config.json; give the folder of a saved model"
        )
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(str(source), "config.json", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"analyze: {str(source)!r} is no folder and not in the hub's cache; give the folder of a saved model"
        ) from error
    return Path(str(file)).parent


def _check_size(folder: Path) -> None:
    size, free = sum(file.stat().st_size for file in weight_files(folder)), free_memory()
    if free is not None and size > free:
        raise ValueError(
            f"analyze: the weights in {str(folder)!r} take {size / 1e9:.1f} GB but {free / 1e9:.1f} GB are free; "
            "analyze a smaller model, or free memory"
        )
