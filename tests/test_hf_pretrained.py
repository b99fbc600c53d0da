"""save_pretrained and from_pretrained of attached models: the record in config.json, the card, what is refused."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

import locant
import locant.hf
from locant.encodings.tisa import Tisa
from locant.hf.attachment import attachments
from locant.hf.pretrained import nearest
from tests.hf_models import BERT_SIZES, HEADS, HOSTS, ROWS, T5_SIZES, attached, first, host, noisy, remark, stir, tokens
from tests.names import home

T.logging.disable_progress_bar()


def saved(tmp_path: Path, name: str = "shaw", family: str = "bert", **options: Any) -> tuple[Any, Path]:
    model = noisy(host(family), name, **options)
    model.save_pretrained(tmp_path / "saved")
    return model, tmp_path / "saved"


def rewrite(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# --- there and back ---------------------------------------------------------------------------------------------------


QUICK = ("none", "absolute", "huang_m4", "rope", "t5", "tupe_r", "deberta")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in locant.names()]
)
def test_from_pretrained_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    (model, folder), ids = saved(tmp_path, name, home(name)), tokens(2, 7)
    loaded = type(model).from_pretrained(folder)
    assert not loaded.training and not any(t.is_meta for t in loaded.state_dict().values())
    assert torch.equal(first(loaded(ids)), first(model(ids)))
    assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.filterwarnings("ignore:.*no-op.*")
def test_weights_put_aside_on_disk_leave_the_encoding_where_it_runs(tmp_path: Path) -> None:
    (model, folder), ids = saved(tmp_path, "huang_m4+tisa"), tokens(2, 7)
    for where in ({"": "disk"}, {"embeddings": "cpu", "encoder": "disk", "pooler": "disk"}):
        loaded = T.AutoModel.from_pretrained(folder, device_map=where, offload_folder=str(tmp_path / "aside"))
        assert not any(tensor.is_meta for tensor in attached(loaded).parameters())
        assert torch.equal(first(loaded(ids)), first(model(ids)))


@pytest.mark.parametrize("family", HOSTS)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    (model, folder), ids = saved(tmp_path, "absolute+shaw", family, clip=3, max_length=ROWS + 4), tokens(2, 7)
    loaded, told = type(model).from_pretrained(folder, output_loading_info=True)
    assert torch.equal(first(loaded(ids)), first(model(ids)))
    assert not told["missing_keys"] and not told["unexpected_keys"]


def test_choices_and_lengths_come_back(tmp_path: Path) -> None:
    model = noisy(host("bert"), "t5", keep_absolute=True, share_layers=False, backend="reference")
    model.train()(tokens(2, 9))
    model.eval()(tokens(2, 11))
    model.save_pretrained(tmp_path)
    loaded = T.AutoModel.from_pretrained(tmp_path)
    spec = attached(loaded).spec
    assert (spec.keep_absolute, spec.share_layers, spec.backend) == (True, False, "reference")
    assert attached(loaded).longest_trained == 9
    assert torch.equal(first(loaded(tokens(2, 7))), first(model(tokens(2, 7))))


def test_the_record_lives_in_the_file_and_nowhere_else(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    record = json.loads((folder / "config.json").read_text())["locant"]
    locant.hf.save(model, tmp_path / "position")
    assert record == json.loads((tmp_path / "position" / "locant.json").read_text())
    loaded = T.AutoModel.from_pretrained(folder)
    assert not hasattr(model.config, "locant") and not hasattr(loaded.config, "locant")
    locant.hf.detach(loaded).save_pretrained(tmp_path / "plain")
    assert "locant" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert not attachments(T.AutoModel.from_pretrained(tmp_path / "plain"))


def test_another_head_and_a_part_of_the_model(tmp_path: Path) -> None:
    ids = tokens(2, 7)
    torch.manual_seed(0)
    model = noisy(stir(T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)), 1).eval(), "huang_m4")
    model.save_pretrained(tmp_path / "bert")
    base = T.AutoModel.from_pretrained(tmp_path / "bert")
    head = T.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")
    for other in (base, head.bert):
        assert torch.equal(first(other(ids)), first(model.bert(ids)))
    torch.manual_seed(0)
    seq2seq = noisy(stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval(), "t5")
    seq2seq.save_pretrained(tmp_path / "t5")
    encoder = T.T5EncoderModel.from_pretrained(tmp_path / "t5")
    assert torch.equal(first(encoder(ids)), first(seq2seq.encoder(ids)))
    whole = T.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    given = {"input_ids": ids, "decoder_input_ids": tokens(2, 4)}
    assert torch.equal(first(whole(**given)), first(seq2seq(**given)))


def test_the_encoding_of_a_decoder_does_not_land_on_an_encoder(tmp_path: Path) -> None:
    model = T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES))
    noisy(model.decoder, "huang_m4")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is for T5Stack at decoder but T5EncoderModel has T5Stack at encoder"):
        T.T5EncoderModel.from_pretrained(tmp_path)
    loaded = T.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert [path for path, _, _ in attachments(loaded)] == ["decoder"]


def test_stacks_with_encodings_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval()
    noisy(model.encoder, "tisa", kernels=3)
    noisy(model.decoder, "shaw", clip=4)
    model.save_pretrained(tmp_path / "both")
    given = {"input_ids": tokens(2, 7), "decoder_input_ids": tokens(2, 4)}
    loaded = T.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "both")
    assert [there.stack.name for _, _, there in attachments(loaded)] == ["tisa", "shaw"]
    assert torch.equal(first(loaded(**given)), first(model(**given)))
    folder = locant.hf.save(model, tmp_path / "position")
    torch.manual_seed(0)
    other = locant.hf.load(stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval(), folder)
    assert torch.equal(first(other(**given)), first(model(**given)))
    locant.hf.detach(model.decoder)
    model.save_pretrained(tmp_path / "one")
    loaded = T.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "one")
    assert [path for path, _, _ in attachments(loaded)] == ["encoder"]
    assert torch.equal(first(loaded(**given)), first(model(**given)))


def test_shards_dtype_and_state_dicts(tmp_path: Path) -> None:
    model, ids = noisy(host("bert"), "huang_m4"), tokens(2, 7)
    model.save_pretrained(tmp_path / "shards", max_shard_size="9kB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert torch.equal(first(T.AutoModel.from_pretrained(tmp_path / "shards")(ids)), first(model(ids)))
    half = model.to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    loaded = T.AutoModel.from_pretrained(tmp_path / "half")
    assert {t.dtype for t in loaded.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    assert torch.equal(first(loaded(ids)), first(half(ids)))
    config = T.AutoConfig.from_pretrained(tmp_path / "half")
    given = T.BertModel.from_pretrained(None, config=config, state_dict=half.state_dict())
    assert torch.equal(first(given(ids)), first(half(ids)))
    assert hasattr(config, "locant"), "the caller's config was changed"


def test_detaching_a_loaded_model_gives_a_whole_host(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    loaded = locant.hf.detach(T.AutoModel.from_pretrained(folder))
    table = loaded.embeddings.position_embeddings.weight.detach()
    assert table.shape == (ROWS, BERT_SIZES["hidden_size"]) and 0 < float(table.std()) < 0.1  # drawn, not trained
    assert torch.isfinite(first(loaded(tokens(2, 7)))).all()


def test_constants_are_built_on_a_real_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers fills buffers that are not stored with whatever is in memory: NaN, under test."""
    built, terms = Tisa.__init__, Tisa.terms

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.register_buffer("constant", torch.full((3,), 2.5), persistent=False)

    def scaled(self: Any, *args: Any) -> Any:
        assert torch.equal(self.constant, torch.full((3,), 2.5)), self.constant
        return terms(self, *args)

    monkeypatch.setattr(Tisa, "__init__", init)
    monkeypatch.setattr(Tisa, "terms", scaled)
    model = noisy(host("bert"), Tisa(num_heads=HEADS))
    model.locant.spec = type(model.locant.spec)("tisa", {}, True, False, "auto", model.locant.spec.sizes)
    model.save_pretrained(tmp_path)
    loaded = T.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(loaded(tokens(2, 7))), first(model(tokens(2, 7))))


