"""`locant list`: all encodings in one table."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Annotated, Any

import typer

from locant.cli.errors import one_sentence

HELP = """List all position encodings: name, paper, where it acts, what happens beyond the trained range.

Examples:

  locant list

  locant list --json
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("list", help=HELP)(list_encodings)


def list_encodings(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Parses, looks up, prints."""
    with one_sentence():
        from locant.cli.facts import all_facts

        rows = all_facts()
        if as_json:
            print(json.dumps(rows, indent=1, ensure_ascii=False))
        else:
            print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line for each encoding; where a terminal is too narrow for it, what it is goes below, folded."""
    header = ("name", "acts in", "shift", "beyond", "layers", "paper", "what it is")
    cells: list[tuple[str, ...]] = [header]
    for row in rows:
        properties = row["properties"]
        shift = "invariant" if properties["shift_invariant"] else "-"
        sites = ", ".join(row["sites"]) or "-"
        paper = row["paper"]["source"]
        cells.append(
            (row["name"], sites, shift, properties["beyond_range"], properties["layers"], paper, row["summary"])
        )
    lines = _aligned(cells)
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if limit is not None and max(map(len, lines)) > limit:
        lines = _folded(cells, limit)
    print("\n".join(lines))
    print("\nlocant describe NAME tells the equation, the options and the parameters of one.")


def _aligned(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _folded(cells: list[tuple[str, ...]], limit: int) -> list[str]:
    """The short columns in one line; below it, what the encoding is, and its paper."""
    lines: list[str] = []
    for short, line in zip(_aligned([line[:5] for line in cells]), cells, strict=True):
        lines += textwrap.wrap(short, limit, subsequent_indent="    ", drop_whitespace=False)
        lines += textwrap.wrap(f"{line[6]} ({line[5]})", limit, initial_indent="    ", subsequent_indent="    ")
    return lines
