"""Checks of a model's folder: what it is for locant, and whether transformers loads all that is in it."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils.hub import cached_file

from locant.hf.attachment import attachments
from locant.hf.behavior import Finding
from locant.hf.directory import inspect_directory


def folder_of(source: str | os.PathLike[str]) -> Path:
    """A model's folder: given, or that of an id in the hub's cache. Raises: ValueError where there is none."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or len(folder.parts) > 2:
        raise ValueError(
            f"diagnose: {str(source)!r} is no folder, needed that of a saved model, or an id such as 'org/name'"
        )
    try:
        file = cached_file(str(source), "config.json", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"diagnose: there is no folder {str(source)!r} here, and no model of that name in the hub's cache (nothing "
            "is downloaded); check the path"
        ) from error
    return Path(str(file)).parent


def open_folder(folder: Path) -> tuple[nn.Module | None, list[Finding]]:
    """The model as transformers loads it, None where it should not be, and what was found on the way.

    Raises: ValueError for a folder without a model.
    """
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"diagnose: {str(folder)!r} holds {found}, needed a config.json; give the folder of a saved model"
        )
    try:
        kind = _kind(folder)
        told = inspect_directory(folder)
    except FileNotFoundError as error:
        raise _no_model(folder, error) from error
    except ValueError as error:
        return None, [Finding("folder", "FAULT", " ".join(str(error).split()), "copy or save it again")]
    if told.kind == "half-converted":
        return None, [Finding("folder", "FAULT", f"half-converted: {told.reason}", told.advice)]
    if told.kind == "attached":
        figure = f"{', '.join(told.encodings)} attached; without locant.hf imported it loads as a plain host"
        first = Finding("folder", "ok", figure)
    else:
        verdict = "FAULT" if told.kind == "legacy" else "ok"
        first = Finding("folder", verdict, told.reason, told.advice if told.kind == "legacy" else "")
    try:
        with torch.random.fork_rng(devices=[]):
            model, info = kind.from_pretrained(str(folder), local_files_only=True, output_loading_info=True)
    except Exception as error:  # whatever a folder under examination brings about is a finding
        told = f"not loaded: {' '.join(str(error).split()) or type(error).__name__}"
        return None, [first, Finding("weights", "FAULT", told, "copy or save it again")]
    return model.eval(), [first, _weights(model, info)]


def _kind(folder: Path) -> Any:
    """The class that a model was saved from."""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except OSError as error:
        raise _no_model(folder, error) from error
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else AutoModel


def _no_model(source: str | os.PathLike[str], error: Exception) -> ValueError:
    reason = textwrap.shorten(str(error), 300, placeholder=" ...")
    return ValueError(f"diagnose: no model could be loaded from {str(source)!r}: {reason}")


def _weights(model: nn.Module, info: dict[str, Any]) -> Finding:
    """Whether all that is in the files was used, and all that the model needs was there."""
    unlike = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    unused, drawn = sorted(info["unexpected_keys"]), sorted({*info["missing_keys"], *unlike})
    left = f" ({len(unused)} in the files are not used, such as {unused[0]})" if unused else ""
    if drawn:
        figure = f"{len(drawn)} not in the files, drawn anew ({', '.join(drawn[:2])}){left}"
        return Finding("weights", "FAULT", figure, "load it with the class it was saved from")
    return Finding("weights", "ok", f"all loaded{', with what is attached' if attachments(model) else ''}{left}")
