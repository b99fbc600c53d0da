"""How readers call what the runs of a task measure; a task says where it departs from language modeling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Names and units, in lower case. What stands under ``loss`` is what encodings are ranked by; less is better."""

    trained: str = "tokens"  # what lengths are counted in
    scored: str = "accuracy"  # what stands under accuracy in results
    mark: str = "%"  # behind it, times 100
    loss: str = "loss"  # head of a column
    measure: str = "validation loss"
    unit: str = "nats per predicted token"
    per: str = "nats per token"  # the same in a few letters
    short: str = "nats"  # of a difference
    training: str = "nats per token"  # of the training loss
