"""A recipe: what `locant compare` runs. Strict TOML, overridden on the command line by `key=value`.

Each table of a recipe is a frozen dataclass that lives beside the code it sets; this file puts them together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from locant.compare.electra import ElectraSettings
from locant.compare.evaluate import EvaluateSettings
from locant.compare.fields import build, kind_of, near, read_value
from locant.compare.finetuning import FinetuneTable
from locant.compare.measure import MeasureSettings
from locant.compare.objective import find_objective
from locant.compare.problems import ProblemSettings
from locant.compare.published import Published
from locant.compare.sizes import choose_size
from locant.compare.translation import PairSettings
from locant.data import MaskingConfig, TextSource, TokenizerConfig
from locant.training.hosts import ModelSize
from locant.training.mlm import EncodingChoice, TrainSettings

# What may differ between two calls that share an output folder: it changes which runs there are, not what a run is.
GRID_KEYS = ("name", "encodings", "seeds", "baseline", "jobs", "measure", "published")
# Keys of tables that came later: where they ask for nothing, it is as if they had never been there.
LATER_KEYS = {"train": ("checkpoints",), "evaluate": ("points",), "model": ("family", "embedding_dim")}
# Tables that belong to one task.
TABLES_OF = {"problems": "length_generalization", "pairs": "translation", "finetune": "finetune", "electra": "electra"}


@dataclass(frozen=True)
class Recipe:
    """Encodings x seeds, and everything that they have in common."""

    encodings: tuple[EncodingChoice, ...]
    name: str = "comparison"
    task: str = "mlm"  # what is trained and scored: a name in locant.compare.objective.ROWS
    seeds: tuple[int, ...] = (1, 2)
    baseline: str = ""  # label that the others are compared with; "": absolute where it takes part, else the first
    jobs: int = 1  # runs trained side by side; threads are divided among them
    text: TextSource = field(default_factory=TextSource)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    problems: ProblemSettings = field(default_factory=ProblemSettings)  # of the task length_generalization
    pairs: PairSettings = field(default_factory=PairSettings)  # of the task translation
    finetune: FinetuneTable = field(default_factory=FinetuneTable)  # of the task finetune
    electra: ElectraSettings = field(default_factory=ElectraSettings)  # of the task electra
    model: ModelSize = field(default_factory=ModelSize)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    published: tuple[Published, ...] = ()  # figures shown beside the results

    def __post_init__(self) -> None:
        if not self.encodings:
            raise ValueError('encodings is empty, needed at least one; write encodings = ["none", "absolute"]')
        if not self.seeds:
            raise ValueError("seeds is empty, needed at least one; write seeds = [1, 2]")
        if not re.fullmatch(r"[^/\\]*\w[^/\\]*", self.name):
            raise ValueError(f"name = {self.name!r}, needed a letter or digit and no slash: it names the output folder")
        labels = [choice.label for choice in self.encodings]
        for values, what in ((labels, "encodings"), ([str(seed) for seed in self.seeds], "seeds")):
            if repeated := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"{what} names {repeated[0]!r} twice; drop one, or give it a label of its own")
        if bad := [seed for seed in self.seeds if not 0 <= seed < 2**32]:
            raise ValueError(f"seeds has {bad[0]}, needed 0 to {2**32 - 1}")
        if self.jobs < 1:
            raise ValueError(f"jobs = {self.jobs}, needed at least 1")
        if self.baseline and self.baseline not in labels:
            raise ValueError(f"baseline = {self.baseline!r} is not among the encodings; {near(self.baseline, labels)}")

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the encodings, in the recipe's order."""
        return tuple(choice.label for choice in self.encodings)

    @property
    def baseline_label(self) -> str:
        """The label that the others are compared with."""
        return self.baseline or ("absolute" if "absolute" in self.labels else self.labels[0])

    def choice(self, label: str) -> EncodingChoice:
        """The encoding shown under this label."""
        return next(choice for choice in self.encodings if choice.label == label)

    def parts(self) -> dict[str, Recipe]:
        """By name, one recipe for each problem or task of fine-tuning where several are named; else this one alone."""
        parts: dict[str, Recipe] = {}
        for problem in self.problems.names:
            parts[problem] = dataclasses.replace(self, problems=dataclasses.replace(self.problems, names=(problem,)))
        for task in self.finetune.tasks:
            only = dataclasses.replace(self.finetune, tasks=(task,))
            parts[task.replace("/", "-")] = dataclasses.replace(self, finetune=only)
        if len(parts) < 2:
            return {next(iter(parts), self.name): self}
        return {name: dataclasses.replace(part, name=f"{self.name}-{name}") for name, part in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-able dict with every default filled in."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def shared(self) -> dict[str, Any]:
        """What all runs have in common: two recipes with equal shared parts may fill one output folder."""
        return shared_part(self.to_dict())

    def run_key(self, label: str, seed: int) -> str:
        """Identifies what one run is, whatever else its recipe asks for."""
        choice = self.choice(label)
        body = {"shared": self.shared(), "encoding": choice.name, "options": choice.options, "seed": seed}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def shared_part(table: dict[str, Any]) -> dict[str, Any]:
    """A recipe as a table, without what tells its runs apart, and without what it does not ask for.

    That is no checkpoints, the tables of other tasks, the task `mlm`: what results hold stays theirs when more can be
    asked for.
    """
    task = table.get("task", "mlm")
    others = {name for name, owner in TABLES_OF.items() if owner != task}
    shared = {key: value for key, value in table.items() if key not in GRID_KEYS and key not in others}
    if task == "mlm":
        shared.pop("task", None)
    for name, later in LATER_KEYS.items():
        if isinstance(part := shared.get(name), dict):
            shared[name] = {key: value for key, value in part.items() if value or key not in later}
    return shared


def load_recipe(path: str | Path, overrides: Sequence[str] = (), size: str = "") -> Recipe:
    """Reads a recipe file at one of its sizes (see `locant.compare.sizes`), applies `key=value` overrides to that, and
    checks everything that can be checked without training.

    Raises: FileNotFoundError; ValueError naming the key, its value and what was needed.
    """
    return read_recipe(choose_size(read_toml(path, "recipes/quickstart.toml"), size), overrides)


def read_toml(path: str | Path, example: str) -> dict[str, Any]:
    """The table of a recipe file, named after it where it names itself not. Raises: FileNotFoundError; ValueError."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"recipe: {str(path)!r} {what}, needed a TOML file such as {example}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe: {path} is not TOML: {error}") from error
    return {"name": path.stem, **table}


def read_recipe(table: dict[str, Any], overrides: Sequence[str] = (), *, check: bool = True) -> Recipe:
    """A recipe from parsed TOML (or from `Recipe.to_dict`), checked unless it was before. Raises: ValueError."""
    for given in overrides:
        table = override(table, given)
    table = dict(table)
    if "encodings" in table:
        choices = _read_encodings(table["encodings"])
        table["encodings"] = [dataclasses.asdict(choice) for choice in choices]
        named = {override.partition("=")[0].strip() for override in overrides}
        if "encodings" in named and "baseline" not in named:  # a subset without the file's baseline takes its own
            table = {key: value for key, value in table.items() if key != "baseline" or _has(choices, value)}
    recipe = build(Recipe, table)
    if check:
        check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Checks what one table alone cannot know. Raises: ValueError."""
    find_objective(recipe.task).check(recipe)
    for choice in recipe.encodings:
        _check_encoding(choice, recipe)


def check_windows(recipe: Recipe) -> None:
    """Lengths of windows must fit each other and the model. Raises: ValueError."""
    train, model, evaluate = recipe.train, recipe.model, recipe.evaluate
    if model.max_positions and model.max_positions < train.length:
        raise ValueError(
            f"recipe: model.max_positions = {model.max_positions} is less than train.length = {train.length}; "
            f"write model.max_positions = {train.length} or more, or 0 for automatic"
        )
    for length in evaluate.lengths:
        if length % train.length:
            raise ValueError(
                f"recipe: evaluate.lengths has {length}, needed multiples of train.length = {train.length}; write "
                f"evaluate.lengths = {[train.length, 2 * train.length, 4 * train.length]}"
            )
    if evaluate.lengths and train.length not in evaluate.lengths:
        raise ValueError(
            f"recipe: evaluate.lengths = {list(evaluate.lengths)} lacks train.length = {train.length}, by which the "
            "encodings are ranked; add it"
        )
    if evaluate.points and train.curve_points % evaluate.points:
        raise ValueError(
            f"recipe: evaluate.points = {evaluate.points} does not divide train.curve_points = {train.curve_points}, "
            f"whose steps it shares; write train.curve_points = {5 * evaluate.points}"
        )


def _check_encoding(choice: EncodingChoice, recipe: Recipe) -> None:
    """Builds the encoding once, small and thrown away: names, options and sizes are the encoding's own to check."""
    import torch

    with torch.random.fork_rng(devices=[]):
        try:
            find_objective(recipe.task).stack(recipe, choice)
        except (ValueError, TypeError) as error:
            raise ValueError(f"recipe: encodings has {choice.label!r}: {error}") from error


def _read_encodings(value: Any) -> list[EncodingChoice]:
    """Names, or tables {name, label, and options}; a table read back from `to_dict` has its options apart."""
    if not isinstance(value, list | tuple):
        raise ValueError(
            f'recipe: encodings = {value!r} is {kind_of(value)}, needed a list; write ["none", "absolute"]'
        )
    return [read_encoding(item, f"encodings[{index}]") for index, item in enumerate(value)]


def read_encoding(item: Any, where: str) -> EncodingChoice:
    """A name, or a table {name, label, and options}. Raises: ValueError naming the key."""
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, dict):
        raise ValueError(
            f'recipe: {where} = {item!r} is {kind_of(item)}, needed a name or {{name = "shaw", clip = 16}}'
        )
    if "name" not in item:
        raise ValueError(f'recipe: {where} = {item!r} lacks a name; write {{name = "shaw", ...}}')
    name = read_value(str, item["name"], f"{where}.name").replace(" ", "")
    if not name:
        raise ValueError(f"recipe: {where} has an empty name, needed that of an encoding; `locant list` shows them")
    nested = read_value(dict, item.get("options", {}), f"{where}.options")
    options = {**nested, **{key: value for key, value in item.items() if key not in ("name", "label", "options")}}
    label = read_value(str, item.get("label", ""), f"{where}.label") or _label(name, options)
    if not re.search(r"\w", label):
        raise ValueError(f"recipe: {where}.label = {label!r} has no letter or digit")
    return EncodingChoice(name, options, label)


