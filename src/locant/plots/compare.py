"""The four figures of a comparison: loss by step, by length, by shift, and speed against quality.

Each takes a result table and a width in inches and returns a matplotlib Figure. Bars and bands are one standard
deviation over seeds. What has no number is named in a note below the axes, never drawn as a number. Every artist of an
encoding has the SVG id `series-<index of the encoding>-<count>`.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from locant.compare.conclusions import SAME_LOSS
from locant.compare.objective import words_of
from locant.compare.results import ResultTable, RunResult
from locant.compare.summary import Row, summarise
from locant.plots.labels import End, label_ends, place_around, settle, shorten, text_width
from locant.plots.style import MUTED, NONE_COLOR, TWO_COLUMN, Mark, marks, new_axes, styled


@dataclass(frozen=True)
class _Line:
    """One encoding's means, and deviations where there are several seeds."""

    label: str
    x: list[float]
    y: list[float]
    deviation: list[float]


def figures(table: ResultTable) -> dict[str, Callable[..., Figure]]:
    """By name, those of the four that have something to show: several lengths, shifted ids, measured speeds."""
    lengths = {score.length for run in table.runs for score in run.lengths}
    shown = {
        loss_by_step: True,
        loss_by_length: len(lengths) > 1,
        loss_by_shift: any(score.shift for run in table.runs for score in run.shifts),
        speed_against_quality: bool(table.speeds),
    }
    return {draw.__name__: draw for draw, something in shown.items() if something}


def loss_by_step(table: ResultTable, width: float = TWO_COLUMN) -> Figure:
    """Validation loss during training, or training loss where it was not taken; a failed run ends in a cross."""
    field = "validation_loss" if _has_validation(table) else "train_loss"
    lines = [line for label in table.encodings if (line := _curve(table, label, field))]
    broken = [run for run in table.runs if run.status == "failed" and _points(run, field)]
    drawn = {line.label for line in lines} | {run.encoding for run in broken}
    note = _note("No finished curve", [label for label in table.encodings if label not in drawn])
    with styled():
        sheet = _Sheet(table, width, [line.label for line in lines], note)
        axes, marked = sheet.axes, sheet.marks
        for line in lines:
            mark = marked[line.label]
            sheet.add(line.label, axes.plot(line.x, line.y, color=mark.color, linestyle=mark.dash))
            if any(line.deviation):
                low = [y - d for y, d in zip(line.y, line.deviation, strict=True)]
                high = [y + d for y, d in zip(line.y, line.deviation, strict=True)]
                sheet.add(line.label, [axes.fill_between(line.x, low, high, color=mark.color, alpha=0.18, linewidth=0)])
        for run in broken:
            x, y = zip(*_points(run, field), strict=True)
            mark = marked[run.encoding]
            sheet.add(run.encoding, axes.plot(x, y, color=mark.color, linewidth=0.8, alpha=0.7))
            sheet.add(run.encoding, axes.plot(x[-1:], y[-1:], color=mark.color, marker="x", markersize=6))
        axes.margins(x=0.015)
        _cut_early_losses(axes, lines)
        training = f"Training loss ({words_of(table).training})"
        name = _measure(table) if field == "validation_loss" else training
        return sheet.finish("Training step", name, [_end(sheet, line) for line in lines])


