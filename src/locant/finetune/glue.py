"""The nine GLUE tasks: one row of data for each, and strict readers of their files.

Files are those of the GLUE download (tab-separated, quoting switched off), of the original CoLA release, and JSON lines
with one object for each example; each plain or compressed with gzip or xz.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from locant.compare.fields import near
from locant.data.files import check_characters, read_text_file
from locant.finetune.scores import GlueMetric, accuracy, accuracy_and_f1, correlations, matthews

SUFFIXES = ("", ".gz", ".xz")


@dataclass(frozen=True)
class GlueTask:
    """One task: where its files lie, which columns hold what, which labels there are, and how it is scored.

    Files are named without the endings of compression; of several names the first that is there is read. ``labels`` are
    the words of the label column, by class; empty for a regression task, whose labels are numbers in ``bounds``.
    """

    name: str
    folder: str
    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    metric: GlueMetric
    train: tuple[str, ...] = ("train.tsv", "train.jsonl")
    dev: tuple[tuple[str, tuple[str, ...]], ...] = (("dev", ("dev.tsv", "dev.jsonl")),)
    columns: tuple[str, ...] = ()  # of files without a header line
    json_text: tuple[str, ...] = ()  # fields of JSON lines, whose labels are the numbers of the classes; (): as `text`
    bounds: tuple[float, float] = (0.0, 0.0)
    skips_broken_rows: bool = False  # the download itself has rows that are cut off; they are counted and left out


@dataclass(frozen=True)
class Example:
    """A text or a pair of texts; ``label`` is the number of a class, or the number to predict."""

    id: str  # file name and row
    texts: tuple[str, ...]
    label: int | float


@dataclass(frozen=True)
class GlueData:
    """The examples of a task: for training, and each dev set under its name. ``notices`` are for the user."""

    train: tuple[Example, ...]
    dev: dict[str, tuple[Example, ...]]
    files: tuple[Path, ...]
    notices: tuple[str, ...]


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            "cola",
            "CoLA",
            ("sentence",),
            "label",
            ("0", "1"),
            matthews,
            train=("train.tsv", "in_domain_train.tsv"),
            dev=(("dev", ("dev.tsv", "in_domain_dev.tsv")),),
            columns=("source", "label", "mark", "sentence"),
        ),
        GlueTask("sst-2", "SST-2", ("sentence",), "label", ("0", "1"), accuracy),
        GlueTask("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1"), accuracy_and_f1),
        GlueTask("sts-b", "STS-B", PAIR, "score", (), correlations, bounds=(0.0, 5.0)),
        GlueTask(
            "qqp",
            "QQP",
            ("question1", "question2"),
            "is_duplicate",
            ("0", "1"),
            accuracy_and_f1,
            dev=(("dev", ("dev.tsv", "qqp.valid.jsonl")),),
            skips_broken_rows=True,
        ),
        GlueTask(
            "mnli",
            "MNLI",
            PAIR,
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            accuracy,
            dev=(
                ("matched", ("dev_matched.tsv", "mnli.valid.jsonl")),
                ("mismatched", ("dev_mismatched.tsv", "mnli-mm.valid.jsonl")),
            ),
            json_text=("premise", "hypothesis"),
        ),
        GlueTask("qnli", "QNLI", ("question", "sentence"), "label", ENTAILMENT, accuracy),
        GlueTask("rte", "RTE", PAIR, "label", ENTAILMENT, accuracy),
        GlueTask("wnli", "WNLI", PAIR, "label", ("0", "1"), accuracy),
    )
}


def read_glue(task: GlueTask, folder: Path) -> GlueData:
    """Training and dev examples of a task from its own folder, or from the one that holds all tasks.

    Where there is no training file, ``train`` is empty. Raises: FileNotFoundError; ValueError with file, row and field.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"glue/{task.name}: no folder {str(folder)!r}; give the folder with {task.folder} in it as --data"
        )
    own = folder / task.folder if (folder / task.folder).is_dir() else folder
    notices: list[str] = []
    files = {name: _find(own, names) for name, names in (("train", task.train), *task.dev)}
    for name, names in task.dev:
        if files[name] is None:
            raise FileNotFoundError(
                f"glue/{task.name}: {str(own)!r} has no dev file ({' or '.join(names)}, plain, .gz or .xz); give the "
                f"folder that holds it as --data"
            )
    read = {name: () if file is None else _read(task, file, notices) for name, file in files.items()}
    found = tuple(file for file in files.values() if file is not None)
    return GlueData(read.pop("train"), read, found, tuple(notices))


