"""Old checkpoints live again: relative positions of transformers v4, and the layouts of the authors' own code.

The numbers of each v4 class were made by transformers 4.56.2 (`tests/data/legacy_v4/make.py`), and those of set A come
with the golden files.
"""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import locant
import locant.hf
from locant.cli import app
from locant.hf import pretrained
from locant.hf.attachment import attachments
from locant.hf.legacy_families import VERSION4
from locant.hf.weights import read_weights, weight_files, weight_shapes
from tests.golden.cases import Case, find_cases
from tests.golden.modules import bias_of
from tests.hf_models import BERT_SIZES, HEADS, ROWS, attached, first, host
from tests.legacy_weights import drawn, mask, tokens

T.logging.disable_progress_bar()

DATA = Path(__file__).parent / "data" / "legacy_v4"
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "cases.json").read_text())["cases"]
OUTPUTS = load_file(DATA / "outputs.safetensors")
NO_POSITIONS = ("SplinterModel", "ChineseCLIPTextModel", "ClapTextModel", "AlignTextModel")
REFUSED = {
    "MegatronBertModel": r"no stack of layers .* megatron-bert \(MegatronBertSelfAttention of v5 computes attention on",
    "GitModel": r"no stack of layers .* of git \(GitSelfAttention of v5 computes attention on its own\)",
    "AltCLIPTextModel": r"holds nothing for \d+ weights of the base model \(roberta\.e",
}
SERVED = [key for key in CASES if key.split("/")[0] not in (*NO_POSITIONS, *REFUSED)]


def halves(keys: list[str]) -> list[Any]:
    """Every class once, the kinds in turn; the other half is for the slow tier, but for classes with quirks."""
    quick = [key for i, key in enumerate(keys) if i % 4 in (0, 3) or key.startswith(("Albert", "Esm", "BertGen"))]
    assert {key.split("/")[0] for key in quick} == {key.split("/")[0] for key in keys}
    return [pytest.param(key, marks=[] if key in quick else pytest.mark.slow) for key in keys]


