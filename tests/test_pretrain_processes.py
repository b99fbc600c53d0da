"""Pre-training by two processes that share the model (FSDP 2), under accelerate; gloo on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import locant.hf
from locant.hf.course import kept
from locant.pretrain.run import pretrain
from tests.launches import finish, kill_behind, launcher
from tests.pretrain_runs import assert_same_run, lines, recipe, toml, weights, write_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS = {"bert": "BertLayer", "roberta": "RobertaLayer", "albert": "AlbertLayer", "gpt2": "GPT2Block"}
LAYERS["electra"] = "ElectraLayer"
RUNS: dict[str, dict[str, Any]] = {
    "bert": {"encoding": "huang_m4"},
    "roberta": {"encoding": "t5", "host": {"family": "roberta"}},
    "albert": {"encoding": "tisa", "host": {"family": "albert", "embedding_dim": 11}},
    "gpt2": {"encoding": "shaw", "host": {"family": "gpt2"}, "objective": "causal"},
    "electra": {"encoding": "tupe_r", "host": {"family": "electra", "embedding_dim": 13}, "objective": "electra"},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


def chosen(family: str, **more: Any) -> dict[str, Any]:
    """Tables of a recipe."""
    own = {**RUNS[family], "text": {"pack": False}}
    for name, value in more.items():
        own[name] = {**own.get(name, {}), **value}
    return own


def sharded(family: str, words: Path, folder: Path, out: str, /, **tables: Any) -> list[str]:
    """The command of two processes that shard the model."""
    file = folder / "words.toml"
    file.write_text(toml(words, **tables))
    launch = launcher("fsdp", folder, LAYERS[family])
    return [*launch, "-m", "tests.held", str(folder / f"{out}-held"), "pretrain", str(file), "--out", str(folder / out)]


@pytest.mark.parametrize(
    ("family", "train"),
    [("bert", {"checkpoints": 3}), ("gpt2", {"accumulate": 2}), ("roberta", {}), ("albert", {}), ("electra", {})],
)
def test_processes_that_share_the_model_agree_with_one(
    family: str, train: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    tables = chosen(family, host={"dropout": 0.0}, train=train)
    pretrain(recipe(text, **tables), tmp_path / "one")
    done = finish(sharded(family, text, tmp_path, "two", **tables))
    assert done.stdout.count("training loss") == 1
    halves = [json.loads((tmp_path / "two-held" / rank).read_text()) for rank in "01"]
    (first, moments, whole), (second, other_moments, _) = halves
    assert first + second == whole and 0.3 * whole < first < 0.7 * whole, halves
    assert moments == 2 * first and other_moments == 2 * second
    one, two = (lines(tmp_path / name, "step", "validation") for name in ("one", "two"))
    for expected, found in zip(one, two, strict=True):
        assert found.pop("event") == expected.pop("event")
        assert found == pytest.approx(expected, rel=1e-5)
    assert len({line["loss"] for line in one}) == len(one), "it learns"
    for name in ("model", "generator")[: 1 + (family == "electra")]:
        ends = [weights(tmp_path / run, name) for run in ("one", "two")]
        assert {n: t.shape for n, t in ends[0].items()} == {n: t.shape for n, t in ends[1].items()}
        assert max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0]) < 2e-3
        configs = [(tmp_path / run / name / "config.json").read_text() for run in ("one", "two")]
        assert configs[0] == configs[1]
    assert [one.step for one, _ in kept(tmp_path / "two")] == ([0, 3, 6, 9] if "checkpoints" in train else [])
    for _, folder in (*kept(tmp_path / "two")[1:], (None, tmp_path / "two" / "model")):
        assert_loads(folder, RUNS[family]["encoding"])


def assert_loads(folder: Path, encoding: str) -> None:
    kind = getattr(T, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    assert [attachment.stack.name for _, _, attachment in locant.hf.attachments(model)] == [encoding]
    with torch.no_grad():
        assert torch.isfinite(model.eval()(input_ids=torch.tensor([[2, 9, 11, 3]])).logits).all()


def test_bfloat16_is_that_of_processes_that_do_not_share_the_model(text: Path, tmp_path: Path) -> None:
    tables = chosen("bert", host={"dropout": 0.0}, train={"precision": "bfloat16"})
    finish(sharded("bert", text, tmp_path, "shared", **tables))
    command = ["-m", "locant.cli", "pretrain", str(tmp_path / "words.toml"), "--out", str(tmp_path / "copies")]
    finish([*launcher("torchrun", tmp_path), *command])
    for copies, shared in zip(
        *(lines(tmp_path / name, "step", "validation") for name in ("copies", "shared")), strict=True
    ):
        assert shared["loss"] == pytest.approx(copies["loss"], rel=1e-6)
    ends = [weights(tmp_path / name) for name in ("copies", "shared")]
    assert max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0]) < 1e-6


@pytest.mark.parametrize("family", ["bert", "gpt2", "electra"])
def test_processes_that_share_the_model_go_on_after_kill_9_to_the_same_numbers(
    family: str, text: Path, tmp_path: Path
) -> None:
    tables = chosen(family)
    finish(sharded(family, text, tmp_path, "whole", **tables))
    launch = sharded(family, text, tmp_path, "killed", **tables)
    kill_behind(launch, tmp_path / "killed" / "log.jsonl", 7)  # start, five steps, one validation
    with pytest.raises(ValueError, match=r"pretrain: .*checkpoint-4 was written with FSDP, .* launched without"):
        pretrain(recipe(text, **tables), tmp_path / "killed")
    assert "goes on from checkpoint-4" in finish(launch).stderr
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    if family == "electra":
        ends = [weights(tmp_path / name, "generator") for name in ("whole", "killed")]
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
