from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from locant.cli import app
from locant.compare.curves import Curve, read_curves, read_runs
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.recipe import read_recipe
from locant.plots import loss_curves, to_svg
from locant.plots.curves import running_mean
from tests.compare_runs import table, write_text


def write_log(folder: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "log.jsonl").write_text(text + end, encoding="utf-8")
    return folder


def steps(losses: list[float], tokens: int = 7, pause: int = 0) -> list[dict[str, Any]]:
    """One second each; after ``pause`` steps the clock starts anew, as a resumed run's does."""
    return [
        {"event": "step", "step": n, "loss": loss, "tokens": n * tokens, "seconds": float(n - pause * (n > pause))}
        for n, loss in enumerate(losses, start=1)
    ]


def drawn(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_gid(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}


def test_the_log_of_a_run_becomes_a_training_and_a_validation_curve(tmp_path: Path) -> None:
    lines = [{"event": "start", "peak_flops": 1.0}, {"event": "validation", "step": 0, "loss": 5.0}]
    lines += steps([4.0, 3.0, 2.0], pause=2)
    lines.insert(4, {"event": "validation", "step": 2, "tokens": 14, "loss": 3.5, "token_loss": 3.25})
    lines.append({"event": "scores", "dev": {"accuracy": 0.5}})
    read = read_curves(write_log(tmp_path / "bert", lines))
    train, held = read.curves
    assert train == Curve("bert", "bert", False, (1, 2, 3), (7.0, 14.0, 21.0), (1.0, 2.0, 3.0), (4.0, 3.0, 2.0))
    assert (held.steps, held.tokens, held.seconds, held.losses) == ((0, 2), (0.0, 14.0), (0.0, 2.0), (5.0, 3.5))
    assert read.notices == ()


def test_seeds_of_a_folder_are_one_group_and_folders_are_told_apart(tmp_path: Path) -> None:
    for name, seeds in (("a", (1, 2)), ("b", (1,))):
        for seed in seeds:
            write_log(tmp_path / name / "runs" / f"seed{seed}", steps([3.0, 2.0]))
    found = read_runs([tmp_path / "a", tmp_path / "b"])
    assert [(curve.group, curve.run) for curve in found.curves] == [("a", "seed1"), ("a", "seed2"), ("b", "seed1")]
    write_log(tmp_path / "c" / "a", steps([3.0, 2.0]))
    twins = read_runs([tmp_path / "a", tmp_path / "c" / "a"])
    assert {curve.group for curve in twins.curves} == {str(tmp_path / "a"), str(tmp_path / "c" / "a")}


def test_a_comparison_has_the_curves_of_its_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    recipe = read_recipe(table(write_text(tmp_path / "text.txt"), seeds=[1, 2]))
    result = compare(recipe, tmp_path / "out", executor=InlineExecutor)
    found = {(c.group, c.run, c.validation): c for c in read_runs([tmp_path / "out"]).curves}
    for run in result.runs:
        curve = found[run.encoding, f"seed {run.seed}", False]
        assert curve.losses == tuple(point.train_loss for point in run.curve)
        assert curve.tokens == (45.0, 90.0, 135.0)
        assert found[run.encoding, f"seed {run.seed}", True].losses == (run.lengths[0].loss,)
    assert len(found) == 8
    write_log(tmp_path / "other", steps([3.0]))
    both = read_runs([tmp_path / "out", tmp_path / "other"])
    assert {curve.group for curve in both.curves} == {"out: none", "out: absolute", "other"}
    one = read_runs([tmp_path / "out" / "runs" / "none-seed1"])
    assert [curve.losses for curve in one.curves if not curve.validation] == [found["none", "seed 1", False].losses]


def test_a_comparison_is_told_by_its_results_whatever_logs_lie_beside(tmp_path: Path) -> None:
    finetune = {"tasks": ["glue/rte"], "settings": {}}
    (tmp_path / "recipe.json").write_text(json.dumps({"recipe": {"encodings": [{"name": "shaw"}]}}))
    for label in ("a", "b"):
        folder = write_log(tmp_path / "runs" / f"{label}-seed1", steps([3.0, 2.0]))
        point = {"step": 2, "tokens": 14, "seconds": 2.0, "train_loss": 2.5, "validation_loss": 30.0}
        result = {"encoding": label, "seed": 1, "curve": [point]}
        body = {"recipe": {"task": "finetune", "finetune": finetune}, "result": result}
        (folder / "run.json").write_text(json.dumps(body))
    found = read_runs([tmp_path]).curves
    assert [(curve.group, curve.validation) for curve in found] == [(g, v) for g in "ab" for v in (False, True)]
    assert [curve.measure for curve in found[:2]] == ["Training loss (per example)", "Error (points short of 100)"]


def test_losses_of_two_kinds_stand_in_panels_of_their_own(tmp_path: Path) -> None:
    electra = {"task": "electra", "electra": {"discriminator_weight": 50.0}}
    point = {"tokens": 14, "seconds": 2.0}
    losses = [(1, 28.0, None), (2, 23.0, 0.37)]
    curve = [{**point, "step": step, "train_loss": a, "validation_loss": b} for step, a, b in losses]
    body = {"recipe": electra, "result": {"encoding": "shaw", "seed": 1, "curve": curve}}
    (tmp_path / "run.json").write_text(json.dumps(body))
    figure = loss_curves(read_runs([tmp_path]).curves, smooth=2)
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.lines] == [[28.0, 25.5], [28.0, 23.0]]
    assert [list(line.get_ydata()) for line in lower.lines] == [[0.37]]
    assert upper.get_title(loc="left").replace("\n", " ") == (
        "Training loss (nats: generator per predicted token + 50 x discriminator per token), mean of 2 points"
    )
    assert lower.get_title(loc="left") == "Validation loss of the discriminator (nats per token)"
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "Training step") and upper.get_xlim() == lower.get_xlim()
    assert upper.get_position().y0 > lower.get_position().y1
    mixed = loss_curves([Curve("a", "a", False, (1, 2), (7.0, 14.0), (1.0, 2.0), (3.0, 2.0))])
    assert [axes.get_ylabel() for axes in mixed.axes] == ["Loss (nats)"]


