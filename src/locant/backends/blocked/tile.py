"""What one tile of attention knows: some heads of one batch row, a block of queries, all keys they may see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.positions import Positions
from locant.terms import Rule


class Scratch:
    """Buffers by name, kept between tiles: fresh memory costs more than the arithmetic done on it."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """A contiguous buffer with undefined content."""
        size = 1
        for extent in shape:
            size *= extent
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._like.new_empty(size)
        return self._buffers[name][:size].view(shape)


@dataclass(frozen=True)
class Group:
    """Some heads of one batch row: k, v, and where their gradients are summed (None in forward)."""

    batch: int
    heads: slice
    k: Float[Tensor, "G J D"]
    v: Float[Tensor, "G J E"]
    dk: Float[Tensor, "G J D"] | None
    scratch: Scratch

    def pick(self, tensor: Tensor) -> Tensor:
        """This group's part of a tensor [B|1 H|1 ..], as [G|1 ..]."""
        tensor = tensor[self.batch if tensor.shape[0] > 1 else 0]
        return tensor[self.heads] if tensor.shape[0] > 1 else tensor


@dataclass(frozen=True)
class Tile:
    """A block of queries of a group. ``q`` is as given, ``scaled`` times the scale; their gradients are kept apart."""

    group: Group
    queries: slice
    num_keys: int  # keys 0 .. num_keys - 1 are looked at
    q: Float[Tensor, "G I D"]
    scaled: Float[Tensor, "G I D"]
    row_scale: Float[Tensor, "I 1"] | None  # where the scale is a number for each query
    positions: Positions
    dq: Float[Tensor, "G I D"] | None = None
    dscaled: Float[Tensor, "G I D"] | None = None

    @property
    def num_queries(self) -> int:
        """Queries in this tile."""
        return self.q.shape[1]

    def pick(self, tensor: Tensor) -> Tensor:
        """This tile's part of a tensor [B|1 H|1 I J], as [G|1 I J]."""
        return self.group.pick(tensor)[:, self.queries, : self.num_keys]

    def rows(self, rule: Rule) -> Int[Tensor, "I J"]:
        """Table row of every pair of the tile, for any ids."""
        rows = rule.rows(self._positions())
        return rows[self.group.batch if rows.shape[0] > 1 else 0] if rows.dim() == 3 else rows

    def _positions(self) -> Positions:
        """The positions of the tile's queries and keys."""
        parts: dict[str, Any] = {}
        for side, here in (("query", self.queries), ("key", slice(self.num_keys))):
            for name in (side, f"{side}_special", f"{side}_document"):
                ids = getattr(self.positions, name)
                parts[name] = None if ids is None else ids[..., here]
        pair = {name: t[..., self.queries, : self.num_keys] for name, t in self.positions.pair.items()}
        return replace(self.positions, **parts, pair=pair, shared={})


class Diagonals:
    """Table rows by offset: ``rows[x]`` serves offset ``first + x``, up to offset ``last``.

    All offsets <= ``left`` share one row, and so do all offsets >= ``right``: a clip, or a bucket that saturates.
    """

    def __init__(self, rule: Rule, first: int, last: int, device: torch.device) -> None:
        self.first, self.last = first, last
        rows = rule.row(torch.arange(self.first, self.last + 1))  # on the CPU: no device is read
        changes = (rows[1:] != rows[:-1]).nonzero().flatten()
        self.left = self.first + (int(changes[0]) if len(changes) else 0)
        self.right = self.first + int(changes[-1]) + 1 if len(changes) else self.last
        self.rows = rows.to(device)

    @property
    def shift(self) -> int:
        """Query t is key shift + t, on contiguous positions: their offsets are 1 - J .. I - 1."""
        return -(self.first + self.last)

    @property
    def band_rows(self) -> Int[Tensor, "W"]:
        """Table rows of the offsets ``left`` .. ``right``."""
        return self.rows[self.left - self.first : self.right - self.first + 1]

    def band(self, tile: Tile) -> Band:
        """Where the tile leaves the constant parts."""
        return Band(self, tile.queries.start + self.shift, tile.num_queries, tile.num_keys)