def loss_by_length(table: ResultTable, width: float = TWO_COLUMN) -> Figure:
    """Validation loss at the trained length and beyond it."""
    rows = summarise(table)
    lines, absent = [], []
    for row in rows:
        scored = [one for one in row.lengths if one.loss.mean is not None]
        values = [
            (float(one.length), one.loss.mean, one.loss.std or 0.0) for one in scored if one.loss.mean is not None
        ]
        lines += [_Line(row.encoding, *map(list, zip(*values, strict=True)))] if values else []
        if missing := [str(one.length) for one in row.lengths if one.loss.mean is None]:
            absent.append(f"{row.encoding} at {', '.join(missing)}")
        elif not values:
            absent.append(row.encoding)
    lengths = sorted({one.length for row in rows for one in row.lengths})
    with styled():
        sheet = _Sheet(table, width, [line.label for line in lines], _note("Cannot be evaluated", absent), tick_lines=2)
        _draw_lines(sheet, lines)
        axes = sheet.axes
        if lengths and lengths[0] > 0:
            axes.set_xscale("log", base=2)
            alone = [line for line in lines if line.x == [float(lengths[0])] and len(lengths) > 1]
            axes.set_xlim(
                lengths[0] / _room_for_names(sheet, alone, lengths), max(lengths[-1], lengths[0] * 1.2) * 1.08
            )
        axes.set_xticks(lengths, [_length_name(length, table) for length in lengths])
        axes.minorticks_off()
        if table.trained_length in lengths:
            axes.axvline(table.trained_length, color=MUTED, linewidth=0.7, linestyle=(0, (2, 2)), zorder=1)
        axes.margins(y=0.06)
        return sheet.finish(
            f"Window length ({words_of(table).trained})", _measure(table), [_end(sheet, x) for x in lines]
        )


def loss_by_shift(table: ResultTable, width: float = TWO_COLUMN) -> Figure:
    """Change of the loss when all position ids are shifted; encodings that do not change share one gray line."""
    rows = summarise(table)
    shifts = sorted({one.shift for row in rows for one in row.shifts})
    lines, same, absent = [], [], []
    for row in rows:
        values = [
            (float(shifts.index(one.shift)), one.change.mean, one.change.std or 0.0)
            for one in row.shifts
            if one.change.mean is not None
        ]
        if row.max_shift_change is not None and row.max_shift_change <= SAME_LOSS:
            same.append(row.encoding)
        elif len(values) > 1:  # the change at shift 0 alone says nothing
            lines.append(_Line(row.encoding, *map(list, zip(*values, strict=True))))
        if missing := [str(one.shift) for one in row.shifts if one.change.mean is None]:
            absent.append(f"{row.encoding} at {', '.join(missing)}")
        elif not values:
            absent.append(row.encoding)
    note = "\n".join(filter(None, (_note("No change", same), _note("Cannot be evaluated", absent))))
    with styled():
        flat = f"no change ({len(same)})"
        sheet = _Sheet(table, width, [line.label for line in lines] + [flat] * bool(same), note)
        axes = sheet.axes
        _draw_lines(sheet, lines)
        ends = [_end(sheet, line) for line in lines]
        if same:
            axes.plot([0, len(shifts) - 1], [0, 0], color=NONE_COLOR, linewidth=2.2, solid_capstyle="butt", zorder=1.5)
            ends.append(End(float(len(shifts) - 1), 0.0, flat, NONE_COLOR, -1))
        axes.set_xticks(range(len(shifts)), [f"{shift:+d}" if shift else "0" for shift in shifts])
        axes.set_xlim(-0.12, max(len(shifts) - 0.88, 0.5))
        low, high = axes.get_ylim() if lines else (0.0, 0.0)
        axes.set_ylim(min(low, -0.01), max(high, 0.05))
        return sheet.finish("Shift of all position ids", "Change in validation loss (nats)", ends)


def speed_against_quality(table: ResultTable, width: float = TWO_COLUMN) -> Figure:
    """Validation loss against training speed; the stepped line joins encodings that none beats in both."""
    rows = summarise(table)
    shown, absent = [], []
    for row in rows:
        speed = row.speed.train_tokens_per_second if row.speed else None
        if speed is None or row.loss is None:
            absent.append(row.encoding)
        else:
            shown.append((speed, row.loss, row))
    with styled():
        sheet = _Sheet(table, width, [], _note("No speed or no loss", absent))
        axes, marked = sheet.axes, sheet.marks
        for speed, loss, row in shown:
            mark, trained = marked[row.encoding], row.trained
            error = trained.loss.std if trained else None
            bars = axes.errorbar(
                [speed],
                [loss],
                yerr=None if error is None else [error],
                color=mark.color,
                marker=mark.marker,
                capsize=2,
            )
            sheet.add(row.encoding, [child for child in bars.get_children() if isinstance(child, Artist)])
        front = _front([(speed, loss) for speed, loss, _ in shown])
        if len(front) > 1:
            x, y = zip(*front, strict=True)
            axes.plot(x, y, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), drawstyle="steps-pre", zorder=1)
        axes.margins(0.14, 0.12)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_major_locator(MaxNLocator(6 if width > 5 else 3))
        _label_points(sheet, shown)
        return sheet.finish("Training speed (tokens per second)", _measure(table), [])


