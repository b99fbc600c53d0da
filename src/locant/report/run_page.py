"""One run, or the seeds of one run, as an HTML page that works from a file: `RunPage` in, page out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from locant.compare.curves import Curve
from locant.plots import ONE_COLUMN, TWO_COLUMN, loss_curves
from locant.report.figures import color_rules, inline_svg
from locant.report.page import HERE, flat, templates
from locant.training.folder import write_atomically


@dataclass(frozen=True)
class RunPage:
    """What the page of a run shows; every text is shown as it is, never read as HTML."""

    command: str  # "locant finetune"
    title: str
    overview: str  # a line below the title
    head: tuple[str, ...]  # of the table of scores; the first column names its row
    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]  # below the table: what the scores say, notices, why seeds failed
    curves: tuple[Curve, ...]
    setting: Mapping[str, Any]  # nested
    environment: Mapping[str, Any]  # as `locant.compare.environment.environment` gives it


def write_run_page(run: RunPage, path: str | Path) -> Path:
    """Writes the page, whole or not at all, and returns its path. Raises: OSError when the folder cannot be written."""
    return write_atomically(path, render_run(run))


def render_run(run: RunPage) -> str:
    """The page as HTML text. Raises: ValueError for a row of another length than the head."""
    if wrong := [row for row in run.rows if len(row) != len(run.head)]:
        raise ValueError(f"run page: a row of {len(wrong[0])} cells ({wrong[0][0]!r}), needed {len(run.head)}")
    return (
        templates()
        .get_template("run.html.jinja")
        .render(
            run=run,
            style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            light=Markup(color_rules(dark=False)),
            dark=Markup(color_rules(dark=True)),
            date=str(run.environment.get("date") or "")[:10],
            plot=[
                Markup(
                    inline_svg(loss_curves(run.curves, width=width), f"loss-{name}", f"Line plot: {run.title}, loss")
                )
                for name, width in (("wide", TWO_COLUMN), ("narrow", ONE_COLUMN))
                if run.curves
            ],
            setting=flat(run.setting),
            environment=flat(run.environment),
        )
    )
