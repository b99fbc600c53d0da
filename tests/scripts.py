"""Scripts beside the package (docs/generate.py, ..) loaded as modules, and modules of tests run as processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str) -> ModuleType:
    """Return the module of a script, by its path below the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def process(module: str, *arguments: str) -> str:
    """What `python -m module arguments` prints, without the annotation checker; a failure shows all that it printed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    fresh = {
        **os.environ,
        "PYTHONPATH": path,
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }  # a kept graph knows no change
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=fresh, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def graphs(device: str, *backends: str) -> dict[str, int]:
    """How many graphs torch.compile made of each backend: two settings, each at one length and at any length."""
    lines = process("tests.compiled_layer", device, *backends).splitlines()
    found = {name: int(number) for name, number in (line.split() for line in lines)}
    assert all(number <= 4 for number in found.values()), found
    return found
