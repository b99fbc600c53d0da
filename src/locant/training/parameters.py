"""Which parameters decay, and which learn at a rate of their own."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import nn

from locant.hf.attachment import attachments


@runtime_checkable
class Rates(Protocol):
    """What settings say of the optimizer."""

    @property
    def learning_rate(self) -> float:
        """At its peak."""
        ...

    @property
    def position_learning_rate(self) -> float:
        """Of the parameters that the encoding brings; 0: as learning_rate."""
        ...

    @property
    def weight_decay(self) -> float:
        """Of weight matrices."""
        ...


def position_parameters(model: nn.Module) -> set[int]:
    """Identities of the parameters that the encodings brought."""
    return {id(parameter) for _, _, attachment in attachments(model) for parameter in attachment.parameters()}


def parameter_groups(model: nn.Module, settings: Rates, command: str) -> list[dict[str, Any]]:
    """Matrices decay; biases, LayerNorms and positions do not; what was attached may learn at a rate of its own.

    Raises: ValueError for a rate of position parameters where there are none; ``command`` stands in it.
    """
    added = position_parameters(model)
    decayed, kept, positional = [], [], []
    for name, parameter in model.named_parameters():
        free = parameter.ndim < 2 or "position_embeddings" in name
        (positional if id(parameter) in added else kept if free else decayed).append(parameter)
    own_rate = settings.position_learning_rate or settings.learning_rate
    if settings.position_learning_rate and not positional:
        raise ValueError(
            f"{command}: position_learning_rate = {settings.position_learning_rate:g}, but no encoding with parameters "
            "is attached; attach one, or leave it out"
        )
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": kept, "weight_decay": 0.0},
        {"params": positional, "weight_decay": 0.0, "lr": own_rate},
    ]
    return [group for group in groups if group["params"]]
