"""save_pretrained and from_pretrained of attached models: config.json records the encoding, loading attaches it again.

Importing `locant.hf` installs this in transformers. A saved config says under ``locant`` what `locant.hf.save` writes
to locant.json, and the added tensors lie among the model's own. Loading builds the host as transformers does, then
attaches, then fills in those tensors: encodings are always built on a real device, never on ``meta``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils

from locant.hf.attachment import attachments
from locant.hf.card import CARD, write_card
from locant.hf.checkpoint import attach_recorded, check_fit, fill
from locant.hf.families import Site, find_sites
from locant.hf.interface import NAME
from locant.hf.record import FORMAT, check_mark, fingerprint, is_record, record_of, recorded_stacks
from locant.hf.weights import mark_of, read_weights, weight_shapes
from locant.hf.writing import replacing

ADDED = re.compile(rf"^(?:(?P<stack>.*)\.)?{NAME}\.(?P<name>encodings\..*)$")  # a tensor of an attachment, in a model
OLD_TABLE = "distance_embedding.weight"  # the relative tables of transformers v4
WAITING = "_locant_waiting"
MARK: ContextVar[str | None] = ContextVar("MARK", default=None)  # of the record that is being saved


@dataclass(frozen=True)
class Waiting:
    """What a model that is being loaded gets attached once it is there. ``who`` begins the errors."""

    who: str
    found: list[tuple[Site, dict[str, Any]]]
    all_sites: bool
    tensors: dict[str, dict[str, Tensor]]  # by stack
    recorded: list[str]  # the paths of all stacks of the record, those that are not asked for too
    part: bool  # the model is a part of the one that was saved


def install() -> None:
    """Put the functions below around those of transformers, once."""
    for name, around in (
        ("save_pretrained", _around_saving),
        ("from_pretrained", _around_loading),
        ("_load_pretrained_model", _around_reading),
        ("_upload_modified_files", _around_upload),
    ):
        there = next(vars(cls)[name] for cls in PreTrainedModel.__mro__ if name in vars(cls))
        function = getattr(there, "__func__", there)
        if not hasattr(function, NAME):
            wrapped = functools.wraps(function)(around(function))
            setattr(wrapped, NAME, function)
            kind = type(there)
            setattr(PreTrainedModel, name, wrapped if function is there else kind(wrapped))
    writing = vars(modeling_utils)["safe_save_file"]
    if not hasattr(writing, NAME):
        marked = functools.wraps(writing)(_around_writing(writing))
        setattr(marked, NAME, writing)
        modeling_utils.__dict__["safe_save_file"] = marked


# --- saving -----------------------------------------------------------------------------------------------------------


def _around_saving(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        if not attachments(self):
            if is_record(vars(config).get(NAME)):  # of the folder that the config was read from
                delattr(config, NAME)
            return original(self, save_directory, is_main_process, *args, **kwargs)
        if kwargs.get("distributed_checkpoint"):
            raise ValueError(
                "save_pretrained: distributed_checkpoint=True came for a model with an encoding attached, which "
                "transformers would load without it; leave it out"
            )
        record = _record(self)
        before, token = vars(config).get(NAME), MARK.set(fingerprint(record))
        setattr(config, NAME, record)
        try:
            if not self.should_save_on_this_rank(is_main_process) or os.path.isfile(save_directory):
                return original(self, save_directory, is_main_process, *args, **kwargs)
            return _save_whole(original, self, Path(save_directory), is_main_process, *args, **kwargs)
        finally:
            MARK.reset(token)
            vars(config).pop(NAME, None)
            if before is not None:
                setattr(config, NAME, before)

    return save_pretrained


def _save_whole(original: Callable[..., Any], model: Any, target: Path, *args: Any, **kwargs: Any) -> Any:
    """Save into a new folder first: what was there stays as it is until all of it is written."""
    with replacing(target) as fresh:
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", target.resolve().name)
        if (target / CARD).is_file():
            shutil.copy2(target / CARD, fresh / CARD)
        saved = original(model, str(fresh), *args, **kwargs)
        write_card(model, fresh)
    return saved


def _around_writing(original: Callable[..., Any]) -> Callable[..., Any]:
    def safe_save_file(tensors: Any, filename: Any, metadata: dict[str, str] | None = None) -> Any:
        mark = MARK.get()
        return original(tensors, filename, metadata=metadata if mark is None else {**(metadata or {}), NAME: mark})

    return safe_save_file


def _record(model: nn.Module) -> dict[str, Any]:
    """The record, or why there is none: a training run should not end at its first checkpoint."""
    try:
        return record_of(model)
    except ValueError as error:
        return {"format": FORMAT, "refused": str(error)}


def _around_upload(original: Callable[..., Any]) -> Callable[..., Any]:
    def _upload_modified_files(self: Any, working_dir: Any, *args: Any, **kwargs: Any) -> Any:
        write_card(self, working_dir)  # transformers puts the Hub's own card there right before
        return original(self, working_dir, *args, **kwargs)

    return _upload_modified_files


# --- loading ----------------------------------------------------------------------------------------------------------


def _around_reading(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = _waiting(model, state_dict, checkpoint_files)
        if waiting is None:
            return original(model, state_dict, checkpoint_files, *args, **kwargs)
        state_dict = None if state_dict is None else {n: t for n, t in state_dict.items() if not ADDED.match(n)}
        _silence(model, waiting)
        info, offloaded = original(model, state_dict, checkpoint_files, *args, **kwargs)
        _check_part(waiting, model, info.missing_keys)
        setattr(model, WAITING, waiting)
        return info, offloaded

    return _load_pretrained_model


def _around_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = original(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        waiting = vars(model).pop(WAITING, None)
        if waiting is not None:
            _restore(model, waiting)
        return loaded

    return from_pretrained


def _waiting(
    model: Any, state_dict: Mapping[str, Any] | None, checkpoint_files: Iterable[Any] | None
) -> Waiting | None:
    """What a checkpoint holds for locant, matched with the model's stacks; None for a checkpoint without."""
    config = getattr(model, "config", None)
    record = vars(config).get(NAME) if config is not None else None
    source = str(getattr(config, "name_or_path", "") or "the state dict")
    files = [Path(f) for f in checkpoint_files or () if str(f).endswith((".safetensors", ".bin"))]
    safe = [] if state_dict is not None else [f for f in files if f.suffix != ".bin"]
    part = not is_record(record)  # a part of a model has a part of its config
    record = _record_beside(safe) if part else vars(config).pop(NAME)
    if record is None:  # torch files would have to be read twice
        _check_strays(source, state_dict, safe, model)
        return None
    who = f"from_pretrained: the record ({NAME}) in config.json of {source}"
    stacks = recorded_stacks(record, who)
    if part and not _concerns(stacks, model):
        return None
    found, all_sites = _match(who, model, stacks)
    for file in safe:
        check_mark(f"from_pretrained: {file.name} of {source}", mark_of(file), record)
    added = (
        {n: t for n, t in state_dict.items() if ADDED.match(n)}
        if state_dict is not None
        else read_weights(files, lambda n: bool(ADDED.match(n)))
    )
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in added.items():
        match = ADDED.match(name)
        assert match is not None
        groups.setdefault(match["stack"] or "", {})[match["name"]] = tensor
    paths = [stack["path"] for stack in stacks]
    return Waiting(f"from_pretrained: {source}", found, all_sites, groups, paths, part)


