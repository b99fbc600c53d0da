"""Fine-tuning runs: they learn, are scored, and can be stopped at any moment without a number changing."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

import locant.finetune.run as run_module
import locant.hf
from locant.cli import app
from locant.cli.finetune import default_folder
from locant.cli.progress import SeedWatcher
from locant.finetune.batches import Feature, Schedule
from locant.finetune.load import DataChoice
from locant.finetune.model import load_tokenizer, model_inputs
from locant.finetune.results import Outcome, SeedResult, read_outcome, to_text
from locant.finetune.run import finetune
from locant.finetune.settings import FinetuneSettings, GlueSettings, ModelChoice, SquadSettings
from locant.training import checkpoints
from locant.training.log import JsonLines
from tests.finetune_runs import save_model, tokenizer, write_rte, write_squad

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {"epochs": 2.0, "batch_size": 8, "learning_rate": 3e-3, "device": "cpu", "save_every": 2}


class Killed(BaseException):
    """Stands for a signal: nothing in the package catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def rte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rte(tmp_path_factory.mktemp("data") / "RTE")


def tune(model: Path, data: Path, out: Path, seeds: tuple[int, ...] = (1,), **more: Any) -> Outcome:
    settings = more.pop("settings", GlueSettings(**SIZES))
    choice = more.pop("choice", ModelChoice(str(model), encoding="huang_m4", init="neutral", keep_absolute=True))
    return finetune("glue/rte", choice, DataChoice((data,)), settings, seeds, out, **more)


def losses(out: Path, seed: int = 1) -> list[tuple[int, float, int]]:
    return [
        (line["step"], line["loss"], line["tokens"])
        for line in JsonLines(out / "runs" / f"seed{seed}" / "log.jsonl").steps()
    ]


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    weights = [load_file(out / "runs" / "seed1" / "model" / "model.safetensors") for out in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    texts = [(out / "runs" / "seed1" / "predictions.json").read_bytes() for out in (one, other)]
    assert texts[0] == texts[1]
    assert [run.scores for run in read_outcome(one).runs] == [run.scores for run in read_outcome(other).runs]


@pytest.fixture(scope="module")
def whole(model: Path, rte: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    tune(model, rte, out)
    return out


def test_a_run_learns_and_leaves_a_model_that_loads(model: Path, tmp_path: Path) -> None:
    data = write_rte(tmp_path / "RTE", train=96, dev=24)
    settings = GlueSettings(**{**SIZES, "epochs": 8.0, "save_every": 0})
    outcome = tune(model, data, tmp_path / "out", settings=settings)
    found = outcome.runs[0]
    assert found.reason is None and found.steps == 96
    assert (found.scores["dev"]["accuracy"] or 0.0) > 2 / 3 + 0.1
    assert outcome.baseline == {"dev": {"accuracy": pytest.approx(2 / 3)}} and outcome.examples == {
        "train": 96,
        "dev": 24,
    }
    curve = [loss for _, loss, _ in losses(tmp_path / "out")]
    assert len(curve) == 96 and sum(curve[-9:]) < 0.8 * sum(curve[:9])
    again = T.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "runs" / "seed1" / "model").eval()
    assert [attachment.stack.name for _, _, attachment in locant.hf.attachments(again)] == ["huang_m4"]
    names = json.loads((tmp_path / "out" / "runs" / "seed1" / "predictions.json").read_text())["dev"]
    lines = [line.split("\t") for line in (data / "dev.tsv").read_text().rstrip().split("\n")[1:]]
    batch = tokenizer()([line[1] for line in lines], [line[2] for line in lines], padding=True, return_tensors="pt")
    with torch.no_grad():
        classes = again(**batch).logits.argmax(-1).tolist()
    assert [("entailment", "not_entailment")[c] for c in classes] == list(names.values())
    right = sum(name == line[3] for name, line in zip(names.values(), lines, strict=True))
    assert found.scores["dev"]["accuracy"] == pytest.approx(right / 24)
    assert not list((tmp_path / "out" / "runs" / "seed1").glob("checkpoint-*"))


def at_step(step: int) -> Callable[[dict[str, Any]], None]:
    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] >= step:
            raise Killed

    return watch


