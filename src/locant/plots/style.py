"""One look for all figures: sizes, inks, a color-blind safe mark for each encoding, and saving."""

from __future__ import annotations

import io
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ONE_COLUMN, TWO_COLUMN = 3.35, 6.9  # figure widths in inches

INK, MUTED, GRID, PAPER = "#1f2328", "#57606a", "#dde2e8", "#ffffff"
NONE_COLOR = "#6b7280"
# Hues found by search: contrast of 4.5 with the ground, far apart also for eyes without red or green cones (tested).
COLORS = ("#3072bf", "#b26112", "#01744f", "#83235e", "#694707", "#5041ee", "#3f7c99", "#67051e")
# The same inks and hues for a dark ground; the report swaps them by style sheet.
DARK = {
    INK: "#e6edf3",
    MUTED: "#a3adb8",
    GRID: "#343c46",
    PAPER: "#161b22",
    NONE_COLOR: "#b1bac4",
    "#3072bf": "#4bb3ff",
    "#b26112": "#ef5604",
    "#01744f": "#20fad2",
    "#83235e": "#dc57a5",
    "#694707": "#fad235",
    "#5041ee": "#866aff",
    "#3f7c99": "#73e0f9",
    "#67051e": "#fc3c6d",
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (5, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX<>p"

# A fixed slot for each known encoding: hue = slot % 8, dash = slot // 8, so that relatives share a hue.
SLOTS = {
    name: slot
    for slot, name in enumerate(
        [
            *("tisa", "huang_m4", "absolute", "tupe_r", "shaw", "t5", "rope", "alibi"),
            *("bert_ad", "huang_m3", "sinusoidal", "tupe_a", "bert_r", "deberta", "xlnet", "huang_m1"),
            *("kerple", "huang_m2", "shape", "cape", "cope", "fire", "dape", "sandwich"),
        ]
    )
}
RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": PAPER,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "locant",
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Mark:
    """How one encoding is drawn, everywhere."""

    color: str
    dash: Any
    marker: str


def marks(labels: Iterable[str]) -> dict[str, Mark]:
    """A mark for each label. Known encodings always get theirs; other labels take a free one near their relatives."""
    labels = list(dict.fromkeys(labels))
    slots = {label: SLOTS[label] for label in labels if label in SLOTS}
    count = len(COLORS) * len(DASHES)
    for label in sorted(set(labels) - set(slots) - {"none"}):
        base = re.split(r"[^A-Za-z0-9_]", label, maxsplit=1)[0]
        start, step = (SLOTS[base], len(COLORS)) if base in SLOTS else (zlib.crc32(label.encode()) % count, 1)
        probes = [(start + step * k) % count for k in range(1, count + 1)] + [(start + k) % count for k in range(count)]
        slots[label] = next((slot for slot in probes if slot not in slots.values()), start)
    return {label: _mark(slots[label]) if label in slots else Mark(NONE_COLOR, DASHES[1], "o") for label in labels}


def _mark(slot: int) -> Mark:
    hue, dash = slot % len(COLORS), slot // len(COLORS)
    return Mark(COLORS[hue], DASHES[dash % len(DASHES)], MARKERS[(hue + 3 * dash) % len(MARKERS)])


@contextmanager
def styled() -> Iterator[None]:
    """Draws in the house style and leaves matplotlib's settings as they were."""
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a label in another script
        yield


def new_axes(width: float, height: float, *, right: float, bottom: float) -> tuple[Figure, Axes]:
    """A figure with one axes; `right` and `bottom` are the inches kept free for labels and notes."""
    figure = Figure(figsize=(width, height))
    left, top = 0.58, 0.12
    axes = figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )
    return figure, axes


def to_svg(figure: Figure) -> str:
    """The figure as SVG text, its words kept as text; the same figure gives the same SVG."""
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save(figure: Figure, path: str | Path, *, dpi: int = 200) -> Path:
    """Writes PNG, SVG or PDF by the suffix of `path`, whole or not at all. Raises: ValueError for another suffix."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"save: {path.name!r} ends in {path.suffix!r}, needed .png, .svg or .pdf; rename it")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=f".{kind}")
    os.close(handle)
    try:
        with styled():
            figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