def _record_beside(files: list[Path]) -> Any:
    """The record in the config.json beside weight files, which that of a part of the model does not show."""
    try:
        beside = json.loads((files[0].parent / "config.json").read_text(encoding="utf-8")) if files else None
    except (OSError, ValueError):
        return None
    record = beside.get(NAME) if isinstance(beside, dict) else None
    return record if is_record(record) else None


def _concerns(stacks: list[dict[str, Any]], model: nn.Module) -> bool:
    """Whether a model has stacks of the classes that a record is about; other parts of the whole have none."""
    classes = {type(module).__name__ for module in model.modules()}
    return any(stack["class"] in classes for stack in stacks)


def _check_part(waiting: Waiting, model: nn.Module, missing: Iterable[str]) -> None:
    """Raise a ValueError where transformers did not find the weights of a part in the files of the whole."""
    for site, stack in waiting.found if waiting.part else ():
        path = f"{site.path}.{site.attention[0][0]}.".lstrip(".")
        if any(name.startswith(path) for name in missing):
            raise ValueError(
                f"{waiting.who} was saved with an encoding of {_named(stack['class'], stack['path'])}, but "
                f"transformers finds no weights for {type(model).__name__} there; load the whole with the class it was "
                "saved from, and take that part"
            )


def attach_as_recorded(model: Any) -> Any:
    """Attach what the config of a model records, with values as drawn: for a look at its structure; returns the model.

    Raises: ValueError for a record that cannot be read, or that does not fit the model.
    """
    record = vars(model.config).get(NAME)
    if is_record(record):
        delattr(model.config, NAME)
        who = f"attach_as_recorded: the record ({NAME}) in the config of {type(model).__name__}"
        attach_recorded(who, model, *_match(who, model, recorded_stacks(record, who)))
    return model


