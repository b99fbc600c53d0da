"""Fine-tuning by two processes, under the launchers that people use; gloo on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file

import locant.hf
from tests.finetune_runs import save_model, write_rte
from tests.launches import finish, kill_behind, launcher

BUDGET = ("epochs=2", "learning_rate=3e-3")
ATTACHED = ("--attach", "huang_m4", "--keep-absolute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    save_model(path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    save_model(path / "model")
    write_rte(path / "rte")
    return path


def command(folder: Path, model: str, out: str, *settings: str) -> list[str]:
    given = ["finetune", "glue/rte", str(folder / model), "--data", str(folder / "rte"), "--seeds", "1"]
    return ["-m", "locant.cli", *given, "--out", str(folder / out), "device=cpu", "batch_size=8", *settings]


def losses(out: Path) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in (out / "runs" / "seed1" / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["tokens"]) for line in lines if line["event"] == "step"]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    finish([sys.executable, *command(folder, "still", "alone", *ATTACHED, *BUDGET)])
    return folder / "alone"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["torchrun", "accelerate", "fsdp"])
def test_two_processes_make_the_steps_of_one_and_the_first_writes(how: str, folder: Path, alone: Path) -> None:
    given = command(folder, "still", how, *ATTACHED, *BUDGET)
    done = finish([*launcher(how, folder), "-m", "tests.held", str(folder / f"{how}-held"), *given[2:]])
    assert done.stdout.count("glue/rte: absolute + huang_m4 (paper)") == 1
    halves = [json.loads((folder / f"{how}-held" / rank).read_text()) for rank in "01"]
    if how == "fsdp":
        assert halves[0][0] + halves[1][0] == halves[0][2] and 0.3 < halves[0][0] / halves[0][2] < 0.7, halves
    else:
        assert all(held == whole for held, _, whole in halves)
    one, two = losses(alone), losses(folder / how)
    assert [(step, tokens) for step, _, tokens in two] == [(step, tokens) for step, _, tokens in one]
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in one], abs=1e-5)
    assert len({loss for _, loss, _ in one}) == len(one), "it learns"
    written, expected = ((place / "runs" / "seed1" / "predictions.json").read_text() for place in (folder / how, alone))
    assert written == expected
    models = [place / "runs" / "seed1" / "model" for place in (folder / how, alone)]
    assert (models[0] / "config.json").read_text() == (models[1] / "config.json").read_text()
    two_model, told = T.AutoModelForSequenceClassification.from_pretrained(models[0], output_loading_info=True)
    assert not any(told.values()) and len(locant.hf.attachments(two_model)) == 1
    ends = [
        model.state_dict() for model in (two_model, T.AutoModelForSequenceClassification.from_pretrained(models[1]))
    ]
    assert max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[1]) < 2e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["torchrun", "fsdp"])
def test_two_processes_killed_in_the_middle_go_on_to_the_same_numbers(how: str, folder: Path) -> None:
    settings = (*ATTACHED, "epochs=40", "save_every=20", "position_learning_rate=1e-3")
    launch = launcher(how, folder)
    whole, killed = f"{how}-whole", f"{how}-killed"
    finish([*launch, *command(folder, "model", whole, *settings)])
    again = [*launch, *command(folder, "model", killed, *settings)]
    kill_behind(again, folder / killed / "runs" / "seed1" / "log.jsonl", 50)
    assert "goes on from checkpoint-" in finish(again).stderr
    assert losses(folder / killed) == losses(folder / whole)
    ends = [load_file(folder / name / "runs" / "seed1" / "model" / "model.safetensors") for name in (killed, whole)]
    assert ends[0].keys() == ends[1].keys() and any("locant" in name for name in ends[0])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
