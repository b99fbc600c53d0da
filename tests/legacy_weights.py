"""Weights that both sides of a comparison can draw: each tensor from its name, whatever the order."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def drawn(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """A float32 tensor for each name: 0.25 z, norm weights 1 + 0.1 z."""
    tensors = {}
    for name, shape in shapes.items():
        z = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        norm = "norm" in name.lower() and name.endswith("weight")
        tensors[name] = 1 + 0.1 * z if norm else 0.25 * z
    return tensors


def tokens(vocabulary: int, batch: int = 2, length: int = 11, seed: int = 0) -> Tensor:
    """Token ids above all special ones."""
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def mask(batch: int = 2, length: int = 11, padding: int = 3) -> Tensor:
    """All tokens of the first row, and the second without its last ones."""
    allowed = torch.ones(batch, length, dtype=torch.long)
    allowed[1:, length - padding :] = 0
    return allowed
