"""What a model's folder is for locant, read from its JSON files and the names of its tensors; nothing is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from locant.catalog import SIZES, load, option_names
from locant.encoding import Encoding
from locant.hf.checkpoint import read_json
from locant.hf.interface import NAME
from locant.hf.legacy_families import ENCODINGS, VERSION4
from locant.hf.pretrained import ADDED, OLD_TABLE
from locant.hf.record import RECORD, TENSORS, check_mark, is_record, recorded_stacks
from locant.hf.weights import mark_of, weight_files, weight_shapes

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
    files = weight_files(folder)
    shapes = weight_shapes(files)
    marks = {file.name: mark_of(file) for file in files if file.suffix == ".safetensors"}
    added = [n for n in shapes if ADDED.match(n)]
    asked = dict(relative_types(config))
    could = bool(asked) or any(kind in VERSION4 for kind in _model_types(config))  # v5 classes have such tables, too
    tables = [n for n in shapes if could and n.endswith(OLD_TABLE)]
    where = str(folder)
    if is_record(config.get(NAME)):
        return _recorded(where, config[NAME], marks, added, tables, asked)
    if added or any(marks.values()):
        told = f"{len(added)} tensors of an attached encoding ({added[0]}, ...)" if added else "marks of an encoding"
        return Directory(
            where,
            "half-converted",
            f"{told} but no record of one in config.json",
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
    record = read_json(folder / RECORD)
    names = _names(recorded_stacks(record, f"inspect_directory: {folder / RECORD}"))
    told = f"{RECORD} of {', '.join(names)} without a model"
    if not (folder / TENSORS).is_file():
        return Directory(str(folder), "half-converted", f"{told}, but {TENSORS} is missing", "copy it again", names)
    unlike = _unlike({TENSORS: mark_of(folder / TENSORS)}, record)
    if unlike:
        return Directory(str(folder), "half-converted", unlike, "copy or save it again", names)
    return Directory(str(folder), "encoding", told, "load the base model, then locant.hf.load(model, folder)", names)


def _unlike(marks: dict[str, str | None], record: Any) -> str:
    """Which weights do not belong to a record, and why; empty where all do."""
    for name, mark in marks.items():
        try:
            check_mark(name, mark, record)
        except ValueError as error:
            return str(error)
    return ""


def _names(stacks: list[dict[str, Any]]) -> tuple[str, ...]:
    each = (s["encoding"] if isinstance(s["encoding"], list) else [s["encoding"]] for s in stacks)
    return tuple(dict.fromkeys(name for names in each for name in names))


def _recorded(
    where: str,
    record: Any,
    marks: dict[str, str | None],
    added: list[str],
    tables: list[str],
    asked: dict[str, str],
) -> Directory:
    if "refused" in record:
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
    unlike = _unlike(marks, record)
    reason = _disagreement(stacks, added) or (unlike and f", but {unlike}")
    if reason:
        return Directory(where, "half-converted", f"{told}{reason}", "save it again from the attached model", names)
    return Directory(
        where,
        "attached",
        f"{told}; without locant, transformers loads the host alone, with other outputs",
        "import locant.hf before from_pretrained",
        names,
    )


def _disagreement(stacks: list[dict[str, Any]], added: list[str]) -> str:
    """How what a record asks for and the tensors that are there tell different stories; empty where they do not."""
    try:
        needed = any(_has_tensors(stack) for stack in stacks)
    except Exception as error:  # whatever a broken record brings about
        return f", which cannot be built here: {error}"
    if needed and not added:
        return " but no tensor of an encoding is there"
    if added and not needed:
        return f", which has no tensors, beside {len(added)} of another encoding ({added[0]}, ...)"
    return ""


def _has_tensors(stack: dict[str, Any]) -> bool:
    """Whether something of a recorded stack is saved: parameters, or the draws of a transform."""
    names = stack["encoding"] if isinstance(stack["encoding"], list) else [stack["encoding"]]
    given = {**stack["sizes"], **stack["options"]}
    used = {option for name in names for part in name.split("+") for option in option_names(part.strip())}
    unknown = sorted(given.keys() - used - set(SIZES))
    if unknown:
        raise ValueError(f"{', '.join(names)}: no part takes the option {unknown[0]!r}={given[unknown[0]]!r}")
    with torch.device("meta"):
        return any(_built(name, given).state_dict() for name in names)


def _built(name: str, given: dict[str, Any]) -> Encoding:
    taken = {*SIZES, *(option for part in name.split("+") for option in option_names(part.strip()))}
    return load(name, **{option: value for option, value in given.items() if option in taken})


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
