from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from locant.compare import folder as folder_module
from locant.compare.executors import InlineExecutor, LocalExecutor
from locant.compare.folder import open_folder, slug
from locant.compare.grid import Stage, compare
from locant.compare.recipe import Recipe, read_recipe
from locant.compare.results import ResultTable, read_results
from locant.compare.run import Task
from locant.training.folder import differences
from tests.compare_runs import table, toml, write_text


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def inline(recipe: Recipe, out: Path, **options: Any) -> ResultTable:
    return compare(recipe, out, executor=InlineExecutor, **options)


def trained(watched: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    return [subject.title for subject, event in watched if event.get("event") == "start"]


def watcher() -> tuple[list[tuple[Any, dict[str, Any]]], Any]:
    seen: list[tuple[Any, dict[str, Any]]] = []
    return seen, lambda subject, event: seen.append((subject, event))


def test_a_comparison_gives_all_numbers_and_files(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, seeds=[1, 2], encodings=["none", "absolute"]))
    result = inline(recipe, tmp_path / "out", command="locant compare x.toml")
    assert [(run.encoding, run.seed, run.status) for run in result.runs] == [
        ("none", 1, "done"),
        ("none", 2, "done"),
        ("absolute", 1, "done"),
        ("absolute", 2, "done"),
    ]
    none, absolute = result.runs[0], result.runs[2]
    assert [point.step for point in none.curve] == [1, 2, 3]
    assert none.curve[-1].tokens == 3 * 5 * 9
    assert none.curve[-1].validation_loss == none.lengths[0].loss
    assert [(score.length, score.factor) for score in none.lengths] == [(9, 1), (18, 2), (36, 4)]
    assert all(2 < (score.loss or 0) < 6 and 0 <= (score.accuracy or 0) <= 1 for score in none.lengths)
    assert none.shifts[0].loss == none.shifts[1].loss == none.lengths[0].loss
    assert (none.extra_parameters, absolute.extra_parameters) == (0, 9 * 8)
    assert absolute.total_parameters == (none.total_parameters or 0) + 72
    assert [score.loss is None for score in absolute.lengths] == [False, True, True]
    assert absolute.lengths[1].reason == "position 17 is beyond its table of 9 rows"
    assert absolute.shifts[1].reason == "position 12 is beyond its table of 9 rows"
    assert result.environment["command"] == "locant compare x.toml"
    assert read_results(tmp_path / "out" / "results.json") == result
    assert {"table.csv", "runs.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_run_json_tells_how_a_run_came_about(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, encodings=[{"name": "shaw", "label": "near", "clip": 3}]))
    inline(recipe, tmp_path / "out")
    body = json.loads((tmp_path / "out" / "runs" / "near-seed1" / "run.json").read_text(encoding="utf-8"))
    assert body["encoding"] == {"label": "near", "name": "shaw", "options": {"clip": 3}}
    assert (body["seed"], body["recipe"]["train"]["steps"]) == (1, 3)
    assert {"hardware", "versions", "commit", "date", "threads"} <= body["environment"].keys()
    assert body["environment"]["versions"].keys() >= {"python", "torch", "transformers"}
    assert body["result"]["status"] == "done"


def test_finished_runs_are_not_done_again_and_the_result_is_the_same(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, seeds=[1, 2]))
    whole = inline(recipe, tmp_path / "whole")

    def stop_at_third(subject: Stage | Task, event: dict[str, Any]) -> None:
        if isinstance(subject, Task) and subject.title == "none seed 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inline(recipe, tmp_path / "out", watch=stop_at_third)
    assert not (tmp_path / "out" / "results.json").exists()
    (tmp_path / "out" / "runs" / "absolute-seed1" / "run.json").write_text('{"key": "cut o', encoding="utf-8")
    seen, watch = watcher()
    resumed = inline(recipe, tmp_path / "out", watch=watch)
    assert "none seed 1" not in trained(seen)
    assert {"absolute seed 1", "absolute seed 2"} <= set(trained(seen))
    for one, other in zip(whole.runs, resumed.runs, strict=True):
        assert (one.lengths, one.shifts) == (other.lengths, other.shifts)
    seen, watch = watcher()
    inline(recipe, tmp_path / "out", watch=watch)
    assert trained(seen) == []


