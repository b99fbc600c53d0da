"""The task `translation`: pairs, alignment, an encoder-decoder, BLEU by length of the source."""

from __future__ import annotations

import dataclasses
import gzip
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import locant.hf
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.objective import find_objective
from locant.compare.recipe import read_recipe
from locant.compare.tables import to_text
from locant.data import alignment, read_pairs
from locant.data.alignment import mean_places, target_places
from locant.hf import course
from locant.report.page import render
from locant.training.causal import IGNORED
from locant.training.hosts import ModelSize
from locant.training.mlm import EncodingChoice
from locant.training.translation import (
    TranslationCollate,
    Translations,
    build_marian,
    decoder_choice,
    make_objective,
    target_logits,
    translate,
)
from tests.compare_tables import make_table

WORDS = [f"w{n}" for n in range(12)]
SIZE = ModelSize(num_layers=1, model_dim=8, num_heads=2, dropout=0.0)
PAD, END = 0, 3
NAN = math.nan


def write_pairs(folder: Path, name: str, count: int, seed: int, longest: int = 6) -> tuple[str, str]:
    """A language that says every word as another one, in reverse order."""
    draw = random.Random(seed)
    sources = [draw.choices(WORDS, k=draw.randint(2, longest)) for _ in range(count)]
    targets = [[word.replace("w", "t") for word in reversed(sentence)] for sentence in sources]
    paths = folder / f"{name}.src.gz", folder / f"{name}.tgt"
    folder.mkdir(parents=True, exist_ok=True)
    paths[0].write_bytes(gzip.compress("".join(f"{' '.join(one)}\n" for one in sources).encode()))
    paths[1].write_text("".join(f"{' '.join(one)}\n" for one in targets))
    return str(paths[0]), str(paths[1])


def recipe_table(folder: Path, **changes: Any) -> dict[str, Any]:
    train, test = write_pairs(folder, "train", 60, 1), write_pairs(folder, "test", 16, 2, longest=9)
    files = dict(zip(("source", "target", "test_source", "test_target"), (*train, *test), strict=True))
    body: dict[str, Any] = {
        "task": "translation",
        "encodings": ["sinusoidal", "dpe"],
        "seeds": [1],
        "pairs": {**files, "max_train_tokens": 5, "buckets": [4, 7, 9]},
        "tokenizer": {"vocab_size": 60, "lowercase": False, "min_frequency": 1},
        "model": {"num_layers": 1, "model_dim": 8, "num_heads": 2, "dropout": 0.0},
        "train": {"steps": 3, "batch_size": 4, "device": "cpu", "curve_points": 3},
        "measure": {"rounds": 0},
    }
    for key, value in changes.items():
        body[key] = {**body.get(key, {}), **value} if isinstance(value, dict) else value
    return body


# --- pairs and alignment ----------------------------------------------------------------------------------------------


def test_pairs_are_read_line_by_line_and_blank_ones_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n two \nthree\n")
    (tmp_path / "b.txt").write_text("eins\nleer\nzwei\n \n")
    pairs = read_pairs(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert (pairs.sources, pairs.targets, pairs.dropped) == (("one", "two"), ("eins", "zwei"), 2)
    assert len(read_pairs(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), limit=1)) == 1


