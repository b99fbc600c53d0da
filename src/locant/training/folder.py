"""The folder of a run: locked, of one recipe, every file written whole."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows: no lock there
    fcntl = None


def claim_folder(path: Path, recipe: dict[str, Any], command: str) -> IO[str]:
    """Makes the folder of a run where it is new, writes its recipe.json, and returns the lock on it.

    Another recipe's folder in which nothing was kept yet is begun anew. Raises: ValueError where it belongs to another
    recipe (naming the keys that differ), holds other files or is in use; OSError where it cannot be written.
    """
    file = path / "recipe.json"
    lock = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(path, command)
        before = read_whole(file)
        others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
        if before is None and others:
            raise ValueError(
                f"{command}: {str(path)!r} holds other files ({', '.join(others[:3])}), needed an empty folder or "
                "one of this recipe; give another --out"
            )
        changed = differences(before, recipe) if before is not None else []
        if changed and _begun(path):
            raise ValueError(
                f"{command}: {str(path)!r} belongs to another recipe: {'; '.join(changed[:6])}; give another --out, "
                "or set these back"
            )
        write_atomically(file, json.dumps(recipe, indent=1, ensure_ascii=False) + "\n")
        return lock
    except OSError as error:
        if lock is not None:
            lock.close()
        raise unwritable(path, error, command) from error
    except ValueError:
        if lock is not None:
            lock.close()
        raise


def _begun(path: Path) -> bool:
    """Whether anything was kept in a folder beside its recipe, which a mistake in that leaves alone."""
    kept = (file for file in path.rglob("*") if file.name != "recipe.json" and not file.name.startswith("."))
    return any(file.is_file() and file.stat().st_size for file in kept)


def lock_folder(path: Path, command: str = "compare") -> IO[str]:
    """A lock on an output folder, held until it is closed.

    Raises: ValueError where another `locant <command>` holds it; OSError where the folder cannot be written.
    """
    lock = open(path / ".lock", "w")  # its life is the lock's
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"{command}: {str(path)!r} is in use by another locant {command}; wait for it, or give another --out"
            ) from None
    return lock


def unwritable(path: Path, error: OSError, command: str = "compare") -> OSError:
    """The error in one sentence: what could not be written, why, and that nothing is lost."""
    return OSError(
        f"{command}: cannot write {str(path)!r}: {error.strerror or error}; free space or give another --out, then "
        "call again: finished runs are kept"
    )


def differences(before: Any, after: Any, where: str = "") -> list[str]:
    """Dotted keys whose values differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [
            change
            for key in keys
            for change in differences(before.get(key), after.get(key), f"{where}.{key}" if where else key)
        ]
    return [] if before == after else [f"{where} is {before!r} there and {after!r} here"]


def read_whole(path: Path) -> dict[str, Any] | None:
    """A JSON file, or None where there is none or it is not whole (written by something that was killed)."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def write_atomically(path: str | Path, text: str) -> Path:
    """Writes a text file whole or not at all: beside its place first, then moved there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
