"""One task, one model, several seeds: trained, scored, and written so that any stop loses nothing that was finished.

recipe.json                 what the folder is for, with every default filled in
runs/seed<N>/               log.jsonl, checkpoint-<step>/ while it runs; then model/, predictions.json and run.json
results.json, runs.csv, table.txt
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from locant.compare.environment import environment
from locant.finetune.load import DataChoice, ReadTask, read_task, settings_kind
from locant.finetune.model import (
    build_model,
    check_fit,
    choose_length,
    identity,
    load_tokenizer,
    model_inputs,
)
from locant.finetune.problem import Problem, Scored
from locant.finetune.results import Outcome, SeedResult, to_text
from locant.finetune.scores import Scores
from locant.finetune.settings import FinetuneSettings, ModelChoice
from locant.finetune.trainer import make_trainer
from locant.hf.writing import replacing
from locant.training import checkpoints, launch
from locant.training.folder import file_digest, read_whole, unwritable, write_atomically
from locant.training.log import JsonLines
from locant.training.mlm import DivergedError
from locant.training.parameters import position_parameters
from locant.training.resumable import Watch, check_trackers, without_bars
from locant.training.together import claim_together, take_up

FIT_EXAMPLES = 32  # training examples that init="fit" looks at


@dataclass(frozen=True)
class Job:
    """What all seeds of a call share."""

    task: ReadTask
    choice: ModelChoice
    settings: FinetuneSettings
    out: Path
    recipe: dict[str, Any]
    problem: Problem
    tokenizer: Any
    report_to: tuple[str, ...]
    keep_models: bool
    watch: Watch
    state: PartialState

    def folder(self, seed: int) -> Path:
        """Folder of one seed."""
        return self.out / "runs" / f"seed{seed}"

    def key(self, seed: int) -> dict[str, Any]:
        """What the numbers of a seed depend on."""
        return {**self.recipe, "seed": seed}

    def model(self, seed: int) -> Any:
        """The model as it is before training."""
        return _build(self.choice, self.problem, seed)


def finetune(
    task: str,
    choice: ModelChoice,
    data: DataChoice,
    settings: FinetuneSettings | None = None,
    seeds: Sequence[int] = (1,),
    out: str | Path = "runs/finetune",
    *,
    report_to: Sequence[str] = (),
    keep_models: bool = True,
    watch: Watch = lambda event: None,
    command: str = "",
) -> Outcome:
    """Fine-tunes a model on ``task`` ("squad", "glue/rte", ...) once for each seed, and scores it.

    The same call goes on where an earlier one was stopped; finished seeds are kept. Under torchrun or `accelerate
    launch` the processes share the work, and each returns the outcome. ``watch`` is told what happens, by events.
    Raises: ValueError and FileNotFoundError for bad input, naming file, record and field, and for a folder of another
    recipe; OSError where nothing can be written. A loss that is not finite is a result: a reason in place of scores.
    """
    settings = settings_kind(task)() if settings is None else settings
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"finetune: seeds = {list(seeds)}, needed at least one, each once")
    _check_packages()
    check_trackers(report_to, "finetune")
    launch.check_launch(settings, "finetune")
    state = PartialState(cpu=settings.device == "cpu" or not torch.accelerator.is_available())
    job = _prepare(task, choice, data, settings, Path(out), tuple(report_to), keep_models, watch, state)
    lock = claim_together(job.out, job.recipe, state, "finetune")
    try:
        state.wait_for_everyone()
        with without_bars():
            done = [_seed(job, seed, number, len(seeds)) for number, seed in enumerate(seeds)]
        outcome = _outcome(job, done, environment(command))
        if state.is_main_process:
            _write(job.out / "results.json", outcome.to_json())
            _write(job.out / "runs.csv", outcome.to_csv())
            _write(job.out / "table.txt", to_text(outcome))
        state.wait_for_everyone()
        return outcome
    finally:
        if lock is not None:
            lock.close()


def _check_packages() -> None:
    """What scores the task must be there before hours of training, and not be missed behind them."""
    lacking = [name for name in ("sklearn", "scipy") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModuleNotFoundError(
            f"finetune: {' and '.join(lacking)} cannot be imported, needed to score; pip install 'locant[finetune]'"
        )


def _prepare(
    name: str,
    choice: ModelChoice,
    data: DataChoice,
    settings: FinetuneSettings,
    out: Path,
    report_to: tuple[str, ...],
    keep_models: bool,
    watch: Watch,
    state: PartialState,
) -> Job:
    """Everything that can be refused is, before the folder is touched or a step is made."""
    watch({"event": "read"})
    task = read_task(name, data)
    identified = identity(choice)
    tokenizer = load_tokenizer(choice)
    probe = _probe(choice, settings, tokenizer)
    length = choose_length(settings, probe)
    settings = dataclasses.replace(settings, length=length)
    problem = task.problem(tokenizer, settings, length, model_inputs(tokenizer, probe.config))
    recipe = {
        "task": name,
        "model": identified,
        "settings": dataclasses.asdict(settings),
        "data": [{"file": file.name, "sha256": file_digest(file)} for file in task.files],
    }
    recipe = json.loads(json.dumps(recipe))  # as it is read back
    return Job(task, choice, settings, out, recipe, problem, tokenizer, report_to, keep_models, watch, state)


def _probe(choice: ModelChoice, settings: FinetuneSettings, tokenizer: Any) -> Any:
    """The model without a task, to learn how long its input may be; nothing is fitted for that."""
    plain = dataclasses.replace(choice, init="paper") if choice.init == "fit" else choice
    model = build_model(plain, "AutoModel", {}, 0, dict)
    check_fit(model, tokenizer)
    return model


def _build(choice: ModelChoice, problem: Problem, seed: int) -> Any:
    def fit_batch() -> dict[str, Any]:
        batch = problem.batch(problem.train[:FIT_EXAMPLES])
        return {
            name: value for name, value in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")
        }

    return build_model(choice, problem.auto, problem.config, seed, fit_batch)


def _seed(job: Job, seed: int, number: int, count: int) -> dict[str, Any]:
    """The kept result of a finished seed, or that of a new run."""
    folder = job.folder(seed)
    kept = read_whole(folder / "run.json")
    job.state.wait_for_everyone()
    if kept is not None and kept.get("recipe") == job.key(seed):
        job.watch({"event": "kept", "seed": seed, "number": number, "count": count})
        return kept
    job.watch({"event": "start", "seed": seed, "number": number, "count": count})
    checkpoint, broken = take_up(folder, job.key(seed), job.state, "finetune")
    return _train(job, seed, folder, checkpoint, broken)


def _train(job: Job, seed: int, folder: Path, checkpoint: Path | None, broken: list[str]) -> dict[str, Any]:
    main = job.state.is_main_process
    log = JsonLines(folder / "log.jsonl", writes=main)
    log.cut(checkpoints.checkpoint_step(checkpoint) if checkpoint else 0, "finetune")
    job.state.wait_for_everyone()
    for words in broken:
        job.watch({"event": "notice", "words": words})
    if checkpoint is not None:
        job.watch({"event": "resume", "checkpoint": checkpoint.name})
    model = job.model(seed)
    facts = {
        "model": sum(parameter.numel() for parameter in model.parameters()),
        "encodings": sum(p.numel() for p in model.parameters() if id(p) in position_parameters(model)),
    }
    trainer = make_trainer(model, job.problem, job.settings, seed, folder, job.report_to)
    trainer.begin(folder, seed, job.key(seed), log, lambda event: job.watch({**event, "seed": seed}))
    reason, scored = None, {}
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        job.watch({"event": "evaluate", "seed": seed})
        scored = job.problem.evaluate(trainer.model_wrapped, trainer)
    except DivergedError as error:
        reason = str(error)
    result = _result(seed, log.steps(), scored, reason)
    body = {
        "recipe": job.key(seed),
        "result": dataclasses.asdict(result),
        "baseline": {name: one.baseline for name, one in scored.items()},
        "examples": {"train": len(job.problem.train), **{name: len(one.predictions) for name, one in scored.items()}},
        "parameters": facts,
        "environment": environment(),
    }
    _keep(job, seed, trainer, scored, body)
    job.watch({"event": "end", "seed": seed, "reason": reason, "scores": result.scores, "task": job.recipe["task"]})
    return body


def _result(seed: int, steps: list[dict[str, Any]], scored: dict[str, Scored], reason: str | None) -> SeedResult:
    last = [line["loss"] for line in steps[-max(1, len(steps) // 10) :]]
    speed, seconds = (steps[-1]["tokens_per_second"], steps[-1]["seconds"]) if steps else (None, None)
    scores: dict[str, Scores] = {name: dict(one.scores) for name, one in scored.items()}
    final = sum(last) / len(last) if last and reason is None else None
    return SeedResult(seed, scores, len(steps), final, speed, seconds, reason)


def _keep(job: Job, seed: int, trainer: Any, scored: dict[str, Scored], body: dict[str, Any]) -> None:
    """Model and predictions first, then run.json, by which the seed counts as finished; last, checkpoints go."""
    folder = job.folder(seed)
    done = body["result"]["reason"] is None
    try:
        if job.keep_models and done:
            _save_model(job, trainer, folder / "model")
        if job.state.is_main_process:
            if done:
                trainer.log_lines("scores", **body["result"]["scores"])
            named = {name: one.predictions for name, one in scored.items()}
            write_atomically(folder / "predictions.json", json.dumps(named, indent=1, ensure_ascii=False) + "\n")
            write_atomically(folder / "run.json", json.dumps(body, indent=1, ensure_ascii=False) + "\n")
            for old in folder.glob(f"{checkpoints.PREFIX}*"):
                shutil.rmtree(old)
    except OSError as error:
        raise unwritable(folder, error, "finetune") from error
    job.state.wait_for_everyone()


def _save_model(job: Job, trainer: Any, target: Path) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    state = launch.whole_state(model, keeps=job.state.is_main_process)
    if job.state.is_main_process:
        with replacing(target) as fresh:
            model.save_pretrained(fresh, state_dict=state)
            job.tokenizer.save_pretrained(fresh)


def _outcome(job: Job, bodies: list[dict[str, Any]], made: dict[str, Any]) -> Outcome:
    whole = next((body for body in bodies if body["result"]["reason"] is None), bodies[0])
    return Outcome(
        task=job.task.name,
        label=job.choice.label,
        recipe=job.recipe,
        environment=made,
        examples=whole["examples"],
        parameters=whole["parameters"],
        baseline=whole["baseline"],
        notices=tuple(job.problem.notices),
        runs=tuple(SeedResult(**body["result"]) for body in bodies),
    )


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise unwritable(path, error, "finetune") from error