def test_a_trainer_checkpoint_is_a_folder_like_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = noisy(stir(T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)), 1), "shaw", clip=3)
    rows = [{"input_ids": tokens(1, 6, seed=i)[0], "labels": tokens(1, 6, seed=i)[0]} for i in range(4)]
    settings = T.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    T.Trainer(model, settings, train_dataset=rows).train()
    loaded = T.AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert attached(loaded).longest_trained == 6
    assert torch.equal(first(loaded(tokens(2, 7))), first(model.eval()(tokens(2, 7))))


def test_without_locant_the_host_is_plain_and_says_so(tmp_path: Path) -> None:
    """Nothing can be done there: hence the record, the card and the doctor."""
    _, folder = saved(tmp_path)
    code = f"import transformers; transformers.AutoModel.from_pretrained({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = done.stdout + done.stderr
    assert "UNEXPECTED" in told and "locant.encodings" in told and "position_embeddings" in told


# --- what is refused --------------------------------------------------------------------------------------------------


def test_half_converted_folders_are_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    intact, weights = (folder / "config.json").read_text(), load_file(folder / "model.safetensors")
    rewrite(folder, lambda config: config.pop("locant"))
    with pytest.raises(
        ValueError, match=r"saved holds 2 tensors of an attached encoding \(locant\.encodings\.0\.table"
    ):
        T.AutoModel.from_pretrained(folder)
    (folder / "config.json").write_text(intact)
    remark(folder, {name: t for name, t in weights.items() if "encodings.1" not in name})
    with pytest.raises(ValueError, match=r"has shape None for 'encodings\.1\.table' but 'shaw' needs \(1, 57, 8\)"):
        T.AutoModel.from_pretrained(folder)
    short = {name: t[:, 1:] if "encodings.1" in name else t for name, t in weights.items()}
    remark(folder, short)
    with pytest.raises(ValueError, match=r"has shape \(1, 56, 8\) for 'encodings\.1\.table' but 'shaw' needs"):
        T.AutoModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r.update(format=7), r"has format 7 \(written by locant 0\..*reads format 1"),
        (
            lambda r: r.update(locant="3.1.0"),
            r"was written by locant 3\.1\.0, which this one \(0\..*install locant 3\.x",
        ),
        (
            lambda r: r.pop("stacks"),
            r"has no stacks, needed a list with one entry for each stack .* it is cut off or was",
        ),
        (lambda r: r["stacks"][0].pop("sizes"), r"has no stacks\[0\]\.sizes, needed num_heads, .* as numbers above 0"),
        (lambda r: r["stacks"][0].update(encoding="shawl"), "unknown encoding 'shawl'; did you mean 'shaw'"),
        (lambda r: r["stacks"][0].update(num_layers=5), "num_layers=5 but the base model has num_layers=2"),
        (lambda r: r["stacks"][0].update({"class": "GPT2Model"}), "is for GPT2Model but BertModel has BertModel"),
    ],
)
def test_records_that_cannot_be_read_are_refused(change: Any, what: str, tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    rewrite(folder, lambda config: change(config["locant"]))
    remark(folder)
    with pytest.raises(ValueError, match=what):
        T.AutoModel.from_pretrained(folder)


def test_another_major_version_is_refused_by_load(tmp_path: Path) -> None:
    folder = locant.hf.save(noisy(host("bert"), "shaw"), tmp_path / "saved")
    record = json.loads((folder / "locant.json").read_text())
    (folder / "locant.json").write_text(json.dumps({**record, "locant": "12.0.1"}))
    base = host("bert")
    with pytest.raises(ValueError, match=r"locant\.json was written by locant 12\.0\.1, which this one"):
        locant.hf.load(base, folder)
    assert not attachments(base)


def test_an_object_saves_and_says_on_loading_why_it_cannot_come_back(tmp_path: Path) -> None:
    model = host("bert")
    locant.hf.attach(model, locant.load("t5", num_heads=HEADS))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be attached again: save: 't5' was attached as an object"):
        T.AutoModel.from_pretrained(tmp_path)
    assert locant.hf.inspect_directory(tmp_path).kind == "half-converted"


def test_a_record_of_another_save_is_refused(tmp_path: Path) -> None:
    """Names and shapes agree; only the marks tell."""
    _, folder = saved(tmp_path, "huang_m4")
    noisy(host("bert"), "shaw").save_pretrained(tmp_path / "other")
    (folder / "config.json").write_bytes((tmp_path / "other" / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"model\.safetensors of .*saved was written by another save \(mark [0-9a-f]{8}"
    ):
        T.AutoModel.from_pretrained(folder)
    found = locant.hf.inspect_directory(folder)
    assert found.kind == "half-converted" and "was written by another save" in found.reason
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not say which save it belongs to, needed the mark [0-9a-f]{8}"):
        T.AutoModel.from_pretrained(folder)
    assert "does not say which save" in locant.hf.inspect_directory(folder).reason


def test_weights_of_an_encoding_without_tensors_need_their_record(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "alibi")
    rewrite(folder, lambda config: config.pop("locant"))
    with pytest.raises(
        ValueError, match=r"model\.safetensors of .* was saved with an encoding attached but its config"
    ):
        T.AutoModel.from_pretrained(folder)
    assert locant.hf.inspect_directory(folder).kind == "half-converted"


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "9kB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("second", ["alibi", "shaw", "huang_m4"])
def test_a_save_that_fails_leaves_the_older_one(
    second: str, shards: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = saved(tmp_path, "huang_m4")
    want, before = first(model(tokens(2, 7))), {file.name: file.read_bytes() for file in folder.iterdir()}
    written = vars(T.modeling_utils)["safe_save_file"]

    def crash(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not shards or any("layer.1" in name for name in tensors):
            raise OSError("no space left")
        written(tensors, *args, **kwargs)

    monkeypatch.setattr(T.modeling_utils, "safe_save_file", crash)
    other = noisy(host("bert"), second, seed=8)
    with pytest.raises(OSError, match="no space left"):
        other.save_pretrained(folder, **shards)
    assert not hasattr(other.config, "locant")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert torch.equal(first(T.AutoModel.from_pretrained(folder)(tokens(2, 7))), want)


def test_a_save_that_is_killed_while_files_take_their_places_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = saved(tmp_path, "huang_m4")
    moved, done, last = Path.replace, [], [0]

    def killed(self: Path, target: Any) -> Any:
        if len(done) == last[0]:
            raise KeyboardInterrupt
        done.append(self.name)
        return moved(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    for last[0] in range(4):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            stir(model).save_pretrained(folder, max_shard_size="9kB")
        assert not (folder / "config.json").exists()
        with pytest.raises((OSError, ValueError), match=r"config\.json|Unrecognized model"):
            T.AutoModel.from_pretrained(folder)
    last[0] = -1
    model.save_pretrained(folder)
    names = {file.name for file in folder.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}, "shards of older saves would be in the way"
    assert done[-1] == "config.json"
    assert torch.equal(first(T.AutoModel.from_pretrained(folder)(tokens(2, 7))), first(model(tokens(2, 7))))


def test_sharded_weights_do_not_lie_behind_an_older_file(tmp_path: Path) -> None:
    """transformers reads model.safetensors first, and leaves it where shards are saved."""
    model, folder = saved(tmp_path, "huang_m4")
    stir(model).save_pretrained(folder, max_shard_size="9kB")
    assert torch.equal(first(T.AutoModel.from_pretrained(folder)(tokens(2, 7))), first(model(tokens(2, 7))))


def test_what_transformers_would_load_without_the_encoding_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="distributed_checkpoint=True came for a model with an encoding attached"):
        noisy(host("bert"), "shaw").save_pretrained(tmp_path / "there", distributed_checkpoint=True)
    assert not (tmp_path / "there").exists()


ANYTHING: tuple[Any, ...] = (None, True, -3, 2.5, "rubbish", [], [1], {}, {"a": 1})


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key of a record, and of what is in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from spots(inner, (*path, key))


def test_any_rubbish_at_any_key_of_a_record_is_one_clear_error(tmp_path: Path) -> None:
    """Or it changes nothing. What a key may hold is no rubbish; there, only the mark tells that it was changed."""
    model, folder = saved(tmp_path, "huang_m4", clip=5)
    ids, want = tokens(2, 7), first(model(tokens(2, 7)))
    position = locant.hf.save(model, tmp_path / "position")
    record = json.loads((position / "locant.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    refused = 0
    for path in [(), *spots(record)]:
        if path and path[-1] == "host":
            continue  # told for the reader, never read
        for rubbish in ANYTHING:
            broken: Any = json.loads(json.dumps({"": record}))
            inner = broken
            for key in ("", *path)[:-1]:
                inner = inner[key]
            inner[("", *path)[-1]] = rubbish
            (position / "locant.json").write_text(json.dumps(broken[""]))
            (folder / "config.json").write_text(json.dumps({**config, "locant": broken[""]}))
            remark(folder)
            remark(position)
            choices = ("keep_absolute", "keep_scale", "share_layers")
            if path and path[-1] in choices and (rubbish is True or rubbish is None):
                continue
            for load in (
                lambda: T.AutoModel.from_pretrained(folder),
                lambda: locant.hf.load(host("bert"), position),
            ):
                try:
                    loaded = load()
                except ValueError as error:
                    assert re.match(r"(from_pretrained|load): \S", str(error)), (path, rubbish, str(error))
                    refused += 1
                else:
                    assert torch.equal(first(loaded(ids)), want), (path, rubbish)
            for look in (lambda: locant.hf.inspect_directory(folder), lambda: locant.hf.inspect_directory(position)):
                try:
                    look()
                except ValueError as error:
                    assert str(error).startswith("inspect_directory: "), (path, rubbish, str(error))
    assert refused > 300


def test_plain_models_are_left_alone(tmp_path: Path) -> None:
    model = host("bert")
    model.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = T.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(first(loaded(tokens(2, 7))), first(model(tokens(2, 7))))


def test_saving_a_plain_model_touches_neither_the_readme_nor_the_config(tmp_path: Path) -> None:
    model = host("bert")
    model.config.locant = {"office": 7}
    theirs = "Mod\u00e8le\r\n<!-- locant: position encoding -->\r\n".encode("latin-1")
    (tmp_path / "README.md").write_bytes(theirs)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == theirs
    assert model.config.locant == {"office": 7}
    assert json.loads((tmp_path / "config.json").read_text())["locant"] == {"office": 7}
    noisy(host("bert"), "alibi").save_pretrained(tmp_path / "alibi")
    T.BertModel(T.AutoConfig.from_pretrained(tmp_path / "alibi")).save_pretrained(tmp_path / "plain")
    assert "locant" not in json.loads((tmp_path / "plain" / "config.json").read_text()), "a record of another model"


def test_transformers_is_wrapped_once() -> None:
    before = [vars(PreTrainedModel)[name] for name in ("save_pretrained", "from_pretrained")]
    locant.hf.pretrained.install()
    assert before == [vars(PreTrainedModel)[name] for name in ("save_pretrained", "from_pretrained")]


@pytest.mark.parametrize(
    ("path", "candidates", "found"),
    [
        ("bert", ["bert"], "bert"),
        ("bert", [""], ""),
        ("", ["bert"], "bert"),
        ("model.encoder", ["encoder", "decoder"], "encoder"),
        ("decoder.bert", ["encoder.bert", "decoder.bert"], "decoder.bert"),
        ("bert", ["encoder.bert", "decoder.bert"], None),
        ("bert", [], None),
    ],
)
def test_stacks_are_matched_by_how_their_paths_end(path: str, candidates: list[str], found: str | None) -> None:
    assert nearest(path, candidates) == found


# --- the model card ---------------------------------------------------------------------------------------------------


def test_the_card_names_encoding_equation_and_both_lengths(tmp_path: Path) -> None:
    model = noisy(host("bert"), "huang_m4", clip=5)
    card = locant.hf.model_card(model)
    assert "`huang_m4`" in card and "2009.13658" in card and "(q_i + a_r).(k_j + a_r)" in card
    assert "| not recorded | 29 |" in card and "switched off: absolute (embeddings.position_embeddings)" in card
    model.train()(tokens(2, 13))
    assert "| 0 to 1 | huang_m4 | 13 | 29 | farther offsets share the last row |" in locant.hf.model_card(model)
    with pytest.raises(ValueError, match="model_card: BertModel has nothing attached"):
        locant.hf.model_card(host("bert"))


def test_layers_and_stacks_have_rows_of_their_own() -> None:
    card = locant.hf.model_card(noisy(host("bert"), ["shaw", "rope"]))
    assert "| 0 | shaw | not recorded | 29 |" in card and "| 1 | rope | not recorded | no table |" in card
    assert card.count("### ") == 2


def test_the_card_keeps_what_others_wrote(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    readme = folder / "README.md"
    readme.write_text("---\nlicense: mit\n---\n# Mine\n" + readme.read_text() + "\nAfterwards.\n")
    model.save_pretrained(folder)
    text = readme.read_text()
    assert text.startswith("---\nlicense: mit") and text.count("## Position encoding") == 1 and "Afterwards." in text
    readme.write_bytes("Mod\u00e8le\n".encode("latin-1"))
    model.save_pretrained(folder)
    assert readme.read_bytes().startswith(b"Mod\xe8le\n\n<!-- locant") and b"`shaw`" in readme.read_bytes()


def test_a_push_uploads_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers puts the Hub's own card over it right before the upload."""
    model = noisy(host("bert"), "shaw")
    up: dict[str, str] = {}

    class Hub:
        repo_id = "me/mine"

        def create_repo(self, *args: Any, **kwargs: Any) -> Hub:
            return self

        def create_commit(self, *args: Any, operations: Any, **kwargs: Any) -> None:
            up.update({op.path_in_repo: Path(op.path_or_fileobj).read_text("latin-1") for op in operations})

    class Card:
        def save(self, file: str) -> None:
            Path(file).write_text("---\nlibrary_name: transformers\n---\n# The Hub's\n")

    monkeypatch.setattr(T.utils.hub, "hf_api", Hub)
    monkeypatch.setattr(T.modeling_utils, "hf_api", Hub)
    for module in (T.utils.hub, T.modeling_utils):
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *a, **k: Card(), raising=False)
    model.push_to_hub("me/mine")
    assert up["README.md"].startswith("---\nlibrary_name") and "`shaw`" in up["README.md"]
    assert json.loads(up["config.json"])["locant"]["stacks"][0]["encoding"] == "shaw"


# --- what a folder is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alibi", "shape+sinusoidal", "cape+sinusoidal", "randomized+rope", "shape+shaw"])
def test_a_folder_is_whole_whatever_its_encoding_saves(name: str, tmp_path: Path) -> None:
    """Nothing, the draws of a transform alone, or parameters."""
    model = host("bert")
    locant.hf.attach(model, name)
    model.save_pretrained(tmp_path)
    found = locant.hf.inspect_directory(tmp_path)
    assert (found.kind, found.encodings) == ("attached", (name,)), found.reason


def test_folders_are_told_apart(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    found = locant.hf.inspect_directory(folder)
    assert (found.kind, found.encodings) == ("attached", ("shaw",)) and "import locant.hf" in found.advice
    host("bert").save_pretrained(tmp_path / "plain")
    assert locant.hf.inspect_directory(tmp_path / "plain").kind == "plain"
    only = locant.hf.save(noisy(host("bert"), ["shaw", "rope"]), tmp_path / "only")
    assert locant.hf.inspect_directory(only).encodings == ("shaw", "rope")
    assert locant.hf.inspect_directory(only).kind == "encoding"
    (only / "locant.safetensors").unlink()
    assert locant.hf.inspect_directory(only).kind == "half-converted"
    noisy(host("bert"), "rope").save_pretrained(tmp_path / "rope")
    assert locant.hf.inspect_directory(tmp_path / "rope").kind == "attached", "rope has no tensors to miss"
    weights = {n: t for n, t in load_file(folder / "model.safetensors").items() if "locant" not in n}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "no tensor of an encoding is there" in locant.hf.inspect_directory(folder).reason
    rewrite(folder, lambda config: config.update(position_embedding_type="relative_key"))
    assert "beside position_embedding_type 'relative_key'" in locant.hf.inspect_directory(folder).reason


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds notes\.txt, needed a config\.json or locant\.json"):
        locant.hf.inspect_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"')
    with pytest.raises(ValueError, match=r"config\.json is cut off or not JSON"):
        locant.hf.inspect_directory(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json holds a list"):
        locant.hf.inspect_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FileNotFoundError, match=r"holds none of model\.safetensors"):
        locant.hf.inspect_directory(tmp_path)


def test_describe_shows_what_a_folder_records(tmp_path: Path) -> None:
    from locant.cli.facts import model_text

    _, folder = saved(tmp_path, "huang_m4", clip=5)
    text = model_text(folder)
    assert "attached, backend auto" in text and "0      huang_m4" in text
    assert isinstance(locant.hf.pretrained.attach_as_recorded(host("bert")), nn.Module)


def test_an_attribute_of_that_name_which_is_no_record_is_left_alone(tmp_path: Path) -> None:
    for mine in ({"office": 7}, "huang", [1], 3):
        model = host("bert")
        model.config.locant = mine
        model.save_pretrained(tmp_path)
        loaded = T.AutoModel.from_pretrained(tmp_path)
        assert loaded.config.locant == mine and torch.equal(first(loaded(tokens(2, 7))), first(model(tokens(2, 7))))
        assert locant.hf.inspect_directory(tmp_path).kind == "plain"
        assert not attachments(locant.hf.pretrained.attach_as_recorded(loaded))
    locant.hf.attach(model, "alibi").save_pretrained(tmp_path)
    assert model.config.locant == 3
    assert attached(T.AutoModel.from_pretrained(tmp_path)).stack.name == "alibi"


def test_a_plain_file_that_is_cut_off_is_for_transformers_to_tell(tmp_path: Path) -> None:
    host("bert").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SafetensorError, match="incomplete metadata"):
        T.AutoModel.from_pretrained(tmp_path)


def test_line_ends_of_a_readme_stay(tmp_path: Path) -> None:
    model = noisy(host("bert"), "shaw")
    (tmp_path / "README.md").write_bytes(b"# Mine\r\n\r\nLine\r\n")
    for _ in range(2):
        model.save_pretrained(tmp_path)
        text = (tmp_path / "README.md").read_bytes()
        assert text.startswith(b"# Mine\r\n\r\nLine\r\n\r\n<!-- locant") and text.count(b"## Position encoding") == 1
        assert text.count(b"\n") == text.count(b"\r\n")


def test_a_push_while_saving_takes_the_name_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the new folder it is written to first."""
    asked: list[str] = []

    class Hub:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            asked.append(repo_id)
            raise OSError("no network")

    monkeypatch.setattr(T.modeling_utils, "hf_api", Hub)
    with pytest.raises(OSError, match="no network"):
        noisy(host("bert"), "shaw").save_pretrained(tmp_path / "my-model", push_to_hub=True)
    assert asked == ["my-model"] and not (tmp_path / "my-model").exists()
