"""`locant doctor`: do positions in a model survive what it will meet?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from locant.cli.errors import FAILED, one_sentence

if TYPE_CHECKING:
    from locant.hf.doctor import Diagnosis

HELP = """Examine a model, attached or plain: does order matter to it at all; do padding, packed documents, caches,
saving and loading keep its outputs; is the length in use trained; are its constants finite; is all of a folder loaded.

MODEL is the folder of a saved model, or the id of one in the hub's cache. Nothing is downloaded. Ends with code 1 where
there is a fault, 2 where there is no such model.

Examples:

  locant doctor ./my-model

  locant doctor ./my-model --length 1024 --json
"""
COLORS = {"ok": "green", "FAULT": "bold red", "cannot": "yellow"}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", help=HELP)(doctor)


def doctor(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or an id.", show_default=False)],
    length: Annotated[int | None, typer.Option(help="Tokens that you mean to use.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parses, diagnoses, prints."""
    with one_sentence():
        from locant.hf.doctor import diagnose

        diagnosis = diagnose(model, length=length)
    if as_json:
        facts = {**dataclasses.asdict(diagnosis), "healthy": diagnosis.healthy}
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        _print(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(FAILED)


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{diagnosis.model}, {diagnosis.encoding}", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for heading in ("check", "verdict", "figure", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in diagnosis.findings:
        verdict = Text(finding.verdict, style=COLORS[finding.verdict])
        table.add_row(Text(finding.check), verdict, Text(finding.figure), Text(finding.advice))
    faults = len(diagnosis.faults)
    console = Console()
    console.print(table)
    console.print(f"\n{faults} {'fault' if faults == 1 else 'faults'}" if faults else "\nno fault", highlight=False)
