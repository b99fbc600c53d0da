"""What can be set in a fine-tuning run: the model and its encoding, the budget, and the sizes of each kind of task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from locant.finetune.windows import WindowSettings


@dataclass(frozen=True)
class ModelChoice:
    """A saved model (folder, or id in the local cache), and the encoding that is attached to it before training."""

    model: str
    tokenizer: str = ""  # "": the model's own
    encoding: str = ""  # "": the model as it is saved, plain or attached
    init: str = "paper"  # paper, neutral or fit: see locant.hf.attach
    keep_absolute: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the encoding

    def __post_init__(self) -> None:
        if self.encoding:
            return
        given = {"init": self.init != "paper", "keep_absolute": self.keep_absolute, "option": bool(self.options)}
        for name, changed in given.items():
            if changed:
                raise ValueError(
                    f"finetune: {name} = {getattr(self, name, self.options)!r} was given without an encoding to "
                    "attach; give one (--attach huang_m4), or leave it out"
                )

    @property
    def label(self) -> str:
        """What the model is called in tables."""
        if not self.encoding:
            return "as saved"
        beside = "absolute + " if self.keep_absolute else ""
        return f"{beside}{self.encoding} ({self.init})"


@dataclass(frozen=True)
class FinetuneSettings:
    """Budget and optimizer (AdamW, betas 0.9 and 0.999) of every task."""

    epochs: float = 3.0  # times that the training examples are seen
    batch_size: int = 32  # examples in a step, over all processes and accumulated batches
    accumulate: int = 1  # batches of which a step is made
    learning_rate: float = 5e-5  # at its peak
    position_learning_rate: float = 0.0  # of the parameters that the encoding brings; 0: as learning_rate
    warmup_fraction: float = 0.1  # share of the steps in which the learning rate rises from 0
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up; the first two end at 0
    weight_decay: float = 0.01  # of weight matrices; never of biases, LayerNorms and position parameters
    max_grad_norm: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: autocast
    device: Literal["auto", "cpu"] = "auto"  # auto: a GPU where there is one
    train_examples: int = 0  # so many, drawn once for all seeds; 0: all
    dev_examples: int = 0  # of each dev set, drawn once for all seeds; 0: all
    eval_batch_size: int = 64
    save_every: int = 0  # steps between checkpoints; 0: five in a run
    length: int = 0  # tokens, special ones among them; 0: `default_length`, or what the model serves where that is less

    default_length = 128

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, needed at least 1")
        for name in ("train_examples", "dev_examples", "save_every", "length"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (automatic) or more")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate = {self.accumulate} does not divide batch_size = {self.batch_size}; a step is made of "
                "batches of equal size"
            )
        for name in ("epochs", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}, needed a number above 0")
        for name in ("weight_decay", "max_grad_norm", "position_learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 or more")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction = {self.warmup_fraction}, needed 0 to 1: it is a share of the steps")

    def steps(self, examples: int) -> int:
        """Steps of a run on so many training examples."""
        return max(1, math.ceil(self.epochs * examples / self.batch_size))


@dataclass(frozen=True)
class GlueSettings(FinetuneSettings):
    """Of GLUE tasks; longer texts are cut at the end, the longer one of a pair first."""

    split_dev: float = 0.0  # where there is no training file: the share of the (first) dev file that is trained on

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.split_dev < 1:
            raise ValueError(f"split_dev = {self.split_dev}, needed a share below 1, such as 0.8")


@dataclass(frozen=True)
class SquadSettings(FinetuneSettings):
    """Of SQuAD: longer paragraphs are read in windows that overlap (see `locant.finetune.windows`)."""

    epochs: float = 2.0
    learning_rate: float = 3e-5
    overlap: int = 128  # tokens of the paragraph that two neighboring windows share
    max_question: int = 64  # tokens; longer questions are cut
    max_answer: int = 30  # tokens of a predicted answer

    default_length = 384

    def windows(self, length: int) -> WindowSettings:
        """Sizes of the windows."""
        return WindowSettings(length, self.overlap, self.max_question, self.max_answer)
