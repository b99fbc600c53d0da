"""`locant analyze`: its folder whole or not at all, its errors one sentence, whatever the model is."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import numpy
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
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.recipe import read_recipe
from locant.hf.course import kept
from locant.pretrain.run import pretrain
from locant.training.folder import lock_folder
from tests import pretrain_runs
from tests.analysis_models import family
from tests.compare_runs import table, write_text
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a comparison of two encodings, its runs kept at three steps, and one of a run without."""
    root = tmp_path_factory.mktemp("trained")
    sizes = {"steps": 4, "checkpoints": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCANT_CACHE", str(root / "cache"))
        text = write_text(root / "text.txt")
        for name, more in (("kept", sizes), ("bare", {"checkpoints": 0})):
            recipe = read_recipe(table(text, encodings=["absolute", "huang_m4"], train=more))
            compare(recipe, root / name, executor=InlineExecutor)
    return root


def test_a_run_with_checkpoints_is_analyzed_over_training(trained, tmp_path):
    runs, out = trained / "kept" / "runs", tmp_path / "out"
    asked = ("--only", "translation_invariance,patterns", "--text", str(trained / "text.txt"), "--out", str(out))
    result = run(str(runs / "absolute-seed1"), "--compare", str(runs / "huang_m4-seed1"), *asked)
    assert result.exit_code == 0, result.stderr
    told = (out / "tables" / "numbers.csv").read_text(encoding="utf-8")
    assert 'over_training,"R² at step 4, table, raw",' in told and "Spearman with the loss" in told
    assert "absolute-seed1: over_training" in result.stderr
    first, second = (
        json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in ("analysis", "compared")
    )
    course = first["over_training"]
    assert [point["step"] for point in course["checkpoints"]] == [0, 2, 4] and course["length"] == 9
    kept_losses = [one.loss for one, _ in kept(runs / "absolute-seed1")]
    assert [point["loss"] for point in course["checkpoints"]] == kept_losses
    last = course["checkpoints"][-1]
    assert last["r2"] == first["translation_invariance"]["position_table"]["raw"]["r2"]
    assert sum(last["attention"].values()) == 2 == sum(last["patterns"].values())
    assert set(course["with_loss"]) == {"r2", "r2_off_diagonal", "r2_layernorm", "heads_r2", "words_r2"}
    assert set(second["over_training"]["with_loss"]) == {"words_r2"}, "Method 4 acts through queries and keys alone"
    assert (out / "figures" / "invariance_over_training.svg").exists()
    rows = (out / "tables" / "over_training.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [
        [f"{name}-seed1", str(step)] for name in ("absolute", "huang_m4") for step in (0, 2, 4)
    ]
    assert 'id="figure-course"' in (out / "index.html").read_text(encoding="utf-8")


def test_a_pretraining_run_is_analyzed_under_its_own_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = pretrain_runs.write_text(tmp_path / "words.jsonl")
    stages = [{"length": 9, "steps": 1}, {"length": 17, "steps": 1}]
    for name, encoding, kept_models in (("tisa-run", "tisa", 2), ("table-run", "absolute", 0)):
        host = {"family": "albert", "embedding_dim": 11}
        train = {"checkpoints": kept_models}
        recipe = pretrain_runs.recipe(text, encoding=encoding, host=host, train=train, curriculum=stages)
        pretrain(recipe, Path("runs") / name)
        result = run(str(Path("runs") / name), "--text", str(text), "--only", "translation_invariance,patterns")
        assert result.exit_code == 0, result.stderr
        found = json.loads((Path("analysis") / name / "analysis.json").read_text(encoding="utf-8"))
        assert (found["model"]["name"], found["model"]["family"]) == (name, "albert")
        assert found["length"] == (17 if encoding == "absolute" else 128)
        course = found["over_training"]
        assert (course is None) == (not kept_models)
        if course is not None:
            assert [point["step"] for point in course["checkpoints"]] == [0, 1, 2]
    assert found["translation_invariance"]["position_table"]["raw"]["n"] == 17


def test_folders_of_comparisons_say_what_to_give(trained):
    for folder, message in (
        ("kept", "is a whole comparison; give one of its runs: runs/absolute-seed1, runs/huang_m4-seed1"),
        ("bare", "was trained without checkpoints; train it with train.checkpoints=10"),
        ("bare/runs/absolute-seed1", "was trained without checkpoints"),
    ):
        result = run(str(trained / folder))
        assert result.exit_code == 2 and message in result.stderr, result.stderr


def write_pairs(folder: Path, rows: int = 4) -> str:
    folder.mkdir(exist_ok=True)
    for name in ("island", "number"):
        said = [
            json.dumps({"sentence_good": words(5 + at), "sentence_bad": words(4 + at), "UID": name})
            for at in range(rows)
        ]
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(said) + "\n")
    return str(folder)


