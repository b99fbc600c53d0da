"""Tasks of `locant compare` beside masked language models: problems, series of them, causal models of text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import locant.hf
from locant.compare.evaluate import CausalValidation
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.objective import TASKS, find_objective
from locant.compare.problems import ProblemSettings
from locant.compare.recipe import read_recipe
from locant.compare.results import LengthScore, ResultTable, RunResult, read_results
from locant.compare.series import compare_series, generalization, generalization_text
from locant.compare.text import prepare_text
from locant.data.mlm import IGNORED
from locant.hf import course
from locant.training.causal import PairCollate, Pairs, WindowCollate, generate
from locant.training.hosts import FAMILIES, ModelSize, build_host, next_token_logits
from locant.training.mlm import BuiltModel, EncodingChoice
from tests.compare_runs import table, write_text
from tests.names import CLAIMS, DECODERS, ENCODERS

SIZE: dict[str, Any] = {"num_layers": 1, "model_dim": 8, "num_heads": 2, "dropout": 0.0}


def build_gpt2(size: ModelSize, vocab_size: int, length: int, encoding: EncodingChoice, seed: int) -> BuiltModel:
    return build_host(FAMILIES["gpt2"], size.shape("gpt2", vocab_size, length, 0), encoding, seed)


def problem_table(**changes: Any) -> dict[str, Any]:
    """A recipe of two problems, small enough for a test."""
    body: dict[str, Any] = {
        "task": "length_generalization",
        "encodings": ["none", "rope"],
        "seeds": [1],
        "model": SIZE,
        "train": {"steps": 3, "batch_size": 4, "device": "cpu", "curve_points": 3},
        "problems": {
            "names": ["copy_rsc", "addition"],
            "ranges": {"copy_rsc": [[2, 3], [4, 5]], "addition": [[1, 2], [3, 3]]},
            "num_train": 30,
            "num_validation": 6,
            "num_test": 10,
        },
        "measure": {"rounds": 0},
    }
    for key, value in changes.items():
        body[key] = {**body.get(key, {}), **value} if isinstance(value, dict) else value
    return body


def one_problem(**changes: Any) -> dict[str, Any]:
    return problem_table(problems={"names": ["copy_rsc"], "ranges": {"copy_rsc": [[2, 3], [4, 5]]}}, **changes)


def test_a_series_is_one_comparison_for_each_problem_and_goes_on_where_it_was(tmp_path: Path):
    recipe = read_recipe(problem_table())
    tables = compare_series(recipe, tmp_path, executor=InlineExecutor)
    assert list(tables) == ["copy_rsc", "addition"] and (tmp_path / "exact_match.txt").is_file()
    assert read_results(tmp_path / "addition" / "results.json") == tables["addition"]
    scores = tables["copy_rsc"].runs[0].lengths
    assert [(one.length, one.factor) for one in scores] == [(3, 1), (4, 4 / 3), (5, 5 / 3)]
    assert all(one.accuracy is not None and 0 <= one.accuracy <= 1 and one.loss for one in scores)
    assert all(one.edit_distance is not None and (one.edit_distance > 0) == (one.accuracy != 1) for one in scores)
    assert "Edit distance, longer than trained (symbols" in (tmp_path / "exact_match.txt").read_text(encoding="utf-8")
    header = (tmp_path / "copy_rsc" / "runs.csv").read_text(encoding="utf-8").split("\n")[0]
    assert "accuracy_at_5,edit_distance_at_5" in header
    card = tables["copy_rsc"].environment["text"]
    assert (card["problem"], card["lengths_from"], card["scratchpad"]) == ("copy_rsc", "the recipe", "plain")
    assert card["lengths"] == {"train": [2, 3], "test": [4, 5], "unit": "symbols"}
    assert card["test_by_length"] == {"4": 5, "5": 5} and card["prompts_also_trained"]["test"] == 0.0
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/run.json")}
    assert len(stamps) == 4
    assert compare_series(recipe, tmp_path, executor=InlineExecutor)["addition"].runs == tables["addition"].runs
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("**/run.json")} == stamps
    body = json.loads((tmp_path / "exact_match.json").read_text(encoding="utf-8"))
    assert set(body["reciprocal_rank"]) == {"none", "rope"}


def test_one_problem_alone_fills_the_folder_itself(tmp_path: Path):
    recipe = read_recipe(one_problem(encodings=["none"], measure={"rounds": 1, "seconds": 0.01}))
    compare_series(recipe, tmp_path, executor=InlineExecutor)
    found = read_results(tmp_path / "results.json")
    assert found.trained_length == 3 and found.speeds["none"].train_tokens_per_second


def test_kept_models_of_a_problem_load_and_are_the_ones_that_were_scored(tmp_path: Path):
    recipe = read_recipe(one_problem(encodings=["t5"], train={"checkpoints": 1}))
    (tables,) = compare_series(recipe, tmp_path, executor=InlineExecutor).values()
    (start, _), (last, folder) = course.kept(tmp_path / "runs" / "t5-seed1")
    assert (start.step, last.step) == (0, 3) and last.loss == tables.runs[0].lengths[0].loss != start.loss
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert [attachment.stack.name for _, _, attachment in locant.hf.attachments(model)] == ["t5"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data: Any = find_objective("length_generalization").read(recipe, tmp_path / "text")
    pairs = Pairs.join(
        [(tokenizer(one.prompt).input_ids, tokenizer(one.target).input_ids) for one in data.split.validation],
        tokenizer.eos_token_id,
    )
    batch = PairCollate(pairs, tokenizer.pad_token_id)([{"example_id": k} for k in range(len(pairs))])
    logits, targets = next_token_logits(
        model, batch["input_ids"], batch["labels"], attention_mask=batch["attention_mask"]
    )
    assert torch.nn.functional.cross_entropy(logits, targets).item() == pytest.approx(last.loss, abs=1e-5)


def test_several_problems_are_not_one_comparison(tmp_path: Path):
    with pytest.raises(ValueError, match="names 2 problems"):
        compare(read_recipe(problem_table()), tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (problem_table(task="sorting"), "task = 'sorting' is not a task"),
        (problem_table(problems={"names": []}), "names no problem"),
        (problem_table(problems={"names": ["copy_rcs"]}), "'copy_rcs', which is no problem; did you mean 'copy_rsc'"),
        (problem_table(problems={"names": ["parity", "parity"]}), "'parity' twice"),
        (problem_table(problems={"scratchpad": "ful"}), "scratchpad = 'ful' is not a choice; did you mean 'full'"),
        (problem_table(problems={"scratchpad": "full"}), "copy_rsc: a scratchpad was asked for"),
        (problem_table(problems={"num_test": 0}), "num_test = 0"),
        (problem_table(problems={"symbols": 500}), "a pool of 500"),
        (problem_table(problems={"ranges": {"copy_rsc": [2, 3]}}), r"ranges.copy_rsc = \[2, 3\]"),
        (problem_table(problems={"names": ["lego"], "ranges": {"lego": [[4, 8], [9, 30]]}}), "at most 26"),
        (problem_table(problems={"ranges": {"addition": [[0, 2], [3, 4]]}}), r"length = \(0, 0\)"),
        (problem_table(train={"length": 64}), "train.length = 64 has no meaning"),
        (problem_table(text={"text": "x"}), "text.text = 'x' has no meaning for task = 'length_generalization'"),
        (problem_table(evaluate={"shifts": [5]}), r"evaluate.shifts = \(5,\) has no meaning"),
        (problem_table(encodings=["nome"]), "did you mean 'none'"),
    ],
)
def test_what_a_recipe_of_problems_cannot_mean_is_named(body, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(body)


def test_problems_have_no_meaning_to_other_tasks(tmp_path: Path):
    body = table(write_text(tmp_path / "text.txt"), problems={"names": ["parity"]})
    with pytest.raises(ValueError, match=r"problems.names = \('parity',\) has no meaning for task = 'mlm'"):
        read_recipe(body)
    with pytest.raises(ValueError, match="has no meaning for task = 'causal_lm'"):
        read_recipe({**body, "task": "causal_lm"})


def test_a_table_that_is_too_short_for_the_examples_is_named(tmp_path: Path):
    recipe = read_recipe(one_problem(model={"max_positions": 8}))
    result = compare(recipe, tmp_path, executor=InlineExecutor)
    assert result.runs[0].status == "failed" and "model.max_positions = 8" in str(result.runs[0].reason)


def test_the_keys_of_runs_made_before_there_were_tasks_are_the_same(tmp_path: Path):
    recipe = read_recipe(table(write_text(tmp_path / "text.txt")))
    assert not {"task", "problems"} & recipe.shared().keys()
    assert "task" in dataclasses.replace(recipe, task="causal_lm").shared()
    assert {"task", "problems"} <= dataclasses.replace(recipe, task="length_generalization").shared().keys()
    assert find_objective(TASKS[0]).trained_length(recipe) == 9


# Scores over problems


def result(scores: dict[str, list[tuple[float, float]]]) -> ResultTable:
    """Runs with (validation, test) accuracy for each seed."""
    runs = []
    for label, values in scores.items():
        for seed, (near, far) in enumerate(values):
            lengths = (LengthScore(10, 1, 0.5, near), LengthScore(11, 1.1, 0.5, far), LengthScore(12, 1.2, 0.5, 0.0))
            runs.append(RunResult(label, {}, seed, "done", lengths=lengths))
    return ResultTable({}, next(iter(scores)), 10, tuple(runs))


def test_reciprocal_ranks_use_the_lengths_beyond_the_trained_one():
    tables = {
        "copy_rsc": result({"none": [(0.1, 0.9), (0.3, 0.7)], "rope": [(1.0, 0.2), (1.0, 0.0)]}),
        "parity": result({"none": [(0.5, 0.4)], "rope": [(0.5, 0.6)]}),
    }
    found = generalization(tables)
    assert found.test["copy_rsc"]["none"].mean == pytest.approx(0.4)
    assert found.validation["copy_rsc"]["none"].mean == pytest.approx(0.2)
    assert found.reciprocal_rank == {"none": 0.75, "rope": 0.75}
    lines = generalization_text(found).splitlines()
    assert lines[1].split() == ["encoding", "copy_rsc", "parity", "mean", "1/rank"] and "0.400 ± 0.071" in lines[3]


def test_results_written_before_edit_distance_was_counted_are_read(tmp_path: Path):
    table = result({"none": [(0.1, 0.9)]})
    body = json.loads(table.to_json())
    for run in body["runs"]:
        for score in run["lengths"]:
            assert score.pop("edit_distance") is None
    assert ResultTable.from_json(json.dumps(body)) == table
    assert "Edit distance" not in generalization_text(generalization({"copy_rsc": table}))
    del body["runs"][0]["lengths"][0]["accuracy"]
    with pytest.raises(ValueError, match=r"lengths\[0\] lacks \['accuracy'\]"):
        ResultTable.from_json(json.dumps(body))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("copy_rsc", "the study"),
        ("pcfg", "the study"),
        ("scan", "the study"),
        ("parity", "chosen here: the first trained length; the others are the study's"),
        ("kinship", "chosen here: all of them"),
    ],
)
def test_the_data_card_says_who_chose_the_lengths(name: str, source: str):
    settings = ProblemSettings(names=(name,))
    assert settings.source_of(name) == source
    assert ProblemSettings(names=(name,), ranges={name: [[3, 4], [5, 6]]}).source_of(name) == "the recipe"


def test_an_encoding_that_did_not_finish_a_problem_takes_that_problem_out():
    half = result({"none": [(0.1, 0.9)], "rope": [(1.0, 0.2)]})
    failed = RunResult("rope", {}, 0, "failed", "loss was nan")
    tables = {"copy_rsc": half, "parity": dataclasses.replace(half, runs=(half.runs[0], failed))}
    assert generalization(tables).reciprocal_rank == {"none": 1.0, "rope": 0.5}


# Causal training


def test_the_loss_is_on_targets_alone_and_the_end_is_predicted():
    pairs = Pairs.join([((5, 6), (7,)), ((8,), (9, 10, 11))], end_id=1)
    batch = PairCollate(pairs, pad_id=0)([{"example_id": 0}, {"example_id": 1}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 0], [8, 9, 10, 11, 1]]
    assert batch["labels"].tolist() == [[IGNORED, IGNORED, 7, 1, IGNORED], [IGNORED, 9, 10, 11, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    with pytest.raises(ValueError, match="example 0 has a prompt of 0 tokens"):
        Pairs.join([((), (7,))], end_id=1)


def test_every_token_of_a_window_is_predicted_but_those_that_frame_it():
    import numpy as np

    batch = WindowCollate()([{"input_ids": np.array([4, 5, 6, 7]), "example_id": 3}])
    assert batch["labels"].tolist() == [[IGNORED, 5, 6, IGNORED]] and batch["example_ids"].tolist() == [3]


@pytest.mark.parametrize("encoding", ["none", "absolute", "sinusoidal", "t5", "alibi", "rope"])
def test_greedy_writing_with_a_cache_and_padding_is_what_full_passes_choose(encoding: str):
    size = ModelSize(num_layers=2, model_dim=16, num_heads=2, dropout=0.0, init_std=0.5)
    host = build_gpt2(size, 13, 20, EncodingChoice(encoding), seed=3).model.eval()
    prompts = [[5, 6, 7, 8], [9], [4, 12]]
    written = generate(host, prompts, 6, pad_id=0, end_id=1)
    for prompt, found in zip(prompts, written, strict=True):
        ids = list(prompt)
        for token in found:
            with torch.no_grad():
                best = int(host(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            assert token == best
            if token == 1:
                break
            ids.append(token)


def test_each_token_is_predicted_from_the_one_before_it():
    host = build_gpt2(ModelSize(**SIZE), 13, 20, EncodingChoice("none"), seed=1).model.eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    labels = torch.tensor([[IGNORED, IGNORED, 7, 1]])
    with torch.no_grad():
        logits, targets = next_token_logits(host, ids, labels)
        full = host(ids, use_cache=False).logits
    assert targets.tolist() == [7, 1]
    torch.testing.assert_close(logits, full[0, 1:3])


def test_host_weights_and_counts_of_parameters_do_not_depend_on_the_encoding():
    one, other = (build_gpt2(ModelSize(**SIZE), 13, 20, EncodingChoice(name), seed=1) for name in ("none", "absolute"))
    assert torch.equal(one.model.transformer.wte.weight, other.model.transformer.wte.weight)
    assert (one.extra_parameters, other.extra_parameters) == (0, 20 * 8)
    assert other.total_parameters - one.total_parameters == 160


def test_a_causal_model_of_text_is_scored_at_longer_windows(tmp_path: Path):
    body = table(write_text(tmp_path / "text.txt"), encodings=["none", "absolute"], evaluate={"lengths": [9, 18, 72]})
    result = compare(read_recipe({**body, "task": "causal_lm"}), tmp_path / "out", executor=InlineExecutor)
    none, absolute = result.runs
    assert [(one.length, one.factor) for one in none.lengths] == [(9, 1), (18, 2), (72, 8)]
    assert all(one.loss is not None and 2 < one.loss < 6 for one in none.lengths)
    assert absolute.lengths[1].loss is None and "beyond its table of 9 rows" in str(absolute.lengths[1].reason)
    assert [one.shift for one in none.shifts] == [0, 4]


def test_a_causal_model_is_kept_on_its_way_and_loads_as_it_was(tmp_path: Path):
    body = table(write_text(tmp_path / "text.txt"), encodings=["shaw"], seeds=[1])
    recipe = read_recipe({**body, "task": "causal_lm", "train": {**body["train"], "checkpoints": 1}})
    result = compare(recipe, tmp_path / "out", executor=InlineExecutor)
    (first, _), (last, folder) = course.kept(tmp_path / "out/runs/shaw-seed1")
    text = prepare_text(recipe, tmp_path / "again", progress=False)
    scores = CausalValidation(text.validation, text.tokenizer, recipe.evaluate)
    loss, _ = scores.score(AutoModelForCausalLM.from_pretrained(folder), recipe.train.length)
    assert first.loss > last.loss
    assert loss == pytest.approx(last.loss, rel=1e-5) == result.runs[0].lengths[0].loss


def test_an_encoding_for_decoders_belongs_to_a_causal_task(tmp_path: Path):
    body = table(write_text(tmp_path / "text.txt"), encodings=["cope"])
    recipe = read_recipe({**body, "task": "causal_lm"})
    (choice,) = recipe.encodings
    task = find_objective("causal_lm")
    trial = task.trial(recipe, choice, 1, task.prepare(recipe, tmp_path / "data", progress=False))
    assert trial.by_length()[0].loss is not None
    with pytest.raises(ValueError, match=r"cope"):
        read_recipe(body)


def test_every_encoding_trains_in_the_tasks_that_it_serves(tmp_path: Path):
    assert {*ENCODERS, *DECODERS} == set(CLAIMS)
    for task, names in (("mlm", ENCODERS), ("causal_lm", DECODERS)):
        body = table(write_text(tmp_path / "text.txt"), encodings=names, train={"steps": 2}, evaluate={"shifts": []})
        result = compare(read_recipe({**body, "task": task}), tmp_path / task, executor=InlineExecutor)
        assert [run.status for run in result.runs] == ["done"] * len(names)
        losses = [run.lengths[0].loss for run in result.runs if run.lengths[0].loss is not None]
        assert len(losses) == len(names) and len(set(losses)) > len(names) // 2
