"""Hosts of a comparison: one table of them for `compare` and `pretrain`; BERT and GPT-2 are what they always were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.masked_lm import MaskedTrial
from locant.compare.objective import find_objective
from locant.compare.recipe import load_recipe, read_recipe
from locant.compare.results import ResultTable
from locant.compare.text import prepare_text
from locant.data import EVALUATION_EPOCH, MlmDataset, make_windows
from locant.pretrain.comparison import NumberedBatch, ReplacedTrial
from locant.pretrain.hosts import HostChoice, shape_of
from locant.training.hosts import FAMILIES, ModelSize, build_host
from locant.training.mlm import EncodingChoice, derived_seed
from locant.training.trainer import parameter_groups
from tests.compare_runs import table, write_text

SIZE = ModelSize(num_layers=2, model_dim=12, num_heads=3, hidden_dim=17, dropout=0.1, init_std=0.05)
RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def host_table(folder: Path, **changes: Any) -> dict[str, Any]:
    return table(write_text(folder / "text.txt"), **changes)


def trial_of(folder: Path, body: dict[str, Any]) -> Any:
    recipe = read_recipe(body)
    task = find_objective(recipe.task)
    text = prepare_text(recipe, folder / "data", progress=False)
    return task.trial(recipe, recipe.encodings[0], 1, text)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_weights_are_those_of_a_plain_model_of_the_same_seed(family: str) -> None:
    built = build_host(FAMILIES[family], SIZE.shape(family, 31, 11, 0), EncodingChoice("none"), 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("host", 3))
        plain: torch.nn.Module
        if family == "bert":
            config = BertConfig(
                vocab_size=31,
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=17,
                max_position_embeddings=11,
                initializer_range=0.05,
            )
            plain = BertForMaskedLM(config)
        else:
            sizes: dict[str, Any] = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 17, "n_positions": 11}
            plain = GPT2LMHeadModel(GPT2Config(vocab_size=31, **sizes, initializer_range=0.05))
    want, found = plain.state_dict(), built.model.state_dict()
    assert set(want) - set(found) == {FAMILIES[family].table} and set(found) < set(want)
    assert all(torch.equal(found[name], want[name]) for name in found)
    dropout = {"bert": "attention_probs_dropout_prob", "gpt2": "attn_pdrop"}[family]
    assert getattr(built.model.config, dropout) == 0.1


@pytest.mark.parametrize(("task", "key"), [("mlm", "e0f351bdafc78580"), ("causal_lm", "a358d56f913904a2")])
def test_runs_made_before_there_were_hosts_to_choose_keep_their_keys(task: str, key: str) -> None:
    body = table(Path("text.txt"), task=task)
    assert read_recipe(body).run_key("absolute", 1) == key
    chosen = read_recipe({**body, "model": {**body["model"], "num_layers": 3}})
    assert chosen.run_key("absolute", 1) != key


def test_a_folder_from_before_there_were_hosts_is_read_and_goes_on(tmp_path: Path) -> None:
    body, out = host_table(tmp_path, encodings=["none"]), tmp_path / "out"
    before = compare(read_recipe(body), out, executor=InlineExecutor)
    old = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    del old["recipe"]["electra"], old["recipe"]["model"]["family"], old["recipe"]["model"]["embedding_dim"]
    (out / "recipe.json").write_text(json.dumps(old), encoding="utf-8")
    assert compare(read_recipe(body), out, executor=InlineExecutor).runs == before.runs
    with pytest.raises(ValueError, match=r"belongs to another recipe: model.family .*'albert'"):
        other = {**body, "model": {**body["model"], "family": "albert"}}
        compare(read_recipe(other), out, executor=InlineExecutor)


def test_compare_and_pretrain_mean_the_same_model_by_the_same_numbers() -> None:
    sizes: dict[str, Any] = dataclasses.asdict(SIZE) | {"family": "albert"}
    for more, width in (({}, 128), ({"embedding_dim": 9}, 9)):
        choice = HostChoice(**{**sizes, **more})
        shape = dataclasses.replace(SIZE, **more).shape("albert", 31, 11, 0)
        assert shape == shape_of(choice, 31, 11, 0) and shape.embedding_dim == width


@pytest.mark.parametrize("family", ["roberta", "albert"])
def test_other_hosts_are_trained_and_scored(family: str, tmp_path: Path) -> None:
    body = host_table(tmp_path, encodings=["absolute", "tisa"], model={"family": family, "num_layers": 3})
    body["train"].update(steps=4, checkpoints=1)
    found = compare(read_recipe(body), tmp_path / "out", executor=InlineExecutor)
    table_run, kernels = (found.of(label)[0] for label in ("absolute", "tisa"))
    assert [run.status for run in found.runs] == ["done", "done"]
    sets = 1 if family == "albert" else 3  # of kernels, one for each layer that has weights of its own
    assert kernels.extra_parameters == sets * 3 * 5 * 2  # amplitude, width and center of 5 kernels in 2 heads
    assert table_run.extra_parameters == 9 * (128 if family == "albert" else 8)
    assert [score.loss is None for score in table_run.lengths] == [False, True, True]  # 9, 18, 36 of 9 rows
    assert all(score.loss for score in kernels.lengths)
    assert kernels.shifts[0].loss == pytest.approx(kernels.shifts[1].loss, abs=1e-5)
    kept = AutoModelForMaskedLM.from_pretrained(tmp_path / "out/runs/tisa-seed1/checkpoints/step-0000004")
    assert kept.config.model_type == family and any(".locant." in name for name, _ in kept.named_parameters())


def test_validation_loss_is_that_of_the_host_itself(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, host_table(tmp_path, encodings=["shaw"], model={"family": "albert"}))
    assert isinstance(trial, MaskedTrial)
    model = trial.built.model.eval()
    loss = trial.validation_loss()
    windows = MlmDataset(make_windows(trial.text.validation, 9, trial.tokenizer), epoch=EVALUATION_EPOCH)
    batch = trial.scores.collate([windows[k] for k in range(min(len(windows), 300 // 9))])
    assert loss == pytest.approx(model(**batch).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"family": "gpt2"}},
            "model.family = 'gpt2' cannot be trained by task = 'mlm'; choose one of 'bert'",
        ),
        ({"model": {"family": "albrt"}}, "model.family = 'albrt' cannot be trained .*'bert', 'roberta', 'albert'"),
        (
            {"task": "causal_lm", "model": {"family": "albert"}},
            "'albert' cannot be trained by .*; choose one of 'gpt2'",
        ),
        ({"task": "electra", "model": {"family": "bert"}}, "'bert' cannot be trained by .*; choose one of 'electra'"),
        ({"model": {"embedding_dim": 7}}, "model.embedding_dim = 7 has no meaning for bert"),
        ({"model": {"embedding_dim": -7}}, r"\[model\] embedding_dim = -7, needed 0"),
        ({"electra": {"generator_fraction": 0.5}}, "electra.generator_fraction = 0.5 has no meaning for task = 'mlm'"),
        ({"task": "electra", "electra": {"generator_fraction": 1.5}}, "generator_fraction = 1.5, needed a share"),
        ({"task": "electra", "electra": {"discriminator_weight": 0.0}}, "discriminator_weight = 0.0, needed a number"),
        (
            {"task": "electra", "electra": {"discriminator_weight": float("inf")}},
            "discriminator_weight = inf, needed a number above 0, not infinity",
        ),
        ({"task": "electra", "encodings": ["xpos"]}, "encodings has 'xpos': xpos: .*causal"),
    ],
)
def test_a_host_that_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(table(Path("text.txt"), **changes))


@pytest.mark.parametrize("key", ["family", "embedding_dim"])
def test_a_task_with_one_host_refuses_to_choose(key: str) -> None:
    value = {"family": "bert", "embedding_dim": 7}[key]
    pairs = dict.fromkeys(("source", "target", "test_source", "test_target"), "x.txt")
    body = {"task": "translation", "encodings": ["sinusoidal"], "pairs": pairs, "model": {key: value}}
    with pytest.raises(ValueError, match=f"model.{key} = {value!r} has no meaning for task = 'translation'; drop it"):
        read_recipe(body)


def test_one_set_of_kernels_serves_all_layers_of_the_tisa_recipe() -> None:
    recipe = load_recipe(RECIPES / "tisa.toml", size="cpu")
    shape = recipe.model.shape("albert", 50, recipe.train.length, 0)
    for kernels in (1, 3, 5):
        built = build_host(FAMILIES[recipe.model.family], shape, recipe.choice(f"tisa-{kernels}"), 1)
        assert built.extra_parameters == 3 * kernels * recipe.model.num_heads
        assert len(built.model.albert.encoder.albert_layer_groups) == 1 < recipe.model.num_layers


# ELECTRA


def electra_table(folder: Path, **changes: Any) -> dict[str, Any]:
    return host_table(folder, **{"task": "electra", "encodings": ["tupe_r"], **changes})


def run_of(found: ResultTable, label: str) -> Any:
    (run,) = found.of(label)
    assert run.status == "done", run.reason
    return run


def test_electra_is_trained_scored_and_kept(tmp_path: Path) -> None:
    body = electra_table(tmp_path, encodings=["absolute", "tupe_r", "tisa"], electra={"generator_fraction": 0.5})
    body["train"].update(steps=4, checkpoints=1)
    body["evaluate"]["points"] = 1
    found = compare(read_recipe(body), tmp_path / "out", executor=InlineExecutor)
    for label in ("absolute", "tupe_r", "tisa"):
        run = run_of(found, label)
        assert run.curve[-1].train_loss > 50 * 0.1, "the discriminator's loss weighs 50"
        assert 0 < run.lengths[0].loss < 2 and 0 <= run.lengths[0].accuracy <= 1
        assert set(run.scores) == {"replaced_f1", "entropy_explained", "generator_accuracy"}
    assert run_of(found, "tisa").extra_parameters == 3 * 5 * 2 + 3 * 5 * 1  # of two heads, and of the generator's one
    assert run_of(found, "absolute").extra_parameters == 9 * 8 * 2
    kept = AutoModelForPreTraining.from_pretrained(tmp_path / "out/runs/tupe_r-seed1/checkpoints/step-0000004")
    assert hasattr(kept, "discriminator_predictions") and any(".locant." in name for name, _ in kept.named_parameters())


def test_discriminator_loss_and_accuracy_are_those_of_the_host_itself(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, electra_table(tmp_path))
    assert isinstance(trial, ReplacedTrial)
    windows = MlmDataset(make_windows(trial.text.validation, 9, trial.tokenizer), epoch=EVALUATION_EPOCH)
    batch = trial.scores.collate([windows[k] for k in range(min(len(windows), 300 // 9))])
    masked = batch["labels"] != -100
    common = batch["labels"][masked].mode().values
    trial.objective.generator.generator_lm_head.bias.data[common] = 3.0  # so that guesses are sometimes right
    loss, accuracy = trial.scores.score(trial.built.model, 9)
    more = trial.further_scores()
    model, generator = (one.eval() for one in (trial.built.model, trial.objective.generator))
    with torch.no_grad():
        logits = generator(batch["input_ids"]).logits
        text = torch.where(masked, batch["labels"], batch["input_ids"])
        shares = logits.softmax(-1).double().cumsum(-1)
        drawn = (shares < batch["draws"][..., None] * shares[..., -1:]).sum(-1)
        filled = torch.where(masked, drawn, text)
        told = model(input_ids=filled).logits
    replaced = filled != text
    assert replaced.any() and (~replaced & masked).any(), "some guesses are the text's own"
    assert loss == pytest.approx(F.binary_cross_entropy_with_logits(told, replaced.float()).item(), rel=1e-4)
    assert accuracy == pytest.approx(((told > 0) == replaced).double().mean().item(), abs=1e-6)
    hits = ((told > 0) & replaced).sum().item()
    assert more["replaced_f1"] == pytest.approx(2 * hits / ((told > 0).sum() + replaced.sum()).item())
    known = F.binary_cross_entropy(replaced.double().mean().expand(told.shape), replaced.double()).item()
    assert more["entropy_explained"] == pytest.approx(1 - loss / known, abs=1e-5)
    assert more["generator_accuracy"] == pytest.approx((logits.argmax(-1) == text)[masked].double().mean().item())


def test_scores_leave_generator_and_draws_as_they_were(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, electra_table(tmp_path, model={"dropout": 0.4}))
    trial.built.model.train()
    trial.objective.generator.train()
    state = torch.get_rng_state()
    first = trial.validation_loss()
    assert trial.objective.generator.training
    trial.built.model.train()
    assert trial.validation_loss() == first and torch.equal(torch.get_rng_state(), state)


def test_batches_of_electra_are_the_same_for_every_encoding_and_name_their_windows(tmp_path: Path) -> None:
    body = electra_table(tmp_path)
    batches = []
    for encoding in ("tupe_r", "none"):
        trial = trial_of(tmp_path, {**body, "encodings": [encoding]})
        collate: Any = trial.scores.collate
        assert isinstance(collate, NumberedBatch)
        batches.append(collate([{"input_ids": trial.windows.ids[k], "example_id": k, "epoch": 1} for k in (4, 2)]))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    assert batches[0]["example_ids"].tolist() == [4, 2] and "draws" in batches[0]


def test_positions_of_both_models_have_no_weight_decay(tmp_path: Path) -> None:
    trial = trial_of(tmp_path, electra_table(tmp_path))
    decayed, kept = parameter_groups(trial.objective, trial.built, 0.01)
    free = {id(parameter) for parameter in kept["params"]}
    names = dict(trial.objective.named_parameters())
    positional = [name for name in names if ".locant." in name]
    assert {name.split(".")[0] for name in positional} == {"host", "generator"}
    assert all(id(names[name]) in free for name in positional)
    assert id(names["generator.electra.encoder.layer.0.intermediate.dense.weight"]) not in free
    assert trial.built.total_parameters == sum(len(p.flatten()) for group in (decayed, kept) for p in group["params"])
    assert trial.built.extra_parameters == sum(names[name].numel() for name in positional)


def test_the_tupe_recipe_for_electra_has_two_sizes_of_which_the_larger_is_base() -> None:
    small, whole = (load_recipe(RECIPES / "tupe_electra.toml", size=size) for size in ("cpu", "paper"))
    assert small == load_recipe(RECIPES / "tupe_electra.toml") != whole
    shape = whole.model.shape("electra", whole.tokenizer.vocab_size, whole.train.length, 0)
    generator = shape.fraction(whole.electra.generator_fraction)
    assert (generator.model_dim, generator.num_heads, generator.hidden_dim) == (256, 4, 1024)
    assert (shape.num_layers, shape.embedding_dim, whole.electra.discriminator_weight) == (12, 768, 50.0)
    assert (whole.train.batch_size, whole.train.learning_rate, whole.masking.rate) == (256, 2e-4, 0.15)
