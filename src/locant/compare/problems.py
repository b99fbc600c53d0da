"""The task `length_generalization`: a small GPT-2 that learns short examples of a problem and is judged by longer ones.

Kazemnejad et al. 2023, arXiv:2305.19466. A recipe with several problems is one comparison for each (see
`locant.compare.series`). In its tables the trained length stands for the validation examples of all trained lengths,
accuracy is exact match of the final answer written greedily, and the loss that of the target under teacher forcing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.compare.fields import near
from locant.compare.objective import OnStep, choose_family, refuse_unused, refuse_windows
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.words import Words
from locant.lengthgen import SCRATCHPADS, Example, Split, SymbolTokenizer, bucket, edit_distance, is_right, split_facts
from locant.lengthgen.splits import SCAN_RANGES, make_split, problems, scan_split

if TYPE_CHECKING:
    from locant.compare.recipe import Recipe
    from locant.encoding import Stack
    from locant.training.mlm import BuiltModel, EncodingChoice, LossPoint, TrainSettings

CHECK_LENGTH = 128  # rows of tables of encodings that are built for a check, before any data is there
SCAN = "scan"


@dataclass(frozen=True)
class ProblemSettings:
    """Which problems, how many examples, and what is short and long."""

    names: tuple[str, ...] = ()  # of locant.lengthgen.PROBLEMS, or scan (which is read from $LOCANT_DATA/scan)
    ranges: dict[str, Any] = field(default_factory=dict)  # by name [[first, last] to train, [first, last] to test]
    scratchpad: str = "plain"  # a name of locant.lengthgen.SCRATCHPADS
    symbols: int = 100  # size of the pool that copying and reversing draw from
    num_train: int = 100_000
    num_validation: int = 7_500
    num_test: int = 10_000
    data_seed: int = 9_842_497  # of the examples, the same for all runs

    def __post_init__(self) -> None:
        known = (*problems(self.symbols), SCAN)
        for name in (*self.names, *self.ranges):
            if name not in known:
                raise ValueError(f"names has {name!r}, which is no problem; {near(name, known)}")
        if repeated := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"names has {repeated[0]!r} twice; drop one")
        if self.scratchpad not in SCRATCHPADS:
            raise ValueError(f"scratchpad = {self.scratchpad!r} is not a choice; {near(self.scratchpad, SCRATCHPADS)}")
        for name in ("num_train", "num_validation", "num_test"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, needed at least 1")
        for name, value in self.ranges.items():
            if not _is_ranges(value):
                raise ValueError(
                    f"ranges.{name} = {value!r}, needed [[first, last], [first, last]] to train and to test"
                )

    def range_of(self, name: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Lengths to train and to test on."""
        if name in self.ranges:
            train, test = self.ranges[name]
            return (train[0], train[1]), (test[0], test[1])
        if name == SCAN:
            return SCAN_RANGES
        problem = problems(self.symbols)[name]
        return problem.train, problem.test

    def unit_of(self, name: str) -> str:
        """What lengths count."""
        return "actions" if name == SCAN else problems(self.symbols)[name].unit

    def source_of(self, name: str) -> str:
        """Who chose the lengths to train and to test on."""
        if name in self.ranges:
            return "the recipe"
        chosen = "" if name == SCAN else problems(self.symbols)[name].chosen
        return f"chosen here: {chosen}" if chosen else "the study"

    def split(self, name: str) -> Split:
        """The examples of one problem. Raises: ValueError, FileNotFoundError for SCAN where it is not there."""
        train, test = self.range_of(name)
        counts = (self.num_train, self.num_validation, self.num_test, self.data_seed)
        if name == SCAN:
            return scan_split(*counts, train=train, test=test)
        problem = problems(self.symbols)[name]
        return make_split(problem, *counts, train=train, test=test, scratchpad=SCRATCHPADS[self.scratchpad])


def _is_ranges(value: Any) -> bool:
    whole = isinstance(value, list | tuple) and len(value) == 2
    return whole and all(
        isinstance(part, list | tuple) and len(part) == 2 and all(type(end) is int for end in part) for part in value
    )


