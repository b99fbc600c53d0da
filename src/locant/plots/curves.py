"""Curves of runs over each other: training losses as lines, validation losses dashed with a mark at each point."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from locant.compare.curves import Curve
from locant.plots.labels import shorten
from locant.plots.style import MUTED, TWO_COLUMN, marks, new_axes, styled

AXES = {"step": "Training step", "tokens": "Tokens read in training", "seconds": "Seconds of training"}
LEGEND = 7.0  # points


def loss_curves(curves: Sequence[Curve], x: str = "step", smooth: int = 1, width: float = TWO_COLUMN) -> Figure:
    """Losses over ``x`` ("step", "tokens" or "seconds"); the runs of a group share a color and a legend entry.

    ``smooth``: each training point is the mean of the last so many; the losses themselves stay as a pale line.
    Raises: ValueError for another ``x``, for ``smooth`` below 1, and where no curve knows ``x``.
    """
    if x not in AXES:
        raise ValueError(f"plot: x = {x!r}, needed {', '.join(AXES)}")
    if smooth < 1:
        raise ValueError(f"plot: smooth = {smooth}, needed at least 1 point to take the mean of")
    groups = list(dict.fromkeys(curve.group for curve in curves))
    with styled():
        marked = marks(groups)
        rows = math.ceil((len(groups) + 1) / max(1, int(width // 2.2)))
        figure, axes = new_axes(width, 3.4 + 0.16 * rows, right=0.15, bottom=0.62 + 0.16 * rows)
        for curve in curves:
            points = _points(curve, x)
            color, index = marked[curve.group].color, groups.index(curve.group)
            if curve.validation:
                drawn = axes.plot(*points, color=color, linestyle="--", marker=marked[curve.group].marker)
            else:
                drawn = axes.plot(points[0], running_mean(points[1], smooth), color=color)
                if smooth > 1:
                    drawn += axes.plot(*points, color=color, alpha=0.25, linewidth=0.7, zorder=1)
            for count, line in enumerate(drawn):
                line.set_gid(f"series-{index}-{curve.run}-{int(curve.validation)}-{count}".replace(" ", "-"))
        if not any(_points(curve, x)[0] for curve in curves):
            raise ValueError(f"plot: none of {len(curves)} curves tells its {x}; take another x, such as step")
        _cut_early(axes, curves, x)
        axes.margins(x=0.015)
        axes.set_xlabel(AXES[x])
        axes.set_ylabel("Loss (nats)" + (f", mean of {smooth} points" if smooth > 1 else ""))
        axes.tick_params(length=3)
        handles = [Line2D([], [], color=marked[group].color, label=shorten(group, 34)) for group in groups]
        if any(curve.validation for curve in curves) and any(not curve.validation for curve in curves):
            handles.append(Line2D([], [], color=MUTED, linestyle="--", marker="o", label="validation"))
        figure.legend(
            handles=handles, loc="lower left", ncols=max(1, int(width // 2.2)), fontsize=LEGEND, frameon=False
        )
    return figure


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
