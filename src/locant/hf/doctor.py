"""Does it all hold? One model or folder in, a list of findings out (see `diagnose`)."""

from __future__ import annotations

import contextlib
import copy
import os
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import nn

from locant.hf.attachment import attachments
from locant.hf.behavior import CHECKS, Finding, generating
from locant.hf.constants import constants, held_tensors, saving
from locant.hf.describe import describe
from locant.hf.folder import folder_of, open_folder
from locant.hf.probe import LENGTH, Probe, exact_copy, probes
from locant.hf.reach import one_too_many, reach, stated_lengths, trained_length

SHORTEST = 8  # tokens that a probe needs
DROPPED = ("relative_key", "relative_key_query")  # kinds of position that transformers v5 no longer has


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found in a model of class ``model``; ``encoding``: what is attached, or the host's own."""

    model: str
    encoding: str
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.verdict == "FAULT")

    @property
    def healthy(self) -> bool:
        """Whether there is no fault (checks that could not be made do not count)."""
        return not self.faults

    def __str__(self) -> str:
        """One line for each check."""
        width = max(len(finding.check) for finding in self.findings)
        lines = [f"{self.model} ({self.encoding})"]
        for f in self.findings:
            lines.append(f"{f.check:{width}}  {f.verdict:6}  {f.figure}{f'; {f.advice}' if f.advice else ''}")
        return "\n".join(lines)


def diagnose(model: nn.Module | str | os.PathLike[str], *, length: int | None = None) -> Diagnosis:
    """Check a model, attached or plain: do its positions survive what it will meet?

    ``model``: a model, the folder of a saved one, or the id of one in the hub's cache (nothing is downloaded, no code
    of a folder is run). ``length``: the number of tokens that you mean to use. Runs made-up tokens through a float64
    copy on the CPU; the model itself stays as it is. Asked: does order matter at all; do padding, packed documents and
    caches change what a token gets; is saving and loading exact; is the length in use trained; are constants finite;
    and of a folder, does transformers load all that is in it.
    Raises: ValueError for a model that takes neither token ids nor hidden states, or a folder without a model.
    """
    with _quiet():
        if isinstance(model, nn.Module):
            return _examine(model, _dropped(model), None, length)
        folder = folder_of(model)
        loaded, findings = open_folder(folder)
        if loaded is None:
            return Diagnosis(str(folder), "not loaded", tuple(findings))
        return _examine(loaded, findings, folder, length)


def _examine(model: nn.Module, findings: list[Finding], folder: Path | None, length: int | None) -> Diagnosis:
    findings = [*findings, constants(model)]
    if not any(tensor.is_meta for _, _, tensor in held_tensors(model)):
        exact = exact_copy(model)
        stacks = list(probes(exact))
        limit = reach(model).limit
        tokens = LENGTH if limit is None else min(LENGTH, limit)
        for probe in stacks:
            findings += _probed(exact, model, probe, tokens, limit)
        findings += _tried("save and load", lambda: saving(model, tokens))
    findings += _tried("length in use", lambda: trained_length(model, stated_lengths(folder, length)))
    return Diagnosis(type(model).__name__, _encoding(model), tuple(findings))


def _probed(exact: nn.Module, model: nn.Module, probe: Probe, tokens: int, limit: int | None) -> Iterator[Finding]:
    """What one stack of layers does; a stack that does not run at all is one fault."""
    prefix = f"{probe.name}: " if probe.name else ""
    runs = _tried("runs", lambda: _runs(model, probe, tokens))
    found = list(runs)
    if tokens < SHORTEST:
        found.append(Finding("behavior", "cannot", f"serves {tokens} tokens, a probe needs {SHORTEST}"))
    elif found[0].verdict == "ok":
        for name, check in CHECKS:
            found += _tried(name, lambda check=check: check(probe, tokens))
        found += _tried("generate", lambda: generating(exact, probe, tokens))
        found += _tried("past the limit", lambda: one_too_many(probe, limit))
    yield from (replace(finding, check=prefix + finding.check) for finding in found)


def _runs(model: nn.Module, probe: Probe, tokens: int) -> Finding:
    out = probe.run(probe.ids(tokens))
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), probe.dtype)
    if bool(out.isfinite().all()) and own in (torch.float16, torch.bfloat16):
        stacks = {other.name: other for other in probes(copy.deepcopy(model).cpu().eval())}
        out = stacks[probe.name].run(probe.ids(tokens))
    if bool(out.isfinite().all()):
        return Finding("runs", "ok", f"{tokens} tokens, finite in {str(own).removeprefix('torch.')}")
    return Finding(
        "runs",
        "FAULT",
        f"outputs of {tokens} tokens are not finite in {str(own).removeprefix('torch.')}",
        "see `constants`; in half precision, try float32",
    )


def _tried(name: str, check: Callable[[], Finding | list[Finding] | None]) -> list[Finding]:
    """What a check found. Whatever a model under examination raises is a finding, and no reason to stop."""
    try:
        found = check()
    except Exception as error:
        text = textwrap.shorten(str(error), 200, placeholder=" ...")
        return [Finding(name, "FAULT" if name == "runs" else "cannot", f"{type(error).__name__}: {text}")]
    return [] if found is None else found if isinstance(found, list) else [found]


def _dropped(model: nn.Module) -> list[Finding]:
    """A config that asks for positions which transformers v5 no longer has."""
    kind = next(
        (k for m in model.modules() if (k := getattr(getattr(m, "config", None), "position_embedding_type", None))),
        None,
    )
    if kind not in DROPPED or attachments(model):
        return []
    return [
        Finding(
            "config",
            "FAULT",
            f"asks for {kind!r}, which transformers v5 dropped without a word",
            "load it with locant.hf.from_legacy, or write it anew with locant convert-legacy",
        )
    ]


def _encoding(model: nn.Module) -> str:
    try:
        layers = [layer.name for stack in describe(model).stacks for layer in stack.layers]
    except ValueError:
        return "its own"
    return ", ".join(dict.fromkeys(layers))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the load reports, progress bars and warnings that probing brings about."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(50)  # critical
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