class LengthGeneralization:
    """Examples as symbols; the model is as long as the longest of them."""

    def words(self, recipe: dict[str, Any]) -> Words:
        """Lengths are those of answers or whole examples."""
        return Words(trained="symbols", scored="exact match")

    def check(self, recipe: Recipe) -> None:
        """Problems must be named, and be able to make the lengths asked for; text and masks have no meaning."""
        task, settings = "length_generalization", recipe.problems
        refuse_unused(recipe, task, ("text", "tokenizer", "masking", "pairs", "finetune", "electra"))
        choose_family(recipe, task, "causal")
        refuse_windows(recipe, task, "problems.ranges = { copy_rsc = [[2, 10], [11, 20]] }")
        if not settings.names:
            raise ValueError(f'recipe: task = {task!r} names no problem; write problems.names = ["copy_rsc", "parity"]')
        for name in settings.names:
            _check_problem(settings, name)

    def trained_length(self, recipe: Recipe) -> int:
        """The longest trained length."""
        return recipe.problems.range_of(recipe.problems.names[0])[0][1]

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """What a trial would attach, with as many rows as the recipe says or as a check needs."""
        from locant.training.hosts import build_encoding

        return build_encoding(choice, recipe.model, CHECK_LENGTH, causal=True)

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> Examples:
        """Draws the examples, or reads what was drawn."""
        path = folder / "examples.json"
        if not path.is_file():
            (name,) = recipe.problems.names
            split = recipe.problems.split(name)
            body = {part: [asdict(one) for one in getattr(split, part)] for part in ("train", "validation", "test")}
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(body), encoding="utf-8")
            os.replace(part, path)
        return self.read(recipe, folder)

    def read(self, recipe: Recipe, folder: Path) -> Examples:
        """What was drawn."""
        body = json.loads((folder / "examples.json").read_text(encoding="utf-8"))
        parts = {name: tuple(_example(one) for one in rows) for name, rows in body.items()}
        return Examples(recipe.problems, Split(**parts))

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: Examples) -> ProblemTrial:
        """A GPT-2."""
        return ProblemTrial(recipe, choice, seed, data)


def _check_problem(settings: ProblemSettings, name: str) -> None:
    """Raise a ValueError where a problem cannot make what is asked of it."""
    from locant.lengthgen import bins

    train, test = settings.range_of(name)
    try:
        if name != SCAN:
            problem = problems(settings.symbols)[name]
            problem.check_scratchpad(SCRATCHPADS[settings.scratchpad])
            for length in (*bins(problem, *train), *bins(problem, *test, trained=train[1])):
                problem.check(length)
        elif settings.scratchpad != "plain":
            raise ValueError(f"scan: scratchpad = {settings.scratchpad!r}, but it has no steps; write 'plain'")
    except ValueError as error:
        raise ValueError(f"recipe: [problems] {error}") from error


def _example(body: dict[str, Any]) -> Example:
    length = body["length"]
    return Example(body["prompt"], body["target"], tuple(length) if isinstance(length, list) else length)


