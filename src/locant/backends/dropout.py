"""Which weights dropout keeps: a hash of seed, head, query and key, so that tiles, passes and backends agree.

The hash (32-bit mixing by shifts and products) is the same in the C++ kernel, bit for bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF
STEPS = 1 << 24  # probabilities are counted in these steps


def draw_seed(probability: float) -> Int[Tensor, ""]:
    """A seed from torch's global generator, which is left alone where nothing is dropped."""
    return torch.randint(1 << 32, ()) if probability else torch.zeros((), dtype=torch.long)


def threshold(probability: float) -> int:
    """Hashes (of 24 bits) below this are dropped."""
    return round(probability * STEPS)


def factor(probability: float) -> float:
    """What kept weights are multiplied by."""
    return 1 / (1 - probability) if probability < 1 else 0.0


def mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """A 32-bit number with every bit depending on every bit of ``x`` (held in int64)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def kept(
    seed: int | Int[Tensor, ""],
    probability: float,
    heads: Int[Tensor, "G"],
    queries: Int[Tensor, "I"],
    num_keys: int,
    dtype: torch.dtype,
) -> Float[Tensor, "G I J"]:
    """0 where a weight is dropped, else 1 / (1 - probability). ``heads`` counts batch row * H + head."""
    head = mix((heads * 0x9E3779B9 + seed) & MASK)
    row = mix((head[:, None] + queries * 0x85EBCA6B) & MASK)
    key = torch.arange(num_keys, device=heads.device) * 0xC2B2AE35
    keep = (mix((row[..., None] + key) & MASK) >> 8) >= threshold(probability)
    return keep.to(dtype).mul_(factor(probability))
