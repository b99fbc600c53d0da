"""`locant convert-legacy`: a transformers v4 checkpoint with relative positions as a v5 folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from locant.cli.errors import one_sentence

HELP = """Write a transformers v4 checkpoint with relative positions as a folder for v5.

SRC is a folder, or an id on the Hub, whose config.json asks for relative_key or relative_key_query. The new folder
loads with from_pretrained while locant.hf is imported, and gives v4's numbers.

Examples:

  locant convert-legacy ./bert-relative --out ./bert-v5

  locant convert-legacy ./bert-relative --out ./classifier --auto-class AutoModelForSequenceClassification
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("convert-legacy", help=HELP)(convert_legacy)


def convert_legacy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, or a Hub id.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="The new folder.", show_default=False)],
    auto_class: Annotated[
        str | None, typer.Option("--auto-class", help="Model class; the one that config.json names if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parses, converts, prints."""
    with one_sentence():
        from locant import hf

        written = hf.convert_legacy(source, out, auto_class)
        found = hf.inspect_directory(written)
    if as_json:
        print(json.dumps({"source": source, "out": str(written), "encodings": list(found.encodings)}, indent=1))
    else:
        print(f"{written}: {', '.join(found.encodings)} attached; {found.advice}")