def test_encodings_and_seeds_may_be_added(text: Path, tmp_path: Path) -> None:
    inline(read_recipe(table(text)), tmp_path / "out")
    seen, watch = watcher()
    recipe = read_recipe(table(text, encodings=["none", "absolute", "tisa"], seeds=[1, 2], baseline="none"))
    result = inline(recipe, tmp_path / "out", watch=watch)
    assert trained(seen) == ["tisa seed 1", "none seed 2", "absolute seed 2", "tisa seed 2"]
    assert result.baseline == "none"
    assert len(result.runs) == 6


def test_a_folder_of_another_recipe_is_refused_with_the_keys_that_differ(text: Path, tmp_path: Path) -> None:
    inline(read_recipe(table(text, encodings=["none"])), tmp_path / "out")
    before = (tmp_path / "out" / "runs" / "none-seed1" / "run.json").read_bytes()
    other = read_recipe(table(text, encodings=["none"], train={"steps": 4}, model={"model_dim": 16}))
    with pytest.raises(
        ValueError, match=r"another recipe: model\.model_dim is 8 there and 16 here; train\.steps is 3 there"
    ):
        inline(other, tmp_path / "out")
    assert (tmp_path / "out" / "runs" / "none-seed1" / "run.json").read_bytes() == before


def test_a_mistake_in_the_recipe_does_not_claim_the_folder(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match="no file at"):
        inline(read_recipe(table(tmp_path / "typo.txt", encodings=["none"])), out)
    with pytest.raises(ValueError, match=r"one window of length=8000 needs 7998"):
        inline(read_recipe(table(text, encodings=["none"], train={"length": 8000})), out)
    result = inline(read_recipe(table(text, encodings=["none"])), out)
    assert [run.status for run in result.runs] == ["done"]


def test_a_recipe_json_of_another_program_claims_the_folder(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "text").mkdir(parents=True)
    (tmp_path / "out" / "recipe.json").write_text('{"recipe": {"eggs": 3}}')
    (tmp_path / "out" / "text" / "book.txt").write_text("mine")
    with pytest.raises(ValueError, match="eggs is 3 there"):
        inline(read_recipe(table(text)), tmp_path / "out")
    assert (tmp_path / "out" / "text" / "book.txt").read_text() == "mine"


def test_a_label_cannot_change_its_meaning(text: Path, tmp_path: Path) -> None:
    inline(read_recipe(table(text, encodings=[{"name": "shaw", "label": "near", "clip": 3}])), tmp_path / "out")
    other = read_recipe(table(text, encodings=[{"name": "shaw", "label": "near", "clip": 2}]))
    with pytest.raises(ValueError, match=r"'near' of another encoding: .*'clip': 3.* there, .*'clip': 2.* here"):
        inline(other, tmp_path / "out")


def test_a_folder_with_other_files_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds other files \(thesis.tex\)"):
        inline(read_recipe(table(text)), tmp_path / "out")


def test_a_folder_in_use_is_refused(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text))
    with (
        open_folder(tmp_path / "out", recipe),
        pytest.raises(ValueError, match="out' is in use by another locant compare"),
    ):
        inline(recipe, tmp_path / "out")


@pytest.mark.parametrize("place", ["/dev/null/out", "/proc/nothing/out"])
def test_a_folder_that_cannot_be_written_is_named(text: Path, place: str) -> None:
    with pytest.raises(OSError, match=f"cannot write '{place}': .*; free space or give another --out"):
        inline(read_recipe(table(text)), Path(place))