def _has(choices: list[EncodingChoice], label: Any) -> bool:
    return any(choice.label == label for choice in choices)


def _label(name: str, options: dict[str, Any]) -> str:
    shown = ", ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    )
    return f"{name}({shown})" if shown else name


# --- overrides -------------------------------------------------------------------------------------------------------


def override(table: dict[str, Any], given: str) -> dict[str, Any]:
    """The table with one `dotted.key=value` put in (`list.0.key`: in a list's first table); keys are checked later."""
    key, sign, text = given.partition("=")
    key = key.strip()
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*(\.([A-Za-z_]\w*|\d+))*", key):
        raise ValueError(f"recipe: override {given!r} is not key=value; write for example train.steps=200")
    value = _override_value(text.strip())
    if key == "encodings":
        value = _select_encodings(table.get("encodings", []), value)
    if key == "seeds" and not isinstance(value, list):
        value = [value]
    return _put(table, key.split("."), value, key)


def _put(inner: Any, path: list[str], value: Any, key: str) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(inner, list) and first.isdecimal():
        if int(first) >= len(inner):
            raise ValueError(f"recipe: override {key}={value!r}, but there are {len(inner)}, counted from 0")
        return [_put(one, rest, value, key) if at == int(first) else one for at, one in enumerate(inner)]
    if not isinstance(inner, dict) or first.isdecimal():
        before = ".".join(key.split(".")[: -len(path)])
        needed = "a list" if first.isdecimal() else "a table"
        raise ValueError(f"recipe: override {key}={value!r}, but {before} is {kind_of(inner)}, not {needed}")
    return {**inner, first: _put(inner.get(first, {}), rest, value, key)}


def _override_value(text: str) -> Any:
    """TOML where it is TOML; a bare word is a text, bare words with commas are a list (which needs no quoting)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if "," in text and not text.startswith(("[", "{", '"', "'")):
            return [_override_value(part.strip()) for part in text.split(",") if part.strip()]
        return text


def _select_encodings(known: Any, value: Any) -> Any:
    """Labels of the recipe keep their options there; any other name stands for itself."""
    by_label: dict[str, Any] = {}
    if isinstance(known, Iterable) and not isinstance(known, str):
        for index, item in enumerate(known):
            by_label[read_encoding(item, f"encodings[{index}]").label] = item
    items = value if isinstance(value, list) else [value]
    return [by_label.get(item, item) if isinstance(item, str) else item for item in items]
