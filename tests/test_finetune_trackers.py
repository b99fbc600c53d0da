"""What TensorBoard and Trackio were told, read back from their own files; no network."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.finetune_runs import save_model, write_rte
from tests.processes import ROOT

READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps([(one.step, one.value) for one in events.Scalars("train/loss")]))
"""


def trained(tmp_path: Path, tracker: str) -> list[tuple[int, float]]:
    """The losses by step of log.jsonl, after a run that reported to ``tracker``."""
    save_model(tmp_path / "model")
    write_rte(tmp_path / "rte")
    command = ["finetune", "glue/rte", str(tmp_path / "model"), "--data", str(tmp_path / "rte"), "--seeds", "1"]
    command += ["--out", str(tmp_path / "out"), "--report-to", tracker, "--json", "epochs=2", "batch_size=8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment["HF_HUB_OFFLINE"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "locant.cli", *command, "device=cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["task"] == "glue/rte", "what trackers print is kept off stdout"
    lines = (tmp_path / "out" / "runs" / "seed1" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines) if line["event"] == "step"]


@pytest.mark.slow
def test_tensorboard_has_the_losses_of_the_log(tmp_path: Path) -> None:
    expected = trained(tmp_path, "tensorboard")
    place = tmp_path / "out" / "runs" / "seed1" / "tensorboard"
    told = subprocess.run([sys.executable, "-c", READ, str(place)], capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    assert [step for step, _ in found] == [step for step, _ in expected] and len(found) == 10
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


@pytest.mark.slow
def test_trackio_has_the_losses_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    expected = trained(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "locant.db") as database:
        rows = database.execute("select run_name, metrics from metrics order by step").fetchall()
    told = [json.loads(metrics) for _, metrics in rows]
    assert [(one["train/global_step"], one["train/loss"]) for one in told if "train/loss" in one] == expected
    assert {name for name, _ in rows} == {"out/runs/seed1"}
