"""Recipes of pre-training: read strictly, with every mistake named before anything is trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from locant.pretrain.hosts import SIZES, HostChoice, shape_of
from locant.pretrain.recipe import load_recipe, read_recipe
from locant.pretrain.run import pretrain
from locant.training.hosts import FAMILIES
from tests.pretrain_runs import recipe, table, write_text

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "pretrain.toml"
TEXT = Path("words.jsonl")


def test_the_recipe_in_the_repository_is_valid_with_every_objective() -> None:
    plain = load_recipe(RECIPE)
    assert plain.name == "pretrain" and plain.encoding.name == "huang_m4" and len(plain.stages) == 2
    for family, row in FAMILIES.items():
        chosen = load_recipe(RECIPE, [f"objective={row.objective}", f"host.family={family}", "encoding=absolute"])
        assert chosen.objective.name == row.objective and chosen.steps == plain.steps


def test_stages_stand_for_lengths_and_steps_however_they_are_written() -> None:
    one = recipe(TEXT, curriculum=[{"length": 11, "steps": 3}])
    other = recipe(TEXT, curriculum=[], train={"length": 11, "steps": 3})
    assert one.key() == other.key() and one.stages[0].batch_size == 8
    assert recipe(TEXT, curriculum=[{"length": 11, "steps": 3, "batch_size": 4}]).key() != one.key()
    assert recipe(TEXT, "name=other", "train.peak_tflops=3").key() == recipe(TEXT).key()
    assert recipe(TEXT).length == 17 and recipe(TEXT).steps == 9
    assert [stage.steps for stage in recipe(TEXT, "curriculum.0.steps=2").stages] == [2, 4]
    assert recipe(TEXT, "curriculum=[]", "train.steps=3").steps == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["host.famly=bert"], r"unknown key 'famly' in \[host\]; did you mean 'family'\?"),
        (["stepz=3"], r"unknown key 'stepz'; known: curriculum, encoding"),
        (["steps=3"], r"unknown key 'steps'; did you mean train.steps\?"),
        (["host.family=brt"], r"family = 'brt' is not a host; did you mean 'bert'\?"),
        (["host.size=huge"], r"size = 'huge' is not a size; known: base, large, mini, small, tiny"),
        (["objective=mlms"], r"objective.name = 'mlms' is not a choice; did you mean 'mlm'\?"),
        (["encoding=hunag_m4"], r"encoding is 'hunag_m4': .*did you mean 'huang_m4'"),
        (["encoding.clip=0"], r"override encoding.clip=0, but encoding is a text, not a table"),
        (['encoding={name="shaw", clip=0}'], r"encoding is 'shaw\(clip=0\)': .*clip"),
        (
            ["host.family=gpt2"],
            r"host.family = 'gpt2' is trained on 'causal', not on 'mlm'; write objective",
        ),
        (["objective=causal"], r"'bert' is trained on 'mlm', not on 'causal'; .*or host.family = 'gpt2'"),
        (["encoding=xpos"], r"encoding is 'xpos': xpos: .*causal"),
        (["encoding=dpe"], r"encoding is 'dpe', whose part dpe has a loss of its own"),
        (["train.length=64"], r"train.length = 64 and a curriculum came together"),
        (
            ["objective=causal", "host.family=gpt2", "masking.rate=0.3"],
            r"masking.rate = 0.3 has no meaning for",
        ),
        (
            ['objective={name="mlm", generator_fraction=0.5}'],
            r"generator_fraction = 0.5 has no meaning for",
        ),
        (
            ["text.pack=false", "text.isolate_documents=true"],
            r"isolate_documents = true has no meaning with",
        ),
        (["text.validation_fraction=1.5"], r"validation_fraction = 1.5, needed a number between 0 and 1"),
        (["host.num_heads=5"], r"num_heads = 5 does not divide model_dim = 24; choose one of \[1, 2, 3, 4, 6"),
        (["host.embedding_dim=7"], r"embedding_dim = 7 has no meaning for bert"),
        (["host.num_layers=-1"], r"num_layers = -1, needed 0"),
        (["host.max_positions=-1"], r"max_positions = -1, needed 0"),
        (["host.dropout=1.0"], r"dropout = 1.0, needed 0 <= dropout < 1"),
        (["host.init_std=0.0"], r"init_std = 0.0, needed a number above 0"),
        (["train.accumulate=3"], r"train.accumulate = 3 does not divide batch_size = 8"),
        (["train.accumulate=0"], r"accumulate = 0, needed at least 1"),
        (["train.save_every=-1"], r"save_every = -1, needed 0 \(automatic\) or more"),
        (["train.peak_tflops=-1.0"], r"peak_tflops = -1.0, needed 0 \(automatic\) or more"),
        (["train.validation_tokens=0"], r"validation_tokens = 0, needed at least 1"),
        (["curriculum=[{length=4, steps=1}]"], r"length = 4, needed at least 8 tokens"),
        (["curriculum=[{length=9, steps=0}]"], r"steps = 0, needed at least 1"),
        (["curriculum=[{length=9, steps=1, batch_size=-2}]"], r"batch_size = -2, needed 0"),
        (["train.checkpoints=11"], r"train.checkpoints = 11, needed 0 \(none\) to 9, the steps of the curriculum"),
        (["text.shuffle=9"], r"shuffle = 9 has no meaning with streaming = false"),
        (["text.shuffle=0"], r"shuffle = 0, needed at least 1"),
        (['text={text="a.txt", streaming=true}'], r"text.streaming = true came without tokenizer.path"),
        (["text={streaming=true}"], r"streaming = true came with the built-in text 'docs'"),
        (['text={text="a.txt", streaming=true, limit_mb=1}'], r"limit_mb = 1.0 has no meaning with streaming = true"),
        (["seed=-1"], r"seed = -1, needed 0 to 4294967295"),
        (["name=a/b"], r"name = 'a/b', needed a letter or digit and no slash"),
        (['objective={name="electra", generator_fraction=0}'], r"generator_fraction = 0.0, needed a share above 0"),
        (
            ['objective={name="electra", discriminator_weight=0}'],
            r"discriminator_weight = 0.0, needed a number",
        ),
    ],
)
def test_mistakes_are_named(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe(TEXT, *overrides)


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"recipe: 'nowhere.toml' does not exist, .*recipes/pretrain.toml"):
        load_recipe("nowhere.toml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": {"max_positions": 11}}, r"host.max_positions = 11, but windows have up to 17 tokens"),
        (
            {"host": {"vocab_size": 31}},
            r"host.vocab_size = 31, but the tokenizer has \d+ tokens; write",
        ),
        (
            {"encoding": {"name": "absolute", "max_length": 13}},
            r"'absolute\(max_length=13\)' has positions for 13",
        ),
        (
            {"curriculum": [{"length": 9000, "steps": 1}]},
            r"training text has \d+ tokens, but one window of",
        ),
        (
            {"curriculum": [{"length": 300, "steps": 1}], "text": {"validation_fraction": 0.05}},
            r"validation text has \d+ tokens, .*validation_fraction \(now 0.05;",
        ),
        (
            {"train": {"position_learning_rate": 0.1}, "encoding": "none"},
            r"pretrain: position_learning_rate = 0.1",
        ),
    ],
)
def test_what_does_not_fit_the_text_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.jsonl")
    with pytest.raises(ValueError, match=words):
        pretrain(recipe(text, **changes), tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint-*")) and not (tmp_path / "out" / "model").exists()


def test_empty_text_and_too_few_examples_for_the_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"text file .*empty.txt: it is empty, some text was needed"):
        pretrain(recipe(tmp_path / "empty.txt"), tmp_path / "out")
    text = write_text(tmp_path / "words.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"pretrain: batch_size = 8 cannot be shared by 3 processes in accumulate = 1"):
        pretrain(recipe(text), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    monkeypatch.delenv("WORLD_SIZE")
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match=r"pretrain: accelerate's configuration has fsdp_version = 1, needed 2: "):
            pretrain(recipe(text), tmp_path / "out")
    with pytest.raises(ValueError, match=r"pretrain: '.*full' holds other files \(thesis.txt\), needed an"):
        pretrain(recipe(text), tmp_path / "full")


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_have_the_published_widths(family: str) -> None:
    shape = shape_of(HostChoice(family, "base"), 100, 64, 0)
    assert (shape.num_layers, shape.model_dim, shape.num_heads, shape.hidden_dim) == (12, 768, 12, 3072)
    assert shape.embedding_dim == (128 if family == "albert" else 768)
    small = shape.fraction(1 / 3)
    assert (small.model_dim, small.num_heads, small.hidden_dim, small.num_layers) == (256, 4, 1024, 12)
    assert dataclasses.asdict(SIZES["large"]) == {
        "num_layers": 24, "model_dim": 1024, "num_heads": 16, "hidden_dim": 4096
    }  # fmt: skip
    assert HostChoice(model_dim=96, num_heads=3).sizes.hidden_dim == 384


def test_a_recipe_read_back_from_its_json_is_the_same() -> None:
    before = recipe(TEXT)
    body = json.loads(json.dumps(before.to_dict()))
    del body["train"]["length"], body["train"]["steps"]
    assert read_recipe(body).key() == before.key()
    assert "unknown" not in str(table(TEXT))
