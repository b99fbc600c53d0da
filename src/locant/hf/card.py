"""The part of a model card (README.md) that tells which position encoding a model uses, and how to load it."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

from torch import nn

import locant
from locant.encoding import Encoding
from locant.hf.attachment import Attachment, attachments
from locant.hf.describe import describe
from locant.hf.record import class_name

START, END = "<!-- locant: position encoding -->", "<!-- locant: end -->"
CARD = "README.md"


def model_card(model: nn.Module) -> str:
    """Markdown that names the encoding of an attached model, its equation and source, and its lengths.

    The trained length is the longest input that the model was given in training while the encoding was attached; the
    table length is how many positions the encoding holds.
    Raises: ValueError where nothing is attached.
    """
    found = attachments(model)
    if not found:
        raise ValueError(
            f"model_card: {type(model).__name__} has nothing attached; call locant.hf.attach(model, name) first"
        )
    parts = list(dict.fromkeys(part for _, _, there in found for layer in there.layers() for part in layer.parts()))
    kinds = list({type(part): part for part in parts}.values())
    names = ", ".join(f"`{part.name}`" for part in kinds)
    lines = [
        "## Position encoding",
        "",
        f"The positions of this {class_name(model)} come from {names}, attached with locant {locant.__version__}. "
        "Import `locant.hf` before you load it; without it, transformers builds the host alone, and its outputs are "
        "not those of this model.",
        "",
        "```python",
        "import locant.hf",
        f"from transformers import {class_name(model)}",
        "",
        f'model = {class_name(model)}.from_pretrained("...")',
        "```",
        "",
        *_lengths(model),
    ]
    for part in kinds:
        lines += ["", f"### {part.name}", "", _source(part), "", "```text", _equation(part), "```"]
    return "\n".join(lines)


def _lengths(model: nn.Module) -> list[str]:
    lines = [
        "| Layers | Encoding | Trained length | Table length | Past the table | Of the host |",
        "|---|---|---|---|---|---|",
    ]
    for stack, (_, _, attachment) in zip(describe(model).stacks, attachments(model), strict=True):
        rows: dict[tuple[str, ...], list[int]] = {}
        off = ", ".join(stack.switched_off)
        kept = ", ".join(name for name in stack.host if name not in stack.switched_off)
        host = "; ".join([f"switched off: {off}"] * bool(off) + [f"kept: {kept}"] * bool(kept)) or "nothing"
        for layer in stack.layers:
            cells = (layer.name, _trained(attachment), _held(attachment.layers()[layer.layer], layer.built_length))
            rows.setdefault((*cells, layer.beyond, host), []).append(layer.layer)
        for cells, layers in rows.items():
            where = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
            if layers != list(range(layers[0], layers[-1] + 1)):
                where = ", ".join(map(str, layers))
            lines.append("| " + " | ".join((f"{stack.path} {where}".strip(), *cells)) + " |")
    return lines


def _trained(attachment: Attachment) -> str:
    return f"{attachment.longest_trained}" if attachment.longest_trained else "not recorded"


def _held(encoding: Encoding, built_for: int | None) -> str:
    return f"{built_for}" if any(True for _ in encoding.parameters()) else "no table"


def _source(part: Encoding) -> str:
    where = f"[{part.paper.source}]({part.paper.url})" if part.paper.url else part.paper.source
    return ", ".join(told for told in (part.paper.authors, where, part.paper.equation) if told) + "."


def _equation(part: Encoding) -> str:
    return inspect.getdoc(sys.modules[type(part).__module__]) or ""


def write_card(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Put the model card's part into a folder's README.md; what else is in it stays, its encoding and line ends, too.

    A model with nothing attached leaves the file alone.
    """
    if not attachments(model):
        return
    file = Path(directory) / CARD
    before = file.read_bytes().decode("utf-8", "surrogateescape") if file.is_file() else ""
    line = "\r\n" if "\r\n" in before else "\n"
    head, start, rest = before.partition(START)
    tail = rest.partition(END)[2] if start else ""
    part = f"{START}\n{model_card(model)}\n{END}\n".replace("\n", line)
    head = head if not head or start or head.endswith(2 * line) else head.rstrip("\r\n") + 2 * line
    file.write_bytes((head + part + tail.lstrip("\r\n")).encode("utf-8", "surrogateescape"))
