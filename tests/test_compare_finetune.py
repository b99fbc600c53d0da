"""The task `finetune` of a comparison: the runs of `locant.finetune`, ranked by what their score is short of 100."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.objective import find_objective
from locant.compare.recipe import Recipe, read_recipe
from locant.compare.results import ResultTable, RunResult
from locant.compare.series import compare_series, series_text
from locant.compare.tables import encodings_csv, runs_csv, to_text
from locant.finetune.comparison import TuningTrial
from locant.finetune.glue import TASKS
from locant.finetune.load import DataChoice
from locant.finetune.run import finetune
from locant.finetune.scores import MAIN
from locant.finetune.settings import GlueSettings, ModelChoice
from locant.report.page import render
from tests.compare_runs import table, write_text
from tests.finetune_runs import save_model, write_rte, write_squad

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SETTINGS = {"epochs": 1.0, "batch_size": 5, "learning_rate": 3e-3, "length": 40, "device": "cpu"}
BESIDE = {"name": "huang_m4", "label": "beside", "init": "neutral", "keep_absolute": True}
SAVED = {"name": "as_saved", "label": "absolute"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **STILL)


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    write_rte(folder / "RTE")
    header, *rows = (folder / "RTE" / "train.tsv").read_text(encoding="utf-8").splitlines()
    (folder / "WNLI").mkdir()
    for name in ("train", "dev"):
        lines = [
            row.replace("not_entailment", "0").replace("entailment", "1")
            for row in rows[: 30 if name[0] == "t" else 11]
        ]
        (folder / "WNLI" / f"{name}.tsv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return folder


def body(model: Path, glue: Path, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "task": "finetune",
        "encodings": [SAVED, BESIDE],
        "seeds": [1],
        "finetune": {"tasks": ["glue/rte"], "model": str(model), "data": [str(glue)], "settings": SETTINGS},
        "measure": {"rounds": 0},
    }
    for key, value in changes.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    return made


def run(recipe: Recipe, out: Path) -> ResultTable:
    return compare(recipe, out, executor=InlineExecutor)


def test_a_comparison_ranks_by_the_score_and_tells_the_majority(model: Path, glue: Path, tmp_path: Path) -> None:
    made = body(model, glue, seeds=[1, 2], encodings=[SAVED, BESIDE, "shaw"], measure={"rounds": 1, "seconds": 0.01})
    found = run(read_recipe(made), tmp_path / "out")
    assert [one.status for one in found.runs] == ["done"] * 6 and found.trained_length == 40
    for one in found.runs:
        (score,) = one.lengths
        assert score.accuracy is not None and score.loss == 100 * (1 - score.accuracy) and one.curve[-1].step == 8
    saved, beside, shaw = (next(x for x in found.runs if x.encoding == name) for name in ("absolute", "beside", "shaw"))
    rows, width = 61, 24
    assert saved.extra_parameters == rows * width
    assert shaw.extra_parameters == 2 * (2 * rows - 1) * width // 3
    assert beside.extra_parameters == saved.extra_parameters + shaw.extra_parameters
    assert all(speed.train_tokens_per_second and speed.inference_peak_mb for speed in found.speeds.values())
    text, page = to_text(found), render(found)
    assert "error at 40" in text and "points short of 100" in text and "nats" not in text.split("Cost")[0]
    assert "without reading, scores accuracy 63.2." in text and "without reading, scores accuracy 63.2." in page
    assert "has the lowest error" in page and "Validation loss" not in page
    assert not list(tmp_path.glob("out/runs/*/checkpoint-*")) and not list(tmp_path.glob("out/speed/*.jsonl"))
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/run.json")}
    assert run(read_recipe(made), tmp_path / "out").runs == found.runs
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/runs/*/run.json")} == stamps


def test_its_runs_are_those_of_locant_finetune(model: Path, glue: Path, tmp_path: Path) -> None:
    found = run(read_recipe(body(model, glue, encodings=[BESIDE], seeds=[3])), tmp_path / "compared").runs[0]
    choice = ModelChoice(str(model), encoding="huang_m4", init="neutral", keep_absolute=True)
    alone = finetune("glue/rte", choice, DataChoice((glue,)), GlueSettings(**SETTINGS), (3,), tmp_path / "alone")
    assert found.lengths[0].accuracy == alone.runs[0].scores["dev"]["accuracy"]
    lines = (tmp_path / "alone/runs/seed3/log.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if line["event"] == "step"]
    assert [point.train_loss for point in found.curve] == losses


def test_a_neutral_start_beside_the_kept_table_begins_where_the_model_is(
    model: Path, glue: Path, tmp_path: Path
) -> None:
    alone = {"name": "huang_m4", "label": "alone"}
    saved, beside, dropped = run(read_recipe(body(model, glue, encodings=[SAVED, BESIDE, alone])), tmp_path / "o").runs
    assert beside.curve[0].train_loss == pytest.approx(saved.curve[0].train_loss, abs=1e-6)
    assert beside.curve[-1].train_loss != saved.curve[-1].train_loss
    assert abs((dropped.curve[0].train_loss or 0) - (saved.curve[0].train_loss or 0)) > 1e-3


def test_all_scores_of_all_dev_files_have_columns(model: Path, tmp_path: Path) -> None:
    train, one, two = (
        write_squad(tmp_path / f"{name}.json", seed=at) for at, name in enumerate(("t", "first", "then"))
    )
    settings = {"length": 60, "overlap": 12, "max_question": 9, "max_answer": 8}
    made = body(
        model,
        tmp_path,
        encodings=[SAVED],
        finetune={
            "tasks": ["squad"],
            "data": [str(train)],
            "dev": [str(one), str(two)],
            "settings": {**SETTINGS, **settings},
        },
    )
    found = run(read_recipe(made), tmp_path / "out")
    assert set(found.runs[0].scores) == {"exact_match_first", "f1_then", "exact_match_then"}
    assert "F1" in to_text(found) and "exact match first" in to_text(found) and "majority" not in to_text(found)
    assert "exact_match_first_mean" in encodings_csv(found) and "f1_then" in runs_csv(found)
    assert "Exact match first" in render(found)
    assert ResultTable.from_json(found.to_json()) == found


def test_several_tasks_are_a_comparison_each_and_share_a_table(model: Path, glue: Path, tmp_path: Path) -> None:
    per_task = {"glue/wnli": {"epochs": 0.4}}
    recipe = read_recipe(body(model, glue, finetune={"tasks": ["glue/rte", "glue/wnli"], "per_task": per_task}))
    tables = compare_series(recipe, tmp_path, executor=InlineExecutor)
    assert list(tables) == ["glue-rte", "glue-wnli"] and (tmp_path / "glue-wnli/results.json").is_file()
    assert [one.runs[0].curve[-1].step for one in tables.values()] == [8, 3]
    scores = [100 * (one.runs[0].lengths[0].accuracy or 0) for one in tables.values()]
    shown = (tmp_path / "scores.txt").read_text(encoding="utf-8")
    assert shown == series_text(recipe, tables) and "glue-wnli (accuracy)" in shown
    line = next(line for line in shown.splitlines() if line.startswith("absolute"))
    assert [float(cell) for cell in line.split()[1:]] == pytest.approx([*scores, sum(scores) / 2], abs=0.006)


def test_a_run_that_is_stopped_goes_on_to_the_same_curve(model: Path, glue: Path, tmp_path: Path) -> None:
    recipe = read_recipe(body(model, glue, finetune={"settings": {**SETTINGS, "epochs": 2.0, "save_every": 4}}))
    row = find_objective("finetune")
    data = row.read(recipe, tmp_path)

    def train(folder: str, stop: int = 0) -> Any:
        seen: list[int] = []

        def on_step(step: int, loss: float) -> bool:
            seen.append(step)
            if step == stop:
                raise KeyboardInterrupt
            return False

        trial = TuningTrial(recipe, recipe.choice("beside"), 1, data)
        curve = trial.train(recipe.train, tmp_path / folder, on_step)
        found = trial.validation_loss()
        (score,) = trial.by_length()
        assert found == score.loss is not None
        return [(point.step, point.tokens, point.loss) for point in curve], score, seen

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", stop=10)
    resumed = train("stopped")
    assert resumed[:2] == whole[:2] and resumed[2][0] == 9 and whole[2][0] == 1


def test_a_folder_with_a_checkpoint_of_another_recipe_is_not_begun_anew(
    model: Path, glue: Path, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def stop(subject: Any, event: dict[str, Any]) -> None:
        raise Killed

    recipe = read_recipe(body(model, glue, encodings=[SAVED]))
    with pytest.raises(Killed):
        compare(recipe, tmp_path, executor=InlineExecutor, watch=stop)
    (tmp_path / "runs" / "absolute-seed1" / "checkpoint-4").mkdir(parents=True)
    other = read_recipe(body(model, glue, encodings=[SAVED], finetune={"settings": {**SETTINGS, "epochs": 2.0}}))
    with pytest.raises(ValueError, match=r"belongs to another recipe: finetune.settings.epochs is 1.0 there and 2.0"):
        run(other, tmp_path)
    (tmp_path / "runs" / "absolute-seed1" / "checkpoint-4").rmdir()
    assert run(other, tmp_path).runs[0].curve[-1].step == 15


def test_files_or_a_model_that_changed_are_refused(model: Path, glue: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    write_rte(own / "RTE")
    recipe = read_recipe(body(model, own, encodings=[SAVED]))
    run(recipe, tmp_path / "out")
    write_rte(own / "RTE", seed=5)
    words = r"no longer those that '.*out' began with: files.train.tsv is "
    with pytest.raises(ValueError, match=words):
        run(recipe, tmp_path / "out")
    with pytest.raises(ValueError, match=words + r".*put them back \(with --ray: on every node\)"):  # as runs do
        find_objective("finetune").read(recipe, tmp_path / "out" / "text")


def test_a_damaged_record_of_the_files_is_no_licence_to_go_on(model: Path, glue: Path, tmp_path: Path) -> None:
    text, task = tmp_path / "out" / "text", find_objective("finetune")
    text.parent.mkdir()
    recipe = read_recipe(body(model, glue))
    task.prepare(recipe, text, progress=False)
    kept = text / "facts.json"
    kept.write_text(kept.read_text()[:-9])
    with pytest.raises(ValueError, match=r"facts.json' is damaged, needed to tell .*'.*out' began with; delete it"):
        task.prepare(recipe, text, progress=False)
    assert kept.is_file()
    kept.unlink()
    task.read(recipe, text)


def test_a_model_of_an_encoding_s_own_that_changed_is_refused(model: Path, glue: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", **STILL)
    row = {"name": "as_saved", "label": "other", "model": str(other)}
    text = tmp_path / "out" / "text"
    task = find_objective("finetune")
    text.parent.mkdir()
    assert "own_models" not in task.prepare(read_recipe(body(model, glue)), text, progress=False).facts
    both = read_recipe(body(model, glue, encodings=[SAVED, row]))
    task.prepare(both, text, progress=False)  # it came later
    task.read(both, text)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "gelu"', '"hidden_act": "relu"'))
    with pytest.raises(ValueError, match=r"no longer those that '.*out' began with: own_models.other is '\w+' there"):
        task.read(both, text)
    task.prepare(read_recipe(body(model, glue)), text, progress=False)  # without it, nothing has changed
    with pytest.raises(ValueError, match=r"own_models.other is '\w+' there"):
        task.prepare(both, text, progress=False)


def test_constant_predictions_have_no_correlation_and_say_so(model: Path, glue: Path, tmp_path: Path) -> None:
    recipe = read_recipe(body(model, glue))
    trial = TuningTrial(recipe, recipe.choice("absolute"), 1, find_objective("finetune").read(recipe, tmp_path))
    trial.train(recipe.train, tmp_path, lambda step, loss: True)
    trial.data.problem.evaluate = lambda *_: {"dev": type("S", (), {"scores": {"pearson": None}})}  # type: ignore[method-assign]
    (score,) = trial.by_length()
    assert score.loss is None and score.reason == "all predictions are equal, so no correlation is defined"
    assert math.isnan(trial.validation_loss())


@pytest.mark.parametrize("batch_size", [5, 64])  # a loss tells, or the step is the last one
def test_a_run_that_diverged_has_failed_and_leaves_no_checkpoint(
    batch_size: int, model: Path, glue: Path, tmp_path: Path
) -> None:
    wild = {**SETTINGS, "learning_rate": 1e30, "warmup_fraction": 0.0, "batch_size": batch_size, "save_every": 1}
    (found,) = run(read_recipe(body(model, glue, encodings=[SAVED], finetune={"settings": wild})), tmp_path).runs
    assert found.status == "failed" and "needed a finite number; try learning_rate below 1e+30" in str(found.reason)
    assert found.lengths == () and not list(tmp_path.glob("runs/*/checkpoint-*"))


def test_the_main_score_is_the_first_one() -> None:
    for task in TASKS.values():
        assert next(iter(task.metric([0, 1, 1], [0, 1, 0]))) == MAIN[task.metric]


def test_results_of_before_there_were_further_scores_are_read() -> None:
    whole = RunResult("a", {}, 1, "done")
    old = {key: value for key, value in whole.to_dict().items() if key != "scores"}
    assert RunResult.from_dict(old) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finetune": {"tasks": []}}, "finetune.tasks is missing; write finetune.tasks ="),
        ({"finetune": {"model": ""}}, "finetune.model is missing"),
        ({"finetune": {"data": []}}, "finetune.data is missing"),
        (
            {"finetune": {"tasks": ["glue/rt"]}},
            "finetune.tasks: finetune: unknown task 'glue/rt'; did you mean 'glue/rte'",
        ),
        ({"finetune": {"tasks": ["squad", "squad"]}}, "tasks has 'squad' twice"),
        (
            {"finetune": {"settings": {"epoch": 1.0}}},
            r"unknown key 'epoch' in \[finetune.settings\]; did you mean 'epochs'",
        ),
        ({"finetune": {"settings": {"overlap": 3}}}, r"unknown key 'overlap' in \[finetune.settings\]"),
        ({"finetune": {"settings": {"batch_size": 0}}}, "batch_size = 0, needed at least 1"),
        ({"finetune": {"per_task": {"glue/wnli": {}}}}, "per_task has 'glue/wnli', which is not among"),
        ({"finetune": {"per_task": {"glue/rte": 3}}}, "per_task has 'glue/rte' = 3, needed a table"),
        (
            {"encodings": [{"name": "as_saved", "init": "neutral"}]},
            "as_saved takes no option but model, and init = 'neutral' came",
        ),
        ({"encodings": [{"name": "shaw", "init": "zero"}]}, "unknown init='zero'"),
        ({"encodings": ["hunag_m4"]}, "unknown encoding 'hunag_m4'; did you mean 'huang_m4'"),
        ({"train": {"steps": 4}}, "train.steps = 4 has no meaning for task = 'finetune'"),
        ({"evaluate": {"points": 5}}, "evaluate.points = 5 has no meaning for task = 'finetune'"),
    ],
)
def test_what_such_a_recipe_cannot_mean_is_named(
    model: Path, glue: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(body(model, glue, **changes))


def test_a_model_or_file_that_is_not_there_is_named(model: Path, glue: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at '.*nowhere'"):
        run(read_recipe(body(tmp_path / "nowhere", glue)), tmp_path / "a")
    with pytest.raises(ValueError, match=r"^path .*environment variable NO_SUCH_NAME is not set"):
        run(read_recipe(body(Path("$NO_SUCH_NAME/x"), glue)), tmp_path / "c")
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere'"):
        run(read_recipe(body(model, tmp_path / "nowhere")), tmp_path / "b")


def test_an_input_longer_than_the_model_serves_fails_that_run(model: Path, glue: Path, tmp_path: Path) -> None:
    made = body(model, glue, encodings=[SAVED, {"name": "huang_m4", "clip": 9}])
    made["finetune"]["settings"] = {**SETTINGS, "length": 62}
    saved, clipped = run(read_recipe(made), tmp_path / "out").runs
    assert saved.status == "failed" and "length = 62 is above the 61 tokens" in str(saved.reason)
    assert clipped.status == "done"


def test_the_table_finetune_has_no_meaning_to_other_tasks(tmp_path: Path) -> None:
    made = table(write_text(tmp_path / "text.txt"), finetune={"model": "x"})
    with pytest.raises(ValueError, match=r"finetune.model = 'x' has no meaning for task = 'mlm'"):
        read_recipe(made)
