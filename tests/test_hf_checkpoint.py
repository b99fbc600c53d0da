"""locant.hf.save and load: only what was added, whole or not at all, and clear errors for what does not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

import locant
import locant.hf
from locant.hf import checkpoint
from locant.hf.attachment import attachments
from tests.hf_models import BERT_SIZES, HEADS, HOSTS, ROWS, T5_SIZES, attached, first, host, noisy, remark, stir, tokens
from tests.names import home


@pytest.mark.parametrize("name", locant.names())
def test_a_loaded_encoding_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    model, ids = noisy(host(home(name)), name), tokens(2, 7)
    want = first(model(ids))
    folder = locant.hf.save(model, tmp_path / "deep" / "saved")
    files = {file.name for file in folder.iterdir()}
    assert files == {"locant.json", "locant.safetensors"}
    before = torch.get_rng_state()
    other = locant.hf.load(host(home(name)), folder)
    assert torch.equal(first(other(ids)), want)
    torch.set_rng_state(before)
    assert sum(t.numel() for t in load_file(folder / "locant.safetensors").values()) == sum(
        p.numel() for p in attached(model).parameters()
    )


@pytest.mark.parametrize("family", HOSTS)
def test_every_family_is_saved_and_loaded(family: str, tmp_path: Path) -> None:
    model, ids = noisy(host(family), "absolute+shaw", clip=3, max_length=ROWS + 4), tokens(2, 7)
    other = locant.hf.load(host(family), locant.hf.save(model, tmp_path / "saved"))
    assert torch.equal(first(other(ids)), first(model(ids)))


def test_choices_are_kept(tmp_path: Path) -> None:
    model, ids = noisy(host("bert"), "t5", keep_absolute=True, share_layers=False, backend="reference"), tokens(2, 7)
    other = locant.hf.load(host("bert"), locant.hf.save(model, tmp_path / "saved"))
    assert torch.equal(first(other(ids)), first(model(ids)))
    spec = attached(other).spec
    assert (spec.keep_absolute, spec.share_layers, spec.backend) == (True, False, "reference")
    record = json.loads((tmp_path / "saved" / "locant.json").read_text())
    assert record["locant"] == locant.__version__ and record["stacks"][0]["encoding"] == "t5"


def test_layers_of_different_kinds_and_two_stacks(tmp_path: Path) -> None:
    model, ids = noisy(host("bert"), ["shaw", "tisa"]), tokens(2, 7)
    other = locant.hf.load(host("bert"), locant.hf.save(model, tmp_path / "one"))
    assert torch.equal(first(other(ids)), first(model(ids)))

    def seq2seq() -> Any:
        torch.manual_seed(0)
        return stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval()

    model = noisy(seq2seq(), "t5")
    other = locant.hf.load(seq2seq(), locant.hf.save(model, tmp_path / "two"))
    given = {"input_ids": ids, "decoder_input_ids": tokens(2, 4)}
    assert torch.equal(first(other(**given)), first(model(**given)))


def test_another_head_may_be_on_top(tmp_path: Path) -> None:
    model = noisy(host("bert"), "shaw")
    other = T.BertForSequenceClassification(T.BertConfig(**BERT_SIZES)).eval()
    other.bert.load_state_dict(host("bert").state_dict())
    locant.hf.load(other, locant.hf.save(model, tmp_path / "saved"))
    ids = tokens(2, 7)
    assert torch.allclose(first(other.bert(ids)), first(model(ids)), atol=1e-6)


def test_saving_again_replaces_and_a_crash_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, ids = noisy(host("bert"), "shaw"), tmp_path / "saved", tokens(1, 5)
    locant.hf.save(model, folder)
    stir(attached(model), seed=8)
    locant.hf.save(model, folder)
    want = first(model(ids))
    assert torch.equal(first(locant.hf.load(host("bert"), folder)(ids)), want)

    def crash(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    stir(attached(model), seed=9)
    monkeypatch.setattr(checkpoint, "save_file", crash)
    with pytest.raises(OSError, match="no space left"):
        locant.hf.save(model, folder)
    assert torch.equal(first(locant.hf.load(host("bert"), folder)(ids)), want)
    assert os.listdir(tmp_path) == ["saved"]


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model = host("bert")
    with pytest.raises(ValueError, match="save: BertModel has nothing attached"):
        locant.hf.save(model, tmp_path / "saved")
    locant.hf.attach(model, locant.load("t5", num_heads=HEADS))
    with pytest.raises(ValueError, match="'t5' was attached as an object, which cannot be rebuilt from a name"):
        locant.hf.save(model, tmp_path / "saved")
    locant.hf.detach(model)
    locant.hf.attach(model, "t5")
    attached(model).spec = dataclasses.replace(attached(model).spec, options={"std": 0.5j})
    with pytest.raises(ValueError, match=r"options \{'std': 0.5j\} cannot be written as JSON"):
        locant.hf.save(model, tmp_path / "saved")
    locant.hf.detach(model)
    locant.hf.attach(model, "t5")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"mine exists and was not written by locant\.hf\.save"):
        locant.hf.save(model, tmp_path / "mine")
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == ["thesis.tex"]


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"num_hidden_layers": 3}, "num_layers=2 but the base model has num_layers=3"),
        ({"num_attention_heads": 4}, "num_heads=3 but the base model has num_heads=4"),
        ({"hidden_size": 30}, "head_dim=8 but the base model has head_dim=10"),
    ],
)
def test_a_base_model_of_other_sizes_is_refused(sizes: dict[str, int], what: str, tmp_path: Path) -> None:
    folder = locant.hf.save(noisy(host("bert"), "shaw"), tmp_path / "saved")
    base = host("bert", **sizes)
    with pytest.raises(ValueError, match=what):
        locant.hf.load(base, folder)
    assert not attachments(base)


def test_a_base_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = locant.hf.save(noisy(host("bert"), "shaw"), tmp_path / "saved")
    with pytest.raises(ValueError, match="class=BertModel but the base model has class=ElectraModel"):
        locant.hf.load(host("electra"), folder)
    seq2seq = T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES))
    with pytest.raises(ValueError, match="is for 1 stacks of layers but T5ForConditionalGeneration has 2"):
        locant.hf.load(seq2seq, folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder, base = locant.hf.save(noisy(host("bert"), "shaw"), tmp_path / "saved"), host("bert")
    record, tensors = folder / "locant.json", folder / "locant.safetensors"
    text, data = record.read_text(), tensors.read_bytes()
    with pytest.raises(FileNotFoundError, match=r"nowhere/locant\.json does not exist"):
        locant.hf.load(base, tmp_path / "nowhere")
    tensors.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"locant\.safetensors is cut off or no safetensors file"):
        locant.hf.load(base, folder)
    tensors.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match=r"locant\.safetensors is cut off or no safetensors file"):
        locant.hf.load(base, folder)
    tensors.unlink()
    with pytest.raises(FileNotFoundError, match=r"locant\.safetensors does not exist"):
        locant.hf.load(base, folder)
    tensors.write_bytes(data)
    for broken, what in (
        (text[: len(text) // 2], r"locant\.json is cut off or not JSON"),
        ("[1, 2]", r"locant\.json has as a whole \[1, 2\], needed an object; it is cut off"),
        ("{}", r"locant\.json has no format, needed the number of a format"),
        (text.replace('"num_layers"', '"layers"'), r"has no stacks\[0\]\.num_layers, needed a count of layers"),
    ):
        record.write_text(broken)
        with pytest.raises(ValueError, match=what):
            locant.hf.load(base, folder)
    record.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match=r"has format 7 \(written by locant 0.*reads format 1"):
        locant.hf.load(base, folder)
    record.write_text(text.replace('"shaw"', '"shawl"'))
    remark(folder)
    with pytest.raises(ValueError, match="unknown encoding 'shawl'; did you mean 'shaw'"):
        locant.hf.load(base, folder)
    record.write_text(text)
    other = locant.hf.save(noisy(host("bert"), "shaw", clip=4), tmp_path / "other")
    shutil.copy(other / "locant.safetensors", tensors)
    with pytest.raises(ValueError, match=r"locant\.safetensors was written by another save \(mark [0-9a-f]{8}\.\.\.\)"):
        locant.hf.load(base, folder)
    save_file(load_file(tensors), tensors)
    with pytest.raises(ValueError, match=r"locant\.safetensors does not say which save it belongs to"):
        locant.hf.load(base, folder)
    remark(folder)
    with pytest.raises(ValueError, match=r"has shape \(1, 9, 8\) for 'encodings.0.table' .* needs \(1, 57, 8\)"):
        locant.hf.load(base, folder)
    assert not attachments(base) and torch.equal(first(base(tokens(1, 5))), first(host("bert")(tokens(1, 5))))


def test_the_folder_that_one_is_in_and_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = noisy(host("bert"), "shaw"), tokens(2, 7)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for directory in (".", "deep/er", "."):
        stir(attached(model), 5)
        locant.hf.save(model, directory)
        assert torch.equal(first(locant.hf.load(host("bert"), directory)(ids)), first(model(ids)))
        shutil.rmtree("deep", ignore_errors=True)
    assert sorted(os.listdir(tmp_path / "here")) == ["locant.json", "locant.safetensors"]
    assert os.listdir(tmp_path) == ["here"]


def test_a_save_that_is_killed_on_the_way_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = noisy(host("bert"), "shaw")
    folder = locant.hf.save(model, tmp_path / "saved")
    moved, done, last = Path.replace, [], [0]

    def killed(self: Path, target: Any) -> Any:
        if len(done) == last[0]:
            raise KeyboardInterrupt
        done.append(self.name)
        return moved(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    for last[0] in range(2):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            locant.hf.save(model, folder)
        with pytest.raises(FileNotFoundError, match=r"locant\.json does not exist"):
            locant.hf.load(host("bert"), folder)
    last[0] = -1
    locant.hf.save(model, folder)
    assert torch.equal(first(locant.hf.load(host("bert"), folder)(tokens(2, 7))), first(model(tokens(2, 7))))