class Band:
    """A tile seen by diagonals: keys before ``start`` are all far left, keys from ``stop`` all far right.

    Between them the tile needs the offsets ``low`` .. ``high`` of each query (``columns`` among those of the band):
    ``compact`` arrays [G I W] have one column for each, and the helpers lay them out over the tile and back.
    """

    def __init__(self, diagonals: Diagonals, first_query: int, num_queries: int, num_keys: int) -> None:
        left, right, last_query = diagonals.left, diagonals.right, first_query + num_queries - 1
        self.num_queries, self.first_query, self.num_keys = num_queries, first_query, num_keys
        self.start = min(max(first_query + left + 1, 0), num_keys)
        self.stop = min(max(last_query + right, self.start), num_keys)
        self.lowest, self.highest = self.start - last_query, self.stop - 1 - first_query
        low = left if self.start else min(max(self.lowest, left), right)
        high = right if self.stop < num_keys else max(min(self.highest, right), low)
        self.columns = slice(low - left, high - left + 1)
        inner_low, inner_high = max(self.lowest, low), min(self.highest, high)
        self.inner = slice(inner_low - low, inner_high - low + 1)  # compact columns that the middle needs
        self.margin = inner_low - self.lowest

    @property
    def width(self) -> int:
        """Keys in the middle."""
        return self.stop - self.start

    def skewed(self, wide: Float[Tensor, "G I W"]) -> Float[Tensor, "G I W2"]:
        """The middle [G I width] of a contiguous array over offsets [G I lowest .. highest], as a view."""
        groups, rows, columns = wide.shape
        start = wide.storage_offset() + rows - 1
        return wide.as_strided((groups, rows, self.width), (rows * columns, columns - 1, 1), start)

    def add(self, logits: Float[Tensor, "G I J"], compact: Float[Tensor, "G I W"], scratch: Scratch) -> None:
        """logits[i, j] += compact[i, offset]."""
        first, last = compact[..., :1], compact[..., -1:]
        if self.start:
            logits[..., : self.start] += first
        if self.stop < self.num_keys:
            logits[..., self.stop :] += last
        if self.width:
            wide = scratch("wide", *compact.shape[:2], self.width + self.num_queries - 1)
            end = self.margin + self.inner.stop - self.inner.start
            wide[..., : self.margin] = first
            wide[..., self.margin : end] = compact[..., self.inner]
            wide[..., end:] = last
            logits[..., self.start : self.stop] += self.skewed(wide)

    def collapse(self, pairs: Float[Tensor, "G I J"], scratch: Scratch) -> Float[Tensor, "G I W"]:
        """compact[i, offset] = the sum of pairs[i, j] over the keys at that offset."""
        compact = scratch("compact", *pairs.shape[:2], self.columns.stop - self.columns.start).zero_()
        if self.start:
            compact[..., 0] += pairs[..., : self.start].sum(-1)
        if self.stop < self.num_keys:
            compact[..., -1] += pairs[..., self.stop :].sum(-1)
        if self.width:
            wide = scratch("wide", *pairs.shape[:2], self.width + self.num_queries - 1).zero_()
            self.skewed(wide).copy_(pairs[..., self.start : self.stop])
            end = self.margin + self.inner.stop - self.inner.start
            compact[..., self.inner] += wide[..., self.margin : end]
            compact[..., 0] += wide[..., : self.margin].sum(-1)
            compact[..., -1] += wide[..., end:].sum(-1)
        return compact

    def offsets(self, device: torch.device) -> Int[Tensor, "I W"]:
        """Offset of every pair of the middle."""
        query = torch.arange(self.num_queries, device=device)
        return torch.arange(self.width, device=device) - query[:, None] + self.lowest + self.num_queries - 1
