"""Cost of attention with positions as ratios to plain attention: one row for each case, one mark for each backend."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locant.bench.attention import PASSES, Row
from locant.bench.timing import BASELINE
from locant.plots.style import COLORS, GRID, MUTED, TWO_COLUMN, styled

TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 5, 8)
TITLES = {"forward": "forward", "forward_backward": "forward and backward"}


def cost_of_attention(rows: Sequence[Row], width: float = TWO_COLUMN) -> Figure:
    """Median ratio to plain SDPA without positions, with quartiles as whiskers; below 1 is faster.

    Raises: ValueError where no row was measured.
    """
    measured = [row for row in rows if row.timings and row.backend != BASELINE]
    if not measured:
        raise ValueError(f"plot: none of {len(rows)} rows holds a measured ratio; measure at least one case")
    cases = list(dict.fromkeys(row.case for row in measured))
    backends = list(dict.fromkeys(row.backend for row in measured))
    passes = [name for name in PASSES if name in measured[0].timings]
    with styled():
        figure = Figure(figsize=(width, 0.9 + 0.24 * len(cases)), layout="constrained")
        for axes, name in zip(figure.subplots(1, len(passes), sharey=True, squeeze=False)[0], passes, strict=True):
            _draw(axes, [row for row in measured if name in row.timings], name, cases, backends)
        figure.axes[0].legend(frameon=False, loc="best")
    return figure


def _draw(axes: Axes, rows: list[Row], name: str, cases: list[str], backends: list[str]) -> None:
    for number, backend in enumerate(backends):
        here = [row for row in rows if row.backend == backend]
        y = [0.22 * (0.5 * (len(backends) - 1) - number) - cases.index(row.case) for row in here]
        low, middle, high = zip(*(row.timings[name].ratio for row in here), strict=True)
        whiskers = (
            [b - a for a, b in zip(low, middle, strict=True)],
            [b - a for a, b in zip(middle, high, strict=True)],
        )
        color = COLORS[number % len(COLORS)]
        axes.errorbar(middle, y, xerr=whiskers, label=backend, fmt="osD^v"[number % 5], ms=4, lw=1, color=color)
    axes.axvline(1.0, color=MUTED, lw=0.8)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.set_yticks([-y for y in range(len(cases))], cases)
    axes.set_title(TITLES[name])
    axes.grid(axis="x", color=GRID)
    axes.set_xlabel("time, as a multiple of plain SDPA")