def test_a_full_disk_stops_the_comparison_and_keeps_what_is_finished(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(table(text))
    write = folder_module.write_atomically

    def full(path: Path, content: str) -> Path:
        if "absolute-seed1" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(folder_module, "write_atomically", full)
    with pytest.raises(OSError, match=r"absolute-seed1.run.json': No space left on device; free space .* are kept"):
        inline(recipe, tmp_path / "out")
    monkeypatch.undo()
    seen, watch = watcher()
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    result = inline(recipe, tmp_path / "out", watch=watch)
    assert trained(seen) == ["absolute seed 1"]
    assert all(run.status == "done" for run in result.runs)


def test_a_loss_that_is_not_finite_stops_its_run_and_keeps_the_others(text: Path, tmp_path: Path) -> None:
    body = table(text, encodings=["none", "broken"], train={"steps": 6})
    body["encodings"] = ["none", {"name": "tisa", "label": "broken"}]
    recipe = read_recipe(body)

    class Break(InlineExecutor):
        def run(self, tasks):  # an amplitude that is infinite from the start
            import torch

            from locant.compare import masked_lm

            build = masked_lm.build_model

            def broken(*arguments, **keywords):
                built = build(*arguments, **keywords)
                for name, parameter in built.model.named_parameters():
                    if name in built.position_parameters and "amplitude" in name:
                        torch.nn.init.constant_(parameter, float("inf"))
                return built

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(masked_lm, "build_model", broken)
                yield from super().run(tasks)

    seen, watch = watcher()
    result = compare(recipe, tmp_path / "out", executor=Break, watch=watch)
    assert [run.status for run in result.runs] == ["done", "failed"]
    assert "loss is nan at step 1 (windows " in (result.runs[1].reason or "")
    assert "try train.learning_rate below 0.001" in (result.runs[1].reason or "")
    assert any(event.get("event") == "failed" for _, event in seen)
    seen, watch = watcher()
    inline(recipe, tmp_path / "out", watch=watch)
    assert trained(seen) == [], "a run that diverged would diverge again"


def test_a_run_that_raises_is_reported_and_tried_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from locant.compare import masked_lm

    recipe = read_recipe(table(text))
    build = masked_lm.build_model

    def out_of_memory(recipe, objective, tokenizer, encoding, seed):
        if encoding.name == "none":
            raise RuntimeError("out of memory: tried to allocate 17 GB")
        return build(recipe, objective, tokenizer, encoding, seed)

    monkeypatch.setattr(masked_lm, "build_model", out_of_memory)
    result = inline(recipe, tmp_path / "out")
    assert [(one.encoding, one.status) for one in result.runs] == [("none", "failed"), ("absolute", "done")]
    assert result.runs[0].reason == "RuntimeError: out of memory: tried to allocate 17 GB"
    monkeypatch.setattr(masked_lm, "build_model", build)
    assert [one.status for one in inline(recipe, tmp_path / "out").runs] == ["done", "done"]


def test_text_shorter_than_a_window_is_named_before_training(tmp_path: Path) -> None:
    short = write_text(tmp_path / "short.txt", num_words=60)
    seen, watch = watcher()
    long = {"lengths": [9, 90]}
    with pytest.raises(ValueError, match=r"validation text has \d+ tokens, but one window of length=90 needs 88"):
        inline(read_recipe(table(short, evaluate=long)), tmp_path / "out", watch=watch)
    with pytest.raises(ValueError, match=r"training text has \d+ tokens, but one window of length=900 .*train.length"):
        inline(read_recipe(table(short, train={"length": 900})), tmp_path / "other", watch=watch)
    assert trained(seen) == []


def test_an_empty_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"empty"):
        inline(read_recipe(table(tmp_path / "empty.txt")), tmp_path / "out")


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCANT_DATA", raising=False)
    recipe = read_recipe(table(tmp_path), ["text.text=${LOCANT_DATA}/books"])
    with pytest.raises((ValueError, FileNotFoundError), match="LOCANT_DATA"):
        inline(recipe, tmp_path / "out")


def test_speed_is_measured_in_alternating_order_and_kept(text: Path, tmp_path: Path) -> None:
    body = table(text, measure={"rounds": 2, "seconds": 0.01, "threads": 1})
    seen, watch = watcher()
    result = inline(read_recipe(body), tmp_path / "out", watch=watch)
    order = [subject.label for subject, event in seen if event.get("event") == "start" and subject.kind == "measure"]
    assert order == ["none", "absolute", "absolute", "none"]
    for speed in result.speeds.values():
        assert (speed.train_tokens_per_second or 0) > 0 and (speed.inference_tokens_per_second or 0) > 0
        assert len(speed.train_rounds) == len(speed.inference_rounds) == 2
        assert min(speed.train_rounds) <= (speed.train_tokens_per_second or 0) <= max(speed.train_rounds)
        assert (speed.inference_peak_mb or 0) > 50 and (speed.train_peak_mb or 0) >= (speed.inference_peak_mb or 0)
    seen, watch = watcher()
    inline(read_recipe(body), tmp_path / "out", watch=watch)
    assert trained(seen) == []


# --- in processes of their own ---------------------------------------------------------------------------------------