def test_pairs_are_scored_at_every_shift(saved, tmp_path):
    pairs, out = write_pairs(tmp_path / "pairs"), tmp_path / "out"
    asked = ("--only", "phase_shift", "--text", saved["text.txt"], "--length", "9", "--out", str(out))
    result = run(saved["bert"], *asked, "--pairs", pairs, "--pairs-each", "3", "--compare", saved["llama"])
    assert result.exit_code == 0, result.stderr
    first, second = (
        json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["phase_shift"]
        for name in ("analysis", "compared")
    )
    assert first["acceptability"]["pairs"] == 6 and set(first["acceptability"]["per_paradigm"]) == {"island", "number"}
    assert len(first["acceptability"]["accuracy"]) == len(first["shifts"]) > 2
    assert second["relative"] and second["control"] and set(second["acceptability"]["delta"]) == {0.0}
    numbers = (out / "tables" / "numbers.csv").read_text(encoding="utf-8")
    assert numbers.count("largest loss of acceptability under a shift") == 2
    assert "accuracy" in (out / "tables" / "scores_by_shift.csv").read_text(encoding="utf-8").splitlines()[0]


def test_pairs_that_cannot_be_scored_are_refused(saved, tmp_path):
    pairs = write_pairs(tmp_path / "pairs")
    (tmp_path / "broken.jsonl").write_text('{"sentence_good": "w5"}\n', encoding="utf-8")
    for model, given, message in (
        (
            "attached",
            ["--pairs", pairs],
            "'attached' cannot tell which of 8 pairs is better: scoring: BertModel has no",
        ),
        ("bert", ["--pairs", pairs, "--only", "table"], "got 8 pairs but only=['table'] leaves out phase_shift"),
        ("bert", ["--pairs", saved["empty"]], "holds no .jsonl or .jsonl.gz file"),
        ("bert", ["--pairs", pairs, "--pairs-each", "0"], "got 0 pairs of each file; give 1 or more"),
        ("bert", ["--pairs", str(tmp_path / "broken.jsonl")], "line 1 of "),
    ):
        result = run(saved[model], "--text", saved["text.txt"], "--length", "9", "--out", str(tmp_path / "out"), *given)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
        assert not (tmp_path / "out").exists()


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
    assert (out / "tables" / "companions.csv").read_text(encoding="utf-8").count("\nattached,0,relative bias,bias,") > 3
    assert "not run: table: " in result.stdout


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("bert", ["--only", "ditsance"], "unknown protocol 'ditsance'; did you mean 'distance'"),
        ("bert", ["--only", ","], "only=[] leaves nothing to do; choose from translation_invariance"),
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


def write_gguf(path: Path) -> str:
    """A llama of one layer as llama.cpp keeps it, with a byte-level tokenizer of a few words."""
    import gguf

    generator, width, heads, hidden, letters = numpy.random.default_rng(0), 16, 2, 24, "abcdefghijklmnopqrstuvwxyzĠ"
    known = ["<|endoftext|>", *letters, *(f"Ġ{letter}" for letter in letters[:-1])]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(known))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(known)
    writer.add_token_types([3] + [1] * (len(known) - 1))
    writer.add_token_merges([f"Ġ {letter}" for letter in letters[:-1]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    square, rows = (width, width), {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    shapes = {"token_embd": (len(known), width), "output": (len(known), width)}
    shapes |= {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": shape for name, shape in rows.items()}
    shapes |= {name: (width,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.3, shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_gguf_file_is_analyzed_and_its_rotations_are_relative(tmp_path):
    file, out = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog did not " * 9, encoding="utf-8")
    asked = ("--text", str(tmp_path / "text.txt"), "--length", "12", "--out", str(out))
    result = run(file, "--only", "phase_shift,distance", *asked)
    assert result.exit_code == 0, result.stderr
    body = json.loads((out / "analysis.json").read_text(encoding="utf-8"))
    assert body["model"]["name"] == "tiny" and body["model"]["positions"] == "rotations of queries and keys"
    assert body["phase_shift"]["relative"] and body["phase_shift"]["control"]
    assert body["phase_shift"]["perplexity"]["kind"] == "causal"
    folder = run(str(tmp_path), *asked)
    assert folder.exit_code == 2 and "holds tiny.gguf; give the path of the file" in folder.stderr


def test_gguf_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match=r"broken\.gguf' does not load: "):
        load.load_model(broken)
    file = write_gguf(tmp_path / "tiny.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(load, "free_memory", lambda: 1234)
        with pytest.raises(ValueError, match=r"tiny\.gguf' take 0\.0 GB but 0\.0 GB are free; analyze a smaller model"):
            load.load_model(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"tiny\.gguf' needs the package gguf to be read; pip install 'locant.gguf.'"):
        load.load_model(file)


def test_a_folder_without_a_tokenizer_is_named(saved, tmp_path):
    family("bert-mlm").save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="bare' holds no tokenizer"):
        load.load_model(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="bare' does not load: "):
        load.load_model(tmp_path / "bare")


def test_weights_that_are_cut_off_are_named(saved, tmp_path):
    shutil.copytree(saved["bert"], tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = run(str(tmp_path / "cut"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "model.safetensors is cut off or no safetensors file" in result.stderr


def test_bars_say_each_part_once(capsys):
    with Bars("m") as bars:
        for part in ("one", "two"):
            for done in (0, 1, 2, 2):
                bars(part, done, 2)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == ["m: one", "m: two"] and said[0].endswith(" s")
