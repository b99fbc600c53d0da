"""Pre-training runs: they learn, leave models that load, and can be stopped at any moment without a number changing."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import locant.hf
from locant.pretrain.run import Pretrained, pretrain
from locant.training import checkpoints
from locant.training.log import JsonLines
from tests.pretrain_runs import STAGES, TRAIN, assert_same_run, lines, recipe, toml, weights, write_text

ROOT = Path(__file__).resolve().parents[1]
SLOW = pytest.mark.slow


class Killed(BaseException):
    """Stands for a signal: nothing in the package catches it."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    pretrain(recipe(text), out)
    return out


def at_step(step: int) -> Callable[[dict[str, Any]], None]:
    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] >= step:
            raise Killed

    return watch


OBJECTIVES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"encoding": "absolute", "host": {"family": "roberta"}},
    "albert": {"encoding": "tisa", "host": {"family": "albert", "embedding_dim": 11}},
    "electra": {"encoding": "tupe_r", "host": {"family": "electra", "embedding_dim": 13}, "objective": "electra"},
    "gpt2": {"encoding": "rope", "host": {"family": "gpt2"}, "objective": "causal"},
}


@pytest.mark.parametrize("family", ["electra", *(pytest.param(n, marks=SLOW) for n in OBJECTIVES if n != "electra")])
def test_every_host_learns_and_leaves_a_model_that_loads(family: str, text: Path, tmp_path: Path) -> None:
    chosen = recipe(text, curriculum=[], train={"length": 13, "steps": 40, "learning_rate": 1e-2}, **OBJECTIVES[family])
    found = pretrain(chosen, tmp_path / "out")
    curve = [line["loss"] for line in lines(tmp_path / "out", "step")]
    assert found.reason is None and found.steps == len(curve) == 40 and found.tokens == 40 * 8 * 13
    assert sum(curve[-8:]) < 0.9 * sum(curve[:8])
    held = [line["loss"] for line in lines(tmp_path / "out", "validation")]
    assert held[-1] < 0.97 * held[0] and found.validation["loss"] == held[-1]
    auto = {"gpt2": T.AutoModelForCausalLM, "electra": T.AutoModelForPreTraining}.get(family, T.AutoModelForMaskedLM)
    for folder in ("model", "generator")[: 1 + (family == "electra")]:
        kind = T.AutoModelForMaskedLM if folder == "generator" else auto
        model, told = kind.from_pretrained(tmp_path / "out" / folder, output_loading_info=True)
        assert not any(told.values())
        assert [a.stack.name for _, _, a in locant.hf.attachments(model)] == [chosen.encoding.name]
        words = T.AutoTokenizer.from_pretrained(tmp_path / "out" / folder)
        read = words("the sea was dark", return_tensors="pt")
        assert words.convert_ids_to_tokens(read["input_ids"][0])[:: len(read["input_ids"][0]) - 1] == ["[CLS]", "[SEP]"]
        with torch.no_grad():
            assert torch.isfinite(model.eval()(input_ids=read["input_ids"]).logits).all()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize("step", [6, *(pytest.param(n, marks=SLOW) for n in (2, 3, 8))])
