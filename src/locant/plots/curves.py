"""Curves of runs over each other: training losses as lines, validation losses dashed with a mark at each point.

Losses of different kinds, which no axis can hold together, stand in panels below each other.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from locant.compare.curves import Curve
from locant.plots.labels import shorten
from locant.plots.style import MUTED, TWO_COLUMN, Mark, marks, new_axes, styled

AXES = {"step": "Training step", "tokens": "Tokens read in training", "seconds": "Seconds of training"}
LEGEND = 7.0  # points
PANEL, LOW_PANEL, TOP = 2.66, 1.9, 0.12  # inches: one panel alone, one of several, and what is free above


def loss_curves(curves: Sequence[Curve], x: str = "step", smooth: int = 1, width: float = TWO_COLUMN) -> Figure:
    """Losses over ``x`` ("step", "tokens" or "seconds"); the runs of a group share a color and a legend entry.

    ``smooth``: each training point is the mean of the last so many; the losses themselves stay as a pale line.
    Raises: ValueError for another ``x``, for ``smooth`` below 1, and where no curve knows ``x``.
    """
    if x not in AXES:
        raise ValueError(f"plot: x = {x!r}, needed {', '.join(AXES)}")
    if smooth < 1:
        raise ValueError(f"plot: smooth = {smooth}, needed at least 1 point to take the mean of")
    if not any(_points(curve, x)[0] for curve in curves):
        raise ValueError(f"plot: none of {len(curves)} curves tells its {x}; take another x, such as step")
    groups = list(dict.fromkeys(curve.group for curve in curves))
    measures = list(dict.fromkeys(curve.measure for curve in curves))
    columns = max(1, int(width // 2.2))
    with styled():
        marked = marks(groups)
        figure, panels = _panels(width, len(measures), 0.62 + 0.16 * math.ceil((len(groups) + 1) / columns))
        for measure, axes in zip(measures, panels, strict=True):
            own = [curve for curve in curves if curve.measure == measure]
            for curve in own:
                index = groups.index(curve.group)
                for count, line in enumerate(_draw(axes, curve, marked[curve.group], x, smooth)):
                    line.set_gid(f"series-{index}-{curve.run}-{int(curve.validation)}-{count}".replace(" ", "-"))
            _cut_early(axes, own, x)
            axes.margins(x=0.015)
            axes.tick_params(length=3)
            averaged = smooth > 1 and not all(curve.validation for curve in own)
            label = measure + (f", mean of {smooth} points" if averaged else "")
            if len(panels) > 1:
                axes.set_title(textwrap.fill(label, int(14 * width)), loc="left", fontsize=LEGEND)
            else:
                axes.set_ylabel(label)
        panels[-1].set_xlabel(AXES[x])
        handles = [Line2D([], [], color=marked[group].color, label=shorten(group, 34)) for group in groups]
        if any(curve.validation for curve in curves) and any(not curve.validation for curve in curves):
            handles.append(Line2D([], [], color=MUTED, linestyle="--", marker="o", label="validation"))
        figure.legend(handles=handles, loc="lower left", ncols=columns, fontsize=LEGEND, frameon=False)
    return figure


def _panels(width: float, count: int, bottom: float) -> tuple[Figure, list[Axes]]:
    """So many axes below each other over one x, which the lowest one names."""
    heights, gap = (PANEL, 0.0) if count == 1 else (LOW_PANEL, 0.42)
    height = bottom + count * (heights + gap) + TOP
    figure, whole = new_axes(width, height, right=0.15, bottom=bottom)
    if count == 1:
        return figure, [whole]
    box = whole.get_position()
    whole.remove()
    places = [bottom + (count - 1 - at) * (heights + gap) for at in range(count)]
    panels = [figure.add_axes((box.x0, place / height, box.width, heights / height)) for place in places]
    for upper in panels[:-1]:
        upper.sharex(panels[-1])
        upper.tick_params(labelbottom=False)
    return figure, panels


def _draw(axes: Axes, curve: Curve, mark: Mark, x: str, smooth: int) -> list[Line2D]:
    points = _points(curve, x)
    if curve.validation:
        return axes.plot(*points, color=mark.color, linestyle="--", marker=mark.marker)
    drawn = axes.plot(points[0], running_mean(points[1], smooth), color=mark.color)
    if smooth > 1:
        drawn += axes.plot(*points, color=mark.color, alpha=0.25, linewidth=0.7, zorder=1)
    return drawn


def running_mean(values: Sequence[float], count: int) -> list[float]:
    """Mean of each value and the up to ``count - 1`` before it."""
    means, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - count] if index >= count else 0.0)
        means.append(total / min(index + 1, count))
    return means


def _points(curve: Curve, x: str) -> tuple[list[float], list[float]]:
    places = {"step": curve.steps, "tokens": curve.tokens, "seconds": curve.seconds}[x]
    kept = [(float(place), loss) for place, loss in zip(places, curve.losses, strict=True) if math.isfinite(place)]
    return [place for place, _ in kept], [loss for _, loss in kept]


def _cut_early(axes: Axes, curves: Sequence[Curve], x: str) -> None:
    """Ends the loss axis above what stands after a tenth of each curve, so that the end is not flattened."""
    late: list[float] = []
    for curve in curves:
        places, losses = _points(curve, x)
        late += [loss for place, loss in zip(places, losses, strict=True) if place >= places[-1] / 10]
    if late and max(late) > min(late):
        pad = 0.05 * (max(late) - min(late))
        axes.set_ylim(min(late) - pad, max(late) + pad)
