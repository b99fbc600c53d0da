"""Batches of token ids: in an order that is a function of seed and step, padded on the right, and read in shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from locant.training.mlm import derived_seed


@dataclass(frozen=True)
class Feature:
    """One input of the model; ``labels`` are its targets by argument name, ``id`` names it in errors."""

    id: str
    input_ids: list[int]
    token_type_ids: list[int]
    labels: dict[str, int | float] = field(default_factory=dict)


def collate(features: Sequence[Feature], pad_id: int, with_types: bool) -> dict[str, Any]:
    """Tensors [B, n] padded to the longest, and targets [B]."""
    longest = max(len(feature.input_ids) for feature in features)
    ids = torch.full((len(features), longest), pad_id, dtype=torch.long)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, feature in enumerate(features):
        count = len(feature.input_ids)
        ids[row, :count] = torch.tensor(feature.input_ids)
        types[row, :count] = torch.tensor(feature.token_type_ids)
        mask[row, :count] = 1
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if with_types:
        batch["token_type_ids"] = types
    for name in features[0].labels:
        batch[name] = torch.tensor([feature.labels[name] for feature in features])
    return batch


class Schedule(Dataset[tuple[int, Feature]]):
    """The examples of all steps in a row: each epoch every example once, in an order of its own.

    Examples of like length are not put together to save padding: their labels are alike, too, and batches that differ
    in their mean label kept an encoder from learning STS-B (docs/finetuning.md).
    """

    def __init__(self, features: Sequence[Feature], seed: int, steps: int, batch_size: int) -> None:
        self.features = features
        total, orders = steps * batch_size, []
        while sum(map(len, orders)) < total:
            generator = torch.Generator().manual_seed(derived_seed("finetune order", seed, len(orders)))
            orders.append(torch.randperm(len(features), generator=generator))
        self.order: list[int] = torch.cat(orders)[:total].tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[int, Feature]:
        number = self.order[index]
        return number, self.features[number]


Reader = Callable[[Sequence[int], Any], list[Any]]  # (numbers of the features, output of the model) -> one result each


def predict(
    model: Any,
    features: Sequence[Feature],
    batch: Callable[[Sequence[Feature]], dict[str, Any]],
    size: int,
    read: Reader,
    trainer: Any,
) -> dict[int, Any]:
    """Results by number of the feature. Every process reads as many batches, then all know all results.

    Raises: DivergedError where a logit is not finite, which no loss says of the last step.
    """
    from accelerate.utils import gather_object

    world, rank = trainer.args.world_size, trainer.args.process_index
    order = sorted(range(len(features)), key=lambda at: (-len(features[at].input_ids), at))
    order += [order[-1]] * (-len(order) % world)  # each process the same number: the last may be read twice
    mine, found, broken = order[rank::world], [], []
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, len(mine), size):
            numbers = mine[begin : begin + size]
            inputs = {
                name: _to(value, trainer.args.device) for name, value in batch([features[n] for n in numbers]).items()
            }
            with torch.no_grad(), trainer.compute_loss_context_manager():
                output = model(**inputs)
            found += zip(numbers, read(numbers, output), strict=True)
            broken += [features[n].id for n, whole in zip(numbers, _finite(output), strict=True) if not whole]
    finally:
        model.train(was_training)
    if world > 1:
        found, broken = gather_object(found), gather_object(broken)
    if broken:
        shown = ", ".join(broken[:3]) + ", ..." * (len(broken) > 3)
        raise trainer.diverged(f"what the trained model says of {len(broken)} inputs ({shown}) is nan or inf")
    return dict(found)


def _finite(output: Any) -> list[bool]:
    """For each row of a model's output, whether all logits are numbers."""
    logits = [value for name, value in output.items() if name.endswith("logits")]
    return torch.stack([torch.isfinite(one).flatten(1).all(1) for one in logits]).all(0).tolist()


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
