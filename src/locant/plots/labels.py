"""Labels beside what they name, moved apart where they would overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from locant.plots.style import PAPER

LETTER = 0.6  # mean width of a letter, in font sizes


@dataclass(frozen=True)
class End:
    """The last point of a drawn series, in data units, and the name to put beside it."""

    x: float
    y: float
    text: str
    color: str
    index: int  # of the encoding, for the tag in the SVG
    alone: bool = False  # the series is this one point


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, the last an ellipsis where some were cut."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def text_width(texts: Sequence[str], size: float) -> float:
    """Width of the widest text in inches, estimated from its letters."""
    return max((len(text) for text in texts), default=0) * LETTER * size / 72


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to `wanted`, in the same order, at least `gap` apart, inside [low, high].

    When they do not fit the gap shrinks.
    """
    if len(wanted) < 2:
        return [min(max(value, low), high) for value in wanted]
    gap = min(gap, (high - low) / (len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, list[int]]] = []  # (place of the first, members); neighbors that collide are merged
    for i in order:
        members = [i]
        while True:
            mean = sum(wanted[m] - k * gap for k, m in enumerate(members)) / len(members)
            first = min(max(mean, low), high - (len(members) - 1) * gap)
            if not blocks or blocks[-1][0] + len(blocks[-1][1]) * gap <= first + 1e-12:
                break
            members = blocks.pop()[1] + members
        blocks.append((first, members))
    places = [0.0] * len(wanted)
    for first, members in blocks:
        for k, member in enumerate(members):
            places[member] = first + k * gap
    return places


def settle(axes: Axes) -> None:
    """Fixes the limits, which matplotlib otherwise leaves open until it draws, so that places can be computed."""
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())


def label_ends(axes: Axes, ends: Sequence[End], size: float) -> list[tuple[int, Artist]]:
    """Names series at their ends: right of the axes, or at the last point of those that end before the others do.

    A series of one point is named on its left, where no other line runs when it is the first.
    """
    drawn: list[tuple[int, Artist]] = []
    settle(axes)
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    last = max((end.x for end in ends), default=0.0)
    for x, alone in sorted({(end.x, end.alone and end.x < last) for end in ends}):
        column = [end for end in ends if (end.x, end.alone and end.x < last) == (x, alone)]
        spots = [axes.transAxes.inverted().transform(axes.transData.transform((end.x, end.y))) for end in column]
        places = spread_apart([float(spot[1]) for spot in spots], 1.22 * size / height, 0.0, 1.0)
        side = "right" if alone else "left"
        beside = 1.025 if x == last else float(spots[0][0]) + (0.025 if side == "left" else -0.025)
        for end, place in zip(column, places, strict=True):
            drawn += _name(axes, end, (beside, place), side, size, ground=x < last and not alone)
    return drawn


def _name(
    axes: Axes, end: End, place: tuple[float, float], side: Literal["left", "right"], size: float, ground: bool
) -> list[tuple[int, Artist]]:
    """One name at `place` (axes fractions) with a thin leader from the point; `ground` clears what lies below it."""
    note = axes.annotate(
        end.text,
        xy=(end.x, end.y),
        xytext=place,
        textcoords="axes fraction",
        fontsize=size,
        color=end.color,
        va="center",
        ha=side,
        parse_math=False,
        annotation_clip=False,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.4, "alpha": 0.75} if ground else None,
        arrowprops={
            "arrowstyle": "-",
            "color": end.color,
            "linewidth": 0.6,
            "shrinkA": 1,
            "shrinkB": 3,
            "relpos": (0 if side == "left" else 1, 0.5),
        },
    )
    return [(end.index, artist) for artist in (note, note.arrow_patch) if artist is not None]


def place_around(
    points: Sequence[tuple[float, float]], widths: Sequence[float], height: float, bounds: tuple[float, float]
) -> list[tuple[float, float]]:
    """Lower left corners of labels near their points, in points of print, found by a greedy search for little overlap.

    `bounds` is the width and height of the ground they should stay on.
    """
    dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    placed: list[tuple[float, float, float, float]] = []
    corners: dict[int, tuple[float, float]] = {}
    for i in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        best = None
        for radius in (6.0, 11.0, 18.0, 27.0, 38.0, 52.0):
            for turn in (0, 4, 2, 6, 1, 7, 3, 5):  # right, left, above, below, then the corners
                box = _box(points[i], widths[i], height, radius, turn * math.pi / 4)
                others = dots[:i] + dots[i + 1 :]
                cost = sum(_overlap(box, other) for other in placed) * 3 + sum(_overlap(box, other) for other in others)
                cost += 5 * _outside(box, bounds) + 0.35 * radius
                if best is None or cost < best[0]:
                    best = (cost, box)
        assert best is not None
        placed.append(best[1])
        corners[i] = best[1][:2]
    return [corners[i] for i in range(len(points))]


def _box(
    point: tuple[float, float], width: float, height: float, radius: float, angle: float
) -> tuple[float, float, float, float]:
    x, y = point[0] + radius * math.cos(angle), point[1] + radius * math.sin(angle)
    left = x - width * (1 - math.cos(angle)) / 2
    bottom = y - height * (1 - math.sin(angle)) / 2
    return left, bottom, left + width, bottom + height


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> float:
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0


def _outside(box: tuple[float, float, float, float], bounds: tuple[float, float]) -> float:
    wide = max(0.0, -box[0]) + max(0.0, box[2] - bounds[0])
    high = max(0.0, -box[1]) + max(0.0, box[3] - bounds[1])
    return wide * (box[3] - box[1]) + high * (box[2] - box[0])