def test_a_last_line_that_was_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    read = read_curves(write_log(tmp_path / "run", steps([3.0, 2.0]), end='{"event": "st'))
    assert [curve.steps for curve in read.curves] == [(1, 2)]
    assert read.notices == (
        f"{tmp_path / 'run' / 'log.jsonl'}: line 3 was cut off while it was written, and is left out",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eggs\n", r"line 2 is no line of a log \('eggs'\)"),
        ("[3]\n", r"line 2 is no line of a log \('\[3\]'\)"),
        ('{"event": "step", "step": 2}\n', "line 2 has loss = None, needed a number"),
        ('{"event": "step", "step": 2, "loss": "low"}\n', "line 2 has loss = 'low', needed a number"),
        ('{"event": "step", "step": 2, "loss": 3.0}\n', "line 2 has seconds = None"),
        ('{"event": "step", "step": 1e999, "loss": 3.0}\n', "line 2 has step = inf, needed a whole number"),
        ('{"event": "validation", "step": NaN, "loss": 3.0}\n', "line 2 has step = nan, needed a whole number"),
        ('{"event": "validation", "step": 1, "loss": 3.0, "tokens": null}\n', "line 2 has tokens = None"),
        ('{"event": "validation", "step": 1, "loss": 3.0, "tokens": "x"}\n', "line 2 has tokens = 'x'"),
    ],
)
def test_a_line_that_is_none_is_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"log.jsonl, {message}"):
        read_curves(write_log(tmp_path / "run", steps([3.0]), end=line))


def test_a_folder_without_a_log_or_a_result_is_named(tmp_path: Path) -> None:
    for name in ("nowhere", "."):
        with pytest.raises(FileNotFoundError, match=r"has no log.jsonl with a step and no finished run"):
            read_curves(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"run' has no log.jsonl with a step"):
        read_curves(write_log(tmp_path / "run", [{"event": "start"}]))
    (tmp_path / "run.json").write_text('{"result": {"encoding": "none"}}')
    with pytest.raises(ValueError, match=r"run.json is no whole run.json of locant compare \(KeyError: 'seed'\)"):
        read_curves(tmp_path)


def test_what_is_not_finite_is_not_drawn(tmp_path: Path) -> None:
    (curve,) = read_curves(write_log(tmp_path / "run", steps([3.0, math.nan, math.inf, 2.0]))).curves
    assert (curve.steps, curve.losses) == ((1, 4), (3.0, 2.0))