def write(folder: Path, key: str = "BertModel/relative_key_query", **config: Any) -> Path:
    """The folder of a v4 checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CASES[key]["config"], **config}))
    save_file(drawn(CASES[key]["shapes"]), folder / "model.safetensors", {"format": "pt"})
    return folder


def class_for(folder: Path) -> str:
    config = T.AutoConfig.from_pretrained(folder)
    return "AutoModel" if type(config) in T.AutoModel._model_mapping else (config.architectures or ["none"])[0]


def verify(model: Any, key: str, atol: float = 1e-5) -> None:
    """The stored outputs of a case, all real tokens."""
    model = getattr(model, "text_model", model)
    seen, expected = mask(), OUTPUTS[f"{key}/hidden"]
    with torch.no_grad():
        got = first(model(tokens(43).masked_fill(seen == 0, 1), attention_mask=seen))
    rows = seen.bool() if expected.dim() == 3 else slice(None)
    torch.testing.assert_close(got[rows], expected[rows], atol=atol, rtol=1e-5)


# --- v4's numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", halves(SERVED))
def test_every_class_gives_the_numbers_of_version_4(key: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "v4", key)
    model = locant.hf.from_legacy(folder)
    assert not model.training and model.dtype == torch.float32
    assert not hasattr(model.config, "locant") and not hasattr(model.config, "_locant_version4")
    assert getattr(model.config, "position_embedding_type", "absolute") == "absolute"
    verify(model, key)


@pytest.mark.filterwarnings("ignore:from_legacy")
@pytest.mark.parametrize("name", NO_POSITIONS)
def test_classes_that_used_no_positions_get_none(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "v4", f"{name}/relative_key")
    with pytest.warns(UserWarning, match=rf"from_legacy: {name} .* took 'relative_key' in v4 .* encoding 'none'"):
        model = locant.hf.from_legacy(folder, class_for(folder))
    verify(model, f"{name}/relative_key")
    assert locant.hf.inspect_directory(folder).encodings == ("none",)


@pytest.mark.parametrize("name", REFUSED)
def test_classes_that_version_5_cannot_serve_are_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "v4", f"{name}/relative_key")
    with pytest.raises(ValueError, match=REFUSED[name]):
        locant.hf.from_legacy(folder, class_for(folder))


def test_every_row_of_the_table_is_run_or_named_above() -> None:
    """Rows of composite models, and of classes that v5 computes on its own, have no numbers here."""
    configs = [case["config"].get("text_config", case["config"]) for case in CASES.values()]
    run = {config["model_type"] for config in configs}
    without = {"blip_text_model", "bros", "canine", "flava_text_model", "layoutlm", "lilt"}
    assert run | without == set(VERSION4) and not run & without


def golden_cases(pytestconfig: Any) -> list[Case]:
    kinds = ("relative_key", "relative_key_query")
    cases = find_cases(pytestconfig.option.golden).cases
    return [c for c in cases if c.config.get("position_embedding_type") in kinds]


def test_set_a_comes_back_from_a_folder(golden_dir: Path, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    cases = golden_cases(pytestconfig)
    assert len(cases) >= 7, [case.id for case in cases]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**case.config, "architectures": [case.key[1]]}))
        save_file(case.weights, folder / "model.safetensors", {"format": "pt"})
        model = locant.hf.from_legacy(folder)
        inputs, atol = dict(case.inputs), dict(atol=1e-5, rtol=1e-5)
        ids = torch.arange(inputs["input_ids"].shape[1])[None]  # v4 counted over padding, too
        with torch.no_grad():
            got = first(model(**inputs, position_ids=ids, use_cache=False))
            prefill = first(model(**inputs, position_ids=ids, use_cache=model.config.is_decoder))
        want = case.outputs["last_hidden_state"]
        torch.testing.assert_close(got, want, **atol, msg=lambda text, case=case: f"{case.id}: {text}")
        torch.testing.assert_close(prefill, want, **atol)  # where v4's prefill with a cache was wrong
        if "last_hidden_state_token_by_token" not in case.outputs:
            continue
        cache, steps = None, []
        for step in range(inputs["input_ids"].shape[1]):
            with torch.no_grad():
                out = model(inputs["input_ids"][:, step : step + 1], cache=cache, use_cache=True)
            cache = out.cache
            steps.append(first(out))
        torch.testing.assert_close(torch.cat(steps, 1), case.outputs["last_hidden_state_token_by_token"], **atol)


def test_decoding_with_a_cache_is_the_full_pass(tmp_path: Path) -> None:
    """v4's prefill with a cache read the wrong rows, so `generate` went elsewhere."""
    folder = write(tmp_path / "v4", is_decoder=True)
    model = locant.hf.from_legacy(folder, "AutoModelForCausalLM")
    prompt = tokens(43, 2, 5)
    with torch.no_grad():
        full = model(prompt, use_cache=False).logits
        for chunk in (2, 3):
            cache, parts = None, []
            for start in range(0, 5, chunk):
                out = model(prompt[:, start : start + chunk], cache=cache, use_cache=True)
                cache = out.cache
                parts.append(out.logits)
            torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-5, rtol=1e-5)
        asked: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, pad_token_id=1)
        ours, slow = (model.generate(prompt, use_cache=use, **asked) for use in (True, False))
    assert torch.equal(ours, slow)


def test_distances_past_the_table_share_the_last_row(tmp_path: Path) -> None:
    """v4 ended in an IndexError one token past P; here they clip, as in Shaw's paper."""
    model = locant.hf.from_legacy(write(tmp_path / "v4"))
    encoding, ids = attached(model).layers()[0], tokens(43, 1, 40)
    assert encoding.table.shape == (1, 37, 8) and attached(model).spec.sizes["max_length"] == 19
    assert torch.isfinite(first(model(ids))).all()
    rows = encoding.rule.rows(locant.Positions.arange(40))
    assert int(rows[0, 39]) == int(rows[0, 18]) == 36 and int(rows[39, 0]) == 0


# --- files and heads --------------------------------------------------------------------------------------------------


