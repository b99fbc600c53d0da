"""`locant finetune`: fine-tune and score a pretrained model on GLUE or SQuAD, with any encoding."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from locant.cli.errors import FAILED, INTERRUPTED, one_sentence

HELP = """Fine-tune a model on a task once for each seed, and score it: SQuAD 1.1 (and its format), and the GLUE tasks.

TASK is squad, glue/cola, glue/sst-2, glue/mrpc, glue/sts-b, glue/qqp, glue/mnli, glue/qnli, glue/rte or glue/wnli.
MODEL is the folder of a saved model (or an id in the local Hugging Face cache), plain or with an encoding attached.

Examples:

  locant finetune glue/rte ./minilm --data glue/RTE --seeds 1,2,3

  locant finetune glue/mrpc ./minilm --data glue --attach huang_m4 --keep-absolute --init neutral --out runs/mrpc-m4
    --against runs/mrpc

  locant finetune glue/qnli ./minilm --data glue/QNLI split_dev=0.8 train_examples=500

  locant finetune squad ./minilm --data train.json.gz --dev dev.json.gz length=384 overlap=128 epochs=2

  torchrun --nproc-per-node 2 -m locant.cli finetune squad ./minilm --data train.json --dev dev.json

Everything in the settings can be set by key=value (see docs/finetuning.md). Stop at any time: the same command goes on
from the last checkpoint, to the same numbers.

Exit code: 0; 1 when a seed failed (the table shows why) or the folder cannot be written; 2 for bad input.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("finetune", help=HELP)(finetune)


def finetune(
    task: Annotated[str, typer.Argument(metavar="TASK", help="squad or glue/NAME.", show_default=False)],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The folder of a saved model.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="For example learning_rate=3e-5.", show_default=False),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="GLUE: a folder. SQuAD: a training file (may be repeated).", show_default=False),
    ] = None,
    dev: Annotated[
        list[Path] | None, typer.Option(help="SQuAD: a file to score on (may be repeated).", show_default=False)
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder of the tokenizer.", show_default="the model's")] = "",
    attach: Annotated[
        str, typer.Option(metavar="ENCODING", help="Attach this before training.", show_default="none")
    ] = "",
    init: Annotated[str, typer.Option(help="How it starts: paper, neutral or fit.")] = "paper",
    keep_absolute: Annotated[
        bool, typer.Option("--keep-absolute", help="Keep the positions that the model brings.")
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE of the encoding (may be repeated).", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option(help="By commas.")] = "1,2,3",
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="runs/TASK-MODEL-ENCODING")] = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="Output folder to compare with (may be repeated).", show_default=False)
    ] = None,
    report_to: Annotated[
        list[str] | None, typer.Option(help="tensorboard, trackio, ... (may be repeated).", show_default=False)
    ] = None,
    keep_models: Annotated[bool, typer.Option(help="Save the fine-tuned model of each seed.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on stdout.")] = False,
) -> None:
    """Parses, fine-tunes, prints."""
    with one_sentence():
        from locant.cli.progress import SeedWatcher
        from locant.compare.environment import command_line
        from locant.compare.fields import build
        from locant.finetune.load import DataChoice, settings_kind
        from locant.finetune.results import read_outcome, to_text
        from locant.finetune.run import finetune as run
        from locant.finetune.settings import ModelChoice
        from locant.report.finetune_page import write_finetune_page
        from locant.training.folder import unwritable

        chosen = build(settings_kind(task), _table(settings))
        choice = ModelChoice(model, tokenizer, attach, init, keep_absolute, _table(option))
        others = tuple(read_outcome(folder) for folder in against or [])
        folder = out or default_folder(task, model, attach)
        first = os.environ.get("RANK", "0") == "0"
        try:
            with SeedWatcher() as watcher, contextlib.redirect_stdout(sys.stderr):  # trackers print
                outcome = run(
                    task,
                    choice,
                    DataChoice(tuple(data or ()), tuple(dev or ())),
                    chosen,
                    _seeds(seeds),
                    folder,
                    report_to=report_to or (),
                    keep_models=keep_models,
                    watch=watcher if first else lambda event: None,
                    command=command_line(),
                )
        except KeyboardInterrupt:
            print(f"\nstopped: what is finished is kept in {folder}; the same command goes on", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        if first:
            print(outcome.to_json() if as_json else to_text(outcome, others), end="", flush=True)
            try:
                page = write_finetune_page(outcome, folder, others)
            except OSError as error:
                raise unwritable(folder, error, "finetune") from error
            print(f"report: {page.resolve()}", file=sys.stderr)
        if any(result.reason for result in outcome.runs):
            raise typer.Exit(FAILED)


def _seeds(given: str) -> list[int]:
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"finetune: --seeds {given!r} must be whole numbers by commas, such as 1,2,3")
    return [int(part) for part in parts]


def _table(given: list[str] | None) -> dict[str, Any]:
    from locant.compare.recipe import override

    return functools.reduce(override, given or [], {})


def default_folder(task: str, model: str, encoding: str = "") -> Path:
    """Where a run goes that has no --out; `locant pretrain` leaves every model in a folder called model."""
    whose = Path(model).resolve()
    whose = whose.parent if whose.name == "model" else whose
    return Path("runs") / "-".join(part for part in (task.replace("/", "-"), whose.name, encoding) if part)
