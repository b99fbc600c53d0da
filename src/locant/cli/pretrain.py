"""`locant pretrain`: pre-train one model with one position encoding on text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from locant.cli.errors import FAILED, INTERRUPTED, one_sentence

HELP = """Pre-train one Hugging Face model with one position encoding on text: masked tokens, ELECTRA, or next tokens.

RECIPE is a TOML file (see docs/pretraining.md); anything in it can be set by key=value. The output folder gets model/,
which transformers, `locant finetune` and `locant analyze` load.

Examples:

  locant pretrain recipes/pretrain.toml

  locant pretrain recipes/pretrain.toml encoding=huang_m4 host.family=albert --out runs/albert-m4

  locant pretrain recipes/pretrain.toml objective=electra host.family=electra --out runs/electra

  torchrun --nproc-per-node 2 -m locant.cli pretrain recipes/pretrain.toml --out runs/two

Stop at any time: the same command goes on from the last checkpoint, to the same numbers.

Exit code: 0; 1 when the loss was not finite or the folder cannot be written; 2 for bad input.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("pretrain", help=HELP)(pretrain)


def pretrain(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For example train.steps=500.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/NAME of the recipe")] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tensorboard, trackio, ... (may be repeated).", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON on stdout.")] = False,
) -> None:
    """Parses, pre-trains, prints."""
    with one_sentence():
        from locant.cli.progress import PretrainWatcher
        from locant.compare.environment import command_line
        from locant.pretrain.recipe import load_recipe
        from locant.pretrain.run import pretrain as run
        from locant.pretrain.run import to_text
        from locant.report.pretrain_page import write_pretrain_page
        from locant.training.folder import unwritable

        chosen = load_recipe(recipe, overrides or ())
        folder = out or Path("runs") / chosen.name
        first = os.environ.get("RANK", "0") == "0"
        try:
            with PretrainWatcher() as watcher, contextlib.redirect_stdout(sys.stderr):  # trackers print
                found = run(
                    chosen,
                    folder,
                    report_to=report_to or (),
                    watch=watcher if first else lambda event: None,
                    command=command_line(),
                )
        except KeyboardInterrupt:
            print(
                f"\nstopped: {folder} is kept, and the same command goes on from its last checkpoint", file=sys.stderr
            )
            raise typer.Exit(INTERRUPTED) from None
        if first:
            print(json.dumps(dataclasses.asdict(found), indent=1) if as_json else to_text(found, folder), flush=True)
            try:
                page = write_pretrain_page(found, folder)
            except OSError as error:
                raise unwritable(folder, error, "pretrain") from error
            print(f"report: {page.resolve()}", file=sys.stderr)
        if found.reason:
            raise typer.Exit(FAILED)
