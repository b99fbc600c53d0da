"""The Hugging Face Trainer of a fine-tuning run: every random draw follows from seed and step, so it can be resumed.

The order of the examples is a function of the seed (`locant.finetune.batches.Schedule`); before each batch all
generators are seeded from the run's seed, the step, the batch within it and the process, so dropout and the draws of
encodings are the same whether a run was interrupted or not. Under torchrun or `accelerate launch` every process takes
its share of each step's batch, and the first one writes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from locant.compare.folder import unwritable
from locant.finetune import checkpoints
from locant.finetune.batches import Feature, Schedule
from locant.finetune.log import JsonLines
from locant.finetune.model import parameter_groups
from locant.finetune.problem import Problem
from locant.finetune.settings import FinetuneSettings
from locant.training.mlm import DivergedError, derived_seed

Watch = Callable[[dict[str, Any]], None]
POINTS = 200  # that trackers get of a curve; log.jsonl has every step
SHOWN = 0.25  # seconds between two reports to the watcher


class FinetuneTrainer(Trainer):
    """Stops at a loss that is not finite, logs each step, and writes checkpoints that are whole or do not count."""

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
        tokens = inputs["attention_mask"].sum()
        place = (self.run_seed, self.state.global_step, len(self._losses), self.args.process_index)
        set_seed(derived_seed("finetune step", *place) % 2**32)
        loss = super().training_step(model, inputs, num_items_in_batch)
        whole = loss.detach()
        if self.args.world_size > 1:
            accelerator: Any = self.accelerator
            whole, tokens = accelerator.reduce(whole.clone(), "mean"), accelerator.reduce(tokens, "sum")
        if not math.isfinite(float(whole)):
            raise DivergedError(_diverged(self.state.global_step + 1, float(whole), ids, self.args.learning_rate))
        self._losses.append(whole)
        self.tokens += int(tokens)
        return loss

    def record_step(self) -> None:
        """A line of the log after each step, and a word to the watcher now and then. Raises: OSError."""
        step, steps, now = self.state.global_step, self.state.max_steps, time.perf_counter()
        loss = sum(float(part) for part in self._losses)
        self._losses = []
        speed = (self.tokens - self._since) / max(now - self._started, 1e-9)
        optimizer: Any = self.optimizer
        rate = optimizer.param_groups[0]["lr"] if optimizer else 0.0
        line = {"step": step, "loss": loss, "next_learning_rate": rate, "tokens": self.tokens}
        times = {"seconds": round(now - self._started, 3), "tokens_per_second": round(speed, 1)}
        try:
            self.log_lines("step", **line, **times)
        except OSError as error:
            raise unwritable(self.log_lines.path, error, "finetune") from error
        if now - self._shown > SHOWN or step == steps:
            self._shown = now
            self.watch({"event": "step", "steps": steps, **line, **times})
        if self.args.report_to and (step % max(1, steps // POINTS) == 0 or step == steps):
            self.log({"loss": loss, "learning_rate": rate, "tokens_per_second": speed})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = self.folder / f"{checkpoints.PREFIX}{self.state.global_step}"
        with _kept_whole(target):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.seal(target, self.state.global_step, self.recipe)
                checkpoints.prune(self.folder)
        self.accelerator.wait_for_everyone()


@contextlib.contextmanager
def _kept_whole(target: Path) -> Iterator[None]:
    """What cannot be written whole is deleted again. Raises: OSError that says what to do."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error).split("\n")[0])
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, RuntimeError) and "writ" not in str(error) and "unexpected pos" not in str(error):
            raise  # not about the disk
        raise OSError(
            f"finetune: cannot write the checkpoint {str(target)!r}: {cause.strerror or cause}; free space, then call "
            "again: the checkpoint before is kept, and the run goes on from there"
        ) from error


class _Record(TrainerCallback):
    def __init__(self, trainer: FinetuneTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.record_step()


def _diverged(step: int, loss: float, ids: Sequence[str], learning_rate: float) -> str:
    shown = ", ".join(ids[:8]) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
    return (
        f"finetune: loss is {loss} at step {step} (examples {shown}), needed a finite number; try learning_rate below "
        f"{learning_rate:g}, a larger warmup_fraction, or a smaller max_grad_norm"
    )


def make_trainer(
    model: nn.Module,
    problem: Problem,
    settings: FinetuneSettings,
    seed: int,
    folder: Path,
    report_to: Sequence[str] = (),
) -> FinetuneTrainer:
    """A Trainer for one seed, writing into ``folder``. Raises: ValueError where processes cannot share a batch."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    steps = settings.steps(len(problem.train))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(settings.batch_size, settings.accumulate * world)
    if rest or not share:
        raise ValueError(
            f"finetune: batch_size = {settings.batch_size} cannot be shared by {world} processes in accumulate = "
            f"{settings.accumulate} batches each; give a multiple of {settings.accumulate * world}"
        )
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
        seed=derived_seed("finetune", seed) % 2**32,
        use_cpu=settings.device == "cpu" or not torch.accelerator.is_available(),
        report_to=list(report_to),
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
    optimizer = torch.optim.AdamW(parameter_groups(model, settings), lr=settings.learning_rate, fused=True)

    def collate(examples: Sequence[tuple[int, Feature]]) -> dict[str, Any]:
        features = [feature for _, feature in examples]
        return {**problem.batch(features), "example_ids": [feature.id for feature in features]}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = FinetuneTrainer(
            model=model,
            args=arguments,
            train_dataset=Schedule(problem.train, seed, steps, settings.batch_size),
            data_collator=collate,
            optimizers=(optimizer, None),
        )
    trainer.model_accepts_loss_kwargs = False  # losses are means over a batch: accumulated ones are averaged
    trainer.add_callback(_Record(trainer))
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer
