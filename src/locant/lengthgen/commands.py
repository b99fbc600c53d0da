"""SCAN: commands to be carried out, read from files."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from locant.lengthgen.problem import SEPARATOR, Example, Raw

DATA = "LOCANT_DATA"
SCAN_FILES = ("tasks_train_length.txt.gz", "tasks_test_length.txt.gz")


def read_scan(folder: str | Path | None = None) -> list[Raw]:
    """Every command of SCAN's length split, training and test part pooled, with its number of actions.

    ``folder`` holds the two files of the split (Lake & Baroni 2018); left out, it is `scan` below `$LOCANT_DATA`.
    Raises: FileNotFoundError where they are not there, ValueError for a line that is none of SCAN's.
    """
    if folder is None:
        if not os.environ.get(DATA):
            raise FileNotFoundError(f"scan: ${DATA} is not set; set it to a folder with scan/{SCAN_FILES[0]} in it")
        folder = Path(os.environ[DATA]) / "scan"
    rows = []
    for name in SCAN_FILES:
        path = Path(folder) / name
        if not path.is_file():
            raise FileNotFoundError(f"scan: {str(path)!r} does not exist; download SCAN's length split there, gzipped")
        for number, line in enumerate(gzip.open(path, "rt", encoding="utf-8"), 1):
            command, sign, actions = line.strip().removeprefix("IN: ").partition(" OUT: ")
            if not sign or not line.startswith("IN: "):
                raise ValueError(f"scan: line {number} of {name} is {line.strip()!r:.60}, needed 'IN: ... OUT: ...'")
            rows.append({"source": command, "target": actions, "category": len(actions.split())})
    return rows


def write_scan(raw: Raw, constant_prompt: bool = True) -> Example:
    """`Solve: jump left[SEP] ` -> `Left Jump`. Without the constant first symbol, decoders without positions fail."""
    words = [word.removeprefix("I_").removeprefix("TURN_").capitalize() for word in raw["target"].split()]
    head = "Solve: " if constant_prompt else ""
    return Example(f"{head}{raw['source']}{SEPARATOR}", " ".join(words), len(words))
