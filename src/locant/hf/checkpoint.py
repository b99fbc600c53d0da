"""Save and load what an encoding added to a model: how it was attached (locant.json) and its tensors (safetensors)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import locant
from locant.hf.attach import Model, attach, detach
from locant.hf.attachment import Attachment, attachments
from locant.hf.build import host_sizes
from locant.hf.families import Site, find_sites

RECORD, TENSORS, FORMAT = "locant.json", "locant.safetensors", 1
CHOICES = (
    "share_layers",
    "keep_absolute",
    "backend",
    "keep_scale",
)  # arguments of attach, beside the encoding and its options
KEYS = ("class", "encoding", "options", *CHOICES, "num_layers", "sizes")
FITTING = ("num_heads", "head_dim", "model_dim")  # sizes that a base model must share


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
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        (fresh / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, fresh / TENSORS)
        put(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def record_of(model: nn.Module) -> dict[str, Any]:
    """How a model's encodings were attached, as JSON: what locant.json holds, and ``config.locant`` of a saved model.

    Raises: ValueError where an object was attached instead of a name, or where options are not JSON.
    """
    found = attachments(model)
    record = {
        "format": FORMAT,
        "locant": locant.__version__,
        "host": type(model).__name__,
        "stacks": [_record(*item) for item in found],
    }
    try:
        return json.loads(json.dumps(record))
    except TypeError as error:
        raise ValueError(f"save: the options {found[0][2].spec.options} cannot be written as JSON: {error}") from error


def _ours(target: Path) -> bool:
    files = {file.name for file in target.iterdir()}
    return not files or (RECORD in files and files <= {RECORD, TENSORS})


def put(fresh: Path, target: Path) -> None:
    """Make a finished folder appear under its name; one that was there is replaced."""
    umask = os.umask(0)
    os.umask(umask)
    fresh.chmod(0o777 & ~umask)
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    target.rename(old / target.name)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _record(path: str, module: nn.Module, attachment: Attachment) -> dict[str, Any]:
    spec = attachment.spec
    if spec.encoding is None:
        raise ValueError(
            f"save: {attachment.stack.name!r} was attached as an object, which cannot be rebuilt from a name; attach "
            "it by name with its options to save it, or keep attachment.state_dict() yourself"
        )
    return {
        "path": path,
        "class": type(module).__name__,
        "family": attachment.family.name,
        "encoding": spec.encoding,
        "options": spec.options,
        **{choice: getattr(spec, choice) for choice in CHOICES},
        "num_layers": len(attachment.layer_of),
        "sizes": spec.sizes,
        "trained_length": attachment.longest_trained,
    }


def load(base_model: Model, directory: str | os.PathLike[str]) -> Model:
    """Attach to a base model, in place, what `save` wrote; returns the model.

    The head of the model may be another one; the stacks of layers must be the same.
    Raises: FileNotFoundError for a missing file; ValueError for a file that is cut off or foreign, or a base model that
    does not fit (then it is left as it was), or another major version of locant wrote.
    """
    source = Path(directory)
    stacks = _read(source)
    sites = find_sites(base_model)
    if len(sites) != len(stacks):
        raise ValueError(
            f"load: {source} is for {len(stacks)} stacks of layers but {type(base_model).__name__} has {len(sites)}"
        )
    for site, stack in zip(sites, stacks, strict=True):
        check_fit(f"load: {source}", site, stack)
    tensors = _tensors(source)
    attach_recorded(base_model, list(zip(sites, stacks, strict=True)), all_sites=True)
    try:
        for number, (_, _, attachment) in enumerate(attachments(base_model)):
            own = {n.removeprefix(f"{number}."): t for n, t in tensors.items() if n.startswith(f"{number}.")}
            fill(f"load: {source / TENSORS}", attachment, own)
    except ValueError:
        detach(base_model)
        raise
    return base_model


def attach_recorded(model: nn.Module, found: list[tuple[Site, dict[str, Any]]], all_sites: bool) -> None:
    """Attach to each stack of layers what its entry of a record tells; nothing stays attached where one is refused.

    ``all_sites``: these are all stacks of the model. The drawn values are to be overwritten: the random state is kept.
    """
    calls = [
        (
            stack["encoding"] if isinstance(stack["encoding"], str) else tuple(stack["encoding"]),
            {name: stack[name] for name in CHOICES} | stack["options"],
        )
        for _, stack in found
    ]
    together = all_sites and all(call == calls[0] for call in calls)
    roots = [model] if together else [site.module for site, _ in found]
    with torch.random.fork_rng(devices=[]):
        try:
            for root, (names, choices) in zip(roots, calls, strict=False):
                attach(root, names, **choices)
        except (ValueError, TypeError):
            if attachments(model):
                detach(model)
            raise
    for site, stack in found:
        site.module.locant.longest_trained = stack.get("trained_length", 0)  # pyright: ignore


def _read(source: Path) -> list[dict[str, Any]]:
    file = source / RECORD
    for needed in (file, source / TENSORS):
        if not needed.is_file():
            raise FileNotFoundError(f"load: {needed} does not exist; give a folder that locant.hf.save wrote")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"load: {file} is cut off or was not written by locant.hf.save ({error!r}); save it again"
        ) from error
    return recorded_stacks(record, f"load: {file}")


def recorded_stacks(record: Any, who: str) -> list[dict[str, Any]]:
    """The stacks of a record. ``who`` begins the errors: the caller, and where the record came from.

    Raises: ValueError for one that is cut off or foreign, of another format, or written by another major version.
    """
    try:
        if record["format"] != FORMAT:
            raise ValueError(
                f"{who} has format {record['format']} (written by locant {record.get('locant')}), this version "
                f"reads format {FORMAT}"
            )
        stacks, version = record["stacks"], str(record["locant"])
        for stack in stacks:
            for key in KEYS:
                stack[key]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{who} is cut off or was not written by locant.hf.save ({error!r}); save it again") from error
    if version.split(".")[0] != locant.__version__.split(".")[0]:
        raise ValueError(
            f"{who} was written by locant {version}, which this one ({locant.__version__}) cannot be sure to read as "
            f"it was meant; install locant {version.split('.')[0]}.x, or save it again with this version"
        )
    return stacks


def _tensors(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source / TENSORS)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"load: {source / TENSORS} is cut off or no safetensors file ({error}); save it again"
        ) from error


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
