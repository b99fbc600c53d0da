"""Scores besides accuracy, the score of the most frequent class, and one line for each encoding over several tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from locant.compare.objective import words_of
from locant.compare.results import ResultTable
from locant.compare.summary import Row, Spread, spread


def score_names(rows: Sequence[Row]) -> list[str]:
    """The further scores that any encoding has, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row.scores))


def spoken(name: str) -> str:
    """`exact_match` as readers see it."""
    return name.replace("_", " ")


def majority_text(table: ResultTable) -> str:
    """What saying the most frequent class of the training set scores, in a sentence; "" where there are no classes."""
    facts = table.environment.get("text")
    found = facts.get("majority") if isinstance(facts, dict) else None
    if not found:
        return ""
    scores = [
        f"{spoken(score)} {100 * value:.1f}" + (f" ({dev})" if len(found) > 1 else "")
        for dev, scores in found.items()
        for score, value in scores.items()
        if value is not None
    ]
    return f"Saying the most frequent class of the training set, without reading, scores {', '.join(scores)}."


def by_task(tables: Mapping[str, ResultTable]) -> tuple[list[str], list[list[Spread]]]:
    """Labels, and for each the main score of every task in points; the last is the mean over tasks, if it has all."""
    labels = list(dict.fromkeys(label for table in tables.values() for label in table.encodings))
    lines = []
    for label in labels:
        runs = [_points(table, label) for table in tables.values()]
        means = [spread(values.values()).mean for values in runs]
        seeds = set.intersection(*map(set, runs)) if None not in means else set()
        over = [sum(values[seed] for values in runs) / len(runs) for seed in sorted(seeds)]
        lines.append([*(spread(values.values()) for values in runs), spread(over)])
    return labels, lines


def task_heads(tables: Mapping[str, ResultTable]) -> list[str]:
    """`glue-cola (Matthews)`, ..."""
    return [f"{name} ({words_of(table).scored})" for name, table in tables.items()]


def _points(table: ResultTable, label: str) -> dict[int, float]:
    """Main score at the trained length by seed, times 100."""
    return {
        run.seed: 100 * one.accuracy
        for run in table.of(label)
        if run.status == "done"
        for one in run.lengths
        if one.factor == 1 and one.accuracy is not None
    }