def _find(folder: Path, names: Sequence[str]) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name in names for suffix in SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _read(task: GlueTask, file: Path, notices: list[str]) -> tuple[Example, ...]:
    text = read_text_file(file)
    examples = tuple(_json_lines(task, file, text) if ".jsonl" in file.name else _table(task, file, text, notices))
    if not examples:
        raise ValueError(f"glue/{task.name}: {file} holds no example, at least one was needed; fetch it again")
    return examples


def _table(task: GlueTask, file: Path, text: str, notices: list[str]) -> Iterator[Example]:
    lines = text.rstrip("\n").split("\n")
    columns = task.columns or tuple(lines[0].split("\t"))
    for field in (*task.text, task.label):
        if columns.count(field) > 1:
            raise ValueError(
                f"glue/{task.name}: {file} has {columns.count(field)} columns {field!r}, needed one; drop or rename "
                "the others"
            )
        if field not in columns:
            raise ValueError(
                f"glue/{task.name}: {file} has the columns {', '.join(columns)[:200]}, and no {field!r}; "
                f"{near(field, columns)}"
            )
    broken = 0
    for number, line in enumerate(lines, start=1):
        cells = line.split("\t")
        if (number == 1 and not task.columns) or not line.strip():
            continue
        where = f"glue/{task.name}: {file}, line {number}"
        if len(cells) != len(columns):
            if task.skips_broken_rows:
                broken += 1
                continue
            raise ValueError(
                f"{where}: {len(cells)} fields came, needed {len(columns)} ({', '.join(columns)[:200]}); fetch the "
                "file again, and read or write it with quoting switched off"
            )
        row = dict(zip(columns, cells, strict=True))
        label = _number(task, where, row[task.label]) if task.bounds[1] else _class(task, where, row[task.label])
        yield _example(task, where, f"{file.name}:{number}", {f: row[f] for f in task.text}, label)
    if broken:
        notices.append(f"{file.name}: {broken} rows that are cut off were left out")


def _json_lines(task: GlueTask, file: Path, text: str) -> Iterator[Example]:
    fields = task.json_text or task.text
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"glue/{task.name}: {file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); each line needs one JSON object") from error
        for field in (*fields, "label"):
            if not isinstance(row, dict) or field not in row:
                came = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{where}: field {field!r} is missing in {came}; add it")
        for field in fields:
            if not isinstance(row[field], str):
                raise ValueError(f"{where}: field {field!r} holds {row[field]!r}, needed a text; mend it")
        label = row["label"]
        classes = range(len(task.labels))
        if task.bounds[1]:
            label = _number(task, where, label)
        elif isinstance(label, bool) or label not in classes:
            raise ValueError(
                f"{where}: field 'label' holds {label!r}, needed one of {', '.join(map(str, classes))} "
                f"({', '.join(task.labels)}); mend it, or leave the line out"
            )
        yield _example(task, where, f"{file.name}:{number}", {f: row[f] for f in fields}, label)


def _example(task: GlueTask, where: str, id_: str, texts: dict[str, str], label: int | float) -> Example:
    for field, text in texts.items():
        if not text.strip():
            raise ValueError(f"{where}: field {field!r} is empty, needed a text; mend it, or leave the row out")
        check_characters(where, field, text)
    return Example(id_, tuple(texts.values()), label)


def _class(task: GlueTask, where: str, word: str) -> int:
    if word not in task.labels:
        raise ValueError(
            f"{where}: field {task.label!r} holds {word!r}, needed one of {', '.join(task.labels)}; mend it, or leave "
            "the row out (test files have no labels)"
        )
    return task.labels.index(word)


def _number(task: GlueTask, where: str, word: object) -> float:
    low, high = task.bounds
    try:
        value = float(word)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"{where}: field {task.label!r} holds {word!r}, needed a number from {low:g} to {high:g}")
    return value
