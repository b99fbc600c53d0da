"""Masked-language-model training of a small encoder with one position encoding.

Every encoding meets the same conditions. From one seed follow: the weights of the host (drawn before the encoding is
attached, and the encoding's own from a generator of its own, so that no encoding moves the draws of another), the order
of the windows and the masks (functions of seed, epoch and window, see `locant.data`), and the schedule. Position
parameters, biases and LayerNorms have no weight decay. The vocabulary head is applied to the predicted tokens only,
which changes no number and saves most of its cost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

MIN_LENGTH = 8  # tokens in a window, [CLS] and [SEP] among them


@dataclass(frozen=True)
class TrainSettings:
    """Budget and optimizer (AdamW, betas 0.9 and 0.999) of a masked-language-model run."""

    length: int = 128  # tokens in a window, [CLS] and [SEP] among them
    steps: int = 10_000
    batch_size: int = 32  # windows in a step
    learning_rate: float = 1e-3  # at its peak
    warmup_fraction: float = 0.05  # share of the steps in which the learning rate rises from 0
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up; the first two end at 0
    weight_decay: float = 0.01  # of weight matrices; never of biases, LayerNorms and position parameters
    max_grad_norm: float = 1.0
    curve_points: int = 50  # points of the loss curve, each the mean since the last
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast
    device: Literal["auto", "cpu"] = "auto"  # auto: a GPU where there is one
    checkpoints: int = (
        0  # the model is kept at step 0 and at so many evenly spaced steps, the last among them; 0: never
    )

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise ValueError(f"length = {self.length}, needed at least {MIN_LENGTH} tokens")
        for name in ("steps", "batch_size", "curve_points"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, needed at least 1")
        if not 0 <= self.checkpoints <= self.steps:
            raise ValueError(f"checkpoints = {self.checkpoints}, needed 0 (none) to steps = {self.steps}")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction = {self.warmup_fraction}, needed 0 to 1: it is a share of the steps")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate = {self.learning_rate}, needed a number above 0")
        for name in ("weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 or more")

    @property
    def checkpoint_steps(self) -> tuple[int, ...]:
        """The steps at which the model is kept: 0 and `checkpoints` more, evenly spaced, or none."""
        count = self.checkpoints
        return tuple(round(at * self.steps / count) for at in range(count + 1)) if count else ()


@dataclass(frozen=True)
class EncodingChoice:
    """One row of a comparison: an encoding by name (`a+b` composes), its options, and the label it is shown under."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""  # "": the name, with the options in brackets


@dataclass(frozen=True)
class BuiltModel:
    """A host with its encoding, and which of its parameters the encoding brought."""

    model: Any  # BertForMaskedLM, AlbertForMaskedLM, GPT2LMHeadModel, MarianMTModel
    position_parameters: frozenset[str]  # names
    extra_parameters: int
    total_parameters: int


@dataclass(frozen=True)
class LossPoint:
    """Mean training loss since the previous point, in nats per predicted token."""

    step: int
    tokens: int
    seconds: float
    loss: float


class DivergedError(RuntimeError):
    """The loss became NaN or infinite; the message names the step and the windows."""


def derived_seed(*parts: Any) -> int:
    """A 63-bit seed that depends on all parts and on nothing else (not on the process, as `hash` does)."""
    digest = hashlib.sha256("\x00".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def assemble(
    make_host: Callable[[], Any],
    tables: tuple[str, ...],
    encoding: EncodingChoice,
    seed: int,
    attach: Callable[[Any, EncodingChoice], None] | None = None,
) -> BuiltModel:
    """A host with the encoding attached; ``tables`` name the host's own position tables, which do not count as host.

    The host's weights are drawn first, from the seed alone, the encoding's from a generator of their own. ``attach``:
    how it is attached, where not to every stack of layers by its name.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("host", seed))
        model = make_host()
        host = {name: parameter.numel() for name, parameter in model.named_parameters()}
        torch.manual_seed(derived_seed("encoding", seed, encoding.label or encoding.name))
        (attach or attach_encoding)(model, encoding)
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(names.values())
    positions = frozenset(name for name in names if name not in host or name in tables)
    return BuiltModel(model, positions, total - (sum(host.values()) - sum(host[table] for table in tables)), total)


def attach_encoding(model: Any, encoding: EncodingChoice) -> None:
    """Every encoding, absolute among them, goes through the same attachment and so the same attention."""
    from locant import hf

    hf.attach(model, encoding.name, **encoding.options)
