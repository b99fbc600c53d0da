"""The Trainer of a pre-training run: what it counts, logs and validates beside the steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from locant.data import EVALUATION_EPOCH, MlmDataset, Windows
from locant.hf import course
from locant.pretrain.flops import Cost
from locant.pretrain.objectives import Collate, Objective, counts
from locant.pretrain.recipe import PretrainRecipe
from locant.pretrain.text import trimmed
from locant.training import launch
from locant.training.folder import unwritable
from locant.training.resumable import ResumableTrainer

VALIDATION_BATCH = 8_192  # tokens


@dataclass(frozen=True)
class Meter:
    """What a step costs, and the operations a second that all devices together can do."""

    cost: Cost
    peak: float


@dataclass(frozen=True)
class Validation:
    """Held-out windows with their fixed masks."""

    windows: Windows
    collate: Collate
    pad: int


class PretrainTrainer(ResumableTrainer):
    """Losses are shares of a step, so accumulated batches and processes add up to the same step."""

    command = "pretrain"

    def equip(self, recipe: PretrainRecipe, tokenizer: Any, validation: Validation, meter: Meter) -> None:
        """What it knows beyond a plain resumable run."""
        self.plan, self.tokenizer, self.validation, self.meter = recipe, tokenizer, validation, meter
        self.points = recipe.train.curve_points
        self.model_accepts_loss_kwargs = True
        self.args.average_tokens_across_devices = True  # a batch's share is of the step of all processes
        self._parts: list[Tensor] = []
        self._flops = 0.0
        self._counted = torch.zeros(2)

    @property
    def objective(self) -> Objective:
        """What is trained, out of any wrapper."""
        return self.accelerator.unwrap_model(self.model_wrapped)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        total: Any = torch.stack([counts(batch) for batch in batch_samples]).sum(0).to(device)
        if self.args.world_size > 1:
            total = self.accelerator.reduce(total, "sum")
        self._counted = total
        length = max(batch["input_ids"].shape[1] for batch in batch_samples)
        self._flops += self.meter.cost.flops(float(total[1]), float(total[0]), length)
        return total

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's; keeps the parts of the loss."""
        given: Any = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss, outputs = given
        if self.objective.parts:
            self._parts.append(torch.stack([outputs[name].detach() for name in self.objective.parts]))
        return (loss, outputs) if return_outputs else loss

    def more(self) -> Mapping[str, float]:
        """Parts of the loss, and the share of the machine that is used."""
        found = {}
        if self._parts:
            parts: Any = torch.stack(self._parts).sum(0)
            if self.args.world_size > 1:
                parts = self.accelerator.reduce(parts, "sum")
            found = dict(zip(self.objective.parts, parts.tolist(), strict=True))
            self._parts = []
        return {**found, "mfu": round(self._flops / max(self.elapsed(), 1e-9) / self.meter.peak, 6)}

    def record_step(self) -> None:
        """The line of the step; behind it, where they are due, validation and a kept model.

        Raises: OSError; DivergedError for a validation loss that is not finite.
        """
        super().record_step()
        step, steps = self.state.global_step, self.plan.steps
        every = self.plan.train.validate_every or max(1, steps // 10)
        keep = step in self.plan.milestones
        if step % every == 0 or step == steps or keep:
            with self.paused():
                losses = self.validate()
                if not math.isfinite(losses["loss"]):
                    raise self.diverged(f"validation loss is {losses['loss']} after step {step}")
                self.write_line("validation", step=step, tokens=self.tokens, **losses)
                self.watch({"event": "validation", "step": step, **losses})
                if keep:
                    self.keep(step, losses["loss"])

    def validate(self) -> dict[str, float]:
        """The losses on the held-out windows, each process reading its share."""
        held = self.validation
        model: Any = self.model_wrapped
        dataset = MlmDataset(held.windows, epoch=EVALUATION_EPOCH)
        size = max(1, VALIDATION_BATCH // held.windows.length)
        firsts = list(range(0, len(dataset), size))
        batches = [
            held.collate([trimmed(dataset[at], held.pad) for at in range(first, min(first + size, len(dataset)))])
            for first in firsts
        ]
        device, world, rank = self.args.device, self.args.world_size, self.args.process_index
        total = torch.stack([counts(batch) for batch in batches]).sum(0).to(device)
        names = ("loss", *self.objective.parts)
        sums: Any = torch.zeros(len(names), device=device)
        model.eval()
        with torch.no_grad():
            for turn in range(-(-len(batches) // world)):  # every process calls the model as often
                at = turn * world + rank
                inputs = self._prepare_inputs(
                    {k: v for k, v in batches[at % len(batches)].items() if k != "example_ids"}
                )
                with self.compute_loss_context_manager():
                    outputs = model(**inputs, num_items_in_batch=total)
                if at < len(batches):
                    sums += torch.stack([outputs[name].float() for name in names])
        model.train()
        if world > 1:
            sums = self.accelerator.reduce(sums, "sum")
        return dict(zip(names, sums.tolist(), strict=True))

    def keep(self, step: int, loss: float) -> None:
        """Keeps the model at a step, for `locant analyze` of a course. Raises: OSError."""
        host = self.objective.host
        state = launch.whole_state(host, keeps=self.args.should_save)
        if not self.args.should_save:
            return
        try:
            course.keep(self.folder, host, self.tokenizer, course.Milestone(step, self.tokens, loss), state)
        except OSError as error:
            raise unwritable(self.folder / course.FOLDER, error, self.command) from error

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """The objective's weights, each once, whatever its models share."""
        if self.args.should_save:
            os.makedirs(str(output_dir), exist_ok=True)
            state = {name: value.contiguous() for name, value in (state_dict or self.objective.state_dict()).items()}
            safetensors.torch.save_file(state, Path(str(output_dir)) / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            batches: Any = self.train_dataset
            batches.save_place(Path(str(output_dir)), self.state.global_step)


def next_batch(collators: Sequence[Collate]) -> Any:
    """The collator of micro-batches: each by that of its stage."""

    def collate(items: Sequence[tuple[int, list[dict[str, Any]]]]) -> dict[str, Any]:
        ((stage, examples),) = items
        return collators[stage](examples)

    return collate


def trained(model: nn.Module) -> int:
    """How many numbers learn."""
    return sum(parameter.numel() for parameter in model.parameters())