def _measure(table: ResultTable) -> str:
    """The name of an axis of losses."""
    words = words_of(table)
    return f"{words.measure[:1].upper()}{words.measure[1:]} ({words.per})"


# --- shared drawing --------------------------------------------------------------------------------------------------


class _Sheet:
    """A figure in the making: its axes, the marks of the encodings, and which artist belongs to which encoding."""

    def __init__(self, table: ResultTable, width: float, labels: Sequence[str], note: str, tick_lines: int = 1) -> None:
        narrow = width < 5
        self.table = table
        self.size = 7.0 if narrow else 8.0  # of labels, in points
        self.limit = 15 if narrow else 26  # letters of a label
        self.note = "\n".join(
            line for part in note.split("\n") for line in textwrap.wrap(part, int(width * 72 / (LETTER_NOTE * 7)))
        )
        right = 0.2 + text_width([shorten(label, self.limit) for label in labels], self.size) if labels else 0.3
        base = 0.46 + 0.14 * (tick_lines - 1)
        bottom = base + (0.08 + 0.135 * (self.note.count("\n") + 1) if self.note else 0)
        height = max(3.0 if narrow else 3.5, 0.6 + len(labels) * 1.25 * self.size / 72) + bottom - base
        self.figure, self.axes = new_axes(width, height, right=right, bottom=bottom)
        self.marks: dict[str, Mark] = marks(table.encodings)
        self.drawn: list[tuple[int, Artist]] = []

    def add(self, label: str, artists: Iterable[Artist]) -> None:
        """Remembers that these artists belong to the encoding `label`."""
        index = self.table.encodings.index(label)
        self.drawn += [(index, artist) for artist in artists]

    def finish(self, xlabel: str, ylabel: str, ends: Sequence[End]) -> Figure:
        """Names axes and series, writes the note and tags what belongs to an encoding."""
        axes = self.axes
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.tick_params(length=3)
        if not axes.has_data():
            axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center", color=MUTED)
            axes.set_xticks([])
            axes.set_yticks([])
        self._make_room_at_left()
        self.drawn += label_ends(axes, ends, self.size)
        if self.note:
            self.figure.text(0.012, 0.012, self.note, fontsize=7, color=MUTED, va="bottom", parse_math=False)
        for count, (index, artist) in enumerate(self.drawn):
            if index >= 0:
                artist.set_gid(f"series-{index}-{count}")
        return self.figure

    def _make_room_at_left(self) -> None:
        """Moves the axes right where wide tick labels push the name of the axis out of the figure."""
        self.figure.draw_without_rendering()
        missing = 0.04 * self.figure.dpi - self.axes.yaxis.label.get_window_extent().x0
        if missing > 0:
            place, shift = self.axes.get_position(), missing / self.figure.bbox.width
            self.axes.set_position((place.x0 + shift, place.y0, place.width - shift, place.height))


LETTER_NOTE = 0.56


def _note(head: str, items: Sequence[str]) -> str:
    return f"{head}: {', '.join(items)}." if items else ""


def _end(sheet: _Sheet, line: _Line) -> End:
    index = sheet.table.encodings.index(line.label)
    return End(
        line.x[-1], line.y[-1], shorten(line.label, sheet.limit), sheet.marks[line.label].color, index, len(line.x) == 1
    )


def _draw_lines(sheet: _Sheet, lines: Sequence[_Line]) -> None:
    for line in lines:
        mark = sheet.marks[line.label]
        error = line.deviation if any(line.deviation) else None
        bars = sheet.axes.errorbar(
            line.x,
            line.y,
            yerr=error,
            color=mark.color,
            linestyle=mark.dash,
            marker=mark.marker,
            capsize=2,
            elinewidth=0.9,
        )
        sheet.add(line.label, [child for child in bars.get_children() if isinstance(child, Artist)])


