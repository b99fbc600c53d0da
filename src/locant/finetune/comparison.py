"""The task `finetune` of `locant compare`: encodings x seeds on one pretrained model and one task of fine-tuning.

How an encoding meets the model is said in the recipe, in its own row: `keep_absolute = true` puts it beside the
positions that the model brings, `init` is its start (see `locant.hf.attach`), and the name `as_saved` is the model as
it is: with `model = "..."` another one than the recipe's, such as one that was pretrained with its encoding. Encodings
are ranked by their error: the points that the main score of the first dev set is short of 100.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.compare.fields import build
from locant.compare.objective import OnStep, refuse_unused
from locant.compare.recipe import Recipe
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.words import Words
from locant.data.files import expand_path
from locant.finetune.glue import TASKS
from locant.finetune.load import GLUE, SQUAD, DataChoice, read_task, settings_kind
from locant.finetune.scores import MAIN
from locant.finetune.settings import FinetuneSettings, ModelChoice
from locant.training.checkpoints import PREFIX
from locant.training.folder import differences, file_digest, read_whole, write_atomically
from locant.training.log import JsonLines
from locant.training.mlm import BuiltModel, DivergedError, EncodingChoice, LossPoint, TrainSettings

if TYPE_CHECKING:
    from locant.encoding import Stack
    from locant.finetune.problem import Problem, Scored

AS_SAVED = "as_saved"
UNUSED = ("text", "tokenizer", "masking", "problems", "pairs", "electra", "model", "train", "evaluate")
FACTS = "facts.json"  # what the files and the model were
OWN_MODELS = "own_models"  # among them: digests of the models that encodings name for themselves, by label
TIMED_STEPS = 5_000  # at most, in a measurement of speed
POINTS = 50  # of the loss curve
BERT_BASE = {"num_heads": 12, "head_dim": 64, "model_dim": 768}  # what encodings are checked with, before any is built


class FineTuning:
    """A row for any task of `locant.finetune`; a recipe that names several is a comparison for each."""

    def words(self, recipe: dict[str, Any]) -> Words:
        """The main score of the task, and what it is short of 100."""
        task = recipe["finetune"]["tasks"][0]
        score = "f1" if task == SQUAD else MAIN[TASKS[task.removeprefix(GLUE)].metric]
        return Words(
            scored="F1" if score == "f1" else score,
            mark="",
            loss="error",
            measure="error",
            unit="points short of 100",
            per="points short of 100",
            short="points",
            training="per example",
        )

    def check(self, recipe: Recipe) -> None:
        """Tasks, model and files must be named; settings are read as strictly as any table."""
        refuse_unused(recipe, "finetune", UNUSED)
        table = recipe.finetune
        for name, example in (("tasks", '["glue/rte"]'), ("model", '"~/minilm"'), ("data", '["$LOCANT_DATA/glue"]')):
            if not getattr(table, name):
                raise ValueError(f"recipe: finetune.{name} is missing; write finetune.{name} = {example}")
        for task in (*table.tasks, *table.per_task):
            _settings(recipe, task)
        if strangers := [task for task in table.per_task if task not in table.tasks]:
            raise ValueError(
                f"recipe: finetune.per_task has {strangers[0]!r}, which is not among finetune.tasks = "
                f"{list(table.tasks)}; add it there, or drop it"
            )

    def trained_length(self, recipe: Recipe) -> int:
        """Tokens of an input, at most."""
        settings = _settings(recipe, recipe.finetune.tasks[0])
        return settings.length or settings.default_length

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """Objects of a BERT-base: names and options are checked before the model is there."""
        import locant
        from locant.hf.starts import check_start

        model = _model_choice(recipe, choice)
        sizes = {**BERT_BASE, "max_length": self.trained_length(recipe), "causal": False}
        stack = locant.stack(model.encoding or "none", 1, **{**sizes, **model.options})
        if model.encoding:
            check_start(model.init, dict.fromkeys(stack), model.keep_absolute)
        return stack

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> TuningData:
        """Files and model are read where they lie; what they were is kept, and must stay so."""
        from locant.compare.text import whole_folder

        data = self.read(recipe, folder)
        kept = _facts(folder)
        models = {**(kept or {}).get(OWN_MODELS, {}), **data.facts.get(OWN_MODELS, {})}
        text = json.dumps({**data.facts, **({OWN_MODELS: models} if models else {})}, indent=1)
        if kept is None:
            with whole_folder(folder) as part:
                (part / FACTS).write_text(text, encoding="utf-8")
        elif models != kept.get(OWN_MODELS, {}):  # encodings may be added later
            write_atomically(folder / FACTS, text)
        return data

    def read(self, recipe: Recipe, folder: Path) -> TuningData:
        """Examples, tokenized, on whatever machine. Raises: ValueError where they are not those of the beginning."""
        data = _read(recipe, self.trained_length(recipe))
        if (before := _facts(folder)) is not None:
            here = json.loads(json.dumps(data.facts))
            theirs, ours = before.pop(OWN_MODELS, {}), here.pop(OWN_MODELS, {})
            both = theirs.keys() & ours.keys()
            changed = differences(before, here)
            changed += differences({x: theirs[x] for x in both}, {x: ours[x] for x in both}, OWN_MODELS)
            if changed:
                raise ValueError(
                    f"compare: files or model are no longer those that {str(folder.parent)!r} began with: "
                    f"{'; '.join(changed[:4])}; put them back (with --ray: on every node), or give another "
                    "--out"
                )
        return data

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: TuningData) -> TuningTrial:
        """The pretrained model with a new head and the encoding."""
        return TuningTrial(recipe, choice, seed, data)


def _settings(recipe: Recipe, task: str) -> FinetuneSettings:
    """What is set for a task. Raises: ValueError."""
    try:
        kind = settings_kind(task)
    except ValueError as error:
        raise ValueError(f"recipe: finetune.tasks: {error}") from error
    return build(kind, recipe.finetune.settings_of(task), "finetune.settings")


def _model_choice(recipe: Recipe, choice: EncodingChoice) -> ModelChoice:
    """What `locant.finetune` is told of an encoding, with paths as they are written. Raises: ValueError."""
    options = dict(choice.options)
    table, own = recipe.finetune, options.pop("model", "")
    where = (str(own) or table.model, table.tokenizer or (table.model if own else ""))
    if choice.name == AS_SAVED and options:
        name, value = next(iter(options.items()))
        raise ValueError(f"{AS_SAVED} takes no option but model, and {name} = {value!r} came; drop it")
    start = {name: options.pop(name) for name in ("init", "keep_absolute") if name in options}
    return ModelChoice(*where, "" if choice.name == AS_SAVED else choice.name, **start, options=options)


def _found(choice: ModelChoice) -> ModelChoice:
    """The same with its paths written out. Raises: ValueError for a $NAME that is not set."""
    return replace(choice, model=expand_path(choice.model), tokenizer=expand_path(choice.tokenizer))


@dataclass(frozen=True)
class TuningData:
    """A task as a problem, and what it was made from."""

    problem: Problem
    settings: FinetuneSettings
    tokenizer: Any
    facts: dict[str, Any]


def _facts(folder: Path) -> dict[str, Any] | None:
    """What was kept of files and models when a folder was begun. Raises: ValueError where it is damaged."""
    kept = read_whole(folder / FACTS)
    if kept is None and (folder / FACTS).is_file():
        raise ValueError(
            f"compare: {str(folder / FACTS)!r} is damaged, needed to tell whether files and models are those that "
            f"{str(folder.parent)!r} began with; delete it if you know that they are, or give another --out"
        )
    return kept


def _read(recipe: Recipe, length: int) -> TuningData:
    from transformers import AutoConfig

    from locant.finetune.model import identity, load_tokenizer, model_inputs

    table, task = recipe.finetune, recipe.finetune.tasks[0]
    choice = DataChoice(*(tuple(Path(expand_path(path)) for path in paths) for paths in (table.data, table.dev)))
    files = read_task(task, choice)
    base = _found(_model_choice(recipe, EncodingChoice(AS_SAVED)))
    told = identity(base)
    tokenizer = load_tokenizer(base)
    settings = replace(_settings(recipe, task), length=length)
    with_types = model_inputs(tokenizer, AutoConfig.from_pretrained(base.model))
    problem = files.problem(tokenizer, settings, length, with_types)
    majority = problem.baselines()
    facts = {
        "task": task,
        "model": told["model"],
        "model_sha256": told["sha256"],
        "files": {file.name: file_digest(file) for file in files.files},
        "train_features": len(problem.train),
        "majority": {dev: scores for dev, scores in majority.items() if scores},
        "notices": list(problem.notices),
    }
    if own := [one for one in recipe.encodings if "model" in one.options]:
        facts[OWN_MODELS] = {one.label: identity(_found(_model_choice(recipe, one)))["sha256"] for one in own}
    return TuningData(problem, settings, tokenizer, facts)


class _Told(JsonLines):
    """A log that hands each step's loss on."""

    loss = 0.0

    def __call__(self, event: str, **values: Any) -> None:
        super().__call__(event, **values)
        self.loss = values.get("loss", self.loss)


