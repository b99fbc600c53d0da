"""Checks of what a model holds: is every number finite and on a real device, are constants those its class builds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locant.hf.behavior import Finding
from locant.hf.probe import EXACT, Probe, distance, exact_copy, probes


def held_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of all that a model holds: parameters, buffers, and plain tensor attributes."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            yield kind, name, tensor
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            for tensor in (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            ):
                if isinstance(tensor, Tensor):
                    yield "attribute", f"{path}.{name}".lstrip("."), tensor


def constants(model: nn.Module) -> Finding:
    """Are all tensors real (not on the meta device) and finite, and non-persistent buffers what the class builds?

    Transformers v5 builds models on the meta device, so that a buffer that is not stored comes back as whatever was in
    memory, unless its class says how to fill it.
    """
    check = "constants"
    there = list(held_tensors(model))
    empty = [f"{kind} {name}" for kind, name, t in there if t.is_meta]
    if empty:
        return Finding(
            check,
            "FAULT",
            f"on the meta device: {_few(empty)}",
            "build it again on a real device, or register it as a buffer",
        )
    broken = [f"{kind} {name}" for kind, name, t in there if _broken(kind, t)]
    if broken:
        return Finding(
            check, "FAULT", f"not finite: {_few(broken)}", "compute it again, or load the model from an intact file"
        )
    fresh = _built_anew(model)
    if fresh is None:
        return Finding(check, "ok", f"{len(there)} tensors finite (not compared with a new build)")
    here, built = dict(model.named_buffers()), dict(fresh.named_buffers())
    unlike = [f"buffer {n}" for n in _not_stored(model) if n in built and not _same(here[n], built[n])]
    if unlike:
        return Finding(
            check,
            "FAULT",
            f"not what {type(model).__name__} builds: {_few(unlike)}",
            "fill it in _init_weights of its class, or store it (persistent=True)",
        )
    return Finding(check, "ok", f"{len(there)} tensors finite")


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _broken(kind: str, tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    return bool(tensor.isnan().any()) or (kind == "parameter" and bool(tensor.isinf().any()))


def _not_stored(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            if module._buffers.get(name) is not None:
                yield f"{path}.{name}".lstrip(".")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double().cpu(), b.double(), rtol=1e-2, atol=1e-6, equal_nan=True)


def _built_anew(model: nn.Module) -> nn.Module | None:
    """The model as its class builds it from its config, for its constants; None where only its maker can."""
    if not isinstance(model, PreTrainedModel) or _large(model):
        return None
    with torch.random.fork_rng(devices=[]):
        try:
            return type(model)(model.config)
        except TypeError:  # a constructor of another form
            return None


def _large(model: nn.Module) -> bool:
    return sum(p.numel() for p in model.parameters()) > EXACT


def saving(model: nn.Module, length: int) -> Finding:
    """Does a model that is saved and loaded give the same outputs?"""
    check = "save and load"
    if not isinstance(model, PreTrainedModel):
        return Finding(
            check,
            "cannot",
            f"{type(model).__name__} has no save_pretrained",
            "save its state_dict, and build it from code",
        )
    if _large(model):
        return Finding(
            check, "cannot", f"{model.num_parameters():,} parameters (tried up to {EXACT:,})", "try it by hand"
        )
    with tempfile.TemporaryDirectory(prefix="locant-") as folder:
        model.save_pretrained(folder)
        loaded = _reload(model, Path(folder))
    far = max(distance(*(_seen(p, length) for p in pair)) for pair in zip(_exact(model), _exact(loaded), strict=True))
    if far <= 1e-5:
        return Finding(check, "ok", f"{far:.1g}")
    return Finding(
        check, "FAULT", f"outputs differ by {far:.2g}", "a constant is not rebuilt: see `constants` of the loaded model"
    )


def _reload(model: PreTrainedModel, folder: Path) -> Any:
    with torch.random.fork_rng(devices=[]):
        return type(model).from_pretrained(folder, local_files_only=True, dtype=model.dtype).eval()


def _exact(model: nn.Module) -> list[Probe]:
    return list(probes(exact_copy(model)))


def _seen(probe: Probe, length: int) -> Tensor:
    return probe.run(probe.ids(length, seed=6))
