"""`locant native`: the compiled kernel of this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from locant.cli.errors import FAILED, one_sentence

HELP = """The attention kernel in C++ that is compiled for this CPU at first use.

Without an option, or with [b]--info[/b]: where it lies, which compiler made it, whether it passed its check.

Examples:

  locant native --build     compile and check it now, not at the first call

  locant native --clear     delete every kernel that was compiled; the next call builds anew
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("native", help=HELP)(native)


def native(
    build: Annotated[bool, typer.Option("--build", help="Compile and check it now.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Delete what was compiled.")] = False,
    info: Annotated[bool, typer.Option("--info", help="Show it (the default).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parses, calls, prints."""
    with one_sentence():
        from locant.backends import native as kernel

        if build and clear:
            raise ValueError("native: --build and --clear were both given; give one of them")
        if clear:
            removed = kernel.build.clear()
            print(json.dumps({"removed": removed}) if as_json else f"removed {len(removed)} files")
            if not info:
                return
        facts = kernel.facts(compile_now=build)
        if as_json:
            print(json.dumps(facts, indent=1))
        else:
            for name, value in facts.items():
                print(f"{name:<12}{value}")
        if build and facts["state"] != "ready":
            raise typer.Exit(FAILED)
