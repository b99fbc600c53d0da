"""Checks of length: what a model was trained for, what it serves, what is asked of it, and one token too many."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from locant.hf.attachment import attachments
from locant.hf.behavior import Finding
from locant.hf.build import FIELDS, spare_rows, table_rows
from locant.hf.families import find_sites, size
from locant.hf.probe import Probe

LONGEST = 4096  # up to this limit, one token too many is tried
STATED = {  # files beside a model that say up to which length it is used: the field
    "tokenizer_config.json": "model_max_length",
    "sentence_bert_config.json": "max_seq_length",
}


@dataclass(frozen=True)
class Reach:
    """``trained``: tokens the model was made for; ``limit``: the most it serves. None: not told; no limit."""

    trained: int | None
    limit: int | None


def reach(model: nn.Module) -> Reach:
    """What the tables, the config, and the record of what is attached say about length."""
    try:
        sites = find_sites(model)
    except ValueError:  # it computes attention on its own: only its config can tell
        return Reach(size(getattr(model, "config", None), FIELDS["max_length"]), None)
    trained, limits = [], []
    for site in sites:
        told = size(getattr(site.module, "config", None), FIELDS["max_length"])
        trained.append(None if told is None else told - spare_rows(site))
        rows = table_rows(site)
        limits.append(None if rows is None else rows - spare_rows(site))
    for _, _, attachment in attachments(model):
        limits += [layer.max_length for layer in attachment.encodings]
        told = attachment.longest_trained or attachment.spec.options.get("max_length")
        trained = [told] if told else trained
        if attachment.kept_rows is not None:
            limits.append(attachment.kept_rows - attachment.spare_rows)
    known, limit = [n for n in trained if n is not None], [n for n in limits if n is not None]
    shortest = min(limit, default=None)
    return Reach(min(known, default=shortest), shortest)


def stated_lengths(folder: Path | None, asked: int | None) -> dict[str, int]:
    """Where a length in use is stated, and which: by the caller, and in the files beside a model."""
    found = {} if asked is None else {"asked for": asked}
    for name, field in STATED.items():
        file = None if folder is None else folder / name
        if file is not None and file.is_file():
            value = _field(file, field)
            if isinstance(value, int) and 0 < value < 10**9:
                found[f"{name} ({field})"] = value
    return found


def _field(file: Path, field: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")).get(field)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"diagnose: {file.name} is cut off or not JSON ({error}); copy it again") from error


def trained_length(model: nn.Module, stated: dict[str, int]) -> Finding:
    """Is the length in use one that the model was trained for, and can serve?"""
    check, there = "length in use", reach(model)
    facts = f"trained for {there.trained or 'an unknown length'}, limit {there.limit or 'none'}"
    for where, length in stated.items():
        if there.limit is not None and length > there.limit:
            advice = f"truncate to {there.limit} tokens, or locant.hf.extend(model, {length})"
            return Finding(check, "FAULT", f"{length} {where}, but it serves {there.limit}", advice)
        if there.trained is not None and length > there.trained:
            advice = f"truncate to {there.trained} tokens, or fine-tune at {length}"
            return Finding(check, "FAULT", f"{length} {where}, but trained for {there.trained}", advice)
    in_use = ", ".join(f"{length} {where}" for where, length in stated.items()) or "none stated"
    return Finding(check, "ok", f"{in_use}; {facts}")


def one_too_many(probe: Probe, limit: int | None) -> Finding:
    """Is the first token past a table one clear error, which names the limit?"""
    check = "past the limit"
    if limit is None:
        return Finding(check, "ok", "defined at any length")
    if limit > LONGEST:
        return Finding(check, "cannot", f"the limit is {limit} (tried up to {LONGEST})")
    try:
        probe.run(probe.ids(limit + 1))
    except ValueError as error:
        if str(limit) in str(error):
            return Finding(check, "ok", f"token {limit + 1} is refused")
        what = f"ValueError without the limit: {error}"
    except (RuntimeError, IndexError) as error:  # what a host's own kernels say
        what = f"{type(error).__name__}: {error}"
    else:
        return Finding(check, "FAULT", f"{limit + 1} tokens run through a table for {limit}", f"truncate to {limit}")
    return Finding(
        check,
        "FAULT",
        f"token {limit + 1} ends in {textwrap.shorten(what, 100, placeholder=' ...')}",
        f"truncate to {limit} tokens; locant.hf.guard(model) makes it one clear error",
    )
