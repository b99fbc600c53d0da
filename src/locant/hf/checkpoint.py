"""Save and load what an encoding added to a model: how it was attached (locant.json) and its tensors (safetensors)."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
    try:
        record = json.dumps(
            {
                "format": FORMAT,
                "locant": locant.__version__,
                "host": type(model).__name__,
                "stacks": [_record(*item) for item in found],
            },
            indent=2,
        )
    except TypeError as error:
        raise ValueError(f"save: the options {found[0][2].spec.options} cannot be written as JSON: {error}") from error
    tensors = {
        f"{number}.{name}": tensor.detach().contiguous()
        for number, (_, _, attachment) in enumerate(found)
        for name, tensor in attachment.state_dict().items()
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        (fresh / RECORD).write_text(record + "\n", encoding="utf-8")
        save_file(tensors, fresh / TENSORS)
        _put(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def _ours(target: Path) -> bool:
    files = {file.name for file in target.iterdir()}
    return not files or (RECORD in files and files <= {RECORD, TENSORS})


def _put(fresh: Path, target: Path) -> None:
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
        "share_layers": spec.share_layers,
        "keep_absolute": spec.keep_absolute,
        "backend": spec.backend,
        "num_layers": len(attachment.layer_of),
        "sizes": spec.sizes,
    }


def load(base_model: Model, directory: str | os.PathLike[str]) -> Model:
    """Attach to a base model, in place, what `save` wrote; returns the model.

    The head of the model may be another one; the stacks of layers must be the same.
    Raises: FileNotFoundError for a missing file; ValueError for a file that is cut off or foreign, or a base model that
    does not fit (then it is left as it was).
    """
    source = Path(directory)
    stacks = _read(source)
    sites = find_sites(base_model)
    if len(sites) != len(stacks):
        raise ValueError(
            f"load: {source} is for {len(stacks)} stacks of layers but {type(base_model).__name__} has {len(sites)}"
        )
    for site, stack in zip(sites, stacks, strict=True):
        _check_fit(source, site, stack)
    tensors = _tensors(source)
    first = stacks[0]
    names = first["encoding"]
    with torch.random.fork_rng(devices=[]):
        attach(
            base_model,
            names if isinstance(names, str) else tuple(names),
            keep_absolute=first["keep_absolute"],
            share_layers=first["share_layers"],
            backend=first["backend"],
            **first["options"],
        )
    try:
        for number, (_, _, attachment) in enumerate(attachments(base_model)):
            _fill(source, attachment, number, tensors)
    except ValueError:
        detach(base_model)
        raise
    return base_model


def _read(source: Path) -> list[dict[str, Any]]:
    file = source / RECORD
    for needed in (file, source / TENSORS):
        if not needed.is_file():
            raise FileNotFoundError(f"load: {needed} does not exist; give a folder that locant.hf.save wrote")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ValueError(
                f"load: {file} has format {record['format']} (written by locant {record.get('locant')}), this version "
                f"reads format {FORMAT}"
            )
        stacks = record["stacks"]
        for stack in stacks:
            for key in (
                "class",
                "encoding",
                "options",
                "share_layers",
                "keep_absolute",
                "backend",
                "num_layers",
                "sizes",
            ):
                stack[key]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"load: {file} is cut off or was not written by locant.hf.save ({error!r}); save it again"
        ) from error
    return stacks


def _tensors(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source / TENSORS)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"load: {source / TENSORS} is cut off or no safetensors file ({error}); save it again"
        ) from error


def _check_fit(source: Path, site: Site, stack: dict[str, Any]) -> None:
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
            raise ValueError(f"load: {source} was saved from {name}={value} but the base model has {name}={have[name]}")


def _fill(source: Path, attachment: Attachment, number: int, tensors: dict[str, Tensor]) -> None:
    own = {name.removeprefix(f"{number}."): t for name, t in tensors.items() if name.startswith(f"{number}.")}
    needed = {name: tuple(t.shape) for name, t in attachment.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in own.items()}
    for name in sorted(needed.keys() | given.keys()):
        if needed.get(name) != given.get(name):
            raise ValueError(
                f"load: {source / TENSORS} has shape {given.get(name)} for {name!r} of stack {number} but "
                f"{attachment.stack.name!r} needs {needed.get(name)}; the two files do not belong together"
            )
    attachment.load_state_dict(own, strict=True)
