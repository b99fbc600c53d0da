from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import locant
from locant.cli import app

RUNNER = CliRunner()


def test_list_has_a_line_for_each_encoding() -> None:
    result = RUNNER.invoke(app, ["list"])
    assert result.exit_code == 0
    first_words = [line.split()[0] for line in result.stdout.splitlines() if line]
    assert set(locant.names()) <= set(first_words)


def test_a_narrow_terminal_gets_all_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from locant.cli.facts import all_facts
    from locant.cli.list_encodings import print_table

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    rows = all_facts()
    print_table(rows)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert all(f"{' '.join(row['summary'].split())} ({row['paper']['source']})" in words for row in rows)


def test_list_as_json_is_complete() -> None:
    rows = json.loads(RUNNER.invoke(app, ["list", "--json"]).stdout)
    assert [row["name"] for row in rows] == locant.names() + locant.names("transforms")
    tisa = next(row for row in rows if row["name"] == "tisa")
    assert tisa["parameters"]["amplitude"] == [5, 12]
    assert tisa["num_parameters"] == 3 * 5 * 12
    assert tisa["properties"]["shift_invariant"] is True
    assert tisa["options"]["kernels"]["default"] == 5
    assert "gaussian" in tisa["description"].lower()


@pytest.mark.parametrize("name", locant.names())
def test_describe_shows_the_equation_and_the_options(name: str) -> None:
    result = RUNNER.invoke(app, ["describe", name])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{name} (")
    for heading in ("acts in", "shift-invariant", "beyond the range", "neutral at", "options", "parameters:"):
        assert heading in result.stdout


def test_describe_knows_compositions() -> None:
    parts = json.loads(RUNNER.invoke(app, ["describe", "absolute + t5", "--json"]).stdout)
    assert [part["name"] for part in parts] == ["absolute", "t5"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hunag_m4", "unknown encoding 'hunag_m4'; did you mean 'huang_m4'"),
        ("./no/model", "'./no/model' is no folder on this machine"),
    ],
)
def test_an_unknown_name_is_one_sentence(name: str, message: str) -> None:
    result = RUNNER.invoke(app, ["describe", name])
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_broken_locant_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "locant.json").write_text("{")
    result = RUNNER.invoke(app, ["describe", str(tmp_path)])
    assert result.exit_code == 2 and "locant.json' is not JSON (Expecting property name" in result.stderr


def test_a_folder_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tisa").mkdir()
    monkeypatch.chdir(tmp_path)
    assert RUNNER.invoke(app, ["describe", "tisa"]).stdout.startswith("tisa (Tisa)")
    assert "'tisa' holds nothing, needed a config.json" in RUNNER.invoke(app, ["describe", "./tisa"]).stderr


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    result = RUNNER.invoke(app, ["describe", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds notes.txt, needed a config.json" in result.stderr


def test_a_saved_model_is_described_without_its_weights(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    from locant import hf

    config = BertConfig(
        vocab_size=30,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=7,
        max_position_embeddings=19,
    )
    model = BertModel(config)
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").unlink()
    result = RUNNER.invoke(app, ["describe", str(tmp_path / "plain")])
    assert result.exit_code == 0, result.stderr
    assert "absolute" in result.stdout and "19" in result.stdout and "nothing attached" in result.stdout
    hf.save(hf.attach(model, "shaw", clip=3), tmp_path / "added")
    body = json.loads(RUNNER.invoke(app, ["describe", str(tmp_path / "added"), "--json"]).stdout)
    assert body["attached"]["host"] == "BertModel"
    assert "shaw" in RUNNER.invoke(app, ["describe", str(tmp_path / "added")]).stdout