def as_file(folder: Path, kind: str) -> None:
    """The same weights in another file, under other names, in shards."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    elif kind == "old":
        renamed = {
            "bert." + n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
            for n, t in weights.items()
        }
        renamed["bert.embeddings.position_ids"] = torch.arange(19)[None]
        torch.save(renamed, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        names = sorted(weights)
        parts = {f"{kind}-{i}": names[i::3] for i in range(3)}
        suffix, write_file = (".safetensors", save_file) if kind == "model" else (".bin", torch.save)
        for part, own in parts.items():
            write_file({n: weights[n] for n in own}, folder / f"{part}{suffix}")
        index = {"weight_map": {n: f"{part}{suffix}" for part, own in parts.items() for n in own}}
        (folder / f"{kind}{suffix}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["bin", "old", "model", "pytorch_model"])
def test_all_files_of_version_4_are_read(kind: str, tmp_path: Path) -> None:
    key = "BertModel/relative_key"
    folder = write(tmp_path / "v4", key)
    as_file(folder, kind)
    model, told = locant.hf.from_legacy(folder), locant.hf.inspect_directory(folder)
    verify(model, key)
    assert told.kind == "legacy" and "2 tables" in told.reason
    table = read_weights(weight_files(folder), lambda name: name.endswith("1.attention.self.distance_embedding.weight"))
    (stored,) = table.values()
    assert torch.equal(attached(model).layers()[1].table[0], stored.flip(0))


def test_heads_are_kept_and_new_ones_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "v4", "BertModel/relative_key")
    model = locant.hf.from_legacy(folder, "AutoModelForSequenceClassification", num_labels=5)
    assert type(model).__name__ == "BertForSequenceClassification" and model.classifier.out_features == 5
    told = caplog.text
    assert "classifier.weight" in told and "MISSING" in told
    assert "distance_embedding" not in told and "locant" not in told and "position_embeddings" not in told
    verify(model.bert, "BertModel/relative_key")
    weights = {"bert." + n: t for n, t in load_file(folder / "model.safetensors").items()}
    weights |= {"qa_outputs.weight": torch.full((2, 24), 0.5), "qa_outputs.bias": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    answers = locant.hf.from_legacy(folder, "AutoModelForQuestionAnswering")
    assert torch.equal(answers.qa_outputs.weight, weights["qa_outputs.weight"])
    verify(answers.bert, "BertModel/relative_key")


def test_the_stored_dtype_is_kept_and_another_is_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "v4", torch_dtype="float32")
    half = {n: t.half() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(half, folder / "model.safetensors", {"format": "pt"})
    model = locant.hf.from_legacy(folder)
    assert model.dtype == attached(model).layers()[0].table.dtype == torch.float16
    wide = locant.hf.from_legacy(folder, dtype=torch.float64, attn_implementation="eager")
    assert wide.dtype == attached(wide).layers()[0].table.dtype == torch.float64
    assert attached(wide).kernel == "eager"


def test_both_stacks_of_an_encoder_decoder_are_served(tmp_path: Path) -> None:
    encoder = write(tmp_path / "encoder", "BertModel/relative_key")
    decoder = write(tmp_path / "decoder", "BertModel/relative_key_query")
    joined = {"encoder." + n: t for n, t in load_file(encoder / "model.safetensors").items()}
    joined |= {"decoder.bert." + n: t for n, t in load_file(decoder / "model.safetensors").items()}
    config = {
        "model_type": "encoder-decoder",
        "encoder": CASES["BertModel/relative_key"]["config"],
        "decoder": {**CASES["BertModel/relative_key_query"]["config"], "is_decoder": True, "add_cross_attention": True},
    }
    folder = tmp_path / "both"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(joined, folder / "model.safetensors", {"format": "pt"})
    model = locant.hf.from_legacy(folder, "AutoModelForSeq2SeqLM")
    verify(model.encoder, "BertModel/relative_key")
    found = {path: there for path, _, there in attachments(model)}
    assert {path: there.stack.name for path, there in found.items()} == {"encoder": "shaw", "decoder.bert": "huang_m4"}
    stored = joined["decoder.bert.encoder.layer.1.attention.self.distance_embedding.weight"]
    assert torch.equal(found["decoder.bert"].layers()[1].table[0], stored.flip(0))
    assert not [n for n, m in model.named_modules() if "cross" in n and hasattr(m, "locant_index")]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_anything_else_is_refused_with_what_it_is(tmp_path: Path) -> None:
    plain = write(tmp_path / "absolute", position_embedding_type="absolute")
    with pytest.raises(ValueError, match=r"half-converted: 2 tables of transformers v4 .* does not ask for them"):
        locant.hf.from_legacy(plain)
    host("bert").save_pretrained(plain)
    with pytest.raises(ValueError, match=r"absolute is plain: no relative table of transformers v4"):
        locant.hf.from_legacy(plain)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    with pytest.raises(ValueError, match=r"is half-converted: .* relative_key of bert but no table is there"):
        locant.hf.from_legacy(plain)
    with pytest.raises(ValueError, match=r"has no model type 'ernie_m' \(v4 may have had it\)"):
        locant.hf.from_legacy(write(tmp_path / "gone", model_type="ernie_m"))
    with pytest.raises(ValueError, match=r"'relative_key_query' in model type 'luke', .* cannot be told what v4"):
        locant.hf.from_legacy(write(tmp_path / "unknown", model_type="luke"))
    config = {"model_type": "layoutlm", "position_embedding_type": "relative_key"}
    (tmp_path / "ignored").mkdir()
    (tmp_path / "ignored" / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, tmp_path / "ignored" / "model.safetensors")
    with pytest.raises(ValueError, match=r"is plain: relative_key of layoutlm, which v4 ignored"):
        locant.hf.from_legacy(tmp_path / "ignored")
    with pytest.raises(ValueError, match=r"has no model class 'AutoModelForDreaming'"):
        locant.hf.from_legacy(write(tmp_path / "v4"), "AutoModelForDreaming")
    with pytest.raises(ValueError, match=r"AutoModelForSpeechSeq2Seq has no class for model type 'bert'"):
        locant.hf.from_legacy(tmp_path / "v4", "AutoModelForSpeechSeq2Seq")
    with pytest.raises(ValueError, match=r"config= was given, but it is read from .*v4"):
        locant.hf.from_legacy(tmp_path / "v4", config=T.BertConfig())
    with pytest.raises(ValueError, match=r"v4 is a folder, for which revision has no meaning"):
        locant.hf.from_legacy(tmp_path / "v4", revision="main")
    with pytest.raises(FileNotFoundError, match=r"no/such is no folder here and could not be fetched from the Hub"):
        locant.hf.from_legacy("no/such", local_files_only=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty/config\.json does not exist"):
        locant.hf.from_legacy(tmp_path / "empty")


def test_tables_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "v4")
    weights = load_file(folder / "model.safetensors")
    last = "encoder.layer.1.attention.self.distance_embedding.weight"

    def change(**tensors: Tensor | None) -> None:
        changed = {**weights, **{n.replace("__", "."): t for n, t in tensors.items()}}
        save_file({n: t for n, t in changed.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})

    change(**{last.replace(".", "__"): None})
    with pytest.raises(
        ValueError, match=r"holds 1 tables but not one for each of the 2 layers of BertModel: .*layer\.1"
    ):
        locant.hf.from_legacy(folder)
    change(**{last.replace(".", "__"): weights[last][1:-1]})
    with pytest.raises(
        ValueError, match=r"has shape \(35, 8\) but max_position_embeddings=19 with heads of 8 needs \(37"
    ):
        locant.hf.from_legacy(folder)
    change(**{last.replace(".1.", ".2.").replace(".", "__"): weights[last].clone()})
    with pytest.raises(ValueError, match=r"1 tables .*layer\.2\.attention.* belong to no layer of BertModel"):
        locant.hf.from_legacy(folder)
    change()
    write(folder, max_position_embeddings=24)
    with pytest.raises(ValueError, match=r"has shape \(37, 8\) but max_position_embeddings=24 .* needs \(47, 8\)"):
        locant.hf.from_legacy(folder)


class Evil:
    def __reduce__(self) -> Any:
        return (Path("/nowhere/at/all").touch, ())


@pytest.mark.parametrize("part", ["layer.1.intermediate", "word_embeddings", "LayerNorm"])
def test_a_checkpoint_that_lacks_a_part_of_the_base_model_is_refused(part: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "v4")
    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if part not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    lost = len(state) - len(kept)
    assert lost
    for auto_class in ("AutoModel", "AutoModelForMaskedLM"):
        with pytest.raises(ValueError, match=rf"holds nothing for {lost} weights of the base model \(.*{part}"):
            locant.hf.from_legacy(folder, auto_class)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_table_that_is_not_finite_is_named(number: float, tmp_path: Path) -> None:
    folder = write(tmp_path / "v4")
    state = load_file(folder / "model.safetensors")
    name = next(n for n in state if n.endswith("1.attention.self.distance_embedding.weight"))
    state[name][3, 2] = number
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} of .* holds NaN or infinite numbers"):
        locant.hf.from_legacy(folder)


def test_files_that_are_broken_or_want_to_run_code_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "v4")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is cut off or no safetensors file"):
        locant.hf.from_legacy(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"v4 holds none of model\.safetensors"):
        locant.hf.from_legacy(folder)
    file = folder / "pytorch_model.bin"
    torch.save({"x": Evil()}, file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is refused, since .* wants to run code"):
        locant.hf.from_legacy(folder)
    file.write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is refused, since .* wants to run code"):
        locant.hf.from_legacy(folder)
    torch.save({"x": torch.zeros(50)}, file)
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is cut off or no torch file"):
        locant.hf.from_legacy(folder)
    torch.save({"x": 3}, file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds a dict of other things than tensors"):
        weight_shapes([file])
    file.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names 1 shards but model-1\.safetensors is missing"):
        weight_files(folder)
    index.write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=r"index\.json is cut off or no index of shards"):
        weight_files(folder)


def test_a_plain_load_is_told_what_is_lost(tmp_path: Path) -> None:
    folder = write(tmp_path / "v4")
    with pytest.warns(UserWarning, match=r"its 2 tables \(encoder\.layer\.0.*use locant\.hf\.from_legacy\('.*v4'\)"):
        T.AutoModel.from_pretrained(folder)


# --- locant convert-legacy --------------------------------------------------------------------------------------------


def test_tables_of_a_class_of_version_5_are_no_sign_of_version_4(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = T.Wav2Vec2BertConfig(
        **sizes, intermediate_size=24, feature_projection_input_dim=16, position_embeddings_type="relative_key"
    )
    T.Wav2Vec2BertModel(config).save_pretrained(tmp_path)
    assert any("distance_embedding" in name for name in load_file(tmp_path / "model.safetensors"))
    T.AutoModel.from_pretrained(tmp_path)
    assert not [w for w in recwarn if "transformers v4" in str(w.message)]
    assert locant.hf.inspect_directory(tmp_path).kind == "plain"


def test_a_converted_folder_loads_as_any_other(tmp_path: Path) -> None:
    source = write(tmp_path / "v4", "AlbertModel/relative_key_query")
    (source / "vocab.txt").write_text("a\nb\n")
    (source / "README.md").write_text("# Mine\n")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["convert-legacy", str(source), "--out", str(tmp_path / "deep" / "v5"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["encodings"] == ["huang_m4"]
    folder = tmp_path / "deep" / "v5"
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert names == {"1_Pooling/config.json", "README.md", "config.json", "model.safetensors", "vocab.txt"}
    model = T.AutoModel.from_pretrained(folder)
    verify(model, "AlbertModel/relative_key_query")
    assert attached(model).spec.options == {"max_length": 19, "scaled": False}
    assert "# Mine" in (folder / "README.md").read_text() and "`huang_m4`" in (folder / "README.md").read_text()
    config = json.loads((folder / "config.json").read_text())
    assert "position_embedding_type" not in config and locant.hf.inspect_directory(folder).kind == "attached"
    with pytest.raises(ValueError, match=r"v5 is attached: config\.json records huang_m4"):
        locant.hf.from_legacy(folder)


def test_conversion_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "v4")
    out = tmp_path / "v5"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    run = lambda: CliRunner().invoke(app, ["convert-legacy", str(source), "--out", str(out)])  # noqa: E731
    done = run()
    assert done.exit_code == 2 and "v5 is there already; give a new or an empty folder" in done.output
    (out / "thesis.tex").unlink()

    def crash(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(pretrained, "write_card", crash)
    assert (
        run().exit_code == 1 and sorted(p.name for p in tmp_path.iterdir()) == ["v4", "v5"] and not any(out.iterdir())
    )
    monkeypatch.undo()
    done = run()
    assert done.exit_code == 0 and "huang_m4 attached; import locant.hf before from_pretrained" in done.output
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    classifier = locant.hf.convert_legacy(source, tmp_path / "head", "AutoModelForTokenClassification")
    assert json.loads((classifier / "config.json").read_text())["architectures"] == ["BertForTokenClassification"]


def test_conversion_into_the_source_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "v4")
    before = sorted(tmp_path.rglob("*"))
    for out in (source / "v5", source / "deep" / "v5", source / ".." / "v4" / "v5"):
        done = CliRunner().invoke(app, ["convert-legacy", str(source), "--out", str(out)])
        assert done.exit_code == 2 and "v4, whose files are copied there; give a folder elsewhere" in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "v4")
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in tensors if "intermediate.dense.weight" in n)
    rows, width = tensors[name].shape
    save_file({**tensors, name: tensors[name][:-5].contiguous()}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"has shape \({rows - 5}, {width}\) but config\.json asks for \({rows}, {width}\)"
    ):
        locant.hf.from_legacy(source)
    done = CliRunner().invoke(app, ["convert-legacy", str(source), "--out", str(tmp_path / "v5")])
    assert done.exit_code == 2 and "intermediate.dense.weight" in done.output and not (tmp_path / "v5").exists()
    assert locant.hf.from_legacy(source, ignore_mismatched_sizes=True).config.hidden_size == width


# --- layouts of the authors' own code ---------------------------------------------------------------------------------


def golden_b(golden_dir: Path, kind: str) -> list[Case]:
    cases = [case for case in find_cases(golden_dir).cases if case.key == ("B", kind)]
    assert cases, f"no golden case of kind {kind}"
    return cases


def tupe_state(case: Case, prefix: str = "") -> dict[str, Tensor]:
    stored = load_file(case.folder / case.meta["params"])
    return {n.replace("param.", prefix, 1): t.double() for n, t in stored.items() if n.startswith("param.")}


def test_a_fairseq_checkpoint_of_tupe_is_a_bert_model(golden_dir: Path, tmp_path: Path) -> None:
    cases = golden_b(golden_dir, "tupe")
    lengths = sorted({case.meta["n"] for case in cases})
    for case in [case for case in cases if case.meta["n"] == lengths[len(lengths) // 2]]:
        if case.meta["pre_norm"]:
            with pytest.raises(ValueError, match="it is a pre-norm encoder, while BERT's layers are post-norm"):
                locant.hf.from_public(tupe_state(case), num_heads=case.meta["heads"])
            continue
        stored = {"model": tupe_state(case, "decoder.sentence_encoder."), "best_loss": 1.5}
        stored["args"] = argparse.Namespace(encoder_attention_heads=case.meta["heads"])
        torch.save(stored, tmp_path / "checkpoint_best.pt")
        model = locant.hf.from_public(tmp_path / "checkpoint_best.pt")
        ids = case.tensors["tokens"].long()
        real = ids != case.meta["pad_id"]
        with torch.no_grad():
            found = model(ids, attention_mask=real.long(), output_hidden_states=True).hidden_states
        for index, states in enumerate(found):
            want, atol = case.tensors[f"hidden.{index}"], case.meta["atol"][f"hidden.{index}"]
            torch.testing.assert_close(states[real], want[real], atol=atol, rtol=0, check_dtype=False)
        assert attached(model).stack.name == ("tupe_r" if case.meta["rel_pos"] else "tupe_a")


def test_a_tupe_model_saves_like_any_other(golden_dir: Path, tmp_path: Path) -> None:
    case = next(case for case in golden_b(golden_dir, "tupe") if case.meta["rel_pos"] and not case.meta["pre_norm"])
    state = tupe_state(case) | {"lm_head.bias": torch.zeros(40)}
    with pytest.warns(UserWarning, match=r"1 tensors have no place in a BertModel: lm_head\.bias"):
        model = locant.hf.from_public(state)  # TUPE-R's buckets tell the heads
    model.save_pretrained(tmp_path)
    ids = tokens(40, 2, 9)
    loaded = T.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert torch.equal(first(loaded(ids)), first(model(ids)))


def test_tisa_fills_one_set_for_all_layers_or_one_for_each(golden_dir: Path) -> None:
    case = next(case for case in golden_b(golden_dir, "tisa") if case.meta["kernels"] > 1)
    sizes = dict(vocab_size=43, hidden_size=32, num_attention_heads=case.meta["heads"], num_hidden_layers=3)
    fresh = lambda: T.BertModel(T.BertConfig(**sizes, intermediate_size=37)).double().eval()  # noqa: E731
    one = {n.replace("param.", "bert.position_scorer."): t for n, t in case.tensors.items() if n.startswith("param.")}
    assert len(one) == 3
    model = locant.hf.load_public(fresh(), one, "tisa")
    assert len(attached(model).encodings) == 1
    n = case.meta["n"]
    matrix = bias_of(attached(model).layers()[2], locant.Positions.arange(n))
    torch.testing.assert_close(matrix, case.tensors["matrix_public"], check_dtype=False)
    each = {
        n.replace("param.", f"layer.{i}.attention."): t + i / 7
        for i in (0, 2, 1)
        for n, t in case.tensors.items()
        if n.startswith("param.")
    }
    model = locant.hf.load_public(fresh(), each, "tisa", keep_absolute=True)
    for i, layer in enumerate(attached(model).layers()):
        assert torch.equal(layer.amplitude, (case.tensors["param.kernel_amplitudes"] + i / 7).double())
    assert attached(model).spec.keep_absolute


def test_public_layouts_that_do_not_fit_leave_the_model_as_it_was(golden_dir: Path, tmp_path: Path) -> None:
    case = golden_b(golden_dir, "tisa")[0]
    one = case.part("param.")
    model = host("bert")

    def refused(message: str, state: Any, layout: str = "tisa", model: nn.Module = model, **options: Any) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            locant.hf.load_public(model, state, layout, **options)
        assert not attachments(model)

    refused(r"gives 'amplitude' the shape \(1, 4\) but BertModel needs \(1, 3\)", one)
    refused(r"unknown layout 'tiza'; choose one of 'tupe', 'tisa'", one, "tiza")
    refused(r"no tensor is called 'pos\.weight', .*'tupe' checkpoint is known", one, "tupe")
    refused(r"no tensor is called 'kernel_amplitudes'.*holds nothing", {})
    refused(r"lacks kernel_sharpness", {n: t for n, t in one.items() if "sharpness" not in n})
    three = {f"{i}.{n}": t[:, :HEADS] for i in range(3) for n, t in one.items()}
    refused(r"holds 3 sets of parameters but BertModel takes 2", three)
    refused(r"nowhere\.pt does not exist", tmp_path / "nowhere.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    refused(r"the checkpoint holds a list; give tensors by name", tmp_path / "list.pt")
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    refused(r"evil\.pt is refused, since .* wants to run code", tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"the layout 'tisa' holds no encoder, only position parameters"):
        locant.hf.from_public(one, "tisa")
    tupe = next(case for case in golden_b(golden_dir, "tupe") if not case.meta["rel_pos"] and not case.meta["pre_norm"])
    state = tupe_state(tupe)
    with pytest.raises(ValueError, match=r"neither the tensors nor stored arguments of this 'tupe' checkpoint"):
        locant.hf.from_public(state)
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.output\.dense\.bias"):
        locant.hf.from_public({n: t for n, t in state.items() if n != "layers.1.fc2.bias"}, num_heads=4)
    positions = {n: t for n, t in state.items() if n.startswith("pos")}
    with pytest.raises(ValueError, match=r"holds 0 tensors of an encoder but neither words nor layers"):
        locant.hf.from_public(positions, num_heads=4)
    save_file({n: t.contiguous() for n, t in positions.items()}, tmp_path / "positions.safetensors")
    sizes = dict(BERT_SIZES, hidden_size=32, num_attention_heads=4)
    model = locant.hf.load_public(T.BertModel(T.BertConfig(**sizes)), tmp_path / "positions.safetensors", "tupe")
    assert attached(model).layers()[0].max_length == tupe.meta["max_seq_len"] != ROWS
