"""What a model's folder is for locant, read from its JSON files and the names of its tensors; nothing is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from locant.encoding import load
from locant.hf.checkpoint import RECORD, TENSORS, recorded_stacks
from locant.hf.interface import NAME
from locant.hf.legacy_families import ENCODINGS, VERSION4
from locant.hf.pretrained import ADDED, OLD_TABLE
from locant.hf.weights import weight_files, weight_shapes

Kind = Literal["plain", "attached", "encoding", "legacy", "half-converted"]


@dataclass(frozen=True)
class Directory:
    """What a folder is, why, and how to load it.

    ``plain``: a model without locant's doing. ``attached``: `save_pretrained` of an attached model; needs locant.hf
    imported. ``encoding``: what `locant.hf.save` wrote. ``legacy``: relative positions of transformers v4, which plain
    v5 loads wrong. ``half-converted``: config and tensors tell different stories. ``encodings``: by name, each once.
    """

    path: str
    kind: Kind
    reason: str
    advice: str
    encodings: tuple[str, ...] = ()


def inspect_directory(directory: str | os.PathLike[str]) -> Directory:
    """Whether a folder holds a plain model, an attached one, one of transformers v4, or something in between.

    Raises: ValueError for a folder that is none of them, or files that are cut off.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file():
        return _encoding_only(folder)
    config = read_config(folder)
    shapes = weight_shapes(weight_files(folder))
    added = [n for n in shapes if ADDED.match(n)]
    asked = dict(relative_types(config))
    could = bool(asked) or any(kind in VERSION4 for kind in _model_types(config))  # v5 classes have such tables, too
    tables = [n for n in shapes if could and n.endswith(OLD_TABLE)]
    where = str(folder)
    if NAME in config:
        return _recorded(where, config[NAME], added, tables, asked)
    if added:
        return Directory(
            where,
            "half-converted",
            f"{len(added)} tensors of an attached encoding ({added[0]}, ...) but no record of one in config.json",
            "save it again with save_pretrained while locant.hf is imported",
        )
    return _version4(where, asked, tables)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json. Raises: ValueError where it is cut off, FileNotFoundError where it is not there."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"config: {file} does not exist; give the folder of a model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config: {file} is cut off or not JSON ({error}); copy it again") from error
    if not isinstance(config, dict):
        raise ValueError(f"config: {file} holds a {type(config).__name__}; give the config of a model")
    return config


def relative_types(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(model type, position_embedding_type) of every part of a config that asks for relative positions as v4 did."""
    asked = config.get("position_embedding_type")
    if asked in ENCODINGS:
        yield str(config.get("model_type")), asked
    for part in config.values():
        if isinstance(part, dict):
            yield from relative_types(part)


def _model_types(config: dict[str, Any]) -> Iterator[str]:
    yield str(config.get("model_type"))
    for part in config.values():
        if isinstance(part, dict):
            yield from _model_types(part)


def _encoding_only(folder: Path) -> Directory:
    if not (folder / RECORD).is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) if folder.is_dir() else "no folder"
        raise ValueError(
            f"inspect_directory: {folder} holds {found or 'nothing'}, needed a config.json or {RECORD}; give the "
            "folder of a saved model"
        )
    names = _names(recorded_stacks(json.loads((folder / RECORD).read_text(encoding="utf-8")), f"{folder / RECORD}"))
    missing = "" if (folder / TENSORS).is_file() else f", but {TENSORS} is missing"
    return Directory(
        str(folder),
        "half-converted" if missing else "encoding",
        f"{RECORD} of {', '.join(names)} without a model{missing}",
        "load the base model, then locant.hf.load(model, folder)",
        names,
    )


def _names(stacks: list[dict[str, Any]]) -> tuple[str, ...]:
    each = (s["encoding"] if isinstance(s["encoding"], list) else [s["encoding"]] for s in stacks)
    return tuple(dict.fromkeys(name for names in each for name in names))


def _recorded(where: str, record: Any, added: list[str], tables: list[str], asked: dict[str, str]) -> Directory:
    if isinstance(record, dict) and "refused" in record:
        return Directory(
            where, "half-converted", f"its encoding cannot be attached again: {record['refused']}", "attach by name"
        )
    stacks = recorded_stacks(record, f"inspect_directory: the record in config.json of {where}")
    names = _names(stacks)
    told = f"config.json records {', '.join(names)}"
    if tables or asked:
        old = (
            f"{len(tables)} tables of transformers v4"
            if tables
            else f"position_embedding_type {next(iter(asked.values()))!r}"
        )
        return Directory(
            where, "half-converted", f"{told} beside {old}", "convert the original with locant convert-legacy", names
        )
    if not added and any(_has_parameters(stack) for stack in stacks):
        return Directory(
            where,
            "half-converted",
            f"{told} but no tensor of an encoding is there",
            "save it again from the attached model",
            names,
        )
    if added and not any(_has_parameters(stack) for stack in stacks):
        return Directory(
            where,
            "half-converted",
            f"{told}, which has no tensors, beside {len(added)} of another encoding ({added[0]}, ...)",
            "save it again from the attached model",
            names,
        )
    return Directory(
        where,
        "attached",
        f"{told}; without locant, transformers loads the host alone, with other outputs",
        "import locant.hf before from_pretrained",
        names,
    )


def _has_parameters(stack: dict[str, Any]) -> bool:
    sizes = {**stack["sizes"], **stack["options"]}
    names = stack["encoding"] if isinstance(stack["encoding"], list) else [stack["encoding"]]
    with torch.device("meta"):
        return any(True for name in names for _ in load(name, **sizes).parameters())


def _version4(where: str, asked: dict[str, str], tables: list[str]) -> Directory:
    names = tuple(dict.fromkeys(ENCODINGS[kind] for kind in asked.values()))
    types = ", ".join(f"{kind} of {model}" for model, kind in asked.items())
    quirks = {VERSION4[model].positions for model in asked if model in VERSION4}
    if not asked and not tables:
        return Directory(where, "plain", "no relative table of transformers v4, no attached encoding", "load as usual")
    if not asked:
        return Directory(
            where,
            "half-converted",
            f"{len(tables)} tables of transformers v4 ({tables[0]}, ...) but config.json does not ask for them",
            'write "position_embedding_type": "relative_key" or "relative_key_query" back into config.json',
        )
    if tables or quirks == {"none"}:
        told = f"{len(tables)} tables" if tables else "no table: v4 gave these models no positions at all"
        return Directory(
            where,
            "legacy",
            f"transformers v4 checkpoint with {types} ({told}); plain v5 adds an absolute table that was never trained",
            "locant.hf.from_legacy(folder), or locant convert-legacy folder --out new",
            names if tables else ("none",),
        )
    if quirks == {"absolute"}:
        return Directory(
            where,
            "plain",
            f"{types}, which v4 ignored: the absolute table is the one that was trained",
            "load as usual",
        )
    return Directory(
        where,
        "half-converted",
        f"config.json asks for {types} but no table is there: plain v5 loaded and saved it, without its positions",
        "go back to the original files",
        names,
    )