def test_lines_stand_at_the_numbers_of_the_log(tmp_path: Path) -> None:
    curves = read_curves(write_log(tmp_path / "run", steps([4.0, 3.0, 2.0, 7.0]))).curves
    assert drawn(loss_curves(curves)) == {"series-0-run-0-0": ([1, 2, 3, 4], [4.0, 3.0, 2.0, 7.0])}
    assert drawn(loss_curves(curves, x="tokens"))["series-0-run-0-0"][0] == [7, 14, 21, 28]
    assert drawn(loss_curves(curves, x="seconds"))["series-0-run-0-0"][0] == [1, 2, 3, 4]
    smooth = drawn(loss_curves(curves, smooth=3))
    assert smooth["series-0-run-0-0"][1] == pytest.approx([4.0, 3.5, 3.0, 4.0])
    assert smooth["series-0-run-0-1"][1] == [4.0, 3.0, 2.0, 7.0]
    figure = loss_curves(curves, x="tokens", smooth=3)
    assert figure.axes[0].get_xlabel() == "Tokens read in training"
    assert figure.axes[0].get_ylabel() == "Loss (nats), mean of 3 points"


def test_groups_have_a_color_and_a_place_in_the_legend() -> None:
    def curve(group: str, run: str, validation: bool = False) -> Curve:
        return Curve(group, run, validation, (1, 2), (5.0, 9.0), (1.0, 2.0), (3.0, 2.5))

    figure = loss_curves(
        [curve("tisa", "seed 1"), curve("tisa", "seed 2"), curve("none", "seed 1"), curve("none", "seed 1", True)]
    )
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["tisa", "none", "validation"]
    colors = {line.get_gid(): line.get_color() for line in figure.axes[0].lines}
    assert colors["series-0-seed-1-0-0"] == colors["series-0-seed-2-0-0"] != colors["series-1-seed-1-0-0"]
    assert figure.axes[0].lines[-1].get_linestyle() == "--"
    assert to_svg(figure) == to_svg(figure)


def test_twelve_runs_leave_room_for_their_legend() -> None:
    curves = [
        Curve(f"a rather long name of a run, number {n}", "x", False, (1, 2), (1.0, 2.0), (1.0, 2.0), (3.0, n / 9))
        for n in range(12)
    ]
    figure = loss_curves(curves, width=3.35)
    figure.draw_without_rendering()
    legend, label = figure.legends[0].get_window_extent(), figure.axes[0].xaxis.label.get_window_extent()
    assert legend.y0 >= 0 and legend.y1 <= label.y0
    assert legend.x1 <= figure.bbox.x1


def test_the_mean_is_of_the_last_points() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0], 2) == [1.0, 1.5, 4.0, 5.0]
    assert running_mean([1.0, 2.0], 9) == [1.0, 1.5]


def test_bad_wishes_are_refused() -> None:
    curve = Curve("run", "run", False, (1,), (math.nan,), (1.0,), (3.0,))
    with pytest.raises(ValueError, match="x = 'stpes', needed step, tokens, seconds"):
        loss_curves([curve], x="stpes")
    with pytest.raises(ValueError, match="smooth = 0, needed at least 1"):
        loss_curves([curve], smooth=0)
    with pytest.raises(ValueError, match="none of 1 curves tells its tokens"):
        loss_curves([curve], x="tokens")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_command_writes_a_file_and_prints_its_path(suffix: str, tmp_path: Path) -> None:
    folders = [write_log(tmp_path / name, steps([3.0, 2.0]), end="{") for name in ("a", "b")]
    out = tmp_path / "to" / f"curves.{suffix}"
    result = CliRunner().invoke(app, ["plot", *map(str, folders), "--x", "tokens", "--smooth", "2", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}\n" and out.stat().st_size > 1000
    assert result.stderr.count("line 3 was cut off") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error: plot: 'nowhere' has no log.jsonl"),
        (["run", "--x", "epoch"], "error: plot: x = 'epoch'"),
        (["run", "--smooth", "0"], "error: plot: smooth = 0"),
        (["run", "--out", "a.gif"], "error: save: 'a.gif' ends in '.gif'"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "run", steps([3.0, 2.0]))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plot", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_a_path_that_cannot_be_written_is_named_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "loss.png"
    result = CliRunner().invoke(app, ["plot", str(write_log(tmp_path / "run", steps([3.0]))), "--out", str(out)])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: plot: cannot write '{out}': ")
