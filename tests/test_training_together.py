"""What processes must agree on, with two real ones (gloo) in two folders, as on two machines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launches import ENVIRONMENT, TORCHRUN

SCRIPT = """\
import os, sys
from pathlib import Path
from accelerate import PartialState
from locant.training import together

together.PATIENCE = 0.2
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
os.chdir(folder / "ab"[rank])
state = PartialState(cpu=True)
for name, path, recipe in [
    ("recipes", folder / "recipes", {"text": {"sha256": "cd"[rank]}, "seed": 3}),
    ("apart", Path("run"), {"seed": 3}),
    ("one", folder / "one", {"seed": 3}),
]:
    try:
        lock = together.claim_together(path, recipe, state, "pretrain")
        words = "locked" if lock else "free"
        state.wait_for_everyone()
        if lock:
            lock.close()
    except ValueError as error:
        words = str(error)
    (folder / f"{name}-{rank}").write_text(words)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    for name in "ab":
        (folder / name).mkdir()
    script = folder / "claim.py"
    script.write_text(SCRIPT)
    done = subprocess.run([*TORCHRUN, str(script), str(folder)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def words(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}-{rank}").read_text() for rank in (0, 1)]


def test_processes_at_another_recipe_are_refused_by_all(said: Path) -> None:
    for one in words(said, "recipes"):
        assert "process 1 (" in one and "text.sha256 is 'd' there and 'c' here; give all machines the same" in one
    assert not (said / "recipes").exists()


def test_a_folder_that_one_process_does_not_see_is_refused_by_all(said: Path) -> None:
    for one in words(said, "apart"):
        first = str(said / "a" / "run")
        assert one.startswith(f"pretrain: {first!r} of process 0 (") and "is not seen by process 1" in one
    assert not (said / "b" / "run").exists()


def test_processes_that_see_one_folder_share_it_and_leave_no_mark(said: Path) -> None:
    assert words(said, "one") == ["locked", "free"]
    assert sorted(os.listdir(said / "one")) == [".lock", "recipe.json"]