def test_files_that_are_no_translations_of_each_other_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\n")
    (tmp_path / "blank.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"a\.txt' has 2 lines but .*b\.txt' has 1"):
        read_pairs(str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    with pytest.raises(ValueError, match=r"blank\.txt' hold no pair"):
        read_pairs(str(tmp_path / "a.txt"), str(tmp_path / "blank.txt"))
    with pytest.raises(FileNotFoundError, match=r"no file at .*none\.txt"):
        read_pairs(str(tmp_path / "none.txt"), str(tmp_path / "b.txt"))


def test_several_links_are_their_mean_and_none_is_no_number():
    found = mean_places([(0, 2), (2, 0), (0, 3), (3, 1)], 4)
    assert found[0] == 2.5 and math.isnan(found[1]) and found[2:] == (0.0, 1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="systran-align is published for Linux alone")
def test_the_aligner_finds_a_reversed_order_and_the_same_one_twice(tmp_path):
    draw = random.Random(3)
    sources = [draw.sample(range(12), k=draw.randint(3, 6)) for _ in range(400)]
    targets = [[word + 20 for word in reversed(sentence)] for sentence in sources]
    places = target_places(sources, targets)
    right = [
        place == len(source) - 1 - at
        for source, found in zip(sources, places, strict=True)
        for at, place in enumerate(found)
    ]
    assert sum(right) / len(right) > 0.9
    assert str(target_places(sources, targets)) == str(places)


def test_an_empty_side_cannot_be_aligned(monkeypatch):
    with pytest.raises(ValueError, match="pair 1 has 2 and 0 tokens"):
        target_places([[1], [2, 3]], [[4], []])
    monkeypatch.setattr(alignment, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"systran-align, which is not installed; .*locant\[translation\]"):
        target_places([[1]], [[2]])


# --- the model --------------------------------------------------------------------------------------------------------


PAIRS = Translations(((5, 6), (7, 8, 9)), ((6, 5, 4), (9,)), ((1.0, NAN), (0.0, 0.5, NAN)))


def test_a_batch_is_padded_and_ended_and_the_end_has_no_place():
    batch = TranslationCollate(PAIRS, PAD, END)([{"example_id": 1}, {"example_id": 0}])
    assert batch["input_ids"].tolist() == [[7, 8, 9, END], [5, 6, END, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[9, END, IGNORED, IGNORED], [6, 5, 4, END]]
    assert batch["order_targets"].isnan().tolist() == [[False, False, True, True], [False, True, True, True]]
    assert batch["order_targets"][0, :2].tolist() == [0.0, 0.5] and batch["order_targets"][1, 0] == 1.0


def model(name: str, **options: Any) -> Any:
    return build_marian(SIZE, 11, 16, EncodingChoice(name, options), 1, PAD, END)


def test_the_decoder_has_a_sinusoid_where_the_encoding_reads_the_whole_source():
    assert decoder_choice(EncodingChoice("dpe", {"layers": 1})) == EncodingChoice("sinusoidal")
    assert decoder_choice(EncodingChoice("dpe+shaw")).name == "sinusoidal"
    shaw = EncodingChoice("shaw", {"clip": 3})
    assert decoder_choice(shaw) == shaw
    host = model("dpe").model
    assert (host.model.encoder.locant.stack.name, host.model.decoder.locant.stack.name) == ("dpe", "sinusoidal")


def test_parameters_of_the_encoding_are_told_from_those_of_the_host():
    plain, learned, dpe = model("sinusoidal"), model("absolute"), model("dpe", layers=1)
    assert plain.extra_parameters == 0
    assert learned.extra_parameters == 2 * 16 * 8
    own = sum(p.numel() for p in dpe.model.model.encoder.locant.parameters())
    assert dpe.extra_parameters == own == dpe.total_parameters - plain.total_parameters
    same = [n for n, p in plain.model.named_parameters() if not torch.equal(p, dict(dpe.model.named_parameters())[n])]
    assert same == [], "host weights follow from the seed alone"


def test_target_logits_are_those_of_the_host_itself():
    host = model("shaw", clip=3).model.eval()
    batch = TranslationCollate(PAIRS, PAD, END)([{"example_id": 0}, {"example_id": 1}])
    logits, targets = target_logits(host, batch["input_ids"], batch["attention_mask"], batch["labels"])
    want = host(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    loss = torch.nn.functional.cross_entropy(logits, targets)
    assert targets.tolist() == [6, 5, 4, END, 9, END], "padding is no target"
    assert loss.item() == pytest.approx(want.loss.item(), abs=1e-5)


def test_the_order_loss_is_mixed_in_as_the_encoding_says():
    objective = make_objective(model("dpe", lam=0.75, layers=1).model).train()
    batch = TranslationCollate(PAIRS, PAD, END)([{"example_id": 0}, {"example_id": 1}])
    batch.pop("example_ids")
    out = objective(**batch)
    assert out["loss"].item() == pytest.approx(0.75 * out["translation"].item() + 0.25 * out["order"].item(), rel=1e-6)
    encoding = objective.host.model.encoder.locant.stack[0]
    at = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(2, -1)
    want = torch.tensor([[1.0, NAN, NAN, NAN], [0.0, 0.5, NAN, NAN]])
    gap = (encoding.waves(at) - encoding.waves(want)).square().mean(-1)
    assert out["order"].item() == pytest.approx(gap[~want.isnan()].mean().item(), rel=1e-4), (
        "c is the sinusoid at first"
    )
    out["loss"].backward()
    assert all(p.grad is not None for p in objective.parameters() if p.requires_grad)
    del batch["order_targets"]
    with pytest.raises(ValueError, match="dpe: learns the order of the target, but these pairs have no order_targets"):
        objective(**batch)
    plain = make_objective(model("sinusoidal").model).train()
    assert set(plain(**batch)) == {"loss", "translation"}


def test_translations_come_in_the_order_of_their_sources_whatever_the_batch():
    host = model("sinusoidal").model
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    sources = [(5, 6, 7, 8), (9,), (4, 5), (6, 7, 8)]
    together = translate(host, sources, 5, PAD, END, 1, batch_size=4)
    assert together == [translate(host, [one], 5, PAD, END, 1, batch_size=1)[0] for one in sources]
    assert all(PAD not in one and END not in one and len(one) <= 5 for one in together) and any(together)


# --- the task ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="systran-align is published for Linux alone")
def test_a_comparison_scores_bleu_by_source_length(tmp_path: Path):
    recipe = read_recipe(recipe_table(tmp_path / "data"))
    found = compare(recipe, tmp_path / "out", executor=InlineExecutor)
    assert found.trained_length == 5 and [run.status for run in found.runs] == ["done", "done"]
    for run in found.runs:
        assert [(one.length, one.factor) for one in run.lengths] == [(5, 1), (4, 0.8), (7, 1.4), (9, 1.8)]
        assert all(one.loss and one.accuracy is not None and 0 <= one.accuracy <= 1 for one in run.lengths)
    facts = found.environment["text"]
    assert facts["test_pairs"] == 16 and facts["train_pairs"] + facts["train_pairs_too_long"] == 60
    assert facts["bleu"].startswith("nrefs:1|") and 0 < facts["aligned_share"] <= 1
    assert compare(recipe, tmp_path / "out", executor=InlineExecutor).runs == found.runs


def test_kept_models_load_with_both_encodings_and_translate_as_they_did(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alignment, "find_spec", lambda name: None)
    recipe = read_recipe(recipe_table(tmp_path / "data", encodings=["shaw"], train={"checkpoints": 1}))
    table = compare(recipe, tmp_path / "out", executor=InlineExecutor)
    (start, _), (last, folder) = course.kept(tmp_path / "out" / "runs" / "shaw-seed1")
    assert (start.step, last.step) == (0, 3) and last.loss == table.runs[0].lengths[0].loss != start.loss
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    assert [attachment.stack.name for _, _, attachment in locant.hf.attachments(model)] == ["shaw", "shaw"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data: Any = find_objective("translation").read(recipe, tmp_path / "out" / "text")
    assert tokenizer.get_vocab() == data.tokenizer.get_vocab()
    short = data.test.take([k for k, ids in enumerate(data.test.sources) if len(ids) <= 5])
    pad, end = tokenizer.pad_token_id, tokenizer.sep_token_id
    batch = TranslationCollate(short, pad, end)([{"example_id": k} for k in range(len(short))])
    logits, targets = target_logits(model, batch["input_ids"], batch["attention_mask"], batch["labels"])
    assert torch.nn.functional.cross_entropy(logits, targets).item() == pytest.approx(last.loss, abs=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="systran-align is published for Linux alone")
def test_what_the_target_says_is_scored_100(tmp_path: Path, monkeypatch):
    recipe = read_recipe(recipe_table(tmp_path / "data", encodings=["sinusoidal"]))
    task = find_objective("translation")
    data: Any = task.prepare(recipe, tmp_path / "text", progress=False)
    trial: Any = task.trial(recipe, recipe.encodings[0], 1, data)
    lengths = [len(ids) for ids in data.test.sources]
    longest = {length: [lengths[k] for k in chosen] for length, chosen in trial._tests().items()}
    assert sorted(longest[4] + longest[7] + longest[9]) == sorted(lengths), "each pair is in one bucket"
    assert {n <= 4 for n in longest[4]} == {4 < n <= 7 for n in longest[7]} == {7 < n for n in longest[9]} == {True}
    assert sorted(longest[5]) == sorted(n for n in lengths if n <= 5) and {4, 7} <= set(lengths)
    said = dict(zip(data.test.sources, data.test.targets, strict=True))
    monkeypatch.setattr(
        "locant.training.translation.translate", lambda host, sources, *rest: [list(said[one]) for one in sources]
    )
    assert [one.accuracy for one in trial.by_length()] == pytest.approx([1.0] * 4)
    monkeypatch.setattr(
        "locant.training.translation.translate", lambda host, sources, *rest: [list(said[one])[::-1] for one in sources]
    )
    assert all(one.accuracy is not None and one.accuracy < 0.5 for one in trial.by_length())


def test_recipes_of_other_tasks_keep_their_keys():
    body = {"encodings": ["none"], "task": "causal_lm"}
    key = read_recipe(body, check=False).run_key("none", 1)
    assert read_recipe({**body, "pairs": {"beams": 4}}, check=False).run_key("none", 1) == key
    assert read_recipe({**body, "task": "translation"}, check=False).run_key("none", 1) != key


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": {"source": ""}}, r"pairs.source is missing"),
        ({"pairs": {"buckets": [9, 4]}}, r"buckets = \[9, 4\], needed rising"),
        ({"pairs": {"buckets": [5]}}, r"buckets has 5, which is max_train_tokens"),
        ({"pairs": {"beams": 0}}, r"beams = 0, needed at least 1"),
        ({"pairs": {"max_train_tokens": 0}}, r"max_train_tokens = 0, needed at least 1"),
        ({"pairs": {"num_test": -1}}, r"num_test = -1, needed 0"),
        ({"train": {"length": 64}}, r"train.length = 64 has no meaning for task = 'translation'"),
        ({"text": {"text": "x"}}, r"text.text = 'x' has no meaning for task = 'translation'"),
        ({"evaluate": {"tokens": 5}}, r"evaluate.tokens = 5 has no meaning"),
        ({"encodings": ["cope"]}, r"cope: .*causal=False"),
    ],
)
def test_recipes_that_cannot_be_are_refused(tmp_path: Path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(recipe_table(tmp_path, **changes))


def test_pairs_that_are_all_too_long_and_tables_too_short_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alignment, "target_places", lambda sources, targets: [(NAN,) * len(one) for one in sources])
    task = find_objective("translation")
    recipe = read_recipe(recipe_table(tmp_path, pairs={"max_train_tokens": 1, "buckets": []}))
    with pytest.raises(ValueError, match=r"max_train_tokens = 1 leaves none of 60 pairs"):
        task.prepare(recipe, tmp_path / "text", progress=False)
    assert not (tmp_path / "text").exists()
    recipe = read_recipe(recipe_table(tmp_path, model={"max_positions": 7}))
    data = task.prepare(recipe, tmp_path / "text", progress=False)
    with pytest.raises(ValueError, match=r"max_positions = 7, but sentences have up to 10 tokens"):
        task.trial(recipe, recipe.encodings[0], 1, data)


def test_without_an_aligner_only_encodings_that_learn_the_order_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(alignment, "find_spec", lambda name: None)
    task = find_objective("translation")
    recipe = read_recipe(recipe_table(tmp_path, encodings=["sinusoidal"]))
    assert task.prepare(recipe, tmp_path / "text", progress=False).facts["aligned_share"] is None
    with pytest.raises(ModuleNotFoundError, match="systran-align"):
        task.prepare(read_recipe(recipe_table(tmp_path)), tmp_path / "other", progress=False)


def test_tables_and_pages_say_what_is_scored_and_in_what_lengths_are_counted():
    for task, scored, counted in (("translation", "BLEU", "source tokens"), ("mlm", "accuracy", "tokens")):
        found = make_table(labels=("none", "tisa"))
        found = dataclasses.replace(found, recipe={**found.recipe, "task": task})
        assert f"  {scored}  " in to_text(found).split("\n")[1]
        page = render(found)
        assert f"trained at 32 {counted}, baseline" in page and f"{scored[0].upper()}{scored[1:]}" in page
