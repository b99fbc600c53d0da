"""The `locant` command: one file for each subcommand; each parses, calls one function and prints."""

from __future__ import annotations

import typer

from locant.cli import (
    analyze,
    bench,
    compare,
    convert_legacy,
    describe,
    doctor,
    extend,
    finetune,
    list_encodings,
    native,
    plot,
    pretrain,
)

app = typer.Typer(
    name="locant",
    help="Position encodings: list and describe them, and compare them on real text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
compare.register(app)
pretrain.register(app)
finetune.register(app)
plot.register(app)
analyze.register(app)
list_encodings.register(app)
describe.register(app)
doctor.register(app)
extend.register(app)
convert_legacy.register(app)
bench.register(app)
native.register(app)
