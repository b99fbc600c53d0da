"""A result table as one HTML page that works from a file: style sheet, script and plots inside, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from locant.compare.conclusions import findings
from locant.compare.objective import words_of
from locant.compare.pace import pace, pace_text
from locant.compare.published import CAUTION, published
from locant.compare.results import ResultTable
from locant.compare.scored import score_names, spoken
from locant.compare.summary import CLEAR, LEANING, LEVEL, Difference, LengthSummary, Row, summarise
from locant.compare.tables import count_text, length_text, score_text, seeds_text, shift_text, spread_text
from locant.plots import ONE_COLUMN, TWO_COLUMN, figures
from locant.plots.style import DASHES, marks
from locant.report.figures import color_reference, color_rules, inline_svg
from locant.training.folder import write_atomically

HERE = Path(__file__).parent
HEADINGS = {
    "answer": "Which one",
    "pace": "How soon",
    "length": "Beyond the trained length",
    "shift": "When all position ids are shifted",
    "cost": "At what cost",
    "gap": "Not measured",
}


@dataclass(frozen=True)
class Cell:
    """One number of a table: what is shown, a second line below it, what it sorts by, and its tone."""

    text: str
    below: str = ""
    value: float | int | None = None
    tone: str = ""  # "better" | "worse" | "open" | "absent"
    share: float | None = None  # of the widest bar, 0 to 1


@dataclass(frozen=True)
class Line:
    """One encoding in a table."""

    encoding: str
    options: str
    series: int  # its number in the figures
    color: str
    dashed: bool
    is_baseline: bool
    cells: tuple[Cell, ...]


def write_report(table: ResultTable, path: str | Path) -> Path:
    """Writes the page, whole or not at all, and returns its path. Raises: OSError when the folder cannot be written."""
    return write_atomically(path, render(table))


def render(table: ResultTable) -> str:
    """The page as HTML text."""
    rows = summarise(table)
    found = findings(table)
    return (
        templates()
        .get_template("page.html.jinja")
        .render(
            style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
            light=Markup(color_rules(dark=False)),
            dark=Markup(color_rules(dark=True)),
            name=str(table.recipe.get("name") or table.recipe.get("title") or ""),
            date=str(table.environment.get("date") or ""),
            overview=_overview(table),
            lead=found[0].text,
            groups=[
                (heading, [one.text for one in found[1:] if one.subject == subject])
                for subject, heading in HEADINGS.items()
            ],
            limits=[one.text for one in found if one.subject == "limit"],
            baseline=table.baseline,
            quality_head=_quality_head(table, rows),
            quality=[_line(table, row, _quality_cells(table, rows, row)) for row in rows],
            timed=any(row.speed for row in rows),
            cost=[_line(table, row, _speed_cells(rows, row) + _parameter_cells(row)) for row in rows],
            figures=_figures(table, rows),
            measured=f"{_capital(words_of(table).measure)} in {words_of(table).unit}",
            published=published(table),
            caution=CAUTION,
            setting=flat({key: value for key, value in table.recipe.items() if key != "published"}),
            environment=flat(table.environment),
            seeds=", ".join(map(str, table.seeds)) or "none",
            runs=table.runs,
            trained_length=table.trained_length,
            run_loss={(run.encoding, run.seed): _run_loss(table, run.lengths) for run in table.runs},
        )
    )


def templates() -> Environment:
    """The templates beside this code; what is put into them is escaped."""
    return Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _overview(table: ResultTable) -> str:
    encodings, seeds, done = len(table.encodings), len(table.seeds), sum(run.status == "done" for run in table.runs)
    return (
        f"{encodings} encoding{'s' * (encodings != 1)} × {seeds} seed{'s' * (seeds != 1)}, {done} of {len(table.runs)} "
        f"runs finished, trained at {table.trained_length} {words_of(table).trained}, baseline {table.baseline}"
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _line(table: ResultTable, row: Row, cells: Sequence[Cell]) -> Line:
    mark = marks(table.encodings)[row.encoding]
    options = ", ".join(f"{key}={value}" for key, value in row.options.items())
    return Line(
        encoding=row.encoding,
        options=options,
        series=table.encodings.index(row.encoding),
        color=color_reference(mark.color),
        dashed=mark.dash != DASHES[0],
        is_baseline=row.is_baseline,
        cells=tuple(cells),
    )


def _other_lengths(table: ResultTable, rows: Sequence[Row]) -> list[int]:
    return sorted({one.length for row in rows for one in row.lengths} - {table.trained_length})


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _quality_head(table: ResultTable, rows: Sequence[Row]) -> list[tuple[str, str]]:
    words = words_of(table)
    head = [(f"{_capital(words.loss)} at {table.trained_length}", words.per)]
    head += [
        (f"Against {table.baseline}", "paired by seed"),
        (_capital(words.scored), f"at {table.trained_length}"),
        *((_capital(spoken(name)), "") for name in score_names(rows)),
    ]
    head += [
        (f"{_capital(words.loss)} at {length}", f"{length / table.trained_length:g}x")
        for length in _other_lengths(table, rows)
    ]
    if pace(table, table.baseline):
        head.append(("Steps", f"to the end of {table.baseline}"))
    if any(row.shifts for row in rows):
        head.append(("Max change", "under shifted ids"))
    return [*head, ("Rank", "by loss"), ("Seeds", "finished")]


def _quality_cells(table: ResultTable, rows: Sequence[Row], row: Row) -> list[Cell]:
    trained = row.trained
    at_length = {one.length: one for one in row.lengths}
    mark = words_of(table).mark
    scores = (trained.accuracy if trained else None, *(row.scores.get(name) for name in score_names(rows)))
    shift = Cell(shift_text(row.max_shift_change).replace("-", "–"), value=row.max_shift_change)
    return [
        _loss_cell(trained),
        Cell("baseline", value=0.0, tone="open") if row.is_baseline else _difference_cell(trained),
        *(Cell(score_text(one, mark), value=one.mean) if one and one.n else Cell("–", tone="absent") for one in scores),
        *(_loss_cell(at_length.get(length), table.baseline) for length in _other_lengths(table, rows)),
        *_pace_cells(table, row),
        *([shift] if any(other.shifts for other in rows) else []),
        Cell("–" if row.rank is None else str(row.rank), value=row.rank),
        Cell(seeds_text(row), value=row.done, tone="worse" if row.done < row.planned else ""),
    ]


def _loss_cell(summary: LengthSummary | None, baseline: str = "") -> Cell:
    if summary is None or not summary.loss.n:
        return Cell(
            length_text(summary).replace("-", "–"), below=(summary.reason or "") if summary else "", tone="absent"
        )
    below = ""
    if baseline and summary.difference and summary.difference.mean is not None:
        below = f"{_signed(summary.difference.mean)} against {baseline}"
    return Cell(spread_text(summary.loss), below=below, value=summary.loss.mean)


def _pace_cells(table: ResultTable, row: Row) -> list[Cell]:
    if not pace(table, table.baseline):
        return []
    found = pace(table, row.encoding)
    tokens = f"{found.tokens.mean:,.0f} tokens" if found and found.tokens.mean is not None else ""
    value = found.steps.mean if found else None
    return [Cell(pace_text(found).replace("-", "–"), below=tokens, value=value, tone="" if found else "absent")]


def _difference_cell(summary: LengthSummary | None) -> Cell:
    gap = summary.difference if summary else None
    if gap is None or gap.mean is None:
        return Cell("–", tone="absent")
    spread = "" if gap.std is None else f" ± {gap.std:.3f}"
    side = "better" if gap.mean < 0 else "worse"
    tone = side if gap.verdict == CLEAR else "open"
    return Cell(f"{_signed(gap.mean)}{spread}", below=_verdict(gap, side), value=gap.mean, tone=tone)


def _verdict(gap: Difference, side: str) -> str:
    words = {CLEAR: f"clearly {side}", LEANING: f"leaning {side}", LEVEL: "not told apart"}.get(
        gap.verdict, "too few seeds"
    )
    if gap.low is None or gap.high is None:
        return words
    return f"{words}\n95%: {_signed(gap.low)} to {_signed(gap.high)}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def _speed_cells(rows: Sequence[Row], row: Row) -> list[Cell]:
    """Speed and memory; none where none of the encodings was measured."""
    if not any(other.speed for other in rows):
        return []
    base = next((other for other in rows if other.is_baseline), None)
    cells = []
    for name, bar in (
        ("train_tokens_per_second", True),
        ("inference_tokens_per_second", True),
        ("train_peak_mb", False),
        ("inference_peak_mb", False),
    ):
        value = getattr(row.speed, name, None)
        most = max((getattr(other.speed, name, None) or 0.0 for other in rows), default=0.0)
        own = getattr(base.speed, name, None) if base and base is not row else None
        rounds = getattr(row.speed, name.replace("tokens_per_second", "rounds"), ()) if bar else ()
        below = [f"{value / own:.0%} of {base.encoding}"] if value and own and base else []
        below += [f"{min(rounds):,.0f} to {max(rounds):,.0f}"] if len(rounds) > 1 else []
        cells.append(
            Cell(
                count_text(value).replace("-", "–"),
                below="\n".join(below),
                value=value,
                tone="" if value is not None else "absent",
                share=value / most if bar and value and most else None,
            )
        )
    return cells


def _parameter_cells(row: Row) -> list[Cell]:
    values = (row.extra_parameters, row.total_parameters)
    return [Cell(count_text(value).replace("-", "–"), value=value) for value in values]


def _run_loss(table: ResultTable, lengths: Sequence[Any]) -> str:
    loss = next((one.loss for one in lengths if one.length == table.trained_length), None)
    return "–" if loss is None else f"{loss:.4f}"


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, text) lines."""
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in flat(item, f"{name}.{key}" if name else str(key))]
    if isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        return [line for index, item in enumerate(value) for line in flat(item, f"{name}[{index}]")]
    if isinstance(value, (list, tuple)):
        return [(name, ", ".join(map(str, value)) or "none")]
    if value is None or value == {}:
        return [(name, "none")] if name else []
    return [(name, json.dumps(value) if isinstance(value, bool) else str(value))]


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """One figure of the page, drawn for wide and for narrow screens."""

    name: str
    heading: str
    caption: str
    wide: str
    narrow: str