def test_a_run_that_was_stopped_at_a_step_goes_on_to_the_same_numbers(
    step: int, whole: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    with pytest.raises(Killed):
        pretrain(recipe(text), tmp_path / "out", watch=at_step(step))
    events: list[dict[str, Any]] = []
    torch.manual_seed(step)  # what was drawn before must not matter
    pretrain(recipe(text), tmp_path / "out", watch=events.append)
    resumed = [event["checkpoint"] for event in events if event["event"] == "resume"]
    assert resumed == ([f"checkpoint-{(step - 1) // 2 * 2}"] if step > 2 else [])
    assert_same_run(whole, tmp_path / "out")


KILL = """
import os, signal, sys
import locant.training.resumable as resumable
from locant.pretrain import run
from locant.training import checkpoints
from locant.cli import app
moment, count = sys.argv[1], int(sys.argv[2])
seen = 0
def reached(kind):
    global seen
    seen += kind == moment
    if kind == moment and seen == count:
        os.kill(os.getpid(), signal.SIGKILL)
def counting(owner, name, kind, after=False):
    call = getattr(owner, name)
    def wrapped(*given, **more):
        if not after: reached(kind)
        found = call(*given, **more)
        if after: reached(kind)
        return found
    setattr(owner, name, wrapped)
counting(resumable.ResumableTrainer, "record_step", "step", after=True)
counting(resumable.Trainer, "_save_optimizer_and_scheduler", "half a checkpoint")
counting(checkpoints, "seal", "an unsealed checkpoint")
counting(checkpoints, "prune", "a sealed checkpoint")
counting(run, "_save_models", "the model", after=True)
sys.argv = ["locant", *sys.argv[3:]]
app()
"""


@pytest.mark.parametrize(
    ("moment", "count"),
    [
        ("half a checkpoint", 2),
        *(
            pytest.param(*case, marks=SLOW)
            for case in (
                ("step", 1),
                ("step", 7),
                ("an unsealed checkpoint", 3),
                ("a sealed checkpoint", 1),
                ("the model", 1),
            )
        ),
    ],
)
def test_kill_9_at_a_moment_changes_no_number(moment: str, count: int, whole: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "words.toml"
    file.write_text(toml(text))
    command = ["pretrain", str(file), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run([sys.executable, "-c", KILL, moment, str(count), *command], cwd=ROOT, env=environment)
    assert killed.returncode == -signal.SIGKILL
    pretrain(recipe(text), tmp_path / "out")
    assert_same_run(whole, tmp_path / "out")


def test_where_the_newest_checkpoint_is_broken_the_one_before_is_taken(
    whole: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    with pytest.raises(Killed):
        pretrain(recipe(text), tmp_path / "out", watch=at_step(5))
    newest = tmp_path / "out" / "checkpoint-4"
    body = bytearray((newest / "model.safetensors").read_bytes())
    body[len(body) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(bytes(body))
    events: list[dict[str, Any]] = []
    pretrain(recipe(text), tmp_path / "out", watch=events.append)
    assert [event["checkpoint"] for event in events if event["event"] == "resume"] == ["checkpoint-2"]
    (notice,) = (event["words"] for event in events if event["event"] == "notice")
    assert notice == "checkpoint-4 is not whole (model.safetensors is not what was written) and was left out"
    assert_same_run(whole, tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda body: b"", 0),
        (lambda body: body.replace(b'"step": 3', b'"stop": 3'), 2),
        (lambda body: b"[1]\n" + body, 0),
        (lambda body: bytes(range(256)) + body, 0),
    ],
)
def test_a_log_that_lost_lines_is_named_and_nothing_is_written(
    damage: Callable[[bytes], bytes], found: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    with pytest.raises(Killed):
        pretrain(recipe(text), tmp_path, watch=at_step(5))
    log = tmp_path / "log.jsonl"
    damaged = damage(log.read_bytes())
    log.write_bytes(damaged)
    words = f"has {found} whole lines of steps, needed all 4 up to the checkpoint .*put the whole log back, or delete"
    with pytest.raises(ValueError, match=words):
        pretrain(recipe(text), tmp_path)
    assert log.read_bytes() == damaged and (tmp_path / "checkpoint-4").is_dir()


def test_a_folder_of_another_recipe_is_refused_and_a_finished_one_is_kept(
    whole: Path, text: Path, tmp_path: Path
) -> None:
    for changes, words in (
        ({"encoding": "shaw"}, "encoding.name is 'huang_m4' there and 'shaw' here"),
        ({"train": {"learning_rate": 0.5}}, "train.learning_rate is 0.003 there and 0.5 here"),
        ({"curriculum": STAGES[:1]}, "curriculum is "),
        ({"text": {"text": str(write_text(tmp_path / "words.jsonl", seed=1))}}, "read.sha256 is '"),
    ):
        with pytest.raises(ValueError, match=rf"belongs to another recipe: .*{re.escape(words)}.*; give another --out"):
            pretrain(recipe(text, **changes), whole)
    events: list[dict[str, Any]] = []
    before = (whole / "log.jsonl").read_bytes()
    again = pretrain(recipe(text, train={"peak_tflops": 2.0}), whole, watch=events.append)
    assert [event["event"] for event in events] == ["read", "kept"] and again.steps == 9
    assert (whole / "log.jsonl").read_bytes() == before


@pytest.mark.parametrize("where", ["torch.save", *(pytest.param(n, marks=SLOW) for n in ("log", "model"))])
def test_a_full_disk_stops_with_a_sentence_and_keeps_the_checkpoint_before(
    where: str, whole: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        if where == "torch.save":
            patch.setattr(torch, "save", full(torch.save, 4))
            words = r"pretrain: cannot write the checkpoint '.*checkpoint-\d': No space left on device; free space"
        elif where == "log":
            patch.setattr(JsonLines, "__call__", full(JsonLines.__call__, 5))
            words = r"pretrain: cannot write '.*log.jsonl': No space left on device; free space or give another --out"
        else:
            patch.setattr(T.PreTrainedModel, "save_pretrained", full(lambda *given, **more: None, 0))
            words = r"pretrain: cannot write '.*out': No space left on device"
        with pytest.raises(OSError, match=words):
            pretrain(recipe(text), out)
    assert checkpoints.last_good(out, json.loads((out / "recipe.json").read_text()), "pretrain")[0] is not None
    pretrain(recipe(text), out)
    assert_same_run(whole, out)


def test_a_loss_that_is_no_number_stops_and_names_step_and_windows(text: Path, tmp_path: Path) -> None:
    chosen = recipe(text, train={"learning_rate": 1e30, "warmup_fraction": 0.0})
    found = pretrain(chosen, tmp_path / "out")
    assert re.match(
        r"pretrain: loss is (nan|inf) at step [2-4] \(examples window \d+, window \d+, .*\), needed a finite number; "
        r"try learning_rate below 1e\+30, a larger warmup_fraction, or a smaller max_grad_norm",
        found.reason or "",
    )
    assert found.final_loss is None and found.validation == {} and not (tmp_path / "out" / "model").exists()
    assert pretrain(chosen, tmp_path / "out") == found, "a divergence is a result, not done again"


def test_what_the_last_step_breaks_is_no_result(text: Path, tmp_path: Path) -> None:
    stages = [{"length": 9, "steps": 1}]
    chosen = recipe(text, curriculum=stages, train={"learning_rate": 1e30, "warmup_fraction": 0.0})
    found = pretrain(chosen, tmp_path)
    assert re.match(
        r"pretrain: validation loss is (nan|inf) after step 1, needed a finite number; try learning_rate below 1e\+30",
        found.reason or "",
    )
    assert found.final_loss is None and found.validation == {} and not (tmp_path / "model").exists()
    assert not lines(tmp_path, "validation")


def test_a_folder_in_which_a_mistake_left_nothing_is_begun_anew(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"position_learning_rate = 0.1, but no encoding with parameters"):
        pretrain(recipe(text, encoding="none", train={"position_learning_rate": 0.1}), tmp_path)
    assert (tmp_path / "recipe.json").is_file()
    mended = recipe(text, curriculum=[{"length": 9, "steps": 1}])
    assert pretrain(mended, tmp_path).reason is None
    with pytest.raises(ValueError, match=r"belongs to another recipe: encoding.name is 'huang_m4' there and 'none'"):
        pretrain(recipe(text, encoding="none"), tmp_path)


@pytest.mark.parametrize("family", ["electra", *(pytest.param(n, marks=SLOW) for n in ("bert", "gpt2"))])
def test_accumulated_batches_make_the_same_steps(family: str, text: Path, tmp_path: Path) -> None:
    still = {**OBJECTIVES[family], "host": {**OBJECTIVES[family].get("host", {}), "dropout": 0.0}}
    curves = []
    for accumulate in (1, 4):
        chosen = recipe(text, **{**still, "train": {"accumulate": accumulate}, "text": {"pack": False}})
        pretrain(chosen, tmp_path / str(accumulate))
        curves.append(lines(tmp_path / str(accumulate), "step", "validation"))
    assert [line["tokens"] for line in curves[0]] == [line["tokens"] for line in curves[1]]
    for one, other in zip(*curves, strict=True):
        assert other == pytest.approx(one, abs=1e-3)
    assert len({line["loss"] for line in curves[0]}) > 5


def test_a_curriculum_keeps_optimizer_and_schedule_over_its_stages(whole: Path) -> None:
    steps = lines(whole, "step")
    assert [line["tokens"] for line in steps] == [9 * 8 * k for k in range(1, 6)] + [
        9 * 8 * 5 + 17 * 4 * k for k in range(1, 5)
    ]
    rates = [line["next_learning_rate"] for line in steps]
    assert rates == pytest.approx([TRAIN["learning_rate"] * (9 - k) / 9 for k in range(1, 10)])
    assert [line["step"] for line in lines(whole, "validation")] == [3, 6, 9]


def test_models_on_the_way_are_kept_as_a_course(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from locant.hf.course import kept

    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    chosen = recipe(text, train={"checkpoints": 3})
    with pytest.raises(Killed):
        pretrain(chosen, tmp_path / "out", watch=at_step(4))
    pretrain(chosen, tmp_path / "out")
    course = kept(tmp_path / "out")
    assert [(one.step, one.tokens) for one, _ in course] == [(0, 0), (3, 216), (6, 428), (9, 632)]
    assert [one.loss for one, _ in course][1:] == [line["loss"] for line in lines(tmp_path / "out", "validation")]
    last = T.AutoModelForMaskedLM.from_pretrained(course[-1][1]).state_dict()
    final = weights(tmp_path / "out")
    assert all(torch.equal(last[name], final[name]) for name in final)


def test_trackers_get_the_curve(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import integration_utils

    seen: list[dict[str, float]] = []

    class Tracker(T.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            seen.append(dict(logs))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "codecarbon", Tracker)
    pretrain(recipe(text, train={"curve_points": 3}), tmp_path / "out", report_to=("codecarbon",))
    losses = [line["loss"] for line in lines(tmp_path / "out", "step")]
    assert [logs["loss"] for logs in seen if "mfu" in logs] == [losses[2], losses[5], losses[8]]
    with pytest.raises(ValueError, match=r"pretrain: report_to = 'tensorbord' is unknown; known: .*tensorboard"):
        pretrain(recipe(text), tmp_path / "b", report_to=("tensorbord",))


def test_a_run_tells_what_it_found(whole: Path) -> None:
    body = json.loads((whole / "run.json").read_text())
    found = Pretrained(**body["result"])
    assert found.steps == 9 and found.tokens == 632 and found.mfu is not None and 0 < found.mfu < 1
    assert body["parameters"]["encoding"]["model"] == sum(
        value.numel() for name, value in weights(whole).items() if ".locant." in name
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "electra", "gpt2"])
def test_two_processes_share_the_work_and_agree_with_one(family: str, text: Path, tmp_path: Path) -> None:
    own = OBJECTIVES[family]
    still = {**own, "host": {**own.get("host", {}), "dropout": 0.0}, "text": {"pack": False}}
    file = tmp_path / "words.toml"
    file.write_text(toml(text, **still))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for processes in ("1", "2"):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m", "locant.cli"]
        command = [sys.executable, *launch, "pretrain", str(file), "--out", str(tmp_path / processes)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("training loss") == 1
    one, two = (lines(tmp_path / processes, "step", "validation") for processes in ("1", "2"))
    assert [line["tokens"] for line in one] == [line["tokens"] for line in two]
    for first, second in zip(one, two, strict=True):
        assert {k: v for k, v in second.items() if k != "event"} == pytest.approx(
            {k: v for k, v in first.items() if k != "event"}, rel=1e-4
        )
    pairs = ((weights(tmp_path / "1")[name], value) for name, value in weights(tmp_path / "2").items())
    assert max(float((first - second).abs().max()) for first, second in pairs) < 2e-3
