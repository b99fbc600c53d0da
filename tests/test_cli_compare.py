from __future__ import annotations

import errno
import functools
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import locant.compare.series as series
from locant.cli import app
from locant.cli.progress import Watcher
from locant.compare.executors import InlineExecutor
from locant.compare.grid import Stage
from locant.compare.run import Task
from tests.compare_runs import table, toml, write_text
from tests.compare_tables import make_table

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(series, "compare_series", functools.partial(series.compare_series, executor=InlineExecutor))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(toml(table(write_text(tmp_path / "text.txt"))), encoding="utf-8")
    return path


def test_a_comparison_ends_with_its_table_and_the_path_of_its_report(recipe: Path, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["compare", str(recipe), "train.steps=2"])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.rstrip().split("\n")
    out = tmp_path / "runs" / "tiny"
    assert lines[-1] == f"report: {out / 'report.html'}"
    assert "absolute" in result.stdout and "loss at 9" in result.stdout
    assert {"results.json", "table.csv", "runs.csv", "report.html", "recipe.json"} <= {
        path.name for path in out.iterdir()
    }
    assert {path.suffix for path in (out / "plots").iterdir()} == {".svg", ".png"}
    assert {path.stem for path in (out / "plots").iterdir()} == {
        "loss_by_step",
        "loss_by_shift",
        "loss_by_length",
    }
    assert "none seed 1" in result.stderr
    again = RUNNER.invoke(app, ["compare", str(recipe), "train.steps=2"])
    assert again.exit_code == 0
    assert "2 of 2 were finished before" in again.stderr
    assert again.stdout == result.stdout


def test_json_is_all_of_stdout(recipe: Path, tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["compare", str(recipe), "--json", "--out", str(tmp_path / "out"), "seeds=7"])
    assert result.exit_code == 0, result.stderr
    body = json.loads(result.stdout)
    assert {(run["encoding"], run["seed"]) for run in body["runs"]} == {("none", 7), ("absolute", 7)}
    assert "report.html" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stesp=2"], "error: recipe: unknown key 'stesp' in [train]; did you mean 'steps'?"),
        (["encodings=hunag_m4"], "did you mean 'huang_m4'"),
        (["model.num_heads=3"], "num_heads = 3 does not divide model_dim = 8"),
        (["text.text=nowhere.txt"], "nowhere.txt"),
        (["--out", "/dev/null/out"], "error: compare: cannot write '/dev/null/out'"),
        (["--jobs", "0"], "error: compare: jobs = 0, needed at least 1"),
        (["--threads", "-1"], "error: compare: threads = -1, needed at least 1, or 0: the cores divided"),
    ],
)
def test_bad_input_is_one_sentence(recipe: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["compare", str(recipe), *arguments])
    assert result.exit_code == (1 if "/dev/null/out" in arguments else 2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert len([line for line in result.stderr.split("\n") if line.startswith("error: ")]) == 1


def test_a_missing_recipe_is_one_sentence(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["compare", "recipes/nothing.toml"])
    assert result.exit_code == 2
    assert "error: recipe: 'recipes/nothing.toml' does not exist" in result.stderr


def test_a_failed_run_shows_in_the_exit_code(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from locant.compare import masked_lm

    def fail(*arguments, **keywords):
        raise RuntimeError("no such luck 17")

    monkeypatch.setattr(masked_lm, "build_model", fail)
    result = RUNNER.invoke(app, ["compare", str(recipe), "encodings=none"])
    assert result.exit_code == 1
    assert "failed: RuntimeError: no such luck 17" in result.stderr
    assert "no such luck 17" in result.stdout


def test_a_disk_that_is_full_before_the_report_still_shows_the_table(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(series, "compare", lambda *arguments, **keywords: make_table())
    monkeypatch.setattr("locant.report.write_report", full)
    result = RUNNER.invoke(app, ["compare", str(recipe), "--json"])
    assert result.exit_code == 1
    assert result.stdout == make_table().to_json()
    assert "error: compare: cannot write 'runs/tiny': No space left on device; free space" in result.stderr


def test_help_shows_brackets() -> None:
    shown = RUNNER.invoke(app, ["compare", "--help"]).stdout
    assert shown.count("[sizes.NAME]") == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_labels_and_messages_may_hold_brackets(terminal: bool) -> None:
    watcher, task, shown = Watcher(), Task("train", "none[/b][red]", seed=1), io.StringIO()
    watcher.progress.disable = not terminal
    watcher.console = watcher.progress.live.console = Console(file=shown, force_terminal=terminal, width=200)
    watcher(Stage("train", (task,)), {})
    watcher(task, {"event": "start"})
    watcher.progress.refresh()
    watcher(task, {"event": "error", "message": "no [/i] here"})
    watcher.progress.stop()
    assert "1/1 none[/b][red] seed 1: " in shown.getvalue()
    assert "failed" in shown.getvalue() and "no [/i] here" in shown.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_run_is_heard_of_once_a_minute_where_there_is_no_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("locant.cli.progress.time.monotonic", lambda: now)
    watcher, task, shown = Watcher(), Task("train", "shaw", seed=1), io.StringIO()
    watcher.console = Console(file=shown, force_terminal=terminal, width=200)
    watcher(Stage("train", (task,)), {})
    watcher(task, {"event": "start"})
    for seconds in range(1, 151):
        now = 1000.0 + seconds
        step = {"event": "step", "step": 3 * seconds, "steps": 900, "loss": 4.5, "tokens_per_second": 1234.5}
        watcher(task, step)
    watcher.progress.stop()
    lines = [line.strip() for line in shown.getvalue().splitlines() if "shaw" in line]
    expected = [f"shaw seed 1: {3 * second}/900  loss 4.500  1,234 tokens/s" for second in (60, 120)]
    assert lines == ([] if terminal else expected)


def test_an_interrupt_says_how_to_go_on(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from locant.compare import masked_lm

    build, calls = masked_lm.build_model, []

    def interrupt(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return build(*arguments, **keywords)

    monkeypatch.setattr(masked_lm, "build_model", interrupt)
    result = RUNNER.invoke(app, ["compare", str(recipe)])
    assert result.exit_code == 130
    assert "stopped: 1 finished runs are kept in runs/tiny; the same command goes on" in result.stderr


@pytest.mark.parametrize("command", [[], ["compare"], ["list"], ["describe"]])
def test_help_teaches(command: list[str]) -> None:
    result = RUNNER.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    if command:
        assert f"locant {command[0]}" in result.stdout and "Examples" in result.stdout


def test_help_starts_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom locant.cli import app\n"
        "assert CliRunner().invoke(app, ['compare', '--help']).exit_code == 0\n"
        "print([name for name in ('transformers', 'matplotlib', 'datasets', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr
