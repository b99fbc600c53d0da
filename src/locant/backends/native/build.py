"""Compile the kernel at first use into the user's cache, and load it with ctypes.

The library is keyed by source, compiler, flags and CPU, so a new version, compiler or machine builds its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("attention.cpp")
COMPILERS = ("g++", "c++")  # after $CXX; the source uses vector types as GCC has them
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-march=native", "-fopenmp")
OPTIONAL = ("-fopenmp", "-march=native")  # left out, one after the other, where a compiler does not know them
LOG = logging.getLogger(__name__)


class Unavailable(Exception):
    """The kernel cannot be had on this machine; the message says why."""


def cache_folder() -> Path:
    """`$LOCANT_CACHE/native`, else `$XDG_CACHE_HOME/locant/native`, else `~/.cache/locant/native`."""
    base = os.environ.get("LOCANT_CACHE")
    if base is None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "locant"
    return Path(base).expanduser() / "native"


def compiler() -> str:
    """The first C++ compiler found.

    Raises: Unavailable if there is none.
    """
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and shutil.which(name):
            return name
    raise Unavailable(f"no C++ compiler was found (looked for $CXX, {', '.join(COMPILERS)})")


def cpu() -> str:
    """What -march=native depends on."""
    return _facts("model name", "flags", "Features")


def processor() -> str:
    """The name of the CPU."""
    return _facts("model name").partition(":")[2].strip() or platform.processor() or platform.machine()


def _facts(*names: str) -> str:
    information = Path("/proc/cpuinfo")
    if not information.exists():
        return platform.processor()
    lines = information.read_text().splitlines()
    return "".join(next((line for line in lines if line.startswith(name)), "") for name in names)


def library_path(command: str) -> Path:
    """Where the library of this source, compiler and CPU lies."""
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    key = "\n".join((SOURCE.read_text(), command, version, " ".join(FLAGS), cpu()))
    return cache_folder() / f"attention-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"


def checked(library: Path) -> Path:
    """The file that says that a library passed its check."""
    return library.with_suffix(".checked")


def build() -> Path:
    """Compile, unless that was done before; returns the library's path.

    Raises: Unavailable if there is no compiler, it fails, or the cache cannot be written.
    """
    command = compiler()
    path = library_path(command)
    if path.exists():
        return path
    LOG.warning("locant: compiling the native attention kernel once, some seconds (kept in %s)", path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(command, made)
            os.replace(made, path)  # whole or not at all, also when several processes build at once
    except OSError as error:
        raise Unavailable(f"the library cannot be written to {path.parent} ({error.strerror or error})") from error
    return path


def _compile(command: str, target: Path) -> None:
    message = ""
    for missing in range(len(OPTIONAL) + 1):
        flags = [flag for flag in FLAGS if flag not in OPTIONAL[:missing]]
        done = subprocess.run([command, *flags, str(SOURCE), "-o", str(target)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        message = (
            message or done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit code {done.returncode}"
        )
    raise Unavailable(f"{command} could not compile it ({message})")


def clear() -> list[str]:
    """Delete every library that was compiled, of any version; returns the paths."""
    removed = sorted(str(path) for path in cache_folder().glob("attention-*"))
    for path in removed:
        Path(path).unlink()
    return removed


def load(path: Path) -> ctypes.CDLL:
    """The library, with its functions declared.

    Raises: Unavailable if it cannot be loaded.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"the library cannot be loaded ({error})") from error
    for name in ("locant_forward", "locant_backward"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = None
    for name in ("locant_arguments_size", "locant_lanes"):
        getattr(library, name).restype = ctypes.c_int64
    return library
