"""Python in processes of its own: for torch.compile, which cannot trace annotation checks, and for several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python on a text of code, or on a module of the tests given by its name (``tests.exports``)."""
    how = ("-m", code) if code.startswith("tests.") else ("-c", code)
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))  # this tree, wherever locant is installed from
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, *how, *arguments], env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def finish(*processes: subprocess.Popen[str], seconds: float = 280) -> None:
    """Wait for all; the first that failed fails the test with its last words."""
    for process in processes:
        _, errors = process.communicate(timeout=seconds)
        assert process.returncode == 0, errors[-2000:]