class TuningTrial:
    """One encoding from one seed on the pretrained model."""

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: TuningData) -> None:
        from locant.finetune.model import build_model, check_fit, choose_length
        from locant.finetune.run import FIT_EXAMPLES
        from locant.training.parameters import position_parameters

        self.recipe, self.choice, self.seed, self.data = recipe, choice, seed, data
        problem = data.problem
        model: Any = build_model(
            _found(_model_choice(recipe, choice)),
            problem.auto,
            problem.config,
            seed,
            lambda: self._inputs(FIT_EXAMPLES, labels=False),
        )
        check_fit(model, data.tokenizer)
        choose_length(data.settings, model)
        added = position_parameters(model)
        positional = {
            name: parameter.numel()
            for name, parameter in model.named_parameters()
            if id(parameter) in added or "position_embeddings" in name
        }
        total = sum(parameter.numel() for parameter in model.parameters())
        self.built = BuiltModel(model, frozenset(positional), sum(positional.values()), total)
        settings = data.settings
        # the model as it is saved has nothing to learn at that rate
        self.settings = settings if added else replace(settings, position_learning_rate=0.0)
        self.steps = settings.steps(len(problem.train))
        self.tokenizer = data.tokenizer
        tokens = sum(len(feature.input_ids) for feature in problem.train)
        self.tokens_per_step = round(tokens / len(problem.train) * settings.batch_size)
        self.tokens_per_pass = int(self._inputs(settings.batch_size, labels=False)["attention_mask"].sum())
        self._scored: dict[str, Scored] = {}

    def _inputs(self, count: int, labels: bool) -> dict[str, Any]:
        batch = self.data.problem.batch(self.data.problem.train[:count])
        known = ("input_ids", "attention_mask", "token_type_ids")
        return {name: value for name, value in batch.items() if labels or name in known}

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """Goes on from the last whole checkpoint of the folder; with more steps than the recipe's, it is only timed."""
        import torch
        from accelerate import PartialState
        from transformers import TrainerCallback

        from locant.finetune.trainer import make_trainer
        from locant.training.resumable import without_bars
        from locant.training.together import take_up

        timed = settings.steps > self.recipe.train.steps
        own = self._timed() if timed else self.settings
        state = PartialState(cpu=own.device == "cpu" or not torch.accelerator.is_available())
        key = {**self.recipe.shared(), "encoding": {"name": self.choice.name, **self.choice.options}, "seed": self.seed}
        checkpoint = None if timed else take_up(work_dir, key, state, "compare")[0]
        log = _Told(work_dir / "log.jsonl", writes=not timed)
        if not timed:
            log.cut(int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0, "compare")

        class Tell(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                control.should_training_stop |= bool(on_step(state.global_step, log.loss))

        self.trainer = make_trainer(self.built.model, self.data.problem, own, self.seed, work_dir)
        self.trainer.add_callback(Tell())
        self.trainer.begin(work_dir, self.seed, key, log, lambda event: None)
        with without_bars(), self._result():
            self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        return () if timed else _curve(log.steps())

    @contextmanager
    def _result(self) -> Iterator[None]:
        """A divergence is a result, too, after which checkpoints are no longer needed."""
        try:
            yield
        except DivergedError:
            self._forget()
            raise

    def _forget(self) -> None:
        for checkpoint in self.trainer.folder.glob(f"{PREFIX}*"):
            shutil.rmtree(checkpoint)

    def _timed(self) -> FinetuneSettings:
        epochs = TIMED_STEPS * self.settings.batch_size / len(self.data.problem.train)
        return replace(self.settings, epochs=epochs, save_every=10 * TIMED_STEPS)

    def infer(self) -> None:
        """The model below its head, over one training batch."""
        device = next(self.built.model.parameters()).device
        batch = self._inputs(self.settings.batch_size, labels=False)
        self.built.model.base_model(**{name: value.to(device) for name, value in batch.items()})

    def validation_loss(self) -> float:
        """The error on the first dev set; not a number where its score is not defined."""
        error = self._error()
        return math.nan if error is None else error

    def by_length(self) -> tuple[LengthScore, ...]:
        """The main score of the first dev set, after which checkpoints are no longer needed."""
        with self._result():
            error = self._error()
        self._forget()
        score = next(iter(self._all_scores().values()))
        reason = "all predictions are equal, so no correlation is defined" if score is None else None
        return (LengthScore(self.data.settings.length, 1, error, score, reason),)

    def further_scores(self) -> dict[str, float | None]:
        """All scores but the main one; those of further dev sets bear its name."""
        return dict(list(self._all_scores().items())[1:])

    def _error(self) -> float | None:
        self._scored = self.data.problem.evaluate(self.trainer.model_wrapped, self.trainer)
        score = next(iter(self._all_scores().values()))
        return None if score is None else 100 * (1 - score)

    def _all_scores(self) -> dict[str, float | None]:
        whole = 100.0 if self.recipe.finetune.tasks[0] == SQUAD else 1.0
        several = len(self._scored) > 1
        return {
            f"{name}_{dev}" if several else name: None if value is None else value / whole
            for dev, one in self._scored.items()
            for name, value in one.scores.items()
        }

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """Not asked."""
        return ()


def _curve(steps: list[dict[str, Any]]) -> tuple[LossPoint, ...]:
    """Means of up to POINTS stretches of the log."""
    size = max(1, -(-len(steps) // POINTS))
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return tuple(
        LossPoint(
            group[-1]["step"], group[-1]["tokens"], group[-1]["seconds"], sum(x["loss"] for x in group) / len(group)
        )
        for group in groups
    )