def _room_for_names(sheet: _Sheet, alone: Sequence[_Line], lengths: Sequence[int]) -> float:
    """Factor by which the length axis begins early, so that names fit left of the series of one point."""
    if not alone:
        return 1.08
    inches = sheet.axes.get_position().width * sheet.figure.get_size_inches()[0]
    names = [shorten(line.label, sheet.limit) for line in alone]
    share = min(0.6, text_width(names, sheet.size) / inches + 0.05)
    return (1.08 * lengths[-1] / lengths[0]) ** (share / (1 - share))


def _length_name(length: int, table: ResultTable) -> str:
    factor = length / table.trained_length
    return f"{length}\ntrained" if factor == 1 else f"{length}\n{factor:g}x"


# --- loss by step ----------------------------------------------------------------------------------------------------


def _has_validation(table: ResultTable) -> bool:
    """Whether a run was validated while it trained; a loss at its end alone draws no curve."""
    return any(sum(point.validation_loss is not None for point in run.curve) > 1 for run in table.runs)


def _points(run: RunResult, field: str) -> list[tuple[int, float]]:
    return [(point.step, getattr(point, field)) for point in run.curve if getattr(point, field) is not None]


def _curve(table: ResultTable, label: str, field: str) -> _Line | None:
    """Mean over the finished runs at the steps which all of them have."""
    curves = [dict(_points(run, field)) for run in table.of(label) if run.status == "done"]
    curves = [curve for curve in curves if curve]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if not steps:
        return None
    values = [[curve[step] for curve in curves] for step in steps]
    deviation = [statistics.stdev(value) if len(value) > 1 else 0.0 for value in values]
    return _Line(label, [float(step) for step in steps], [statistics.fmean(value) for value in values], deviation)


def _cut_early_losses(axes: Axes, lines: Sequence[_Line]) -> None:
    """Ends the loss axis above what stands after a sixth of the training, so that the end is not flattened."""
    late = [y for line in lines for x, y in zip(line.x, line.y, strict=True) if x >= line.x[-1] / 6]
    if late and max(late) > min(late):
        pad = 0.05 * (max(late) - min(late))
        axes.set_ylim(min(late) - pad, max(late) + pad)


# --- speed against quality -------------------------------------------------------------------------------------------


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points which no other equals or beats in both speed and loss, slowest first."""
    front: list[tuple[float, float]] = []
    for speed, loss in sorted(points, key=lambda point: (-point[0], point[1])):
        if not front or loss < front[-1][1]:
            front.append((speed, loss))
    return front[::-1]


def _label_points(sheet: _Sheet, shown: Sequence[tuple[float, float, Row]]) -> None:
    """Writes each name near its point, off the other names and points."""
    settle(sheet.axes)
    axes, box = sheet.axes, sheet.axes.get_position()
    wide, high = (float(inches) * 72 for inches in sheet.figure.get_size_inches())
    ground = (box.width * wide, box.height * high)
    to_axes = axes.transAxes.inverted()
    fractions = [to_axes.transform(axes.transData.transform((speed, loss))) for speed, loss, _ in shown]
    points = [(float(x) * ground[0], float(y) * ground[1]) for x, y in fractions]
    texts = [shorten(row.encoding, sheet.limit) for *_, row in shown]
    widths = [text_width([text], sheet.size) * 72 for text in texts]
    for (x, y), corner, text, wide_text, (speed, loss, row) in zip(
        points, place_around(points, widths, sheet.size, ground), texts, widths, shown, strict=True
    ):
        middle = (corner[0] + wide_text / 2, corner[1] + sheet.size / 2)
        far = max(abs(middle[0] - x) - wide_text / 2, abs(middle[1] - y) - sheet.size / 2) > 9
        note = axes.annotate(
            text,
            xy=(speed, loss),
            xytext=(middle[0] / ground[0], middle[1] / ground[1]),
            textcoords="axes fraction",
            fontsize=sheet.size,
            color=sheet.marks[row.encoding].color,
            ha="center",
            va="center",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3}
            if far
            else None,
        )
        sheet.add(row.encoding, [note] + ([note.arrow_patch] if note.arrow_patch is not None else []))
