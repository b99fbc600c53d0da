"""`locant extend`: a saved model for longer input, with what it does at each length before and after."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from locant.cli.errors import one_sentence

if TYPE_CHECKING:
    from locant.hf.lengths import AtLength

HELP = """Make a saved model serve longer input, and print what it does at each length before and after.

MODEL is a folder (or a name in the local Hugging Face cache). Printed are the loss in nats (masked or causal language
models), or how often the embedding of a piece of text is nearest to that of the text right behind it, with the mean
cosines (other models).

Rules: interpolate (rows are stretched), tile (rows start over), clip (the last row repeats), fit (rows go on by the
rotation that best carries each to the next). Rotary positions: interpolate, fit, or --theta.

Examples:

  locant extend ./my-model --length 1024

  locant extend ./my-model --length 2048 --rule tile --text book.txt --out ./my-model-2048

  locant extend ./my-llama --length 8192 --theta 500000 --lengths 1024,4096,8192
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("extend", help=HELP)(extend)


def extend(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder with config, weights and tokenizer.")],
    length: Annotated[int, typer.Option(help="Tokens that it shall serve.", show_default=False)],
    rule: Annotated[str, typer.Option(help="interpolate, tile, clip or fit.")] = "interpolate",
    theta: Annotated[float | None, typer.Option(help="A new base for rotary positions.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file to measure on.", show_default="docs of installed packages")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Lengths to measure, by commas.", show_default="half, full, between, new")
    ] = "",
    windows: Annotated[int, typer.Option(help="Pieces of text to measure on.")] = 8,
    out: Annotated[Path | None, typer.Option(help="A new folder for the longer model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parses, extends, measures, prints."""
    with one_sentence():
        from locant.data import TextSource, read_text
        from locant.hf.lengths import extend_and_measure

        source = TextSource("docs", limit_mb=1.0) if text is None else TextSource(str(text))
        words = "\n".join(document.text for document in read_text(source, progress=False))
        numbers = _numbers(lengths)
        report = extend_and_measure(model, length, rule, words, theta=theta, lengths=numbers, windows=windows, out=out)
        if as_json:
            print(json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False))
            return
        print(f"{model} ({report.kind}): {report.capacity or 'any length'} -> {length} tokens, rule {report.rule}")
        print("\n".join(_table(report.before, report.after)))
        if out is not None:
            print(f"\nwritten: {out}")


def _numbers(given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 2 for part in parts):
        raise ValueError(f"extend: --lengths {given!r} must be numbers above 2 by commas, such as 256,512,1024")
    return [int(part) for part in parts]


def _table(before: tuple[AtLength, ...], after: tuple[AtLength, ...]) -> list[str]:
    lines = [f"{'length':>7}  {'pieces':>6}  {'before':<34}  {'after':<34}".rstrip()]
    for old, new in zip(before, after, strict=True):
        lines.append(f"{old.length:>7}  {old.windows:>6}  {_cell(old):<34}  {_cell(new):<34}".rstrip())
    refused = [row.refused for row in (*before, *after) if row.refused is not None]
    return lines + [f"refused: {reason}" for reason in dict.fromkeys(refused)]


def _cell(row: AtLength) -> str:
    if row.refused is not None:
        return "refused"
    if row.loss is not None:
        return f"loss {row.loss:.3f}"
    other = "" if row.other is None else f", others {row.other:.3f}"
    return f"found {row.found:.2f}, cosine {row.own:.3f}{other}"
