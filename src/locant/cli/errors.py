"""Errors that a user can do something about: one sentence on stderr, no traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

BAD_INPUT = 2  # something asked for cannot be
FAILED = 1  # something went wrong, or some runs failed
INTERRUPTED = 130  # Ctrl-C, as shells count it


@contextmanager
def one_sentence() -> Iterator[None]:
    """ValueError and FileNotFoundError end with code 2, other OSErrors with code 1; others are bugs."""
    try:
        yield
    except (ValueError, FileNotFoundError, NotADirectoryError, ModuleNotFoundError) as error:
        _print(error)
        raise typer.Exit(BAD_INPUT) from None
    except OSError as error:
        _print(error)
        raise typer.Exit(FAILED) from None


@contextmanager
def writing(command: str, path: Path) -> Iterator[None]:
    """An OSError while a file is written becomes one sentence of the command, with code 1 whatever its kind."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{command}: cannot write {str(path)!r}: {error.strerror or error}; free space or give another path"
        ) from error


def _print(error: Exception) -> None:
    print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