def _figures(table: ResultTable, rows: Sequence[Row]) -> list[Plot]:
    ranked = [row for row in rows if row.loss is not None]
    extremes = ""
    if ranked:
        first, last = ranked[0], ranked[-1]
        extremes = (
            f" Lowest at the end: {first.encoding} at {first.loss:.3f}; highest: {last.encoding} at {last.loss:.3f}."
        )
    count, words = f"{len(table.encodings)} encodings", words_of(table)
    drawings = {
        "loss_by_step": (
            "step",
            "Loss by step",
            f"Line plot: loss during training for {count}.{extremes}",
            "Loss on the way, mean over seeds with a band of one standard deviation; a lower line learned more "
            "from the same text, and the first steep part is cut off above.",
        ),
        "loss_by_length": (
            "length",
            "Loss by length",
            f"Line plot: {words.measure} by window length for {count}, trained at {table.trained_length} "
            f"{words.trained}.",
            "Loss on windows as long as in training (dotted line) and longer; a flat line keeps its quality on text "
            "longer than it ever saw, a rising one does not.",
        ),
        "loss_by_shift": (
            "shift",
            "Loss by shift",
            f"Line plot: change of the validation loss when all position ids are shifted, for {count}.",
            "Change of the loss when the same number is added to all position ids; an encoding at zero does not care "
            "where a text starts, one above zero does.",
        ),
        "speed_against_quality": (
            "speed",
            "Speed against quality",
            f"Scatter plot: {words.measure} against training tokens per second for {count}.",
            "Each encoding's loss against its training speed; lower and farther right is better, and the dotted steps "
            "join those that no other beats in both.",
        ),
    }
    return [
        Plot(
            name,
            heading,
            caption,
            wide=Markup(inline_svg(draw(table, TWO_COLUMN), f"{name}-wide", description)),
            narrow=Markup(inline_svg(draw(table, ONE_COLUMN), f"{name}-narrow", description)),
        )
        for key, draw in figures(table).items()
        for name, heading, description, caption in [drawings[key]]
    ]