def _check_strays(source: str, state_dict: Mapping[str, Any] | None, files: list[Path], model: nn.Module) -> None:
    """Weights that belong to an attachment without its record, or to the relative tables of transformers v4."""
    try:
        names = state_dict if state_dict is not None else weight_shapes(files)
        marked = [file.name for file in files if mark_of(file) is not None]
    except ValueError:  # not ours: transformers says in its own words what it cannot read
        return
    added, old = [n for n in names if ADDED.match(n)], [n for n in names if n.endswith(OLD_TABLE)]
    own = old and any(name.endswith(OLD_TABLE) for name, _ in model.named_parameters())  # Wav2Vec2-BERT has such tables
    if added:
        raise ValueError(
            f"from_pretrained: {source} holds {len(added)} tensors of an attached encoding ({added[0]}, ...) but its "
            "config.json does not record one, so the model would load without it; save it again with save_pretrained "
            "while locant.hf is imported"
        )
    if marked:
        raise ValueError(
            f"from_pretrained: {marked[0]} of {source} was saved with an encoding attached but its config.json does "
            "not record one, so the model would load without it; copy or save it again"
        )
    if old and not own:
        warnings.warn(
            f"from_pretrained: {source} is a relative checkpoint of transformers v4; its {len(old)} tables ({old[0]}, "
            "...) are left out and a table that was never trained takes their place; use "
            f"locant.hf.from_legacy({source!r})",
            stacklevel=6,
        )


def nearest(path: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ends most like ``path``, part by part; None where there is none, or two are alike."""
    parts = path.split(".")[::-1]

    def alike(other: str) -> tuple[bool, int]:
        same = [a == b for a, b in zip(parts, other.split(".")[::-1], strict=False)]
        return other == path, (same.index(False) if False in same else len(same))

    ranked = sorted(set(candidates), key=alike, reverse=True)
    unclear = len(ranked) > 1 and alike(ranked[0]) == alike(ranked[1])
    return None if not ranked or unclear else ranked[0]


def _match(who: str, model: nn.Module, stacks: list[dict[str, Any]]) -> tuple[list[tuple[Site, dict[str, Any]]], bool]:
    sites = find_sites(model)
    found = []
    for stack in stacks:
        fitting = {
            site.path: site
            for site in sites
            if type(site.module).__name__ == stack["class"] and not _opposite(site.path, stack["path"])
        }
        path = nearest(stack["path"], fitting)
        alike = [other["path"] for other in stacks if other["class"] == stack["class"]]
        # neither a part of the checkpoint that is not asked for, nor a stack that had nothing attached
        if path is not None and nearest(path, alike) == stack["path"]:
            check_fit(who, fitting[path], stack)
            found.append((fitting[path], stack))
    if not found:
        raise ValueError(
            f"{who} is for {', '.join(_named(stack['class'], stack['path']) for stack in stacks)} but "
            f"{type(model).__name__} has {', '.join(_named(type(site.module).__name__, site.path) for site in sites)}; "
            "load it with the class it was saved from"
        )
    return found, len(found) == len(sites)


def _opposite(path: str, other: str) -> bool:
    """Whether one is an encoder and the other a decoder, which may be of one class (T5's)."""
    return {path.rpartition(".")[2], other.rpartition(".")[2]} == {"encoder", "decoder"}


def _named(cls: str, path: str) -> str:
    return f"{cls} at {path}" if path else cls


def _silence(model: Any, waiting: Waiting) -> None:
    """What is filled in here, or switched off here, is not missing and not unexpected."""
    gone = {
        rf"(^|\.){re.escape(path)}(\.|$)"
        for site, stack in waiting.found
        if not stack["keep_absolute"]
        for _, path in site.own
    }
    for name, patterns in (
        ("_keys_to_ignore_on_load_unexpected", {rf"(^|\.){NAME}\.encodings\."} | gone),
        ("_keys_to_ignore_on_load_missing", gone),
    ):
        setattr(model, name, set(getattr(model, name, None) or ()) | patterns)


def _restore(model: nn.Module, waiting: Waiting) -> None:
    attach_recorded(waiting.who, model, waiting.found, waiting.all_sites)
    taken = set()
    for site, stack in waiting.found:
        attachment: Any = site.module.get_submodule(NAME)
        own = nearest(stack["path"], waiting.tensors) if attachment.state_dict() else None
        fill(waiting.who, attachment, waiting.tensors[own] if own is not None else {})
        taken.add(own)
    served = {stack["path"] for _, stack in waiting.found}
    for path in waiting.tensors.keys() - taken:
        if nearest(path, waiting.recorded) in served:
            name = ".".join(filter(None, (path, NAME, min(waiting.tensors[path]))))
            raise ValueError(
                f"{waiting.who} holds {name}, which no encoding of the record takes; the record and the tensors do not "
                "belong together (an interrupted save?), save it again"
            )
