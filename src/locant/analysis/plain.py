"""Results as plain data: dataclasses to dictionaries that JSON can hold, where None means undefined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def plain(value: Any) -> Any:
    """Dataclasses, tensors, mappings and sequences as dictionaries, lists and numbers; what is not finite is None.

    Raises: TypeError for anything else.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor):
        return _listed(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [plain(entry) for entry in value]
    raise TypeError(
        f"analysis: a {type(value).__name__} ({value!r}) has no plain form; give numbers, tensors, mappings"
    )


def _listed(tensor: Tensor) -> Any:
    listed = tensor.detach().cpu().tolist()
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return listed
    return plain(listed)


def defined(value: Tensor | float) -> float | None:
    """A number, or None where it is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def reduced(maps: Float[Tensor, "... I J"], side: int) -> Float[Tensor, "... m n"]:
    """Maps no larger than ``side`` by ``side``: block means, like a small picture of a large one."""
    rows, columns = (min(side, size) for size in maps.shape[-2:])
    if (rows, columns) == tuple(maps.shape[-2:]):
        return maps
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    return F.adaptive_avg_pool2d(flat, (rows, columns)).reshape(*maps.shape[:-2], rows, columns)


def check_finite(who: str, name: str, tensor: Tensor) -> None:
    """Raise a ValueError that names the part of the model that is not finite."""
    bad = int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else 0
    if bad:
        raise ValueError(
            f"{who}: {name} holds {bad} of {tensor.numel()} numbers that are not finite; "
            "check how the model was trained or loaded before analyzing it"
        )


def check_square(who: str, matrix: Tensor) -> int:
    """The side of a square matrix of finite numbers.

    Raises: ValueError for another shape, an empty matrix, or numbers that are not finite.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.shape[0]:
        raise ValueError(
            f"{who}: the matrix has shape {tuple(matrix.shape)}; give queries by keys of the same n >= 1 positions"
        )
    check_finite(who, "the matrix", matrix)
    return matrix.shape[0]


def as_double(tensor: Tensor) -> Tensor:
    """In float64 on the CPU, without gradient."""
    return tensor.detach().to("cpu", torch.float64)