@pytest.mark.parametrize("step", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 9)), 5])
def test_a_run_that_was_stopped_at_a_step_goes_on_to_the_same_numbers(
    step: int, whole: Path, model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    with pytest.raises(Killed):
        tune(model, rte, tmp_path / "out", watch=at_step(step))
    events: list[dict[str, Any]] = []
    torch.manual_seed(step)  # what was drawn before must not matter
    tune(model, rte, tmp_path / "out", watch=events.append)
    resumed = [event["checkpoint"] for event in events if event["event"] == "resume"]
    assert resumed == ([f"checkpoint-{(step - 1) // 2 * 2}"] if step > 2 else [])
    assert_same_run(whole, tmp_path / "out")


@pytest.mark.parametrize(
    "what", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("prune", "evaluate")), "seal", "_save_model"]
)
def test_a_run_that_was_stopped_while_it_writes_goes_on_to_the_same_numbers(
    what: str, whole: Path, model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*given: Any, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if what == "evaluate":
            patch.setattr("locant.finetune.classification.Classification.evaluate", kill)
        else:
            patch.setattr(run_module if what == "_save_model" else checkpoints, what, kill)
        with pytest.raises(Killed):
            tune(model, rte, tmp_path / "out")
    tune(model, rte, tmp_path / "out")
    assert_same_run(whole, tmp_path / "out")


def interrupted(model: Path, rte: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with checkpoints 2 and 4; the run was stopped at step 5."""
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    with pytest.raises(Killed):
        tune(model, rte, out, watch=at_step(5))
    assert {path.name for path in (out / "runs" / "seed1").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    return out / "runs" / "seed1" / "checkpoint-4"


def break_byte(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 1
    file.write_bytes(bytes(body))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda newest: break_byte(newest / "model.safetensors"), "model.safetensors is not what was written"),
        (lambda newest: (newest / "files.json").unlink(), "it was not finished"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (lambda newest: (newest / "optimizer.pt").write_bytes(b"PK"), r"optimizer.pt has 2 bytes, not \d+"),
                (lambda newest: (newest / "scheduler.pt").unlink(), "scheduler.pt is missing"),
                (lambda newest: (newest / "files.json").write_text("{"), "files.json is damaged"),
            )
        ),
    ],
)
def test_where_the_newest_checkpoint_is_broken_the_one_before_is_taken(
    harm: Callable[[Path], Any], words: str, whole: Path, model: Path, rte: Path, tmp_path: Path, monkeypatch
) -> None:
    harm(interrupted(model, rte, tmp_path / "out", monkeypatch))
    events: list[dict[str, Any]] = []
    tune(model, rte, tmp_path / "out", watch=events.append)
    assert [event["checkpoint"] for event in events if event["event"] == "resume"] == ["checkpoint-2"]
    (notice,) = (event["words"] for event in events if event["event"] == "notice")
    assert re.fullmatch(rf"checkpoint-4 is not whole \({words}\) and was left out", notice)
    assert_same_run(whole, tmp_path / "out")


def test_folders_and_checkpoints_of_another_recipe_are_refused(
    model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = interrupted(model, rte, tmp_path / "out", monkeypatch)
    with pytest.raises(ValueError, match=r"belongs to another recipe: settings.epochs is 2.0 there and 3.0 here"):
        tune(model, rte, tmp_path / "out", settings=GlueSettings(**{**SIZES, "epochs": 3.0}))
    told = json.loads((newest / "files.json").read_text())
    told["recipe"]["settings"]["learning_rate"] = 0.5
    (newest / "files.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"checkpoint-4 is of another recipe: settings.learning_rate is 0.5 there"):
        tune(model, rte, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files \(thesis.txt\), needed an empty folder"):
        tune(model, rte, tmp_path / "full")


@pytest.mark.parametrize("where", ["torch.save", "log"])
def test_a_full_disk_stops_with_a_sentence_and_keeps_the_checkpoint_before(
    where: str, whole: Path, model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "out", []

    def full(write: Callable[..., Any], after: int) -> Callable[..., Any]:
        def limited(*given: Any, **more: Any) -> Any:
            calls.append(0)
            if len(calls) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*given, **more)

        return limited

    with monkeypatch.context() as patch:
        if where == "torch.save":  # two or more for each checkpoint: the second checkpoint fails
            patch.setattr(torch, "save", full(torch.save, 4))
            words = r"cannot write the checkpoint '.*checkpoint-4': No space left on device; free space"
        else:
            patch.setattr(JsonLines, "__call__", full(JsonLines.__call__, 3))
            words = r"finetune: cannot write '.*log.jsonl': No space left on device; free space or give another --out"
        with pytest.raises(OSError, match=words):
            tune(model, rte, out)
    assert {path.name for path in (out / "runs" / "seed1").glob("checkpoint-*")} == {"checkpoint-2"}
    tune(model, rte, out)
    assert_same_run(whole, out)


def test_a_loss_that_is_no_number_stops_the_seed_and_names_step_and_examples(
    model: Path, rte: Path, tmp_path: Path
) -> None:
    settings = GlueSettings(**{**SIZES, "learning_rate": 1e30, "warmup_fraction": 0.0})
    outcome = tune(model, rte, tmp_path / "out", (1, 2), settings=settings)
    for result in outcome.runs:
        assert re.match(
            r"finetune: loss is (nan|inf) at step [2-4] \(examples train.tsv:\d+, .*\), needed a finite number; try "
            r"learning_rate below 1e\+30, a larger warmup_fraction, or a smaller max_grad_norm",
            result.reason or "",
        )
        assert result.scores == {} and result.final_loss is None
    assert "0 of 2 seeds" in to_text(outcome) and "seed 2: finetune: loss is" in to_text(outcome)
    assert outcome.spreads() == {} and "," in outcome.to_csv().split("\n")[1]
    again = tune(model, rte, tmp_path / "out", (1, 2), settings=settings)
    assert again.runs == outcome.runs, "a divergence is a result, not done again"


@pytest.mark.parametrize("task", ["squad", "glue/rte"])
def test_scores_of_a_model_that_the_last_step_broke_are_none(task: str, model: Path, rte: Path, tmp_path: Path) -> None:
    rates: dict[str, Any] = {"learning_rate": 1e30, "warmup_fraction": 0.0, "batch_size": 64, "epochs": 1.0}
    if task == "squad":
        files = write_squad(tmp_path / "train.json"), write_squad(tmp_path / "dev.json", seed=1)
        data, sizes = DataChoice(files[:1], files[1:]), {"overlap": 8, "max_question": 8, "max_answer": 5}
        settings: Any = SquadSettings(**{**SIZES, **sizes, **rates})
    else:
        data, settings = DataChoice((rte,)), GlueSettings(**{**SIZES, **rates})
    outcome = finetune(task, ModelChoice(str(model)), data, settings, (1,), tmp_path / "out")
    words = r"finetune: what the trained model says of \d+ inputs \(.+, .+, .+, \.\.\.\) is nan or inf, needed a finite"
    assert re.match(words, outcome.runs[0].reason or "")
    assert outcome.runs[0].steps == 1 and outcome.runs[0].scores == {} and outcome.spreads() == {}


def test_a_folder_in_which_a_mistake_left_nothing_is_begun_anew(model: Path, rte: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"position_learning_rate = 0.1, but no encoding with parameters"):
        wrong = GlueSettings(**{**SIZES, "position_learning_rate": 0.1})
        finetune("glue/rte", ModelChoice(str(model)), DataChoice((rte,)), wrong, (1,), tmp_path)
    assert (tmp_path / "runs" / "seed1" / "log.jsonl").is_file()
    mended = GlueSettings(**{**SIZES, "epochs": 0.1})
    outcome = finetune("glue/rte", ModelChoice(str(model)), DataChoice((rte,)), mended, (1,), tmp_path)
    assert outcome.runs[0].steps == 1 and outcome.runs[0].reason is None


def test_accumulated_batches_make_the_same_steps(model: Path, rte: Path, tmp_path: Path) -> None:
    still = save_model(tmp_path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    curves = []
    for accumulate in (1, 4):
        settings = GlueSettings(**{**SIZES, "epochs": 1.0}, accumulate=accumulate)
        tune(still, rte, tmp_path / str(accumulate), settings=settings, keep_models=False)
        curves.append([loss for _, loss, _ in losses(tmp_path / str(accumulate))])
    assert curves[1] == pytest.approx(curves[0], abs=2e-5) and len(curves[0]) == 5
    assert not (tmp_path / "1" / "runs" / "seed1" / "model").exists()


def test_a_neutral_start_beside_the_kept_positions_begins_as_the_plain_model(
    model: Path, rte: Path, tmp_path: Path
) -> None:
    settings = GlueSettings(**{**SIZES, "epochs": 0.2})
    still = save_model(tmp_path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    first = {}
    for name, choice in {
        "plain": ModelChoice(str(still)),
        "beside": ModelChoice(str(still), encoding="huang_m4", init="neutral", keep_absolute=True),
        "instead": ModelChoice(str(still), encoding="shaw"),
        "fitted": ModelChoice(str(still), encoding="shaw", init="fit"),
    }.items():
        outcome = tune(model, rte, tmp_path / name, settings=settings, choice=choice, keep_models=False)
        first[name] = losses(tmp_path / name)[0][1]
        assert bool(outcome.parameters["encodings"]) == bool(choice.encoding)
    assert first["beside"] == pytest.approx(first["plain"], abs=1e-6)
    assert abs(first["instead"] - first["plain"]) > 1e-5 < abs(first["fitted"] - first["instead"])


def test_squad_is_trained_read_in_windows_and_scored(model: Path, tmp_path: Path) -> None:
    train, dev = write_squad(tmp_path / "train.json", 23), write_squad(tmp_path / "dev.json", 11, seed=1)
    settings = SquadSettings(
        epochs=1.0, batch_size=8, length=29, overlap=7, max_question=10, max_answer=5, device="cpu", save_every=2
    )
    outcome = finetune("squad", ModelChoice(str(model)), DataChoice((train,), (dev,)), settings, (1,), tmp_path / "out")
    scores = outcome.runs[0].scores["dev"]
    predictions = json.loads((tmp_path / "out" / "runs" / "seed1" / "predictions.json").read_text())["dev"]
    assert len(predictions) == 11 and outcome.examples["dev"] == 11 and outcome.examples["train"] > 23
    contexts = {q["id"]: p["context"] for p in json.loads(dev.read_text())["data"][0]["paragraphs"] for q in p["qas"]}
    assert all(text and text in contexts[id_] for id_, text in predictions.items())
    assert 0 <= (scores["exact_match"] or 0.0) <= (scores["f1"] or 0.0) <= 100 and outcome.baseline == {"dev": {}}
    with pytest.raises(ValueError, match=r"length = 62 is above the 61 tokens that the model serves"):
        long = SquadSettings(length=62)
        finetune("squad", ModelChoice(str(model)), DataChoice((train,), (dev,)), long, (1,), tmp_path / "long")
    with pytest.raises(ValueError, match=r"none of the 23 answers can be trained on \(training: 23 answers are longer"):
        words = [
            {**q, "answers": [{"text": p["context"], "answer_start": 0}]} for p in _paragraphs(train) for q in p["qas"]
        ]
        body = {"data": [{"paragraphs": [{**p, "qas": [q]} for p, q in zip(_paragraphs(train), words, strict=True)]}]}
        train.write_text(json.dumps(body))
        short = SquadSettings(length=15, overlap=2, max_question=8, max_answer=2)
        finetune("squad", ModelChoice(str(model)), DataChoice((train,), (dev,)), short, (1,), tmp_path / "short")


def _paragraphs(path: Path) -> list[dict[str, Any]]:
    return [{**p, "context": p["context"] + " sea" * 20} for p in json.loads(path.read_text())["data"][0]["paragraphs"]]


# --- what does not fit together --------------------------------------------------------------------------------------


def test_a_model_and_a_tokenizer_that_do_not_fit_are_refused(model: Path, rte: Path, tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", vocab_size=50)
    with pytest.raises(ValueError, match=r"tokenizer has ids up to \d+, but the model embeds 50 \(0 to 49\)"):
        tune(small, rte, tmp_path / "out")
    other = save_model(tmp_path / "other", pad_token_id=4)
    with pytest.raises(ValueError, match=r"tokenizer pads with id 0 and the model with 4"):
        tune(other, rte, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "the folder is not touched before everything was checked"


def test_token_types_go_to_models_that_embed_them_whatever_the_tokenizer_says() -> None:
    names = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "\u2581sea")
    albert = T.AlbertTokenizer(vocab=[(name, float(-at)) for at, name in enumerate(names)])
    assert "token_type_ids" not in albert.model_input_names, "as transformers has it"
    assert model_inputs(albert, T.AlbertConfig()) and model_inputs(tokenizer(), T.BertConfig())
    assert not model_inputs(tokenizer(), T.RobertaConfig(type_vocab_size=1))
    assert not model_inputs(tokenizer(), T.DistilBertConfig())
    words = tokenizer()
    frames = {"single": "[CLS]:0 $A:0 [SEP]:0", "pair": "[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0"}
    words.backend_tokenizer.post_processor = TemplateProcessing(**frames, special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    assert not model_inputs(words, T.BertConfig())


def test_models_and_tokenizers_that_cannot_be_loaded_are_refused(model: Path, rte: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"finetune: no model at '.*nowhere'"):
        tune(tmp_path / "nowhere", rte, tmp_path / "out")
    bare = shutil.copytree(model, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"tokenizer of '.*bare' knows no word but \[.*--tokenizer FOLDER"):
        load_tokenizer(ModelChoice(str(bare)))
    words = tokenizer()
    words.pad_token = None
    words.save_pretrained(bare)
    with pytest.raises(ValueError, match=r"tokenizer of '.*bare' has no padding token"):
        load_tokenizer(ModelChoice(str(bare)))
    weights = load_file(model / "model.safetensors")
    cut = shutil.copytree(model, tmp_path / "cut")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, cut / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of \w+ \(.*encoder.layer.1.output.dense.weight\)"):
        tune(cut, rte, tmp_path / "out", choice=ModelChoice(str(cut)))


def test_options_without_effect_are_refused(model: Path, rte: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"init = 'neutral' was given without an encoding"):
        ModelChoice(str(model), init="neutral")
    with pytest.raises(ValueError, match=r"keep_absolute = True was given without an encoding"):
        ModelChoice(str(model), keep_absolute=True)
    with pytest.raises(ValueError, match=r"option = \{'clip': 3\} was given without an encoding"):
        ModelChoice(str(model), options={"clip": 3})
    with pytest.raises(ValueError, match=r"position_learning_rate = 0.01, but no encoding with parameters is attached"):
        tune(
            model,
            rte,
            tmp_path / "a",
            settings=GlueSettings(**SIZES, position_learning_rate=0.01),
            choice=ModelChoice(str(model)),
        )
    with pytest.raises(ValueError, match=r"seeds = \[1, 1\], needed at least one, each once"):
        tune(model, rte, tmp_path / "b", (1, 1))
    with pytest.raises(ValueError, match=r"report_to = 'tensorbord' is unknown; known: .*tensorboard"):
        tune(model, rte, tmp_path / "c", report_to=("tensorbord",))


def test_packages_that_are_missing_are_named_before_anything_is_trained(
    model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = run_module.importlib.util.find_spec
    hidden = {"sklearn", "trackio"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    with pytest.raises(ModuleNotFoundError, match=r"sklearn cannot be imported, needed to score; pip install 'locant"):
        tune(model, rte, tmp_path / "out")
    hidden.remove("sklearn")
    with pytest.raises(ValueError, match=r"report_to = 'trackio', but the package is not installed"):
        tune(model, rte, tmp_path / "out", report_to=("trackio",))


def test_trackers_get_the_curve(model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    seen: list[dict[str, float]] = []

    class Tracker(T.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            seen.append(dict(logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "codecarbon", Tracker)
    tune(model, rte, tmp_path / "out", report_to=("codecarbon",), keep_models=False)
    curve = [line["loss"] for line in seen if "loss" in line]
    assert curve == [loss for _, loss, _ in losses(tmp_path / "out")]


# --- order of the examples -------------------------------------------------------------------------------------------


def test_every_epoch_shows_every_example_once_and_follows_from_the_seed() -> None:
    features = [Feature(str(n), [1] * (1 + n % 7), [0] * (1 + n % 7)) for n in range(24)]
    order = Schedule(features, 1, 9, 8).order
    assert len(order) == 72 and sorted(order) == sorted([*range(24)] * 3)
    assert order == Schedule(features, 1, 9, 8).order != Schedule(features, 2, 9, 8).order
    assert all(sorted(order[at : at + 24]) == [*range(24)] for at in (0, 24, 48))
    assert [item[1].id for item in (Schedule(features, 1, 9, 8)[k] for k in range(3))] == [str(n) for n in order[:3]]


def test_batches_hold_examples_of_all_lengths() -> None:
    lengths = [1 + n % 7 for n in range(1400)]
    order = Schedule([Feature(str(n), [1] * n, [0] * n) for n in lengths], 1, 175, 8).order
    means = [statistics.fmean(lengths[n] for n in order[at : at + 8]) for at in range(0, len(order), 8)]
    assert statistics.stdev(means) == pytest.approx(2.0 / 8**0.5, rel=0.15), "as drawn at random"


@pytest.mark.parametrize(("examples", "steps"), [(37, 10), (8, 2), (3, 1)])
def test_steps_follow_from_epochs_and_examples(examples: int, steps: int) -> None:
    assert FinetuneSettings(epochs=2.0, batch_size=8).steps(examples) == steps


# --- results ---------------------------------------------------------------------------------------------------------


def made(label: str, values: list[float | None], dev: int = 19) -> Outcome:
    runs = tuple(SeedResult(n, {"dev": {"accuracy": value}}, 5, 0.5, 9.0, 1.0) for n, value in enumerate(values, 1))
    return Outcome(
        "glue/rte", label, {}, {}, {"train": 37, "dev": dev}, {}, {"dev": {"accuracy": 0.5}}, ("a note",), runs
    )


def test_a_table_shows_mean_deviation_values_majority_and_how_many_seeds_it_takes() -> None:
    text = to_text(made("m4", [0.60, 0.62, 0.64]), (made("plain", [0.58, 0.60, 0.59]),))
    assert "m4, 3 of 3 seeds, train 37, dev 19" in text and "note: a note" in text
    assert re.search(r"dev +accuracy +62.00 ± 2.00 +50.00 +60.00, 62.00, 64.00", text)
    assert re.search(
        r"against the majority class: \+12.00 \(95% interval \+7.03 to \+16.97\), shown; .* takes 3 seeds", text
    )
    assert re.search(
        r"against plain: \+3.00 \(95% interval .*\), not shown; a difference of this size takes 6 seeds", text
    )
    one = to_text(made("m4", [0.60]))
    assert "+10.00; from one seed, so whether it is chance is unknown" in one
    assert "undefined" in to_text(made("m4", [0.6, None]))
    assert "no number of seeds" in to_text(made("m4", [0.6, 0.7]), (made("same", [0.6, 0.7]),))


def test_results_come_back_from_their_file_and_are_held_against_the_same_sets_only(whole: Path, tmp_path: Path) -> None:
    outcome = read_outcome(whole)
    assert outcome.to_json() == (whole / "results.json").read_text() and outcome.task == "glue/rte"
    assert outcome.environment["versions"]["torch"] == torch.__version__ and outcome.recipe["settings"]["epochs"] == 2.0
    with pytest.raises(
        ValueError, match=r"glue/rte on train 37, dev 18 cannot be held against glue/rte on train 37, dev 19"
    ):
        made("a", [0.5]).against(made("b", [0.5], dev=18))
    with pytest.raises(FileNotFoundError, match=r"no '.*nowhere'; give the output folder"):
        read_outcome(tmp_path / "nowhere")
    (tmp_path / "results.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"results.json is no whole result of locant finetune \(KeyError"):
        read_outcome(tmp_path)


# --- the command -----------------------------------------------------------------------------------------------------

RUNNER = CliRunner()
QUICK = ["epochs=0.5", "batch_size=8", "device=cpu"]


def test_the_command_trains_several_seeds_prints_the_table_and_keeps_what_is_finished(
    model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = ["finetune", "glue/rte", str(model), "--data", str(rte), "--seeds", "1,2", *QUICK]
    result = RUNNER.invoke(app, plain)
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "runs" / "glue-rte-tiny"
    assert {"results.json", "runs.csv", "table.txt", "recipe.json", "runs"} <= {path.name for path in out.iterdir()}
    assert result.stdout == (out / "table.txt").read_text() and "2 of 2 seeds" in result.stdout
    attached = ["--attach", "tisa", "--init", "neutral", "--keep-absolute", "--option", "kernels=3"]
    more = RUNNER.invoke(app, [*plain, *attached, "--against", str(out), "--no-keep-models"])
    assert more.exit_code == 0, more.stderr
    assert "absolute + tisa (neutral)" in more.stdout and "against as saved" in more.stdout
    assert not (tmp_path / "runs" / "glue-rte-tiny-tisa" / "runs" / "seed1" / "model").exists()
    again = RUNNER.invoke(app, [*plain, "--json"])
    assert "seed 1: finished before" in again.stderr and json.loads(again.stdout)["format"] == "locant.finetune.results"


def test_the_folder_is_called_after_the_run_that_left_the_model() -> None:
    assert default_folder("glue/rte", "runs/bert-tisa/model") == Path("runs/glue-rte-bert-tisa")
    assert default_folder("squad", "./minilm/", "shaw") == Path("runs/squad-minilm-shaw")


def test_a_terminal_shows_step_loss_and_tokens_per_second() -> None:
    watcher, shown = SeedWatcher(), io.StringIO()
    watcher.progress.disable = False
    watcher.console = watcher.progress.live.console = Console(file=shown, force_terminal=True, width=150)
    with watcher:
        watcher({"event": "start", "seed": 3, "number": 1, "count": 2})
        step = {"event": "step", "step": 4, "steps": 9, "loss": 0.51234, "tokens_per_second": 1234.5, "seed": 3}
        watcher(step)
        watcher.progress.refresh()
        watcher({"event": "evaluate", "seed": 3})
        scores = {"dev": {"pearson": None, "f1": 0.5}}
        watcher({"event": "end", "seed": 3, "reason": None, "scores": scores, "task": "glue/mrpc"})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert re.search(r"seed 3 \(2 of 2\).* 4/9 loss 0.512  1,23[45] tokens/s", text)
    assert "seed 3 (2 of 2): dev pearson -, dev f1 50" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["glue/rtf"], "unknown task 'glue/rtf'; did you mean 'glue/rte'?"),
        (["glue/rte", "epoch=3"], "unknown key 'epoch'; did you mean 'epochs'?"),
        (["glue/rte", "--seeds", "1,x"], "--seeds '1,x' must be whole numbers by commas, such as 1,2,3"),
        (["glue/rte", "--against", "nowhere"], "no 'nowhere'; give the output folder"),
        (["squad"], "squad: 1 training and 0 dev files came"),
    ],
)
def test_bad_arguments_are_one_sentence_and_code_2(arguments: list[str], words: str, model: Path, rte: Path) -> None:
    result = RUNNER.invoke(app, ["finetune", arguments[0], str(model), "--data", str(rte), *arguments[1:]])
    assert result.exit_code == 2 and words in result.stderr and "Traceback" not in result.stderr


def test_help_names_tasks_and_shows_examples() -> None:
    text = RUNNER.invoke(app, ["finetune", "--help"], env={"COLUMNS": "120"}).stdout
    assert all(word in text for word in ("glue/wnli", "--keep-absolute", "torchrun", "split_dev=0.8", "--attach"))


def test_a_failed_seed_is_code_1_and_a_full_disk_too(
    model: Path, rte: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["finetune", "glue/rte", str(model), "--data", str(rte), "--seeds", "1", *QUICK]
    failed = RUNNER.invoke(app, [*arguments, "--out", str(tmp_path / "a"), "learning_rate=1e30", "warmup_fraction=0"])
    assert failed.exit_code == 1 and "seed 1: finetune: loss is" in failed.stdout

    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    stopped = RUNNER.invoke(app, [*arguments, "--out", str(tmp_path / "b")])
    assert stopped.exit_code == 1 and "No space left on device" in stopped.stderr and "Traceback" not in stopped.stderr


KILL = """
import os, signal, sys
import locant.training.resumable as trainer
from locant.training import checkpoints
from locant.cli import app
from locant.cli.progress import SeedWatcher
moment, step = sys.argv[1], int(sys.argv[2])
count = 0
def counted(kind):
    global count
    count += kind == moment
    if kind == moment and count == step:
        os.kill(os.getpid(), signal.SIGKILL)
trainer.SHOWN = 0.0
record, seal, save = trainer.ResumableTrainer.record_step, checkpoints.seal, trainer.Trainer._save_checkpoint
def recorded(self): record(self); counted("step")
def sealed(*given): counted("seal"); seal(*given)
def saved(self, *given): counted("save"); save(self, *given); counted("saved")
trainer.ResumableTrainer.record_step, checkpoints.seal, trainer.Trainer._save_checkpoint = recorded, sealed, saved
sys.argv = ["locant", *sys.argv[3:]]
app()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "count"), [("step", 3), ("step", 10), ("save", 2), ("seal", 3), ("saved", 5)])
def test_kill_9_at_a_moment_changes_no_number(
    moment: str, count: int, whole: Path, model: Path, rte: Path, tmp_path: Path
) -> None:
    settings = [f"{key}={value}" for key, value in SIZES.items()]
    command = ["finetune", "glue/rte", str(model), "--data", str(rte), "--seeds", "1", "--out", str(tmp_path / "out")]
    command += ["--attach", "huang_m4", "--init", "neutral", "--keep-absolute", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run([sys.executable, "-c", KILL, moment, str(count), *command], cwd=ROOT, env=environment)
    assert killed.returncode == -signal.SIGKILL
    done = subprocess.run(
        [sys.executable, "-m", "locant.cli", *command], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_run(whole, tmp_path / "out")
