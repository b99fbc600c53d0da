"""One recipe, pre-trained: a folder that transformers and locant load, written so that any stop loses nothing.

recipe.json                 what the folder is for, with every default filled in
log.jsonl                   a line for each step, and for each look at the validation loss
checkpoint-<step>/          while it runs
model/ (generator/)         the trained model with its tokenizer; then run.json, by which the run counts as finished
checkpoints/step-<N>/       models on the way, where train.checkpoints asks for them
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

import locant.hf
from locant.compare.environment import environment
from locant.data import Vocabulary
from locant.data.tokenizer import special_id
from locant.hf.writing import replacing
from locant.pretrain.flops import cost_of, measure_peak
from locant.pretrain.hosts import shape_of
from locant.pretrain.objectives import BATCHES, Objective, build_objective
from locant.pretrain.recipe import PretrainRecipe
from locant.pretrain.text import MicroBatches, Text, read, ready_tokenizer, stage_seed
from locant.pretrain.trainer import Meter, PretrainTrainer, Validation, next_batch, trained
from locant.training import checkpoints, launch
from locant.training.folder import read_whole, unwritable, write_atomically
from locant.training.hosts import FAMILIES, Shape
from locant.training.log import JsonLines
from locant.training.mlm import DivergedError
from locant.training.parameters import position_parameters
from locant.training.resumable import Watch, check_trackers, resumable_trainer, shares, without_bars
from locant.training.together import claim_together, take_up

COMMAND = PretrainTrainer.command
VALIDATION_SEED = 0  # of the validation masks, whatever the seed of the run


@dataclass(frozen=True)
class Pretrained:
    """What a run found. Losses in nats; ``reason`` says why there is no model."""

    steps: int
    tokens: int
    final_loss: float | None  # mean training loss of the last tenth of the steps
    validation: dict[str, float]  # at the last step; {} where it was not reached
    tokens_per_second: float | None
    mfu: float | None  # share of the peak of the devices that was used
    seconds: float | None  # of training, since it was last taken up
    reason: str | None = None


@dataclass(frozen=True)
class Job:
    """A recipe with everything that is made before the first step."""

    recipe: PretrainRecipe
    out: Path
    key: dict[str, Any]
    text: Text
    shape: Shape
    objective: Objective
    report_to: tuple[str, ...]
    watch: Watch
    state: PartialState

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return self.shape.pad_id

    def collate(self, seed: int) -> Any:
        """The collator of an objective, with its masks."""
        vocabulary = Vocabulary.from_tokenizer(self.text.tokenizer)
        return BATCHES[self.recipe.objective.name](vocabulary, seed, self.recipe.masking)


def pretrain(
    recipe: PretrainRecipe,
    out: str | Path,
    *,
    report_to: Sequence[str] = (),
    watch: Watch = lambda event: None,
    command: str = "",
) -> Pretrained:
    """Pre-trains the model of a recipe and leaves it in ``out / "model"``.

    The same call goes on where an earlier one was stopped, to the same numbers; a finished run is not done again. Under
    torchrun or `accelerate launch` the processes share each step's batch. ``watch`` is told what happens, by events.
    Raises: ValueError and FileNotFoundError for bad input, and for a folder of another recipe; OSError where nothing
    can be written. A loss that is not finite is a result: a reason in place of a model.
    """
    check_trackers(report_to, COMMAND)
    settings = recipe.train
    launch.check_launch(settings, COMMAND)
    state = PartialState(cpu=settings.device == "cpu" or not torch.accelerator.is_available())
    for stage in recipe.stages:
        shares(stage.batch_size, settings.accumulate, COMMAND)
    job = _prepare(recipe, Path(out), tuple(report_to), watch, state)
    lock = claim_together(job.out, job.key, state, COMMAND)
    try:
        state.wait_for_everyone()
        kept = read_whole(job.out / "run.json")
        state.wait_for_everyone()
        if kept is not None and kept.get("recipe") == job.key:
            watch({"event": "kept"})
            return Pretrained(**kept["result"])
        with without_bars():
            return _train(job, command)
    finally:
        if lock is not None:
            lock.close()


def _prepare(recipe: PretrainRecipe, out: Path, report_to: tuple[str, ...], watch: Watch, state: PartialState) -> Job:
    """Everything that can be refused is, before the folder is touched or a step is made."""
    watch({"event": "read"})
    with state.main_process_first():  # which fills the caches
        text = read(recipe, progress=state.is_main_process)
    shape = shape_of(recipe.host, len(text.tokenizer), recipe.length, special_id(text.tokenizer, "pad_token"))
    objective = build_objective(recipe.objective, FAMILIES[recipe.host.family], shape, recipe.encoding, recipe.seed)
    for name, model in objective.saved().items():
        limit = locant.hf.capacity(model)
        if limit is not None and recipe.length > limit:
            raise ValueError(
                f"{COMMAND}: windows have up to {recipe.length} tokens, but {recipe.encoding.label!r} has positions "
                f"for {limit} in the {name}; give shorter windows, or encoding.max_length = {recipe.length}"
            )
    key = json.loads(json.dumps({**recipe.key(), "read": text.facts}))
    return Job(recipe, out, key, text, shape, objective, report_to, watch, state)


def _train(job: Job, command: str) -> Pretrained:
    checkpoint, broken = take_up(job.out, job.key, job.state, COMMAND)
    log = JsonLines(job.out / "log.jsonl", writes=job.state.is_main_process)
    log.cut(checkpoints.checkpoint_step(checkpoint) if checkpoint else 0, COMMAND)
    job.state.wait_for_everyone()
    for words in broken:
        job.watch({"event": "notice", "words": words})
    job.watch(
        {"event": "start", "title": f"{job.recipe.host.family} {job.recipe.host.size}, {job.recipe.encoding.label}"}
    )
    if checkpoint is not None:
        job.watch({"event": "resume", "checkpoint": checkpoint.name})
    trainer = _trainer(job, log)
    reason = None
    try:
        if checkpoint is None and 0 in job.recipe.milestones:
            trainer.keep(0, trainer.validate()["loss"])
        if checkpoint is not None and checkpoints.checkpoint_step(checkpoint) < job.recipe.steps:
            batches: Any = trainer.train_dataset
            batches.restore_place(checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except DivergedError as error:
        reason = str(error)
    job.state.wait_for_everyone()  # the first process has written its last line
    result = _result(log, reason)
    facts = {name: trained(model) for name, model in job.objective.saved().items()}
    positions = {name: _positional(model) for name, model in job.objective.saved().items()}
    body = {
        "recipe": job.key,
        "result": dataclasses.asdict(result),
        "parameters": {"all": facts, "encoding": positions},
        "environment": environment(command),
    }
    _keep(job, trainer, body, done=reason is None)
    job.watch({"event": "end", "reason": reason, "losses": result.validation})
    return result


def _positional(model: Any) -> int:
    added = position_parameters(model)
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) in added)


def _trainer(job: Job, log: JsonLines) -> PretrainTrainer:
    recipe, settings = job.recipe, job.recipe.train
    parts = settings.accumulate * job.state.num_processes
    dataset = MicroBatches(recipe, job.text.stages, parts, job.pad)
    collators = [job.collate(stage_seed(recipe.seed, number)) for number in range(len(recipe.stages))]
    trainer = resumable_trainer(
        PretrainTrainer,
        job.objective,
        dataset,
        next_batch(collators),
        settings,
        recipe.seed,
        job.out,
        steps=recipe.steps,
        share=1,
        report_to=job.report_to,
    )
    given = settings.peak_tflops * 1e12
    peak = given or measure_peak(trainer.args.device, settings.precision == "bfloat16")
    cost = cost_of(recipe.objective, FAMILIES[recipe.host.family], job.shape)
    meter = Meter(cost, peak * job.state.num_processes)
    tokenizer = ready_tokenizer(job.text.tokenizer, locant.hf.capacity(job.objective.saved()["model"]))
    held = Validation(job.text.validation, job.collate(VALIDATION_SEED), job.pad)
    trainer.equip(recipe, tokenizer, held, meter)
    trainer.begin(job.out, recipe.seed, job.key, log, job.watch)
    trainer.write_line(
        "start", peak_flops=peak, peak_is="given" if given else "measured", processes=job.state.num_processes
    )
    return trainer


def _result(log: JsonLines, reason: str | None) -> Pretrained:
    steps = log.steps()
    last = [line["loss"] for line in steps[-max(1, len(steps) // 10) :]]
    end = steps[-1] if steps else {}
    found = log.last("validation") if reason is None else {}
    return Pretrained(
        steps=len(steps),
        tokens=end.get("tokens", 0),
        final_loss=sum(last) / len(last) if last and reason is None else None,
        validation={name: value for name, value in found.items() if name.endswith("loss")},
        tokens_per_second=end.get("tokens_per_second"),
        mfu=end.get("mfu"),
        seconds=end.get("seconds"),
        reason=reason,
    )


def _keep(job: Job, trainer: PretrainTrainer, body: dict[str, Any], done: bool) -> None:
    """Models first, then run.json, by which the run counts as finished; last, checkpoints go."""
    try:
        if done:
            _save_models(job, trainer)
        if job.state.is_main_process:
            write_atomically(job.out / "run.json", json.dumps(body, indent=1, ensure_ascii=False) + "\n")
            for old in job.out.glob(f"{checkpoints.PREFIX}*"):
                shutil.rmtree(old)
    except OSError as error:
        raise unwritable(job.out, error, COMMAND) from error
    job.state.wait_for_everyone()


def _save_models(job: Job, trainer: PretrainTrainer) -> None:
    for name, model in trainer.objective.saved().items():
        state = launch.whole_state(model, keeps=job.state.is_main_process)
        if job.state.is_main_process:
            with replacing(job.out / name) as fresh:
                model.save_pretrained(fresh, state_dict=state)
                trainer.tokenizer.save_pretrained(fresh)


def to_text(found: Pretrained, folder: Path) -> str:
    """What a run found, in a few lines."""
    if found.reason:
        return f"no model: {found.reason}"
    losses = ", ".join(f"{name} {value:.4f}" for name, value in found.validation.items())
    lines = [
        f"steps {found.steps:,}, tokens {found.tokens:,}",
        f"training loss {found.final_loss:.4f} (mean of the last tenth); validation: {losses}",
        f"{found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.1%}",
        f"model: {folder / 'model'}",
    ]
    return "\n".join(lines)
