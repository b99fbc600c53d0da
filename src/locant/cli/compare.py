"""`locant compare`: train, measure and report the encodings of a recipe."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from locant.cli.errors import FAILED, INTERRUPTED, one_sentence

if TYPE_CHECKING:
    from locant.compare.results import ResultTable

HELP = """Compare position encodings: train the same small model once for each encoding and seed, evaluate, report.

RECIPE is a TOML file. Everything in it can be overridden by key=value behind it, with dots into its tables.

Examples:

  locant compare recipes/quickstart.toml

  locant compare recipes/quickstart.toml train.steps=200 seeds=1,2,3 --out runs/short

  locant compare recipes/quickstart.toml encodings=none,tisa,huang_m4 text.text=~/notes --out runs/notes

  locant compare recipes/quickstart.toml 'encodings=["none", {name="shaw", label="shaw-4", clip=4}]'

  LOCANT_DATA=~/data locant compare recipes/books.toml --jobs 4

  LOCANT_DATA=~/data locant compare recipes/length_generalization.toml

  locant compare recipes/quickstart.toml --ray auto

A recipe may have several sizes, tables \\[sizes.NAME] that are laid over the rest of it; without --size it is cpu where
the recipe has that, else the recipe as it is written. Figures that it quotes from papers stand beside the results.

The output folder gets results.json, table.csv, runs.csv, plots and report.html. Stop at any time (Ctrl-C): the same
command goes on after the last finished run. More encodings or seeds may be added later; any other change
needs another --out. A recipe with several problems makes a folder for each, and exact_match.txt beside them.

Exit code: 0; 1 when runs failed (the table shows which) or the folder cannot be written; 2 for bad input.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("compare", help=HELP)(compare)


def compare(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A TOML file, such as recipes/quickstart.toml.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For example train.steps=200.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/<name of the recipe>")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs trained side by side.", show_default="the recipe's jobs, or 1")
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Threads of each run.", show_default="the cores divided among the runs")
    ] = 0,
    size: Annotated[
        str, typer.Option(help="Which \\[sizes.NAME] of the recipe.", show_default="cpu, or as it is written")
    ] = "",
    ray: Annotated[
        str | None,
        typer.Option(metavar="auto|HOST:PORT", help="Train on this Ray cluster.", show_default="this machine"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result table as JSON on stdout.")] = False,
) -> None:
    """Parses, compares, prints."""
    with one_sentence():
        from locant.cli.progress import Watcher
        from locant.compare.environment import command_line
        from locant.compare.on_ray import ray_executor
        from locant.compare.recipe import load_recipe
        from locant.compare.series import compare_series, series_text
        from locant.compare.tables import to_text
        from locant.report import write_report
        from locant.training.folder import unwritable

        loaded = load_recipe(recipe, overrides or [], size)
        folder = out or Path("runs") / loaded.name
        command = command_line()
        reports: list[Path] = []
        try:
            with contextlib.ExitStack() as stack:
                where = {"executor": stack.enter_context(ray_executor(ray))} if ray else {}
                watcher = stack.enter_context(Watcher())
                tables = compare_series(
                    loaded, folder, jobs=jobs, threads=threads, watch=watcher, command=command, **where
                )
            if as_json and len(tables) > 1:
                print(json.dumps({name: json.loads(table.to_json()) for name, table in tables.items()}), flush=True)
            for name, table in tables.items():
                if not as_json or len(tables) == 1:
                    heading = f"== {name} ==\n" if len(tables) > 1 else ""
                    print(heading + (table.to_json() if as_json else to_text(table)), end="", flush=True)
                place = folder / name if len(tables) > 1 else folder
                try:
                    reports.append(write_report(table, place / "report.html"))
                    _save_plots(table, place / "plots")
                except OSError as error:
                    raise unwritable(place, error) from error
            if not as_json and (over := series_text(loaded, tables)):
                print("\n" + over, end="")
        except KeyboardInterrupt:
            finished = len(list(folder.glob("**/runs/*/run.json")))
            print(
                f"\nstopped: {finished} finished runs are kept in {folder}; the same command goes on", file=sys.stderr
            )
            raise typer.Exit(INTERRUPTED) from None
        for report in reports:
            print(f"\nreport: {report.resolve()}", file=sys.stderr if as_json else sys.stdout)
        if any(run.status != "done" for table in tables.values() for run in table.runs):
            raise typer.Exit(FAILED)


def _save_plots(table: ResultTable, folder: Path) -> None:
    from locant import plots

    for name, draw in plots.figures(table).items():
        figure = draw(table)
        for suffix in ("svg", "png"):
            plots.save(figure, folder / f"{name}.{suffix}")
