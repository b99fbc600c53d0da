"""Analyses as CSV: one row for each number or group of numbers, all digits, empty where undefined."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from locant.analysis import Analysis, plain
from locant.report.analysis_findings import findings

Row = dict[str, Any]
NAMED = ("previous", "next", "whole", "local", "broad", "other")


def analysis_tables(analyses: Sequence[Analysis]) -> dict[str, str]:
    """CSV text by the name of its table; each row begins with the model's name. Tables without rows are left out."""
    found = {}
    for name, rows_of in TABLES.items():
        rows = [{"model": one.model.name, **row} for one in analyses for row in rows_of(one)]
        if rows:
            found[name] = _csv(rows)
    return found


def _csv(rows: list[Row]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: "" if (value := plain(item)) is None else value for key, item in row.items()} for row in rows
    )
    return text.getvalue()


def _numbers(analysis: Analysis) -> Iterator[Row]:
    yield from (vars(finding) for finding in findings(analysis))


def _position_table(analysis: Analysis) -> Iterator[Row]:
    found = analysis.translation_invariance
    if found is None or found.position_table is None:
        return
    scalars = ("n", "width", "r2", "r2_off_diagonal", "null", "null_off_diagonal", "null_shuffled")
    for treatment, one in vars(found.position_table).items():
        if one is not None:
            row = {"treatment": treatment, **{key: getattr(one, key) for key in scalars}}
            first = None if one.first is None else one.first.r2
            yield {**row, "r2_centered": one.centered.r2, "r2_cosine": one.cosine.r2, "r2_first_128": first}


def _heads(analysis: Analysis) -> Iterator[Row]:
    found = analysis.translation_invariance
    for one in () if found is None else found.heads:
        columns = {key: plain(getattr(one, key)) for key in ("r2", "r2_off_diagonal", "null_shuffled", "spread")}
        for head in range(len(one.r2)):
            yield {"layer": one.layer, "source": one.source, "head": head, "n": one.n} | {
                key: column[head] for key, column in columns.items()
            }


def _scoring_functions(analysis: Analysis) -> Iterator[Row]:
    found = analysis.translation_invariance
    for one in () if found is None else found.heads:
        for head, profile in enumerate(plain(one.profile)):
            for offset, value in zip(plain(one.offsets), profile, strict=True):
                yield {"layer": one.layer, "source": one.source, "head": head, "offset": offset, "f": value}


def _kernels(analysis: Analysis) -> Iterator[Row]:
    found = analysis.translation_invariance
    for one in () if found is None else found.kernels:
        columns = {key: plain(getattr(one, key)) for key in ("r2", "amplitude", "sharpness", "center")}
        for head, needed in enumerate(one.needed):
            for at in range(one.r2.shape[1]):
                yield {
                    "layer": one.layer,
                    "source": one.source,
                    "head": head,
                    "needed": needed,
                    "kernel": at + 1,
                    **{key: column[head][at] for key, column in columns.items()},
                }


def _correlations(analysis: Analysis) -> Iterator[Row]:
    if analysis.correlations is None:
        return
    for expansion in ("raw", "exact"):
        four = getattr(analysis.correlations, expansion)
        for name, one in {} if four is None else vars(four).items():
            yield {
                "expansion": expansion,
                "map": name,
                "mean": one.mean,
                "std": one.std,
                "r2": one.r2,
                "share": one.share,
            }


def _patterns(analysis: Analysis) -> Iterator[Row]:
    found = analysis.patterns
    for one in () if found is None else (*found.layers, *(found.attention or ())):
        for head, pattern in enumerate(one.heads):
            yield {"layer": one.layer, "source": one.source, "head": head, **vars(pattern)}


def _distance(analysis: Analysis) -> Iterator[Row]:
    found = analysis.distance
    if found is None:
        return
    offsets, counts, mean, mass = (plain(getattr(found, key)) for key in ("offsets", "counts", "mean", "mass"))
    for layer, heads in enumerate(mean):
        for head, values in enumerate(heads):
            for at, offset in enumerate(offsets):
                row = {"layer": layer, "head": head, "offset": offset, "count": counts[at], "mean": values[at]}
                yield {**row, "mass": mass[layer][head][at]}