def test_where_forking_is_unsafe_every_task_has_a_process_of_its_own(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, encodings=["none", "tisa"], measure={"rounds": 0}))
    result = compare(recipe, tmp_path / "fresh", executor=functools.partial(LocalExecutor, fresh=True))
    assert [(run.status, run.reason) for run in result.runs] == [("done", None)] * 2


def test_processes_of_their_own_give_the_same_numbers(text: Path, tmp_path: Path) -> None:
    body = table(text, encodings=["none", "tisa"], measure={"rounds": 1, "seconds": 0.01, "threads": 1})
    seen, watch = watcher()
    apart = compare(read_recipe(body), tmp_path / "apart", jobs=2, watch=watch)
    together = inline(read_recipe({**body, "measure": {"rounds": 0}}), tmp_path / "together")
    assert [run.status for run in apart.runs] == ["done"] * 2
    for one, other in zip(apart.runs, together.runs, strict=True):
        assert [score.loss for score in one.lengths] == pytest.approx([score.loss for score in other.lengths], rel=1e-5)
    assert {label: speed.reason for label, speed in apart.speeds.items()} == {"none": None, "tisa": None}
    assert [event for _, event in seen if event.get("event") == "error"] == []
    assert sum(event.get("event") == "done" for _, event in seen) == 4


def test_a_killed_comparison_leaves_no_process_and_goes_on_where_it_was(text: Path, tmp_path: Path) -> None:
    recipe_file, out = tmp_path / "killed.toml", tmp_path / "out"
    recipe_file.write_text(toml(table(text, encodings=["none", "tisa"], train={"steps": 40_000})), encoding="utf-8")
    command = [sys.executable, "-m", "locant.cli", "compare", str(recipe_file), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 90
        while not (out / "runs" / "none-seed1" / "log.txt").exists():
            assert process.poll() is None, (process.stderr.read() if process.stderr else b"").decode()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        workers = workers_of(out)
        assert workers
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    deadline = time.monotonic() + 20
    while workers_of(out):
        assert time.monotonic() < deadline, f"{workers_of(out)} still run"
        time.sleep(0.1)
    assert list(out.glob("runs/*/run.json")) == []
    again = inline(read_recipe(table(text)), out)  # no run had finished, so nothing binds the folder to the old recipe
    assert [run.status for run in again.runs] == ["done"] * len(again.runs)


def workers_of(out: Path) -> list[int]:
    """Processes that serve this folder (their command line names it)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"locant.compare.worker" in command and str(out).encode() in command:
                found.append(int(entry.name))
    return found


def test_a_worker_that_dies_fails_its_run_alone(text: Path, tmp_path: Path) -> None:
    recipe = read_recipe(table(text, encodings=["none"], train={"steps": 100_000}))
    with open_folder(tmp_path / "out", recipe) as folder:
        from locant.compare.text import prepare_text

        prepare_text(recipe, folder.text, progress=False)
        events = []
        for task, event in LocalExecutor(folder, jobs=1).run([Task("train", "none", seed=1)]):
            events.append((task.label, event))
            if event["event"] == "step":
                for pid in workers_of(tmp_path / "out"):
                    os.kill(pid, signal.SIGKILL)
    assert events[-1][1]["event"] == "error"
    assert "code -9" in events[-1][1]["message"]


def test_labels_become_file_names_of_their_own() -> None:
    assert slug("huang_m4") == "huang_m4"
    assert slug("absolute+t5") == "absolute+t5"
    assert slug("a/b") != slug("a b") != slug("a-b") == "a-b"
    assert "/" not in slug("../../etc")


def test_differences_name_nested_and_missing_keys() -> None:
    before, after = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "e": 4}
    assert differences(before, after) == [
        "a.c is 2 there and 3 here",
        "d is [1] there and None here",
        "e is None there and 4 here",
    ]


def test_threads_of_each_run_can_be_given(text: Path, tmp_path: Path) -> None:
    compare(read_recipe(table(text, encodings=["none"])), tmp_path / "out", threads=1)
    body = json.loads((tmp_path / "out" / "runs" / "none-seed1" / "run.json").read_text(encoding="utf-8"))
    assert body["environment"]["threads"] == 1
    compare(read_recipe(table(text, encodings=["none"])), tmp_path / "three", threads=3)
    body = json.loads((tmp_path / "three" / "runs" / "none-seed1" / "run.json").read_text(encoding="utf-8"))
    assert body["environment"]["threads"] == 3