class Examples:
    """The examples of one problem, with a tokenizer that knows their symbols."""

    def __init__(self, settings: ProblemSettings, split: Split) -> None:
        (self.name,) = settings.names
        self.settings, self.split = settings, split
        every = (*split.train, *split.validation, *split.test)
        self.tokenizer = SymbolTokenizer.of(text for one in every for text in (one.prompt, one.target))
        self.longest = max(len(self.tokenizer.encode(one.prompt + one.target)) for one in every) + 1

    @property
    def facts(self) -> dict[str, Any]:
        """The data card: numbers of examples, their lengths and who chose these, and what they were drawn with."""
        train, test = self.settings.range_of(self.name)
        return {
            "problem": self.name,
            **split_facts(self.split),
            "vocabulary": len(self.tokenizer),
            "longest_tokens": self.longest,
            "lengths": {"train": list(train), "test": list(test), "unit": self.settings.unit_of(self.name)},
            "lengths_from": self.settings.source_of(self.name),
            "scratchpad": self.settings.scratchpad,
            "symbols": self.settings.symbols,
            "data_seed": self.settings.data_seed,
        }

    def encode(self, examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
        """Prompt and target ids."""
        return [(self.tokenizer.encode(one.prompt), self.tokenizer.encode(one.target)) for one in examples]


class ProblemTrial:
    """One GPT-2 on one problem."""

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: Examples) -> None:
        from locant.training.causal import PairCollate, Pairs
        from locant.training.hosts import FAMILIES, build_host

        self.recipe, self.seed, self.data, self.steps = recipe, seed, data, recipe.train.steps
        self.tokenizer = data.tokenizer
        longest = recipe.model.max_positions or data.longest
        if longest < data.longest:
            raise ValueError(
                f"recipe: model.max_positions = {longest}, but examples of {data.name} have up to {data.longest} "
                "symbols; write more, or 0 for automatic"
            )
        family = choose_family(recipe, recipe.task, "causal")
        shape = recipe.model.shape(family, len(data.tokenizer), longest, data.tokenizer.pad_id)
        self.built: BuiltModel = build_host(FAMILIES[family], shape, choice, seed)
        self.pairs = Pairs.join(data.encode(data.split.train), data.tokenizer.end_id)
        self.collate = PairCollate(self.pairs, data.tokenizer.pad_id)
        mean = sum(len(ids) for ids in self.pairs.ids) / len(self.pairs)
        self.tokens_per_step = round(mean * recipe.train.batch_size)
        first = range(min(recipe.train.batch_size, len(self.pairs)))
        self.batch = self.collate([{"example_id": k} for k in first])
        self.tokens_per_pass = self.batch["input_ids"].numel()

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """The order of the examples follows from the seed."""
        from locant.training.causal import make_objective
        from locant.training.trainer import train

        objective = make_objective(self.built.model)
        return train(
            objective, self.pairs, self.collate, self.built, settings, self.seed, work_dir=work_dir, on_step=on_step
        )

    def infer(self) -> None:
        """The decoder alone, over one training batch."""
        device = next(self.built.model.parameters()).device
        ids, mask = (self.batch[name].to(device) for name in ("input_ids", "attention_mask"))
        self.built.model.transformer(input_ids=ids, attention_mask=mask, use_cache=False)

    def validation_loss(self) -> float:
        """Of the targets of all validation examples."""
        return self._loss(self.data.split.validation)

    def by_length(self) -> tuple[LengthScore, ...]:
        """Validation examples at the trained length, then the test examples by their own."""
        trained = self.recipe.problems.range_of(self.data.name)[0][1]
        groups: dict[int, list[Example]] = {trained: list(self.data.split.validation)}
        for example in sorted(self.data.split.test, key=bucket):
            groups.setdefault(bucket(example), []).append(example)
        return tuple(self._score(length, length / trained, found) for length, found in groups.items())

    def further_scores(self) -> dict[str, float | None]:
        """None."""
        return {}

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """Not asked."""
        return ()

    def _batch_size(self) -> int:
        return max(1, self.recipe.evaluate.batch_tokens // self.data.longest)

    def _loss(self, examples: Sequence[Example]) -> float:
        """Nats per target symbol, the end among them, under teacher forcing."""
        import torch

        from locant.training.causal import PairCollate, Pairs
        from locant.training.hosts import next_token_logits

        model, tokenizer = self.built.model, self.data.tokenizer
        pairs = Pairs.join(self.data.encode(examples), tokenizer.end_id)
        collate, size = PairCollate(pairs, tokenizer.pad_id), self._batch_size()
        device = next(model.parameters()).device
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for start in range(0, len(pairs), size):
                rows = [{"example_id": k} for k in range(start, min(start + size, len(pairs)))]
                batch = {key: value.to(device) for key, value in collate(rows).items()}
                logits, targets = next_token_logits(
                    model, batch["input_ids"], batch["labels"], attention_mask=batch["attention_mask"]
                )
                total += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
                count += targets.numel()
        return total / count

    def _score(self, length: int, factor: float, examples: Sequence[Example]) -> LengthScore:
        from locant.training.causal import generate

        tokenizer, encoded = self.data.tokenizer, self.data.encode(examples)
        longest = max(len(target) for _, target in encoded) + 1
        prompts = [prompt for prompt, _ in encoded]
        ids = generate(self.built.model, prompts, longest, tokenizer.pad_id, tokenizer.end_id, self._batch_size())
        written = [(tokenizer.decode(one), example.target) for one, example in zip(ids, examples, strict=True)]
        right = sum(is_right(*pair) for pair in written) / len(written)
        edits = sum(edit_distance(*pair) for pair in written) / len(written)
        return LengthScore(length, factor, self._loss(examples), right, edit_distance=edits)
