"""The Hugging Face Trainer of a run that loses nothing: every random draw follows from seed and step.

The order of the examples is a function of the seed, which the dataset sees to (it is read in order); before each batch
all generators are seeded from the run's seed, the step, the batch within it and the process, so dropout and the draws
of encodings are the same whether a run was interrupted or not. Under torchrun or `accelerate launch` every process
takes its share of each step's batch, and the first one writes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from locant.training import checkpoints, launch
from locant.training.folder import unwritable
from locant.training.log import JsonLines
from locant.training.mlm import DivergedError, derived_seed
from locant.training.parameters import Rates, parameter_groups

Watch = Callable[[dict[str, Any]], None]
SHOWN = 0.25  # seconds between two reports to the watcher


@runtime_checkable
class Budget(Rates, Protocol):
    """What the settings of a run say of its training."""

    @property
    def accumulate(self) -> int:
        """Batches of which a step is made."""
        ...

    @property
    def schedule(self) -> Literal["linear", "cosine", "constant"]:
        """Of the learning rate, after the warm-up."""
        ...

    @property
    def warmup_fraction(self) -> float:
        """Share of the steps in which the learning rate rises."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """Above it gradients are scaled down."""
        ...

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """bfloat16: autocast."""
        ...

    @property
    def device(self) -> Literal["auto", "cpu"]:
        """auto: a GPU where there is one."""
        ...

    @property
    def save_every(self) -> int:
        """Steps between checkpoints; 0: five in a run."""
        ...


class ResumableTrainer(Trainer):
    """Stops at a loss that is not finite, logs each step, and writes checkpoints that are whole or do not count.

    Batches hold ``input_ids``, ``example_ids`` (for errors) and, where there is padding, ``attention_mask``.
    """

    command = "train"  # by which errors and random draws are named
    points = 200  # that trackers get of a curve; log.jsonl has every step

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's; the model is sharded wherever accelerate is asked to, also on a CPU."""
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = launch.shard(self.accelerator)

    def begin(self, folder: Path, seed: int, recipe: dict[str, Any], log: JsonLines, watch: Watch) -> None:
        """What a run is recorded in."""
        self.folder, self.run_seed, self.recipe, self.log_lines, self.watch = folder, seed, recipe, log, watch
        steps = log.steps()
        self.tokens = steps[-1]["tokens"] if steps else 0
        self._losses: list[Tensor] = []
        self._started = self._shown = time.perf_counter()
        self._since = self.tokens

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward; raises DivergedError before the optimizer can spread a NaN."""
        ids = inputs.pop("example_ids")
        mask = inputs.get("attention_mask")
        tokens = torch.tensor(inputs["input_ids"].numel(), device=self.args.device) if mask is None else mask.sum()
        place = (self.run_seed, self.state.global_step, len(self._losses), self.args.process_index)
        set_seed(derived_seed(f"{self.command} step", *place) % 2**32)
        loss = super().training_step(model, inputs, num_items_in_batch)
        whole = loss.detach()
        if self.args.world_size > 1:
            accelerator: Any = self.accelerator
            whole, tokens = accelerator.reduce(whole.clone(), "mean"), accelerator.reduce(tokens, "sum")
        if not math.isfinite(float(whole)):
            shown = ", ".join(ids[:8]) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
            raise self.diverged(f"loss is {float(whole)} at step {self.state.global_step + 1} (examples {shown})")
        self._losses.append(whole)
        self.tokens += int(tokens)
        return loss

    def diverged(self, what: str) -> DivergedError:
        """The error for a number that is not finite: a loss, or what the last step, which no loss follows, has left."""
        return DivergedError(
            f"{self.command}: {what}, needed a finite number; try learning_rate below {self.args.learning_rate:g}, a "
            "larger warmup_fraction, or a smaller max_grad_norm"
        )

    def elapsed(self) -> float:
        """Seconds of training, since it was last taken up."""
        return time.perf_counter() - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done here does not count as training."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - before

    def more(self) -> Mapping[str, float]:
        """Further numbers of the step that was made, for its line."""
        return {}

    def record_step(self) -> None:
        """A line of the log after each step, and a word to the watcher now and then. Raises: OSError."""
        step, steps, now = self.state.global_step, self.state.max_steps, time.perf_counter()
        loss = sum(float(part) for part in self._losses)
        self._losses = []
        speed = (self.tokens - self._since) / max(now - self._started, 1e-9)
        optimizer: Any = self.optimizer
        rate = optimizer.param_groups[0]["lr"] if optimizer else 0.0
        more = self.more()
        line = {"step": step, "loss": loss, "next_learning_rate": rate, "tokens": self.tokens, **more}
        times = {"seconds": round(now - self._started, 3), "tokens_per_second": round(speed, 1)}
        self.write_line("step", **line, **times)
        if now - self._shown > SHOWN or step == steps:
            self._shown = now
            self.watch({"event": "step", "steps": steps, **line, **times})
        if self.args.report_to and (step % max(1, steps // self.points) == 0 or step == steps):
            self.log({"loss": loss, "learning_rate": rate, "tokens_per_second": speed, **more})

    def write_line(self, event: str, **values: Any) -> None:
        """Adds a line to the log. Raises: OSError that says what to do."""
        try:
            self.log_lines(event, **values)
        except OSError as error:
            raise unwritable(self.log_lines.path, error, self.command) from error

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = self.folder / f"{checkpoints.PREFIX}{self.state.global_step}"
        with _kept_whole(target, self.command):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.seal(target, self.state.global_step, self.recipe)
                checkpoints.prune(self.folder)
        self.accelerator.wait_for_everyone()


@contextlib.contextmanager
def _kept_whole(target: Path, command: str) -> Iterator[None]:
    """What cannot be written whole is deleted again. Raises: OSError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error).split("\n")[0])
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, RuntimeError) and "writ" not in str(error) and "unexpected pos" not in str(error):
            raise  # not about the disk
        raise OSError(
            f"{command}: cannot write the checkpoint {str(target)!r}: {cause.strerror or cause}; free space, then call "
            "again: the checkpoint before is kept, and the run goes on from there"
        ) from error


