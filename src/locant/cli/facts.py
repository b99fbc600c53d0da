"""What `list` and `describe` show, gathered from the encodings themselves."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

EXAMPLE_SIZES = {"num_heads": 12, "head_dim": 64, "model_dim": 768, "max_length": 512}  # BERT-base


def all_facts() -> list[dict[str, Any]]:
    """Facts of every encoding, by name, and after them of every transform of position ids."""
    import locant

    return [encoding_facts(name) for name in locant.names() + locant.names("transforms")]


def encoding_facts(name: str) -> dict[str, Any]:
    """JSON-able facts of one encoding. Raises: ValueError for an unknown name, with the near ones."""
    import torch

    import locant
    from locant.catalog import SIZES, encoding_class

    kind = encoding_class(name)
    with torch.random.fork_rng(devices=[]):
        built = locant.load(name, **EXAMPLE_SIZES)
    module = inspect.getdoc(sys.modules[kind.__module__]) or ""
    described = inspect.getdoc(kind) or ""
    options = {
        option: {"default": _plain(parameter.default), "type": str(parameter.annotation)}
        for option, parameter in inspect.signature(kind.__init__).parameters.items()
        if option != "self" and option not in SIZES
    }
    return {
        "name": name,
        "class": kind.__name__,
        "summary": described.split("\n")[0],
        "paper": {**dataclasses.asdict(built.paper), "url": built.paper.url},
        "sites": list(built.sites),
        "properties": dataclasses.asdict(built.properties),
        "logit_factor": built.logit_factor,
        "max_length": built.max_length,
        "options": options,
        "parameters": {key: list(value.shape) for key, value in built.named_parameters()},
        "num_parameters": sum(parameter.numel() for parameter in built.parameters()),
        "sizes": dict(EXAMPLE_SIZES),
        "equation": module,
        "description": described,
    }


def _plain(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return "required"
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def encoding_text(facts: dict[str, Any]) -> str:
    """The facts of one encoding for reading."""
    sizes = facts["sizes"]
    properties = facts["properties"]
    limit = f"up to {facts['max_length']} tokens" if facts["max_length"] else "any length"
    lines = [
        f"{facts['name']} ({facts['class']})",
        "",
        textwrap.indent(facts["equation"], "  "),
        "",
        textwrap.indent(facts["description"], "  "),
        "",
        f"acts in           {', '.join(facts['sites']) or 'no hook: no position information'}",
        f"shift-invariant   {'yes' if properties['shift_invariant'] else 'no'}",
        f"symmetric         {'yes' if properties['symmetric'] else 'no'}",
        f"beyond the range  {properties['beyond_range']} ({limit} at the sizes below)",
        f"layers            {properties['layers']}",
        f"neutral at        {properties['neutral'] or 'no parameter value'}",
        f"logit factor      {facts['logit_factor']:.4g}",
    ]
    if facts["paper"]["url"]:
        lines.append(f"paper             {facts['paper']['url']}")
    lines += ["", "options" if facts["options"] else "options: none"]
    lines += [
        f"  {option} = {_toml(value['default'])}  ({value['type']})" for option, value in facts["options"].items()
    ]
    count = f"{facts['num_parameters']:,} of each object"
    where = f"{sizes['num_heads']} heads of width {sizes['head_dim']}, max_length {sizes['max_length']}"
    lines += ["", f"parameters: {count} ({where})"]
    lines += [f"  {key} {shape}" for key, shape in facts["parameters"].items()]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "automatic" if value is None else str(value)


def model_facts(folder: Path) -> dict[str, Any]:
    """What a saved model uses: `model` as `locant.hf.describe` sees it, `attached` as `locant.hf.save` recorded it.

    Reads config.json and locant.json, not the weights. Raises: ValueError where the folder holds neither.
    """
    facts: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        facts["model"] = dataclasses.asdict(_model_description(folder))
    if (folder / "locant.json").is_file():
        try:
            facts["attached"] = json.loads((folder / "locant.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"describe: {str(folder / 'locant.json')!r} is not JSON ({error}); save it again"
            ) from error
    if not facts:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"describe: {str(folder)!r} holds {found}, needed a config.json or locant.json; give the folder of a "
            "saved model"
        )
    return facts


def _model_description(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel

    from locant import hf
    from locant.hf.pretrained import attach_as_recorded

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):  # the structure is enough
        return hf.describe(attach_as_recorded(AutoModel.from_config(config)))


def model_text(folder: Path) -> str:
    """The same for reading."""
    facts = model_facts(folder)
    parts = [str(_model_description(folder))] if "model" in facts else []
    if "attached" in facts:
        parts.append("\n".join(["attached (locant.json)", *_lines(facts["attached"], 1)]))
    return "\n\n".join(parts)


def _lines(value: Any, depth: int) -> list[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            if isinstance(item, dict | list | tuple) and item:
                lines += [f"{pad}{key}", *_lines(item, depth + 1)]
            else:
                lines.append(f"{pad}{key}: {_toml(item)}")
        return lines
    if isinstance(value, list | tuple):
        lines = []
        for index, item in enumerate(value):
            lines += [f"{pad}[{index}]", *_lines(item, depth + 1)] if isinstance(item, dict) else [f"{pad}- {item}"]
        return lines
    return [f"{pad}{value}"]
