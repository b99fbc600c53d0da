"""Files that can be made again: where they lie, how they are written whole and how a damaged one is noticed."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path

_MAGIC = b"locant-cache "
_noticed: set[str] = set()


def cache_dir() -> Path:
    """Return the cache folder: `$LOCANT_CACHE`, else `$XDG_CACHE_HOME/locant`, else `~/.cache/locant`."""
    if own := os.environ.get("LOCANT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "locant"


def load_cached(name: str) -> bytes | None:
    """Return what was stored under `name`, or None when there is none or its checksum does not hold."""
    try:
        data = (cache_dir() / name).read_bytes()
    except OSError:
        return None
    header, _, payload = data.partition(b"\n")
    return payload if header == _header(payload) else None


def store_cached(name: str, payload: bytes) -> bool:
    """Write `payload` under `name` in one step; where that cannot be, say so once a process and return False."""
    folder = cache_dir()
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(_header(payload) + b"\n")
            file.write(payload)
        os.replace(temporary, folder / name)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        _notice(folder, error)
        return False
    return True


def _header(payload: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(payload).hexdigest().encode()


def _notice(folder: Path, error: OSError) -> None:
    if str(folder) not in _noticed:
        _noticed.add(str(folder))
        warnings.warn(
            f"data cache: {folder} cannot be written ({error.strerror or error}), so text is prepared anew each time; "
            "set LOCANT_CACHE to a writable folder",
            stacklevel=4,
        )
