"""`locant analyze`: what a model does with positions, as numbers, figures and one page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from locant.cli.errors import one_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from locant.analysis import Analysis
    from locant.analysis.load import Loaded

HELP = """Analyze what a model does with positions: how much of it depends on the offset alone, where heads look, what a
shift of all positions changes, where absolute position can be read.

MODEL is the folder of a saved model, attached or plain, a GGUF file, the id of a model in the hub's cache, or the
folder of a run of `locant pretrain`, or of `locant compare` with checkpoints: its last model is analyzed, and its
course where train.checkpoints kept one. Nothing is downloaded.

Examples:

  locant analyze ./my-model

  locant analyze ./my-model --compare ./other-model --out both

  locant analyze ./my-model --only distance,patterns --text book.txt --length 256

  locant analyze runs/books/runs/absolute-seed1 --only translation_invariance,patterns

  locant analyze runs/pretrain

  locant analyze ./my-gpt --only phase_shift --pairs blimp/data --pairs-each 5

The output folder gets index.html (a page to explore, works offline), analysis.json, tables as CSV, and figures as SVG
and PNG.

Protocols: translation_invariance, correlations, patterns, distance, phase_shift, locality, probe, table.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("analyze", help=HELP)(analyze)


def analyze(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or an id.", show_default=False)],
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Protocols, by commas.", show_default="all that can run")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to run through it.", show_default="docs of installed packages")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a window.", show_default="128, or what the model serves")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A second model, side by side.", show_default=False)
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(help="Minimal pairs (BLiMP's .jsonl files) to score at every shift.", show_default=False),
    ] = None,
    pairs_each: Annotated[int, typer.Option(help="Pairs read of each file.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Output folder.", show_default="analysis/<name of the model>")
    ] = None,
    seed: Annotated[int, typer.Option(help="For shuffles, probes and words that are repeated.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the analysis of another model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print analysis.json on stdout.")] = False,
) -> None:
    """Parses, analyzes, writes, prints."""
    with one_sentence():
        from locant.analysis.load import common_length, load_model, read_pairs
        from locant.analysis.protocols import chosen_protocols
        from locant.compare.environment import command_line, environment
        from locant.data import TextSource, read_text
        from locant.report.analysis_folder import open_analysis_folder

        names = chosen_protocols(None if only is None else [part.strip() for part in only.split(",") if part.strip()])
        rows = [] if pairs is None else read_pairs(pairs, pairs_each)
        loaded = [load_model(source) for source in (model, compare) if source is not None]
        folder = out or Path("analysis") / loaded[0].name
        with open_analysis_folder(folder, [one.identity for one in loaded], overwrite=overwrite) as output:
            source = TextSource("docs", limit_mb=1.0) if text is None else TextSource(str(text))
            texts = [document.text for document in read_text(source, progress=False)]
            window = common_length(loaded) if length is None else length
            analyses = [_analyze(one, texts, names, window, rows, seed) for one in loaded]
            page = output.write(analyses, environment(command_line()))
        if as_json:
            print(json.dumps(analyses[0].to_dict(), allow_nan=False, ensure_ascii=False))
        else:
            _print(analyses)
        print(f"\npage: {page.resolve()}", file=sys.stderr if as_json else sys.stdout)


def _analyze(
    loaded: Loaded,
    texts: Sequence[str],
    names: Sequence[str],
    length: int,
    pairs: Sequence[dict[str, str]],
    seed: int,
) -> Analysis:
    from locant.analysis.load import analyze_saved
    from locant.cli.progress import Bars

    with Bars(loaded.name) as bars:
        return analyze_saved(loaded, texts, only=names, length=length, pairs=pairs, seed=seed, progress=bars)


def _print(analyses: Sequence[Analysis]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from locant.report.analysis_findings import findings

    console = Console()
    for analysis in analyses:
        title = f"{analysis.model.name} ({analysis.model.family}), {analysis.model.positions}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for heading in ("measure", "value", "held against"):
            table.add_column(heading, overflow="fold")
        for finding in findings(analysis):
            table.add_row(Text(finding.measure), Text(finding.value), Text(finding.control))
        console.print(table)
        for protocol, reason in analysis.skipped.items():
            console.print(f"not run: {protocol}: {reason}", highlight=False, soft_wrap=True, markup=False)
