"""Folders that are written whole or not at all, also where an older one lies in their place."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEYS = ("config.json", "locant.json")  # without it a folder does not load
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")  # one file, or shards with their index


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder to write into; what is in it becomes ``target`` (see `put`) when the block ends without an error."""
    target = target.resolve()
    home = target if target.is_dir() else target.parent
    home.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=home))
    try:
        yield fresh
        put(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def put(fresh: Path, target: Path) -> None:
    """Make a finished folder appear under its name; in one that is there already, its files take their places.

    There, the file without which a folder does not load goes first and comes last, so that a folder does not load
    where this is stopped on the way. Weights of an older save go; other files stay.
    """
    if not target.exists():
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o777 & ~umask)
        fresh.rename(target)
        return
    names = sorted(str(file.relative_to(fresh)) for file in fresh.rglob("*") if file.is_file())
    keys = [name for name in names if name in KEYS]
    for key in keys:
        (target / key).unlink(missing_ok=True)
    if any(WEIGHTS.fullmatch(name) for name in names):
        for old in target.iterdir():
            if WEIGHTS.fullmatch(old.name) and old.name not in names:
                old.unlink()
    for name in (*(name for name in names if name not in keys), *keys):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).replace(target / name)
