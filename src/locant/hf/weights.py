"""The weight files of a model's folder: which tensors they hold, and the tensors, without running code from them."""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from locant.hf.interface import NAME

FILES = (  # as transformers looks for them: the first that is there
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a folder's weights: one, or the shards of an index.

    Raises: FileNotFoundError where there is none, or where a shard is missing; ValueError for a broken index.
    """
    found = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"weights: {directory} holds none of {', '.join(FILES)}; give the folder of a model")
    if found.suffix != ".json":
        return [found]
    try:
        names = sorted(set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: {found} is cut off or no index of shards ({error!r}); copy it again") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"weights: {found} names {len(names)} shards but {missing[0]} is missing; copy all files of the model"
        )
    return [directory / name for name in names]


def read_weights(files: Iterable[Path], wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The tensors of weight files whose names are wanted, on the CPU. Torch files are read as data only.

    Raises: ValueError for a file that is cut off, holds other things than tensors, or wants to run code.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        read = _from_safetensors if file.suffix == ".safetensors" else _from_torch
        found |= read(file, wanted, "cpu")
    return found


def weight_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of what weight files hold, without reading the numbers of safetensors files.

    Raises: as `read_weights`.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix == ".safetensors":
            with _opened(file) as tensors:
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
        else:
            found |= {name: tuple(t.shape) for name, t in _from_torch(file, lambda name: True, "meta").items()}
    return found


def mark_of(file: Path) -> str | None:
    """What a safetensors file says under our name: the fingerprint of the record it belongs to. None without.

    Raises: as `read_weights`.
    """
    with _opened(file) as tensors:
        return (tensors.metadata() or {}).get(NAME)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights: {file} is cut off or no safetensors file ({error}); copy it again") from error


def _from_safetensors(file: Path, wanted: Callable[[str], bool], device: str) -> dict[str, Tensor]:
    with _opened(file) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys() if wanted(name)}


def _from_torch(file: Path, wanted: Callable[[str], bool], device: str) -> dict[str, Tensor]:
    state = load_torch(file, device)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"weights: {file} holds a {type(state).__name__} of other things than tensors by name; give a state dict"
        )
    return {name: tensor for name, tensor in state.items() if wanted(name)}


def load_torch(file: Path, device: str = "cpu") -> Any:
    """What a torch file holds, read as data only (an argparse.Namespace, which fairseq stores, is data).

    Raises: ValueError for a file that is cut off, or wants to run code.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"weights: {file} is refused, since it is more than tensors and wants to run code when it is read "
            f"({_first_line(error)}); have its maker save it as safetensors"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"weights: {file} is cut off or no torch file ({_first_line(error)}); copy it again"
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {told[:160]}"