class _Record(TrainerCallback):
    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.record_step()


def shares(batch_size: int, accumulate: int, command: str) -> int:
    """Examples in one batch of one process. Raises: ValueError where the processes cannot share a step's examples."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(batch_size, accumulate * world)
    if rest or not share:
        raise ValueError(
            f"{command}: batch_size = {batch_size} cannot be shared by {world} processes in accumulate = {accumulate} "
            f"batches each; give a multiple of {accumulate * world}"
        )
    return share


Kind = TypeVar("Kind", bound=ResumableTrainer)


def resumable_trainer(
    kind: type[Kind],
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], dict[str, Any]],
    settings: Budget,
    seed: int,
    folder: Path,
    *,
    steps: int,
    share: int,
    report_to: Sequence[str] = (),
) -> Kind:
    """A Trainer that writes into ``folder``; ``share``: items of the dataset in one batch of one process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=share,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        warmup_steps=round(settings.warmup_fraction * steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision == "bfloat16",
        seed=derived_seed(kind.command, seed) % 2**32,
        use_cpu=settings.device == "cpu" or not torch.accelerator.is_available(),
        report_to=list(report_to),
        project="locant",  # these two name the run in trackers that know names
        run_name="/".join(folder.parts[-3:]),
        save_strategy="steps",
        save_steps=settings.save_every or max(1, math.ceil(steps / 5)),
        logging_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available() and settings.device != "cpu",
        average_tokens_across_devices=False,
        ddp_find_unused_parameters=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one device: DataParallel would change the batch
    groups = parameter_groups(model, settings, kind.command)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = kind(model=model, args=arguments, train_dataset=dataset, data_collator=collate)
    trainer.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, fused=True)
    if trainer.is_fsdp_enabled and arguments.bf16:
        launch.autocast(model, arguments.device)
    trainer.model_accepts_loss_kwargs = False  # losses are means over a batch: accumulated ones are averaged
    trainer.add_callback(_Record(trainer))
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer


def check_trackers(report_to: Sequence[str], command: str) -> None:
    """Raises: ValueError for a tracker that transformers does not know, or whose package is not installed."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"{command}: report_to = {name!r} is unknown; known: {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name in ("tensorboard", "trackio") and importlib.util.find_spec(name) is None:
            raise ValueError(f"{command}: report_to = {name!r}, but the package is not installed; pip install {name}")


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' bars of loading and saving, which would break into ours."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
