"""Uninitialized memory reads as NaN under test, so that a forgotten initialization cannot pass by luck.

`torch.utils.deterministic.fill_uninitialized_memory` does this only together with deterministic algorithms, which
change the kernels under test. The wrappers here only fill. They stay in place for the whole process (a torch function
that changes its identity halfway confuses torch's caches) and pickle as the functions that they wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Fill in place with NaN, or with the largest value of an integer type."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _filled(function: Callable[..., torch.Tensor], module: str, qualname: str) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fill(function(*args, **kwargs))

    empty.__module__, empty.__qualname__ = module, qualname
    return empty


def fill_uninitialized_memory() -> None:
    """Wrap torch.empty, empty_like, empty_strided and Tensor.new_empty for the rest of this process, once."""
    if hasattr(torch.empty, "__wrapped__"):
        return
    # `with torch.device(...)` knows the constructors by identity, in a set built once: let it see the originals.
    torch.utils._device._device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, _filled(getattr(torch, name), "torch", name))
    torch.Tensor.new_empty = _filled(torch.Tensor.new_empty, "torch", "Tensor.new_empty")
