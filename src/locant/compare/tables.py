"""A result table as plain text and as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from locant.compare.objective import words_of
from locant.compare.pace import Pace, pace, pace_text
from locant.compare.published import CAUTION, published
from locant.compare.results import ResultTable
from locant.compare.scored import majority_text, score_names, spoken
from locant.compare.summary import CLEAR, LEANING, Difference, LengthSummary, Row, Spread, summarise

CANNOT = "cannot"  # the run ended, this number does not exist
ABSENT = "-"  # nothing was measured
UNSTEADY = 1.5  # between the fastest and the slowest round, from which speeds are told to say little


def to_text(table: ResultTable) -> str:
    """Aligned tables: quality and cost, best first, with the meaning of the marks below; then published figures."""
    rows, words = summarise(table), words_of(table)
    factors = sorted({(one.length, one.factor) for row in rows for one in row.lengths if one.factor != 1})
    header = ["#", "encoding", "seeds", f"{words.loss} at {table.trained_length}", f"against {table.baseline}"]
    header += [words.scored, *map(spoken, score_names(rows))]
    header += [f"{words.loss} at {length} ({factor:g}x)" for length, factor in factors]
    quality = [_quality_cells(row, [length for length, _ in factors], score_names(rows), words.mark) for row in rows]
    if any(row.shifts for row in rows):
        header.append("max shift change")
        quality = [[*cells, shift_text(row.max_shift_change)] for cells, row in zip(quality, rows, strict=True)]
    paces = [pace(table, row.encoding) for row in rows]
    if any(paces):
        header.append(f"steps to the end of {table.baseline}")
        quality = [[*cells, pace_text(found)] for cells, found in zip(quality, paces, strict=True)]
    lines = [f"Quality (validation, {words.unit}, mean ± deviation over seeds)", *align(header, quality, 2)]
    lines += [majority] if (majority := majority_text(table)) else []
    lines += ["* clear: beyond the spread of the seeds, and the 95% interval of the paired differences excludes zero."]
    lines += ["~ leaning: beyond the spread of the seeds, but that interval reaches zero. No mark: not told apart."]
    if interval := max((found.interval for found in paces if found), default=0):
        lines += [
            f"Steps to the end of {table.baseline}: until the validation loss is no higher than its final one, as a "
            f"share of its steps; validated every {interval} steps."
        ]
    lines += ["", *_cost_lines(rows)]
    if unsteady := [row.encoding for row in rows if _unsteady(row)]:
        lines += [
            f"The rounds of {', '.join(unsteady)} lie far apart: the machine was busy, and these speeds say little."
        ]
    notes = [f"{row.encoding}: {failure}" for row in rows for failure in row.failed]
    notes += [f"{row.encoding} at {one.length}: {one.reason}" for row in rows for one in row.lengths if one.reason]
    lines += ["", "Not measured", *notes] if notes else []
    if figures := published(table):
        shown = [[one.claim, one.value, one.source] for one in figures]
        lines += ["", f"Published figures ({CAUTION})", *align(["claim", "value", "source"], shown, 3)]
    return "\n".join(lines) + "\n"


def _unsteady(row: Row) -> bool:
    """Whether the fastest round was more than half as fast again as the slowest."""
    rounds = (row.speed.train_rounds, row.speed.inference_rounds) if row.speed else ()
    return any(max(found) > UNSTEADY * min(found) for found in rounds if found)


def encodings_csv(table: ResultTable) -> str:
    """One row for each encoding, best first: the statistics over seeds, then cost."""
    rows = summarise(table)
    lengths = sorted({one.length for row in rows for one in row.lengths})
    shifts = sorted({one.shift for row in rows for one in row.shifts})
    header = ["rank", "encoding", "options", "is_baseline", "seeds_planned", "seeds_done"]
    for length in lengths:
        header += [f"{what}_at_{length}" for what in ("loss_mean", "loss_std", "n", "accuracy_mean", "accuracy_std")]
        header += [f"difference_{what}_at_{length}" for what in ("mean", "std", "n", "low", "high", "verdict")]
        header.append(f"reason_at_{length}")
    header += [f"change_shifted_{shift}_{what}" for shift in shifts for what in ("mean", "std", "n")]
    header += ["max_shift_change", "train_tokens_per_second", "inference_tokens_per_second", "train_peak_mb"]
    header += ["inference_peak_mb", "speed_reason", "extra_parameters", "total_parameters", "failed"]
    cells = [_csv_cells(row, lengths, shifts) for row in rows]
    for name in score_names(rows):
        header += [f"{name}_{part}" for part in ("mean", "std", "n")]
        found = [row.scores.get(name) for row in rows]
        cells = [
            [*line, *((one.mean, one.std, one.n) if one else [None] * 3)]
            for line, one in zip(cells, found, strict=True)
        ]
    paces = [pace(table, row.encoding) for row in rows]
    if any(paces):
        header += [f"{what}_to_baseline_{part}" for what in ("steps", "tokens") for part in ("mean", "std", "n")]
        cells = [[*line, *_pace_cells(found)] for line, found in zip(cells, paces, strict=True)]
    return as_csv(header, cells)


def runs_csv(table: ResultTable) -> str:
    """One row for each run: status, parameters, then loss, accuracy and edit distance by length, loss by shift."""
    edited = any(score.edit_distance is not None for run in table.runs for score in run.lengths)
    scores = ("loss", "accuracy", "edit_distance")[: 2 + edited]
    lengths = sorted({score.length for run in table.runs for score in run.lengths})
    shifts = sorted({score.shift for run in table.runs for score in run.shifts})
    header = ["encoding", "options", "seed", "status", "reason", "seconds", "extra_parameters", "total_parameters"]
    header += [f"{what}_at_{length}" for length in lengths for what in scores]
    header += [f"loss_shifted_{shift}" for shift in shifts]
    further = list(dict.fromkeys(name for run in table.runs for name in run.scores))
    header += further
    rows = []
    for run in table.runs:
        at_length = {score.length: score for score in run.lengths}
        at_shift = {score.shift: score for score in run.shifts}
        row: list[Any] = [run.encoding, _options(run.options), run.seed, run.status, run.reason]
        row += [run.seconds, run.extra_parameters, run.total_parameters]
        row += [getattr(at_length.get(length), what, None) for length in lengths for what in scores]
        row += [getattr(at_shift.get(shift), "loss", None) for shift in shifts]
        row += [run.scores.get(name) for name in further]
        rows.append(row)
    return as_csv(header, rows)


# --- cells -----------------------------------------------------------------------------------------------------------


def spread_text(value: Spread, digits: int = 3, scale: float = 1.0) -> str:
    """`2.413 ± 0.012`; without the deviation at one seed; `-` at none."""
    if value.mean is None:
        return ABSENT
    deviation = "" if value.std is None else f" ± {value.std * scale:.{digits}f}"
    return f"{value.mean * scale:.{digits}f}{deviation}"


def difference_text(value: Difference | None) -> str:
    """`-0.413 ± 0.011 *`: signed mean and deviation of the paired differences, with the mark of the verdict."""
    if value is None or value.mean is None:
        return ABSENT
    mark = {CLEAR: " *", LEANING: " ~"}.get(value.verdict, "")
    return f"{value.mean:+.3f}" + ("" if value.std is None else f" ± {value.std:.3f}") + mark


def length_text(summary: LengthSummary | None) -> str:
    """Loss at one length, or `cannot` where it does not exist."""
    if summary is None:
        return ABSENT
    return spread_text(summary.loss) if summary.loss.n else CANNOT


def score_text(value: Spread | None, mark: str) -> str:
    """A score times 100, with the mark behind it."""
    return ABSENT if value is None or not value.n else spread_text(value, 1, 100.0) + mark


def count_text(value: float | int | None) -> str:
    """Whole number with thin grouping, or `-`."""
    return ABSENT if value is None else f"{value:,.0f}"


def shift_text(value: float | None) -> str:
    """Largest absolute change, or `-`."""
    return ABSENT if value is None else f"{value:.4f}"


def seeds_text(row: Row) -> str:
    """`2`, or `1 of 2` when runs did not finish."""
    return f"{row.done}" if row.done == row.planned else f"{row.done} of {row.planned}"


def _quality_cells(row: Row, lengths: Sequence[int], scores: Sequence[str], mark: str) -> list[str]:
    trained = row.trained
    at_length = {one.length: one for one in row.lengths}
    cells = [ABSENT if row.rank is None else str(row.rank), row.encoding, seeds_text(row), length_text(trained)]
    cells.append("baseline" if row.is_baseline else difference_text(trained.difference if trained else None))
    accuracy = trained.accuracy if trained else None
    cells += [score_text(one, mark) for one in (accuracy, *(row.scores.get(name) for name in scores))]
    return [*cells, *(length_text(at_length.get(length)) for length in lengths)]


def _cost_lines(rows: Sequence[Row]) -> list[str]:
    """Speed and memory, where they were measured (measure.rounds = 0: nowhere), and parameters."""
    speeds = {
        "train tok/s": "train_tokens_per_second",
        "infer tok/s": "inference_tokens_per_second",
        "train MB": "train_peak_mb",
        "infer MB": "inference_peak_mb",
    }
    if not any(row.speed for row in rows):
        speeds = {}
    cells = [
        [
            row.encoding,
            *(count_text(getattr(row.speed, name, None)) for name in speeds.values()),
            count_text(row.extra_parameters),
            count_text(row.total_parameters),
        ]
        for row in rows
    ]
    title = "Cost (measured alone)" if speeds else "Parameters"
    return [title, *align(["encoding", *speeds, "extra params", "params"], cells, 1)]


def align(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Columns padded to their widest cell; the first `left` are flush left, numbers flush right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = []
    for line in (header, ["-" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _csv_cells(row: Row, lengths: Sequence[int], shifts: Sequence[int]) -> list[Any]:
    at_length = {one.length: one for one in row.lengths}
    at_shift = {one.shift: one for one in row.shifts}
    cells: list[Any] = [row.rank, row.encoding, _options(row.options), row.is_baseline, row.planned, row.done]
    for length in lengths:
        one = at_length.get(length)
        cells += [one.loss.mean, one.loss.std, one.loss.n, one.accuracy.mean, one.accuracy.std] if one else [None] * 5
        gap = one.difference if one else None
        cells += [gap.mean, gap.std, gap.n, gap.low, gap.high, gap.verdict] if gap else [None] * 6
        cells.append(one.reason if one else None)
    for shift in shifts:
        change = at_shift[shift].change if shift in at_shift else None
        cells += [change.mean, change.std, change.n] if change else [None] * 3
    speed = row.speed
    cells.append(row.max_shift_change)
    cells += [speed.train_tokens_per_second, speed.inference_tokens_per_second] if speed else [None] * 2
    cells += [speed.train_peak_mb, speed.inference_peak_mb, speed.reason] if speed else [None] * 3
    return [*cells, row.extra_parameters, row.total_parameters, "; ".join(row.failed) or None]


def _pace_cells(found: Pace | None) -> list[Any]:
    both = (found.steps, found.tokens) if found else ()
    return [cell for one in both for cell in (one.mean, one.std, one.n)] or [None] * 6


def _options(options: dict[str, Any]) -> str:
    return json.dumps(options, ensure_ascii=False, default=str)


def as_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with full floats; None is an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(["" if cell is None else repr(cell) if isinstance(cell, float) else cell for cell in row])
    return buffer.getvalue()
