"""A recipe with several problems: one comparison for each, in a folder of its own, and what they say together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from locant.compare.executors import Executor, LocalExecutor
from locant.compare.grid import Watch, compare
from locant.compare.recipe import Recipe
from locant.compare.results import ResultTable
from locant.compare.scored import by_task, task_heads
from locant.compare.summary import Spread, spread
from locant.compare.tables import align, spread_text
from locant.lengthgen import mean_reciprocal_rank
from locant.training.folder import write_atomically

NAME = "exact_match"


@dataclass(frozen=True)
class Generalization:
    """Exact match beyond the trained length, by problem and encoding, over seeds.

    ``validation``, ``test``: 0 to 1; test is the mean over the lengths beyond the trained one. ``edit_distance``: how
    far answers at those lengths are from right ones, in symbols. ``reciprocal_rank``: mean over the problems that every
    encoding finished, by mean test score, where equal scores share the mean of their ranks; 1 is the best everywhere.
    """

    encodings: tuple[str, ...]
    validation: dict[str, dict[str, Spread]]
    test: dict[str, dict[str, Spread]]
    edit_distance: dict[str, dict[str, Spread]]
    reciprocal_rank: dict[str, float]


def compare_series(
    recipe: Recipe,
    out: str | Path,
    *,
    jobs: int | None = None,
    threads: int = 0,
    watch: Watch | None = None,
    command: str = "",
    executor: Callable[..., Executor] = LocalExecutor,
) -> dict[str, ResultTable]:
    """`compare` for each part of a recipe, below ``out`` where there are several, and what they say together.

    That is exact_match.json and .txt for problems of length generalization, scores.txt for several fine-tuning tasks.

    Raises: as `compare`.
    """
    parts, out = recipe.parts(), Path(out)
    tables = {}
    for name, part in parts.items():
        folder = out / name if len(parts) > 1 else out
        tables[name] = compare(
            part, folder, jobs=jobs, threads=threads, watch=watch, command=command, executor=executor
        )
    if recipe.problems.names:
        found = generalization(tables)
        write_atomically(out / f"{NAME}.json", json.dumps(asdict(found), indent=1) + "\n")
        write_atomically(out / f"{NAME}.txt", generalization_text(found))
    elif len(tables) > 1:
        write_atomically(out / "scores.txt", scores_text(tables))
    return tables


def series_text(recipe: Recipe, tables: Mapping[str, ResultTable]) -> str:
    """What the parts of a recipe say together; "" where it has one part."""
    if recipe.problems.names:
        return generalization_text(generalization(tables))
    return scores_text(tables) if len(tables) > 1 else ""


def scores_text(tables: Mapping[str, ResultTable]) -> str:
    """An aligned table: a row for each encoding, best first, a column for each task, and their mean."""
    labels, lines = by_task(tables)
    order = sorted(range(len(labels)), key=lambda at: -(lines[at][-1].mean or 0.0))
    rows = [[labels[at], *(spread_text(one, 2) for one in lines[at])] for at in order]
    title = "Main score of each task, in points (mean ± deviation over seeds), and the mean over all tasks"
    return "\n".join([title, *align(["encoding", *task_heads(tables), "mean"], rows, 1)]) + "\n"


def generalization(tables: Mapping[str, ResultTable]) -> Generalization:
    """Exact match within and beyond the trained lengths, and the mean reciprocal rank of each encoding."""
    validation = {name: _scores(table, "accuracy", trained=True) for name, table in tables.items()}
    test = {name: _scores(table, "accuracy", trained=False) for name, table in tables.items()}
    edits = {name: _scores(table, "edit_distance", trained=False) for name, table in tables.items()}
    encodings = tuple(dict.fromkeys(label for table in tables.values() for label in table.encodings))
    whole: dict[str, dict[str, float]] = {}
    for name, scores in test.items():
        means = {label: score.mean for label, score in scores.items() if score.mean is not None}
        if means.keys() == set(encodings):
            whole[name] = means
    return Generalization(encodings, validation, test, edits, mean_reciprocal_rank(whole) if whole else {})


def _scores(table: ResultTable, score: str, trained: bool) -> dict[str, Spread]:
    """Mean score of each run over the lengths of one side, then over seeds."""
    scores = {}
    for label in table.encodings:
        runs = []
        for run in table.of(label):
            found = [getattr(one, score) for one in run.lengths if (one.factor == 1) == trained]
            found = [value for value in found if value is not None]
            if found:
                runs.append(sum(found) / len(found))
        scores[label] = spread(runs)
    return scores


def generalization_text(found: Generalization) -> str:
    """Aligned tables: a row for each encoding, best first, a column for each problem."""
    order = sorted(found.encodings, key=lambda label: -found.reciprocal_rank.get(label, 0.0))
    tables = [
        ("Exact match, longer than trained (0 to 1", found.test),
        ("Exact match, validation, trained lengths (0 to 1", found.validation),
    ]
    if any(one.n for scores in found.edit_distance.values() for one in scores.values()):
        tables.append(("Edit distance, longer than trained (symbols", found.edit_distance))
    lines = []
    for title, scores in tables:
        header = ["encoding", *scores] + ["mean 1/rank"] * (scores is found.test)
        rows = []
        for label in order:
            cells = [spread_text(one[label], 3) if label in one else "-" for one in scores.values()]
            rank = found.reciprocal_rank.get(label)
            rows.append([label, *cells] + [f"{rank:.2f}" if rank is not None else "-"] * (scores is found.test))
        lines += [f"{title}, mean ± deviation over seeds)", *align(header, rows, 1), ""]
    return "\n".join(lines[:-1]) + "\n"