def _mean_distance(analysis: Analysis) -> Iterator[Row]:
    found = analysis.distance
    for layer, heads in enumerate([] if found is None else plain(found.mean_distance)):
        yield from ({"layer": layer, "head": head, "mean_distance": value} for head, value in enumerate(heads))


def _companions(analysis: Analysis) -> Iterator[Row]:
    found = analysis.distance
    for one in () if found is None else found.companions:
        for head, values in enumerate(plain(one.values)):
            for offset, value in zip(plain(one.offsets), values, strict=True):
                row = {"layer": one.layer, "term": one.name, "kind": one.kind}
                yield {**row, "head": head if len(one.values) > 1 else "all", "offset": offset, "value": value}


def _drift(analysis: Analysis) -> Iterator[Row]:
    found = analysis.phase_shift
    if found is None:
        return
    cosine, l2 = plain(found.drift.cosine), plain(found.drift.l2)
    for at, shift in enumerate(found.shifts):
        for layer, value in enumerate(cosine[at]):
            yield {"shift": shift, "layer": layer, "cosine": value, "l2": l2[at][layer]}


def _scores(analysis: Analysis) -> Iterator[Row]:
    found = analysis.phase_shift
    if found is None:
        return
    for at, shift in enumerate(found.shifts):
        row: Row = {"shift": shift}
        if found.perplexity is not None:
            row |= {"kind": found.perplexity.kind, "perplexity": float(found.perplexity.mean[at])}
            row |= {"mean_rank": float(found.perplexity.mean_rank[at])}
        if found.acceptability is not None:
            row |= {"accuracy": float(found.acceptability.accuracy[at])}
        if len(row) > 1:
            yield row


def _locality(analysis: Analysis) -> Iterator[Row]:
    found = analysis.locality
    if found is None:
        return
    keys = ("locality", "symmetry", "symmetry_raw")
    yield {"source": "one repeated word", "layer": "all", **{key: getattr(found.identical_words, key) for key in keys}}
    for layer, one in enumerate(found.identical_words.per_layer):
        yield {"source": "one repeated word", "layer": layer, **vars(one)}
    for one in found.logits or ():
        columns = {key: plain(getattr(one, key)) for key in keys}
        for head in range(len(one.locality)):
            yield {"source": one.source, "layer": one.layer, "head": head} | {k: c[head] for k, c in columns.items()}


def _probe(analysis: Analysis) -> Iterator[Row]:
    found = analysis.probe
    if found is None:
        return
    keys = ("distance", "accuracy", "linear_distance", "linear_accuracy")
    columns = {key: plain(getattr(found, key)) for key in keys}
    for at, layer in enumerate(found.layers):
        yield {"layer": layer, "chance": found.chance, **{key: column[at] for key, column in columns.items()}}


def _rows(analysis: Analysis) -> Iterator[Row]:
    found = analysis.table
    if found is None:
        return
    yield {
        "n": found.n,
        "width": found.width,
        "regression_error": found.regression.error,
        "regression_always_mean": found.regression.training_mean_error,
        "order_error": found.order.error,
        "order_majority": found.order.majority,
        "monotonicity": found.monotonicity,
        "rank_99": found.spectrum.rank_99,
        "rank": found.spectrum.rank,
    }


def _over_training(analysis: Analysis) -> Iterator[Row]:
    found = analysis.over_training
    for point in () if found is None else found.checkpoints:
        row = dict(vars(point))
        by_logits, measured = row.pop("patterns"), row.pop("attention")
        for title, counts in (("position_logits", by_logits), ("attention", measured)):
            row |= {f"{title}_{name}": counts.get(name, 0) if counts else None for name in NAMED}
        yield row


TABLES: dict[str, Callable[[Analysis], Iterator[Row]]] = {
    "numbers": _numbers,
    "position_table": _position_table,
    "heads": _heads,
    "scoring_functions": _scoring_functions,
    "kernels": _kernels,
    "correlations": _correlations,
    "patterns": _patterns,
    "attention_by_distance": _distance,
    "mean_distance": _mean_distance,
    "companions": _companions,
    "drift": _drift,
    "scores_by_shift": _scores,
    "locality": _locality,
    "probe": _probe,
    "table": _rows,
    "over_training": _over_training,
}
