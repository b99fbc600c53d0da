"""The Hugging Face Trainer of comparisons: quiet, without files, stopped by a loss that is not finite."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from locant.data import MlmCollator, ScheduledDataset
from locant.training.hosts import predicted_logits
from locant.training.mlm import BuiltModel, DivergedError, LossPoint, TrainSettings


class MlmObjective(nn.Module):
    """Mean cross-entropy of the predicted tokens, with the vocabulary head applied to those alone."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def forward(
        self,
        input_ids: Int[Tensor, "B I"],
        labels: Int[Tensor, "B I"],
        attention_mask: Bool[Tensor, "B I"] | Int[Tensor, "B I"] | None = None,
        position_ids: Int[Tensor, "B I"] | None = None,
    ) -> dict[str, Tensor]:
        """Gives `loss` (a scalar), and `logits` and `targets` of the predicted tokens."""
        logits, targets = predicted_logits(
            self.host, input_ids, labels, attention_mask=attention_mask, position_ids=position_ids
        )
        return {"loss": nn.functional.cross_entropy(logits.float(), targets), "logits": logits, "targets": targets}


class Collate:
    """MLM batches that keep the ids of their windows (for errors) and drop a mask that masks nothing."""

    def __init__(self, collator: MlmCollator) -> None:
        self.collator = collator

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        batch = dict(self.collator(examples))
        batch["example_ids"] = torch.tensor([int(example["example_id"]) for example in examples])
        if bool(batch["attention_mask"].all()):
            del batch["attention_mask"]
        return batch


class MlmTrainer(Trainer):
    """Keeps the loss curve, reads windows in their scheduled order, and stops at a loss that is not finite."""

    on_step: Callable[[int, float], bool | None] | None = None
    points: int = 50

    def start_curve(self, points: int, on_step: Callable[[int, float], bool | None] | None) -> None:
        """Forgets what was recorded."""
        self.points, self.on_step = points, on_step
        self.curve: tuple[LossPoint, ...] = ()
        self._sum, self._count, self._tokens, self._last = 0.0, 0, 0, 0.0
        self._start = time.perf_counter()

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward; raises DivergedError before the optimizer can spread a NaN."""
        example_ids = inputs.pop("example_ids")
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._last = float(loss)
        if not torch.isfinite(loss):
            raise DivergedError(_diverged(self.state.global_step + 1, self._last, example_ids, self.args.learning_rate))
        self._sum, self._count = self._sum + self._last, self._count + 1
        self._tokens += inputs["input_ids"].numel()
        return loss

    def record_step(self, step: int, steps: int) -> bool:
        """Adds a curve point where one is due; True when the caller asked to stop."""
        before = time.perf_counter()
        stop = bool(self.on_step(step, self._last)) if self.on_step is not None else False
        self._start += time.perf_counter() - before  # what the caller does between steps is no training time
        if step * self.points // steps > (step - 1) * self.points // steps or step == steps or stop:
            point = LossPoint(step, self._tokens, time.perf_counter() - self._start, self._sum / self._count)
            self.curve, self._sum, self._count = (*self.curve, point), 0.0, 0
        return stop


class _Record(TrainerCallback):
    def __init__(self, trainer: MlmTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.record_step(state.global_step, state.max_steps):
            control.should_training_stop = True


def _diverged(step: int, loss: float, example_ids: Tensor, learning_rate: float) -> str:
    ids = example_ids.tolist()
    shown = ", ".join(str(i) for i in ids[:8]) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
    return (
        f"training: loss is {loss} at step {step} (windows {shown}), needed a finite number; try train.learning_rate "
        f"below {learning_rate:g}, a larger train.warmup_fraction, or a smaller train.max_grad_norm"
    )


def train(
    objective: nn.Module,
    rows: Any,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    built: BuiltModel,
    settings: TrainSettings,
    seed: int,
    *,
    work_dir: Path,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> tuple[LossPoint, ...]:
    """Trains in place with a Hugging Face Trainer and returns the loss curve; arguments as of `plain_trainer`.

    `on_step(step, loss)` is called after every step; when it returns True training stops there.
    Raises: DivergedError when the loss is not finite.
    """
    trainer = plain_trainer(objective, rows, collate, built, settings, seed, work_dir, on_step)
    trainer.train()
    return trainer.curve


def plain_trainer(
    objective: nn.Module,
    rows: Any,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    built: BuiltModel,
    settings: TrainSettings,
    seed: int,
    work_dir: Path,
    on_step: Callable[[int, float], bool | None] | None = None,
) -> MlmTrainer:
    """A Trainer of any objective whose forward gives a `loss`; it writes nothing to disk.

    ``objective`` keeps the model as ``host``. ``rows`` (`Windows`, `Pairs`, `Translations`) are read in an order that
    follows from the seed; batches of ``collate`` name their examples in ``example_ids``.
    """
    dataset = ScheduledDataset(rows, seed, settings.steps * settings.batch_size)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    arguments = TrainingArguments(
        output_dir=str(work_dir),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        warmup_steps=round(settings.warmup_fraction * settings.steps),
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.precision == "bfloat16",
        seed=derived_seed_32(seed),
        use_cpu=settings.device == "cpu" or not torch.accelerator.is_available(),  # the Trainer refuses bf16 otherwise
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available() and settings.device != "cpu",
        average_tokens_across_devices=False,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one run, one device: DataParallel would change the batch
    optimizer = torch.optim.AdamW(
        parameter_groups(objective, built, settings.weight_decay),
        lr=settings.learning_rate,
        fused=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = MlmTrainer(
            model=objective, args=arguments, train_dataset=dataset, data_collator=collate, optimizers=(optimizer, None)
        )
    trainer.start_curve(settings.curve_points, on_step)
    trainer.add_callback(_Record(trainer))
    trainer.remove_callback(PrinterCallback)
    return trainer


def derived_seed_32(seed: int) -> int:
    """Trainer seeds numpy too, which takes 32 bits."""
    return seed % 2**32


def parameter_groups(objective: nn.Module, built: BuiltModel, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: host matrices, which decay; biases, LayerNorms and everything positional, which do not."""
    decayed, kept = [], []
    for name, parameter in objective.named_parameters():
        host_name = name.removeprefix("host.")
        free = parameter.ndim < 2 or host_name in built.position_parameters
        (kept if free else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
