"""`locant plot`: the training and validation curves of runs, over each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from locant.cli.errors import one_sentence, writing

HELP = """Draw the training and validation curves of runs over each other.

RUN is an output folder of locant compare, finetune or pretrain, or the folder of one run in it (runs/NAME). A run that
is still at work, or was killed, is drawn as far as its log goes; a comparison has the curves of its finished runs.

Examples:

  locant plot runs/quickstart

  locant plot runs/rte runs/rte-m4 --smooth 20 --out rte.pdf

  locant plot runs/pretrain --x tokens

Exit code: 0; 1 when the file cannot be written; 2 for bad input.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plot", help=HELP)(plot)


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders.", show_default=False)],
    x: Annotated[str, typer.Option("--x", metavar="step|tokens|seconds", help="What is drawn to the right.")] = "step",
    smooth: Annotated[int, typer.Option(metavar="N", help="Mean of the last N training losses.")] = 1,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf file.")] = Path("loss.png"),
) -> None:
    """Parses, draws, prints the path."""
    with one_sentence():
        from locant import plots
        from locant.compare.curves import read_runs

        found = read_runs(runs)
        figure = plots.loss_curves(found.curves, x, smooth)
        with writing("plot", out):
            path = plots.save(figure, out)
        for notice in found.notices:
            print(f"note: {notice}", file=sys.stderr)
        print(path)
