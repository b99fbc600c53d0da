"""A recipe: what `locant pretrain` trains. Strict TOML, overridden on the command line by `key=value`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locant.compare.fields import build
from locant.compare.recipe import override, read_encoding, read_toml
from locant.data import MaskingConfig, TextSource, TokenizerConfig
from locant.pretrain.hosts import HostChoice
from locant.pretrain.objectives import ObjectiveChoice
from locant.training.hosts import FAMILIES
from locant.training.mlm import MIN_LENGTH, EncodingChoice, TrainSettings

# What may differ between two calls that share an output folder: it changes no number of the run.
FREE_KEYS = (("name",), ("train", "peak_tflops"))


@dataclass(frozen=True)
class PretrainText(TextSource):
    """Names a text, and says how windows are made of it."""

    pack: bool = True  # windows run on from document to document; false: one piece of one document each, padded
    isolate_documents: bool = False  # packed documents do not see each other, and positions restart in each
    validation_fraction: float = 0.05  # share of the documents that is held out
    split_seed: int = 0
    streaming: bool = False  # read as it is needed, through `datasets`, and not whole beforehand
    shuffle: int = 1024  # streamed windows that are put in another order at a time; 1: the order of the text

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle < 1:
            raise ValueError(f"shuffle = {self.shuffle}, needed at least 1, which keeps the order of the text")
        self._check_streaming()
        if self.isolate_documents and not self.pack:
            raise ValueError(
                "isolate_documents = true has no meaning with pack = false, where a window is of one document; drop it"
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction = {self.validation_fraction}, needed a number between 0 and 1")

    def _check_streaming(self) -> None:
        if self.streaming and self.text == "docs":
            raise ValueError("streaming = true came with the built-in text 'docs', needed files or 'hf:NAME'; drop it")
        idle = ("limit_mb", "validation_fraction", "split_seed") if self.streaming else ("shuffle",)
        for name in idle:
            if getattr(self, name) != getattr(type(self), name):
                given = str(self.streaming).lower()
                raise ValueError(f"{name} = {getattr(self, name)!r} has no meaning with streaming = {given}; drop it")


@dataclass(frozen=True)
class PretrainSettings(TrainSettings):
    """Budget and optimizer, with what a run that is stopped and watched needs beside."""

    accumulate: int = 1  # batches of which a step is made
    position_learning_rate: float = 0.0  # of the parameters that the encoding brings; 0: as learning_rate
    save_every: int = 0  # steps between checkpoints; 0: five in a run
    validate_every: int = 0  # steps between two looks at the validation loss; 0: ten in a run
    validation_tokens: int = 65_536  # that are read for it
    peak_tflops: float = 0.0  # of one device, for the share that is used (MFU); 0: measured by a matrix product

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate < 1:
            raise ValueError(f"accumulate = {self.accumulate}, needed at least 1")
        for name in ("save_every", "validate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (automatic) or more")
        for name in ("position_learning_rate", "peak_tflops"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (automatic) or more")
        if self.validation_tokens < 1:
            raise ValueError(f"validation_tokens = {self.validation_tokens}, needed at least 1")


@dataclass(frozen=True)
class Stage:
    """One part of a curriculum: so many steps at one window length."""

    length: int
    steps: int
    batch_size: int = 0  # windows in a step, over all processes and accumulated batches; 0: train.batch_size

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise ValueError(f"length = {self.length}, needed at least {MIN_LENGTH} tokens")
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}, needed at least 1")
        if self.batch_size < 0:
            raise ValueError(f"batch_size = {self.batch_size}, needed 0 (train.batch_size) or more")


@dataclass(frozen=True)
class PretrainRecipe:
    """One host, one encoding, one text, one seed."""

    encoding: EncodingChoice = field(default_factory=lambda: EncodingChoice("absolute", label="absolute"))
    name: str = "pretrain"
    seed: int = 1
    host: HostChoice = field(default_factory=HostChoice)
    objective: ObjectiveChoice = field(default_factory=ObjectiveChoice)
    text: PretrainText = field(default_factory=PretrainText)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    train: PretrainSettings = field(default_factory=PretrainSettings)
    curriculum: tuple[Stage, ...] = ()  # in place of train.length and train.steps

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/\\]*\w[^/\\]*", self.name):
            raise ValueError(f"name = {self.name!r}, needed a letter or digit and no slash: it names the output folder")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed = {self.seed}, needed 0 to {2**32 - 1}")
        needed = FAMILIES[self.host.family].objective
        if self.objective.name != needed:
            fit = [name for name, family in FAMILIES.items() if family.objective == self.objective.name]
            raise ValueError(
                f"host.family = {self.host.family!r} is trained on {needed!r}, not on {self.objective.name!r}; write "
                f"objective = {needed!r}, or host.family = {' or '.join(map(repr, fit))}"
            )
        if self.objective.name == "causal" and self.masking != MaskingConfig():
            changed = next(key for key, value in vars(self.masking).items() if value != getattr(MaskingConfig, key))
            raise ValueError(
                f"masking.{changed} = {getattr(self.masking, changed)!r} has no meaning for objective 'causal'; drop it"
            )
        if self.text.streaming and self.tokenizer.path is None:
            raise ValueError(
                "text.streaming = true came without tokenizer.path, needed a tokenizer that is there already, since "
                "text is read as it is needed; give tokenizer.path"
            )
        if self.train.checkpoints > self.steps:
            raise ValueError(
                f"train.checkpoints = {self.train.checkpoints}, needed 0 (none) to {self.steps}, the steps of the "
                "curriculum"
            )
        for stage in self.stages:
            if stage.batch_size % self.train.accumulate:
                raise ValueError(
                    f"train.accumulate = {self.train.accumulate} does not divide batch_size = {stage.batch_size}; a "
                    "step is made of batches of equal size"
                )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is trained in turn, with every size filled in."""
        train = self.train
        stages = self.curriculum or (Stage(train.length, train.steps),)
        return tuple(dataclasses.replace(stage, batch_size=stage.batch_size or train.batch_size) for stage in stages)

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def milestones(self) -> tuple[int, ...]:
        """Steps at which the model is kept: 0 and `train.checkpoints` more, evenly spaced, or none."""
        count = self.train.checkpoints
        return tuple(round(at * self.steps / count) for at in range(count + 1)) if count else ()

    @property
    def length(self) -> int:
        """Of the longest windows."""
        return max(stage.length for stage in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able dict with every default filled in."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def key(self) -> dict[str, Any]:
        """What the numbers of a run depend on: stages stand for lengths and steps, however they were written."""
        table = self.to_dict()
        table["curriculum"] = [dataclasses.asdict(stage) for stage in self.stages]
        for name in ("length", "steps", "batch_size"):
            del table["train"][name]
        for *above, name in FREE_KEYS:
            inner = table
            for step in above:
                inner = inner[step]
            del inner[name]
        return table


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> PretrainRecipe:
    """Reads a recipe file and applies `key=value` overrides. Raises: FileNotFoundError; ValueError naming the key."""
    return read_recipe(read_toml(path, "recipes/pretrain.toml"), overrides)


def read_recipe(table: dict[str, Any], overrides: Sequence[str] = ()) -> PretrainRecipe:
    """The same from a parsed table."""
    for given in overrides:
        table = override(table, given)
    if "encoding" in table:
        table = {**table, "encoding": dataclasses.asdict(read_encoding(table["encoding"], "encoding"))}
    if isinstance(table.get("objective"), str):
        table = {**table, "objective": {"name": table["objective"]}}
    train = table.get("train")
    if table.get("curriculum") and isinstance(train, dict):
        for name in ("length", "steps"):
            if name in train:
                raise ValueError(
                    f"recipe: train.{name} = {train[name]!r} and a curriculum came together, and each stage says its "
                    f"own {name}; drop either (curriculum=[] drops the stages), or set curriculum.0.{name}"
                )
    recipe = build(PretrainRecipe, table)
    _check_encoding(recipe)
    return recipe


def _check_encoding(recipe: PretrainRecipe) -> None:
    """Builds the encoding once, thrown away: names, options and sizes are the encoding's own to check."""
    import torch

    import locant

    choice, size = recipe.encoding, recipe.host.sizes
    sizes: dict[str, Any] = {
        "num_heads": size.num_heads,
        "head_dim": size.model_dim // size.num_heads,
        "model_dim": size.model_dim,
        "max_length": recipe.host.max_positions or recipe.length,
        "causal": recipe.objective.name == "causal",
    }
    with torch.random.fork_rng(devices=[]):
        try:
            stack = locant.stack(choice.name, 1, **{**sizes, **choice.options})
            for layer in stack:
                layer.check_causal(sizes["causal"])
        except (ValueError, TypeError) as error:
            raise ValueError(f"recipe: encoding is {choice.label!r}: {error}") from error
    if helped := [part.name for layer in stack for part in layer.parts() if part.auxiliary_share]:
        raise ValueError(
            f"recipe: encoding is {choice.label!r}, whose part {helped[0]} has a loss of its own that needs the order "
            "of a target; it is trained by `locant compare` with task = 'translation'"
        )
