"""`locant bench`: what positions cost, as ratios to plain attention in the same run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from locant.cli.errors import one_sentence, writing

if TYPE_CHECKING:
    from locant.bench.attention import Row
    from locant.bench.timing import Timing

ATTENTION = """Attention alone: every case on every backend, against plain SDPA without positions, in turns.

What counts is the ratio within a turn (median, and the quartiles in brackets), on one thread: a busy neighbor bends it
less than two. Peak memory is measured in a fresh process for each number.

Examples:

  locant bench attention

  locant bench attention --cases "m4 clip 64,shaw clip 64" --length 2048 --batch 1 --threads 2

  locant bench attention --json attention.json --plot attention.svg

  locant bench attention --refresh      measure what backend="auto" goes by on this machine, and keep it
"""

MODEL = """A BERT with an encoding: inference and a training step, against the absolute model on SDPA, in turns.

Examples:

  locant bench model --encodings "m4 clip 64,tisa" --layers 3
"""

app = typer.Typer(help="Measure what positions cost.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Adds the commands."""
    app.command("attention", help=ATTENTION)(attention)
    app.command("model", help=MODEL)(model)
    parent.add_typer(app, name="bench")


Json = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]


def attention(
    cases: Annotated[str, typer.Option(help="Cases, by commas; empty: all.")] = "",
    backends: Annotated[str, typer.Option(help="Backends, by commas.")] = "native,blocked",
    passes: Annotated[str, typer.Option(help="forward, forward_backward, or both by a comma.")] = "",
    batch: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 12,
    length: Annotated[int, typer.Option(min=1, help="Queries and keys.")] = 512,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="Measure with the causal mask.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU.")] = 1,
    repeats: Annotated[int, typer.Option(min=2, help="Turns that count.")] = 20,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure what `auto` goes by; writes into the package.")
    ] = False,
    json_file: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this file (svg, pdf, png).")] = None,
) -> None:
    """Parses, measures, prints."""
    with one_sentence():
        from locant.bench import attention as bench

        if refresh:
            _refresh(device, repeats)
            return
        sizes = bench.Sizes(batch, heads, length, head_dim, dtype, causal, threads, device)
        names, chosen = _names(cases, bench.CASES), _names(backends, ())
        wanted = _names(passes, bench.PASSES)
        print(f"{'case':<22}{'backend':<12}" + "".join(f"{name:>26}{'MB':>7}" for name in wanted))
        turns = len(names) * len(wanted) * (repeats + 2)
        with Bar(turns, "measuring") as advance:
            rows = bench.measure(
                names,
                chosen,
                sizes,
                passes=wanted,
                repeats=repeats,
                memory=memory,
                on_row=lambda row: print(_line(row, wanted), flush=True),
                on_turn=advance,
            )
        _write(json_file, {"sizes": dataclasses.asdict(sizes), "rows": [dataclasses.asdict(row) for row in rows]})
        if plot:
            from locant import plots

            with writing("bench", plot):
                plots.save(plots.cost_of_attention(rows), plot)


def model(
    encodings: Annotated[str, typer.Option(help="Cases or encodings, by commas.")] = "m4 clip 64",
    backend: Annotated[str, typer.Option(help="The backend of the encodings.")] = "auto",
    layers: Annotated[int, typer.Option(min=1)] = 12,
    width: Annotated[int, typer.Option(min=1)] = 768,
    heads: Annotated[int, typer.Option(min=1)] = 12,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    length: Annotated[int, typer.Option(min=1)] = 512,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 for autocast.")] = "float32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=2, help="Turns that count.")] = 20,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    json_file: Json = None,
) -> None:
    """Parses, measures, prints."""
    with one_sentence():
        from locant.bench import model as bench

        sizes = bench.ModelSizes(layers, width, heads, batch, length, threads, dtype)
        with Bar(len(bench.PASSES) * (repeats + 2), "measuring") as advance:
            rows = bench.measure(
                _names(encodings, ()), sizes, backend=backend, repeats=repeats, memory=memory, on_turn=advance
            )
        print(f"{'encoding':<22}{'backend':<12}" + "".join(f"{name:>26}{'MB':>7}" for name in bench.PASSES))
        for row in rows:
            print(f"{row.encoding:<22}{row.backend:<12}{_cells(row.timings, row.peak_mb, bench.PASSES)}")
        _write(json_file, {"sizes": dataclasses.asdict(sizes), "rows": [dataclasses.asdict(row) for row in rows]})


def _names(text: str, default: Any) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip()) or tuple(default)


def _line(row: Row, passes: tuple[str, ...]) -> str:
    start = f"{row.case:<22}{row.backend:<12}"
    return f"{start}  cannot: {row.cannot}" if row.cannot else start + _cells(row.timings, row.peak_mb, passes)


def _cells(timings: dict[str, Timing], peaks: dict[str, float | None], passes: tuple[str, ...]) -> str:
    parts = []
    for name in passes:
        low, middle, high = timings[name].ratio
        peak = peaks[name]
        parts.append(f"{f'{middle:.2f} ({low:.2f} .. {high:.2f})':>26}{'-' if peak is None else f'{peak:.0f}':>7}")
    return "".join(parts)


def _refresh(device: str, repeats: int) -> None:
    from locant.backends import speeds
    from locant.bench.speeds import FAMILY_PASSES, LENGTHS, refresh
    from locant.compare.environment import environment

    with Bar(FAMILY_PASSES * len(LENGTHS), "measuring") as advance:
        found = refresh(device, repeats, on_length=lambda what: advance())
    made = environment(f"locant bench attention --refresh --device {device}")
    print(speeds.write(device, made, found))


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path is None:
        return
    from locant.compare.environment import environment

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made": environment(), **results}, indent=1) + "\n", encoding="utf-8")
    print(f"results: {path}")


class Bar:
    """A progress bar on stderr that is called to advance."""

    def __init__(self, total: int, title: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(compact=True))
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task(title, total=total)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __call__(self) -> None:
        """One step done."""
        self.progress.advance(self.task)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
