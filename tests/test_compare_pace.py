"""Steps to the baseline's final validation loss, and the validations on the way that it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locant.compare.conclusions import findings
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.pace import pace, pace_text
from locant.compare.recipe import read_recipe, shared_part
from locant.compare.results import CurvePoint, LengthScore, ResultTable, RunResult
from locant.compare.tables import encodings_csv, to_text
from locant.report.page import render
from tests.compare_runs import table, write_text


def run(encoding: str, seed: int, losses: dict[int, float | None], status: str = "done") -> RunResult:
    curve = tuple(CurvePoint(step, 10 * step, 1.0, 9.0, loss) for step, loss in losses.items())
    last = list(losses.values())[-1]
    reason = None if status == "done" else "stopped"
    return RunResult(encoding, {}, seed, status, reason, curve, (LengthScore(32, 1, last, 0.5),))


def results(*runs: RunResult) -> ResultTable:
    return ResultTable({}, "base", 32, runs)


BASE = {100: 6.0, 200: 5.0, 300: 4.5, 400: 4.0}


def test_the_first_step_no_higher_than_the_end_of_the_baseline_counts_seed_by_seed() -> None:
    found = results(
        run("base", 1, BASE),
        run("base", 2, {**BASE, 400: 3.0}),
        run("fast", 1, {100: 5.0, 200: 4.0, 300: 3.5, 400: 2.0}),
        run("fast", 2, {100: 5.0, 200: 4.0, 300: 3.5, 400: 2.0}),
    )
    fast = pace(found, "fast")
    assert fast is not None and (fast.steps.mean, fast.steps.n, fast.seeds, fast.interval) == (300.0, 2, 2, 100)
    assert fast.tokens.mean == 3000.0 and fast.share.mean == 0.75
    base = pace(found, "base")
    assert base is not None and base.steps.mean == 400.0
    assert pace_text(fast) == "300 ± 141 (75%)" and pace_text(base) == "400 ± 0 (100%)"


def test_seeds_that_never_get_there_are_counted_and_not_averaged() -> None:
    found = results(
        run("base", 1, BASE),
        run("base", 2, BASE),
        run("some", 1, {100: 3.0, 200: 3.0}),
        run("some", 2, {100: 6.0, 200: 4.1}),
        run("none", 1, {100: 6.0, 200: 4.1}),
    )
    assert pace_text(pace(found, "some")) == "100 (25%), 1 of 2 seeds"
    assert pace_text(pace(found, "none")) == "not reached"
    sentences = [one.text for one in findings(found) if one.subject == "pace"]
    assert "some after 25% of them (1 of 2 seeds); it was looked at every 100 steps." in sentences[0]
    assert sentences[1] == "Never as low as the end of base: none."
    assert "not reached" in to_text(found) and "Steps to the end of base" in to_text(found)
    assert "to the end of base" in render(found)
    header, *lines = encodings_csv(found).splitlines()
    assert header.endswith("steps_to_baseline_n,tokens_to_baseline_mean,tokens_to_baseline_std,tokens_to_baseline_n")
    assert {line.split(",")[1]: line.split(",")[-6:] for line in lines}["some"] == ["100.0", "", "1", "1000.0", "", "1"]


@pytest.mark.parametrize(
    "runs",
    [
        (run("base", 1, {100: None, 400: 4.0}), run("one", 1, BASE)),
        (run("base", 1, BASE), run("one", 1, {100: None, 400: 4.0})),
        (run("base", 1, BASE), run("one", 2, BASE)),
        (run("base", 1, BASE), run("one", 1, BASE, status="failed")),
    ],
    ids=["baseline not validated", "not validated", "no common seed", "failed"],
)
def test_there_is_no_pace_without_validation_on_both_ways(runs: tuple[RunResult, ...]) -> None:
    found = results(*runs)
    assert pace(found, "one") is None and pace_text(None) == "-"
    if pace(found, "base") is None:
        assert "Steps to" not in to_text(found) and "steps_to_baseline" not in encodings_csv(found)


def study(folder: Path, points: int, **changes: Any) -> ResultTable:
    body = table(
        write_text(folder / "text.txt"),
        encodings=["absolute", "shape+sinusoidal"],
        baseline="absolute",
        model={"num_layers": 1, "model_dim": 8, "num_heads": 2, "dropout": 0.3},
        train={"length": 9, "steps": 7, "batch_size": 5, "device": "cpu", "curve_points": 6},
        **changes,
    )
    body["evaluate"]["points"] = points
    return compare(read_recipe(body), folder / f"out{points}", executor=InlineExecutor)


@pytest.mark.parametrize("task", ["mlm", "causal_lm", "electra"])
def test_validating_on_the_way_changes_no_training_number(task: str, tmp_path: Path) -> None:
    without, validated = (study(tmp_path, points, task=task) for points in (0, 3))
    for one, other in zip(without.runs, validated.runs, strict=True):
        assert [point.train_loss for point in one.curve] == [point.train_loss for point in other.curve]
        assert one.lengths == other.lengths
        assert [point.step for point in other.curve if point.validation_loss is not None] == [3, 5, 7]
        assert [point.step for point in one.curve if point.validation_loss is not None] == [7]
    assert pace(without, "absolute") is None
    found = pace(validated, "absolute")
    assert found is not None and found.steps.mean is not None and found.steps.mean <= 7


def test_no_points_is_as_if_the_key_had_never_been_there() -> None:
    body = table(Path("text.txt"))
    recipe = read_recipe(body).to_dict()
    old = {**recipe, "evaluate": {key: value for key, value in recipe["evaluate"].items() if key != "points"}}
    assert shared_part(old) == shared_part(recipe)
    body["evaluate"]["points"], body["train"]["curve_points"] = 2, 4
    assert "points" in read_recipe(body).shared()["evaluate"]


@pytest.mark.parametrize(
    ("points", "message"),
    [(-1, "points = -1, needed 0"), (4, "evaluate.points = 4 does not divide train.curve_points = 6")],
)
def test_points_that_are_none_of_the_curve_are_named(points: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        study(tmp_path, points)
