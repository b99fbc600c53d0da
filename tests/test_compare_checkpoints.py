"""Checkpoints of a comparison's runs: at the right steps, whole, loadable, and without effect on the run."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM

import locant.hf
from locant.compare.evaluate import Validation
from locant.compare.executors import InlineExecutor
from locant.compare.folder import OutputFolder, open_folder
from locant.compare.grid import compare
from locant.compare.recipe import Recipe, read_recipe
from locant.compare.results import ResultTable
from locant.compare.text import read_prepared
from locant.hf import course
from locant.training.mlm import TrainSettings
from tests.compare_runs import table, toml, write_text


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def inline(recipe: Recipe, out: Path, **options: Any) -> ResultTable:
    return compare(recipe, out, executor=InlineExecutor, **options)


def small(text: Path, encoding: str = "tupe_a", **train: Any) -> Recipe:
    sizes = {"steps": 7, "checkpoints": 3, "learning_rate": 2e-2, **train}
    return read_recipe(table(text, encodings=[encoding], train=sizes, model={"dropout": 0.1}))


@pytest.mark.parametrize(
    ("steps", "count", "kept"),
    [(7, 3, (0, 2, 5, 7)), (800, 4, (0, 200, 400, 600, 800)), (3, 3, (0, 1, 2, 3)), (9, 1, (0, 9)), (9, 0, ())],
)
def test_steps_are_evenly_spaced_and_hold_the_first_and_the_last(steps, count, kept) -> None:
    assert TrainSettings(steps=steps, checkpoints=count).checkpoint_steps == kept


def test_every_checkpoint_is_a_model_with_its_encoding_tokenizer_and_loss(text: Path, tmp_path: Path) -> None:
    recipe = small(text)
    result = inline(recipe, tmp_path / "out")
    run = tmp_path / "out" / "runs" / "tupe_a-seed1"
    found = course.kept(run)
    assert [(one.step, one.tokens) for one, _ in found] == [(0, 0), (2, 90), (5, 225), (7, 315)]
    assert [folder.name for _, folder in found] == [f"step-{step:07d}" for step in (0, 2, 5, 7)]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {folder.name for _, folder in found}
    assert found[-1][0].loss == result.runs[0].lengths[0].loss, "the last checkpoint is the model that was evaluated"
    prepared = read_prepared(OutputFolder(tmp_path / "out", recipe).text)
    tables = []
    for milestone, folder in found:
        model = AutoModelForMaskedLM.from_pretrained(folder)
        assert [attachment.stack.name for _, _, attachment in locant.hf.attachments(model)] == ["tupe_a"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.get_vocab() == prepared.tokenizer.get_vocab()
        validation = Validation(prepared.validation, tokenizer, recipe.evaluate, recipe.masking)
        assert validation.score(model, 9)[0] == pytest.approx(milestone.loss, abs=1e-6)
        tables.append(next(tensor for name, tensor in model.named_parameters() if ".locant." in name))
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(tables))


def test_checkpoints_change_nothing_of_a_run(text: Path, tmp_path: Path) -> None:
    with_them = inline(small(text), tmp_path / "with").runs[0]
    without = inline(small(text, checkpoints=0), tmp_path / "without").runs[0]
    assert [point.train_loss for point in with_them.curve] == [point.train_loss for point in without.curve]
    assert (with_them.lengths, with_them.shifts) == (without.lengths, without.shifts)
    assert not (tmp_path / "without" / "runs" / "tupe_a-seed1" / "checkpoints").exists()


def test_time_spent_on_checkpoints_is_no_training_time(text: Path, tmp_path: Path, monkeypatch) -> None:
    keep = course.keep

    def slow(*arguments):
        time.sleep(0.7)
        return keep(*arguments)

    monkeypatch.setattr(course, "keep", slow)
    run = inline(small(text), tmp_path / "out").runs[0]
    assert run.seconds is not None and run.seconds - run.curve[-1].seconds > 3 * 0.7


def test_a_recipe_without_checkpoints_is_the_recipe_it_was_before_the_key(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, encodings=["none"]))
    assert "checkpoints" not in recipe.shared()["train"] and recipe.to_dict()["train"]["checkpoints"] == 0
    with open_folder(tmp_path / "out", recipe):
        pass
    written = tmp_path / "out" / "recipe.json"
    old = json.loads(written.read_text(encoding="utf-8"))
    del old["recipe"]["train"]["checkpoints"]
    written.write_text(json.dumps(old), encoding="utf-8")
    (tmp_path / "out" / "runs" / "none-seed1").mkdir()
    (tmp_path / "out" / "runs" / "none-seed1" / "run.json").write_text(
        json.dumps({"key": recipe.run_key("none", 1)}), encoding="utf-8"
    )
    with open_folder(tmp_path / "out", recipe):
        pass
    asked = read_recipe(table(text, encodings=["none"]), ["train.checkpoints=2"])
    assert asked.run_key("none", 1) != recipe.run_key("none", 1)
    with (
        pytest.raises(ValueError, match=r"belongs to another recipe: train.checkpoints is None there and 2 here"),
        open_folder(tmp_path / "out", asked),
    ):
        pass


def test_a_run_that_was_interrupted_forgets_what_it_kept(text: Path, tmp_path: Path) -> None:
    recipe = small(text)
    left = tmp_path / "out" / "runs" / "tupe_a-seed1" / "checkpoints" / "step-0000004"
    with open_folder(tmp_path / "out", recipe):
        left.mkdir(parents=True)
    (left / "checkpoint.json").write_text('{"step": 4, "tokens": 0, "loss": 1.0}', encoding="utf-8")
    inline(recipe, tmp_path / "out")
    assert [one.step for one, _ in course.kept(left.parents[1])] == [0, 2, 5, 7]
    before = {path: path.stat().st_mtime_ns for path in left.parent.rglob("*")}
    inline(recipe, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in left.parent.rglob("*")} == before, "a finished run is done again"


def test_a_killed_comparison_begins_its_run_anew_with_the_same_checkpoints(text: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "small.toml", tmp_path / "out"
    body = table(text, encodings=["absolute"], train={"steps": 400, "checkpoints": 8})
    recipe.write_text(toml(body), encoding="utf-8")
    command = [sys.executable, "-m", "locant.cli", "compare", str(recipe), "--out", str(out)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run, deadline = out / "runs" / "absolute-seed1", time.monotonic() + 120
    while not (run / "checkpoints" / "step-0000050").exists():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(2)  # its worker sees that nobody listens, and ends
    assert not (run / "run.json").exists()
    before = course.kept(run)
    assert all((folder / "model.safetensors").exists() for _, folder in before), "a checkpoint is not whole"
    inline(read_recipe(body | {"name": "small"}), out)
    after = [one for one, _ in course.kept(run)]
    assert [one.step for one in after] == list(range(0, 401, 50))
    assert [one.loss for one, _ in before] == pytest.approx([one.loss for one in after[: len(before)]], abs=1e-4)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_is_named_and_leaves_no_half_of_a_checkpoint(text, tmp_path, monkeypatch, error) -> None:
    def full(self, folder, *arguments, **keywords):
        (Path(folder) / "half").write_text("x", encoding="utf-8")
        raise error

    monkeypatch.setattr(BertForMaskedLM, "save_pretrained", full)
    with pytest.raises(OSError, match=r"tupe_a-seed1.checkpoints': .*No space left on device; free space"):
        inline(small(text), tmp_path / "out")
    assert list((tmp_path / "out" / "runs" / "tupe_a-seed1" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "body", ['{"step": 4, "tok', '{"step": 4, "loss": 1.0}', '{"step": 4, "tokens": 1, "loss": null}']
)
def test_a_checkpoint_that_does_not_tell_its_step_is_named(tmp_path: Path, body: str) -> None:
    folder = tmp_path / "checkpoints" / "step-0000004"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(body, encoding="utf-8")
    with pytest.raises(ValueError, match=r"step-0000004.checkpoint.json does not tell step, tokens and loss"):
        course.kept(tmp_path)
    assert course.kept(tmp_path / "nowhere") == ()
