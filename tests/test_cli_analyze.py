"""`locant analyze`: its folder whole or not at all, its errors one sentence, whatever the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import locant.analysis.load as load
import locant.analysis.protocols as protocols
import locant.hf
from locant.cli import app
from locant.cli.progress import Bars
from locant.compare.folder import lock_folder
from tests.analysis_models import family
from tests.hf_models import LAYERS, ROWS, VOCABULARY, host, tokens

RUNNER = CliRunner()
QUICK = ("--only", "distance,table", "--length", "9")


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in tokens(1, count, seed=2)[0].tolist())


def save_tokenizer(folder: Path) -> None:
    known = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, **{f"w{i}": i for i in range(4, VOCABULARY)}}
    built = Tokenizer(models.WordLevel(known, unk_token="[MASK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    PreTrainedTokenizerFast(tokenizer_object=built, **names).save_pretrained(folder)


def save_model(model, folder: Path) -> str:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    broken = host("bert")
    with torch.no_grad():
        broken.encoder.layer[1].attention.self.key.weight[2, 3] = float("nan")
    attached = host("bert")
    locant.hf.attach(attached, "t5")
    built = {"bert": family("bert-mlm"), "llama": family("llama"), "broken": broken, "attached": attached}
    found = {name: save_model(model, root / name) for name, model in built.items()}
    (root / "text.txt").write_text(words(900), encoding="utf-8")
    (root / "short.txt").write_text(words(5), encoding="utf-8")
    (root / "empty").mkdir()
    return found | {name: str(root / name) for name in ("text.txt", "short.txt", "empty")}


def run(*arguments: str):
    return RUNNER.invoke(app, ["analyze", *arguments])


def test_everything_is_written_and_the_numbers_are_printed(saved, tmp_path):
    out = tmp_path / "out"
    result = run(saved["bert"], "--text", saved["text.txt"], "--length", "17", "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip().split("\n")[-1] == f"page: {(out / 'index.html').resolve()}"
    assert "R² of the position table, raw" in result.stdout and "random rows 0.4" in result.stdout
    assert [line.split(",")[0] for line in result.stderr.splitlines() if line.startswith("bert: ")] == [
        f"bert: {name}" for name in protocols.PROTOCOLS
    ]
    body = json.loads((out / "analysis.json").read_text(encoding="utf-8"))
    raw = body["translation_invariance"]["position_table"]["raw"]
    assert raw["n"] == ROWS and raw["r2"] != round(raw["r2"], 6) and raw["first"] is None
    assert body["environment"]["command"].startswith("locant") and body["model"]["name"] == "bert"
    assert {path.name for path in out.iterdir()} == {"analysis.json", "index.html", "tables", "figures", ".lock"}
    assert sorted(body["files"]) == sorted(
        str(path.relative_to(out))
        for path in out.rglob("*")
        if path.is_file() and path.name not in ("analysis.json", ".lock")
    )
    assert len(list(out.glob("figures/*.svg"))) == len(list(out.glob("figures/*.png"))) == 9
    assert (out / "tables" / "probe.csv").read_text(encoding="utf-8").startswith("model,layer,chance,distance")


def test_the_same_model_replaces_its_analysis_and_no_file_is_left_behind(saved, tmp_path):
    out = tmp_path / "out"
    first = run(saved["bert"], "--text", saved["text.txt"], *QUICK, "--out", str(out))
    assert first.exit_code == 0, first.stderr
    assert (out / "tables" / "mean_distance.csv").exists() and (out / "figures" / "attention_by_offset.png").exists()
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    again = run(saved["bert"], "--only", "table", "--text", saved["text.txt"], "--out", str(out), "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["distance"] is None and "page:" in again.stderr
    assert not (out / "tables" / "mean_distance.csv").exists() and (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in (out / "figures").glob("*.png")] == ["spectrum_of_table.png"]

    llama = (saved["llama"], "--only", "distance", "--text", saved["text.txt"], "--length", "9", "--out", str(out))
    other = run(*llama)
    assert other.exit_code == 2 and "holds the analysis of bert, not of llama" in other.stderr
    forced = run(*llama, "--overwrite")
    assert forced.exit_code == 0, forced.stderr
    assert json.loads((out / "analysis.json").read_text(encoding="utf-8"))["model"]["name"] == "llama"


def test_two_models_stand_side_by_side(saved, tmp_path):
    out = tmp_path / "both"
    arguments = ("--compare", saved["attached"], "--text", saved["text.txt"], *QUICK, "--out", str(out))
    result = run(saved["bert"], *arguments)
    assert result.exit_code == 0, result.stderr
    beside = json.loads((out / "compared.json").read_text(encoding="utf-8"))
    assert beside["model"]["positions"] == "t5 (attached)" and beside["table"] is None
    assert [one["name"] for one in beside["models"]] == ["bert", "attached"]
    assert "What bert and attached do with positions" in (out / "index.html").read_text(encoding="utf-8")
    assert (out / "figures" / "compared" / "attention_by_offset.svg").exists()
    table = (out / "tables" / "mean_distance.csv").read_text(encoding="utf-8")
    assert table.count("\nbert,") == table.count("\nattached,") == LAYERS * 3
    assert (out / "tables" / "companions.csv").read_text(encoding="utf-8").count("\nattached,0,pair bias,bias,") > 3
    assert "not run: table: " in result.stdout


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("bert", ["--only", "ditsance"], "unknown protocol 'ditsance'; did you mean 'distance'"),
        ("bert", ["--length", "2"], "length=2 has no offsets to compare"),
        ("bert", ["--length", "99"], f"length=99 but the model has {ROWS} positions"),
        ("bert", ["--text", "short.txt"], f"the text has 5 tokens but one window takes {ROWS - 2}"),
        ("bert", ["--text", "nowhere.txt"], "nowhere.txt"),
        ("bert", ["--compare", "no/such"], "'no/such' is no folder and not in the hub's cache"),
        ("broken", [], "encoder.layer.1.attention.self.key.weight"),
        ("llama", ["--only", "table,correlations"], "none of correlations, table can run on LlamaForCausalLM"),
        ("empty", [], "holds nothing, needed a config.json"),
        ("bert", ["--out", "/dev/null/out"], "analyze: cannot write '/dev/null/out'"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(saved, tmp_path, monkeypatch, model, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = [saved.get(one, one) for one in arguments]
    text = [] if "--text" in given else ["--text", saved["text.txt"]]
    out = [] if "--out" in given else ["--out", "out"]
    result = run(saved[model], *text, *out, *given)
    assert result.exit_code in (1, 2) and message in result.stderr, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(saved, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    for flag in ([], ["--overwrite"]):
        result = run(saved["bert"], "--text", saved["text.txt"], *QUICK, "--out", str(tmp_path), *flag)
        assert result.exit_code == 2 and "holds other files (thesis.tex)" in result.stderr
    (tmp_path / "analysis.json").write_text('{"made_by": "hand"}', encoding="utf-8")
    result = run(saved["bert"], "--text", saved["text.txt"], *QUICK, "--out", str(tmp_path))
    assert result.exit_code == 2 and "holds other files (analysis.json" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "analysis.json", ".lock"}


def test_a_folder_in_use_is_refused(saved, tmp_path):
    with lock_folder(tmp_path, "analyze"):
        result = run(saved["bert"], "--text", saved["text.txt"], *QUICK, "--out", str(tmp_path))
    assert result.exit_code == 2 and "is in use by another locant analyze" in result.stderr


def test_a_model_too_large_for_memory_says_what_to_do(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "free_memory", lambda: 1234)
    result = run(saved["bert"], "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "but 0.0 GB are free; analyze a smaller model" in result.stderr
    monkeypatch.setattr(load, "free_memory", lambda: None)
    monkeypatch.setattr(protocols, "free_memory", lambda: 50_000)
    result = run(saved["bert"], "--text", saved["text.txt"], "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "lower length to about" in result.stderr and not (tmp_path / "out").exists()


def test_a_full_disk_keeps_the_analysis_before(saved, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = (saved["bert"], "--only", "table", "--text", saved["text.txt"], "--out", str(out))
    assert run(*arguments).exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = run(*arguments, "--seed", "5")
    assert result.exit_code == 1 and "No space left on device; free space" in result.stderr
    assert before.keys() == {path for path in out.rglob("*") if path.is_file()}
    assert before[out / "analysis.json"] == (out / "analysis.json").read_bytes()


def test_the_window_is_what_all_models_serve(saved):
    loaded = [load.load_model(saved[name]) for name in ("bert", "llama")]
    assert [one.longest for one in loaded] == [ROWS, None]
    assert load.common_length(loaded) == ROWS and load.common_length(loaded[1:]) == 128
    assert loaded[0].name == "bert" and loaded[0].identity["parameters"] > 1000


def test_a_folder_without_a_tokenizer_is_named(saved, tmp_path):
    family("bert-mlm").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="bare' holds no tokenizer"):
        load.load_model(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="bare' does not load: "):
        load.load_model(tmp_path / "bare")


def test_bars_say_each_part_once(capsys):
    with Bars("m") as bars:
        for part in ("one", "two"):
            for done in (0, 1, 2, 2):
                bars(part, done, 2)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == ["m: one", "m: two"] and said[0].endswith(" s")
