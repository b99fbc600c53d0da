"""The page of a pre-training run: its losses, curves, recipe, and where and with what it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from locant.compare.curves import read_curves
from locant.pretrain.hosts import HostChoice
from locant.pretrain.run import Pretrained
from locant.report.run_page import RunPage, write_run_page


def write_pretrain_page(found: Pretrained, folder: Path) -> Path:
    """Writes report.html into the output folder that ``found`` came from. Raises: OSError."""
    return write_run_page(pretrain_page(found, folder), folder / "report.html")


def pretrain_page(found: Pretrained, folder: Path) -> RunPage:
    """What the page shows; recipe, parameters and environment are read from run.json in the folder."""
    body = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    numbers = [(f"validation {name}", f"{value:.4f}") for name, value in found.validation.items()]
    if found.final_loss is not None:
        numbers.insert(0, ("training loss, mean of the last tenth of the steps", f"{found.final_loss:.4f}"))
    for name, value, form in (
        ("tokens per second", found.tokens_per_second, ",.0f"),
        ("MFU", found.mfu, ".1%"),
        ("seconds of training, since it was last taken up", found.seconds, ",.0f"),
    ):
        numbers += [] if value is None else [(name, format(value, form))]
    try:
        curves = read_curves(folder).curves
    except FileNotFoundError:  # the log was deleted
        curves = ()
    return RunPage(
        command="locant pretrain",
        title=folder.resolve().name,
        overview=f"{_model(body['recipe'])}; {found.steps:,} steps, {found.tokens:,} tokens; losses in nats",
        head=("Number", "Value"),
        rows=tuple(numbers),
        sentences=(f"There is no model: {found.reason}",) if found.reason else (),
        curves=curves,
        setting={**body["recipe"], "parameters": body["parameters"]},
        environment=body["environment"],
    )


def _model(recipe: dict[str, Any]) -> str:
    """The host with the sizes that it has, whether they were given or are those of its name; and the encoding."""
    host = HostChoice(**recipe["host"])
    size = host.sizes
    return (
        f"{host.family} of {size.num_layers} layers, width {size.model_dim}, {size.num_heads} heads, with "
        f"{recipe['encoding']['label']}"
    )
