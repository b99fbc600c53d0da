"""Checkpoints that count only when they are whole: a list of their files, with digests, is written last of all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locant.training.folder import differences, file_digest, write_atomically

PREFIX, LIST = "checkpoint-", "files.json"
KEPT = 2  # the newest and the one before, should the newest turn out broken


def seal(folder: Path, step: int, recipe: dict[str, Any]) -> None:
    """Make a checkpoint count: everything reaches the disk first, then its list of files. Raises: OSError."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LIST):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        files[str(file.relative_to(folder))] = [file.stat().st_size, file_digest(file)]
    write_atomically(folder / LIST, json.dumps({"step": step, "recipe": recipe, "files": files}, indent=1) + "\n")


def last_good(folder: Path, recipe: dict[str, Any], command: str) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, and what is wrong with newer ones, which are deleted.

    Raises: ValueError for a checkpoint of another recipe.
    """
    broken = []
    for checkpoint in sorted(_checkpoints(folder), key=checkpoint_step, reverse=True):
        wrong = _wrong(checkpoint, recipe, command)
        if not wrong:
            return checkpoint, broken
        broken.append(f"{checkpoint.name} is not whole ({wrong}) and was left out")
        shutil.rmtree(checkpoint)
    return None, broken


def prune(folder: Path) -> None:
    """Delete all checkpoints but the newest ones."""
    for old in sorted(_checkpoints(folder), key=checkpoint_step)[:-KEPT]:
        shutil.rmtree(old)


def _checkpoints(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob(f"{PREFIX}*") if path.is_dir() and path.name[len(PREFIX) :].isdecimal())


def checkpoint_step(checkpoint: Path) -> int:
    """The step that a checkpoint was written after."""
    return int(checkpoint.name[len(PREFIX) :])


def _wrong(checkpoint: Path, recipe: dict[str, Any], command: str) -> str:
    """What is wrong with a checkpoint; empty where nothing is."""
    try:
        told = json.loads((checkpoint / LIST).read_text(encoding="utf-8"))
        files, theirs = told["files"], told["recipe"]
    except FileNotFoundError:
        return "it was not finished"
    except (ValueError, KeyError, TypeError):
        return f"{LIST} is damaged"
    changed = differences(theirs, recipe)
    if changed:
        raise ValueError(
            f"{command}: {checkpoint} is of another recipe: {'; '.join(changed[:4])}; give another --out, or set these "
            "back"
        )
    for name, (size, digest) in files.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if file_digest(file) != digest:
            return f"{name} is not what was written"
    return ""
