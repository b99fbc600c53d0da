"""`locant describe`: one encoding, or what a saved model uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from locant.cli.errors import one_sentence

HELP = """Describe one encoding (equation, properties, options, parameters), or the encoding of a model on disk.

NAME_OR_MODEL is a name from `locant list`, several joined by +, or the folder of a saved model.

Examples:

  locant describe huang_m4

  locant describe absolute+t5 --json

  locant describe ./my-model
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("describe", help=HELP)(describe)


def describe(
    name_or_model: Annotated[
        str, typer.Argument(metavar="NAME_OR_MODEL", help="huang_m4, absolute+t5, or a folder.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parses, looks up, prints."""
    with one_sentence():
        import locant
        from locant.cli.facts import encoding_facts, encoding_text, model_facts, model_text

        known = name_or_model in locant.names()  # such a folder here, of results for example, is ./NAME
        if not known and Path(name_or_model).is_dir():
            folder = Path(name_or_model)
            print(json.dumps(model_facts(folder), indent=1, ensure_ascii=False) if as_json else model_text(folder))
        elif "/" in name_or_model or "\\" in name_or_model:
            raise ValueError(
                f"describe: {name_or_model!r} is no folder on this machine, needed a name (see locant list) or "
                "the folder of a saved model"
            )
        else:
            parts = [encoding_facts(part.strip()) for part in name_or_model.split("+")]
            if as_json:
                print(json.dumps(parts[0] if len(parts) == 1 else parts, indent=1, ensure_ascii=False))
            else:
                print("\n\n".join(encoding_text(part) for part in parts))
