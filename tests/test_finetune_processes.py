"""Fine-tuning by two processes, under the launchers that people use; gloo on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.finetune_runs import save_model, write_rte
from tests.processes import ROOT

BIN = Path(sys.executable).parent
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    save_model(path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    save_model(path / "model")
    write_rte(path / "rte")
    (path / "fsdp.yaml").write_text(FSDP, encoding="utf-8")
    return path


def command(folder: Path, model: str, out: str, *settings: str) -> list[str]:
    given = ["finetune", "glue/rte", str(folder / model), "--data", str(folder / "rte"), "--seeds", "1"]
    return ["-m", "locant.cli", *given, "--out", str(folder / out), "device=cpu", "batch_size=8", *settings]


def finish(launch: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(launch, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(out: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in (out / "runs" / "seed1" / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens"]) for line in lines if line["event"] == "step"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    finish([sys.executable, *command(folder, "still", "alone", "epochs=2", "learning_rate=3e-3")])
    return folder / "alone"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["torchrun", "accelerate", "fsdp"])
def test_two_processes_make_the_steps_of_one_and_the_first_writes(how: str, folder: Path, alone: Path) -> None:
    launch = {
        "torchrun": TORCHRUN,
        "accelerate": [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"],
        "fsdp": [str(BIN / "accelerate"), "launch", "--config_file", str(folder / "fsdp.yaml")],
    }[how]
    done = finish([*launch, *command(folder, "still", how, "epochs=2", "learning_rate=3e-3")])
    assert done.stdout.count("glue/rte: as saved") == 1
    one, two = losses(alone), losses(folder / how)
    assert [(step, tokens) for step, _, tokens in two] == [(step, tokens) for step, _, tokens in one]
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in one], abs=1e-5)
    assert len({loss for _, loss, _ in one}) == len(one), "it learns"
    written, expected = ((place / "runs" / "seed1" / "predictions.json").read_text() for place in (folder / how, alone))
    assert written == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_killed_in_the_middle_go_on_to_the_same_numbers(folder: Path) -> None:
    settings = ("epochs=40", "save_every=20")
    finish([*TORCHRUN, *command(folder, "model", "whole", *settings)])
    launch = [*TORCHRUN, *command(folder, "model", "killed", *settings)]
    log = folder / "killed" / "runs" / "seed1" / "log.jsonl"
    process = subprocess.Popen(launch, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not log.is_file() or log.read_bytes().count(b"\n") < 50:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        one.kill()
    process.wait()
    assert not (log.parent / "run.json").exists()
    done = finish(launch)
    assert "goes on from checkpoint-" in done.stderr
    assert losses(folder / "killed") == losses(folder / "whole")
    ends = [
        (folder / name / "runs" / "seed1" / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")
    ]
    assert ends[0] == ends[1]
