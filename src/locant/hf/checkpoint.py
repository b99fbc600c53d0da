"""Save and load what an encoding added to a model: how it was attached (locant.json) and its tensors (safetensors)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from locant.hf.attach import Model, attach, detach
from locant.hf.attachment import Attachment, attachments
from locant.hf.build import host_sizes
from locant.hf.families import Site, find_sites
from locant.hf.interface import NAME
from locant.hf.record import CHOICES, FITTING, RECORD, TENSORS, check_mark, fingerprint, record_of, recorded_stacks
from locant.hf.weights import mark_of, read_weights
from locant.hf.writing import replacing


def save(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Write what was attached to a model, and nothing of the model itself; returns the folder.

    The folder appears whole or not at all; one that an earlier `save` wrote is replaced.
    Raises: ValueError where nothing is attached, where an object was attached instead of a name, where options are not
    JSON, or where the folder holds other files.
    """
    found = attachments(model)
    if not found:
        raise ValueError(f"save: {type(model).__name__} has nothing attached; call locant.hf.attach(model, name) first")
    target = Path(directory)
    if target.exists() and not (target.is_dir() and _ours(target)):
        raise ValueError(f"save: {target} exists and was not written by locant.hf.save; give a new or an empty folder")
    record = record_of(model)
    tensors = {
        f"{number}.{name}": tensor.detach().contiguous()
        for number, (_, _, attachment) in enumerate(found)
        for name, tensor in attachment.state_dict().items()
    }
    with replacing(target) as fresh:
        (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / TENSORS, {NAME: fingerprint(record)})
    return target


def _ours(target: Path) -> bool:
    return {file.name for file in target.iterdir() if not file.name.startswith(".")} <= {RECORD, TENSORS}


def load(base_model: Model, directory: str | os.PathLike[str]) -> Model:
    """Attach to a base model, in place, what `save` wrote; returns the model.

    The head of the model may be another one; the stacks of layers must be the same.
    Raises: FileNotFoundError for a missing file; ValueError for a file that is cut off or foreign, or a base model that
    does not fit (then it is left as it was), or another major version of locant wrote.
    """
    source = Path(directory)
    record = _read(source)
    stacks = recorded_stacks(record, f"load: {source / RECORD}")
    sites = find_sites(base_model)
    if len(sites) != len(stacks):
        raise ValueError(
            f"load: {source} is for {len(stacks)} stacks of layers but {type(base_model).__name__} has {len(sites)}"
        )
    for site, stack in zip(sites, stacks, strict=True):
        check_fit(f"load: {source}", site, stack)
    check_mark(f"load: {source / TENSORS}", mark_of(source / TENSORS), record)
    tensors = read_weights([source / TENSORS])
    attach_recorded(f"load: {source / RECORD}", base_model, list(zip(sites, stacks, strict=True)), all_sites=True)
    try:
        for number, (_, _, attachment) in enumerate(attachments(base_model)):
            own = {n.removeprefix(f"{number}."): t for n, t in tensors.items() if n.startswith(f"{number}.")}
            fill(f"load: {source / TENSORS}", attachment, own)
    except ValueError:
        detach(base_model)
        raise
    return base_model


def attach_recorded(who: str, model: nn.Module, found: list[tuple[Site, dict[str, Any]]], all_sites: bool) -> None:
    """Attach to each stack of layers what its entry of a record tells; nothing stays attached where one is refused.

    ``who`` begins the errors. ``all_sites``: these are all stacks of the model. The drawn values are to be overwritten:
    the random state is kept.
    Raises: ValueError for what cannot be built.
    """
    calls = [
        (
            stack["encoding"] if isinstance(stack["encoding"], str) else tuple(stack["encoding"]),
            {name: stack[name] for name in CHOICES},
            stack["options"],
        )
        for _, stack in found
    ]
    together = all_sites and all(call == calls[0] for call in calls)
    roots = [model] if together else [site.module for site, _ in found]
    with torch.random.fork_rng(devices=[]):
        for root, (names, choices, options) in zip(roots, calls, strict=False):
            try:
                attach(root, names, init="paper", fit_inputs=None, **choices, **options)
            except Exception as error:  # whatever a broken record brings about
                if attachments(model):
                    detach(model)
                raise ValueError(
                    f"{who} asks for {names!r} with {options}, which cannot be attached here: {error}"
                ) from error
    for site, stack in found:
        site.module.locant.longest_trained = stack.get("trained_length", 0)  # pyright: ignore


def _read(source: Path) -> Any:
    file = source / RECORD
    for needed in (file, source / TENSORS):
        if not needed.is_file():
            raise FileNotFoundError(f"load: {needed} does not exist; give a folder that locant.hf.save wrote")
    return read_json(file)


def read_json(file: Path) -> Any:
    """What a JSON file holds. Raises: ValueError where it is cut off, or something else."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load: {file} is cut off or not JSON ({error!r}); copy or save it again") from error


def check_fit(who: str, site: Site, stack: dict[str, Any]) -> None:
    """Raise a ValueError where a stack of layers is not what an entry of a record was saved from."""
    have = {"class": type(site.module).__name__, "num_layers": len(site.attention)}
    sizes = host_sizes(site, stack["options"])
    have.update({name: sizes[name] for name in FITTING})
    want = {
        "class": stack["class"],
        "num_layers": stack["num_layers"],
        **{name: stack["sizes"].get(name) for name in FITTING},
    }
    for name, value in want.items():
        if have[name] != value:
            raise ValueError(f"{who} was saved from {name}={value} but the base model has {name}={have[name]}")


def fill(who: str, attachment: Attachment, tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors into an attachment. Raises: ValueError where names or shapes are not those it needs."""
    needed = {name: tuple(t.shape) for name, t in attachment.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(needed.keys() | given.keys()):
        if needed.get(name) != given.get(name):
            raise ValueError(
                f"{who} has shape {given.get(name)} for {name!r} but {attachment.stack.name!r} needs "
                f"{needed.get(name)}; the record and the tensors do not belong together"
            )
    attachment.load_state_dict(dict(tensors), strict=True)
