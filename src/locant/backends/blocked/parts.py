"""Each term as seen by one tile: what it does to the tile's logits, weights or output, and the way back.

The package's `PARTS` names the class for each term. A part that is built on diagonals (contiguous positions, a rule
that reads only the offset) has a twin that gathers, for any ids and any rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.backends.blocked.tile import Diagonals, Group, Scratch, Tile
from locant.positions import Positions

KEY_CHUNK = 32  # keys that share one window of offsets in `KeyDiagonals`
Stage = Literal["gate", "scale", "logits", "weights", "value"]


@dataclass(frozen=True)
class Setting:
    """What all tiles of one call have in common. ``scale`` is 1 where it is a number for each query instead."""

    positions: Positions
    block: int
    scale: float
    like: Tensor

    def diagonals(self, rule: Any) -> Diagonals:
        """The rule's rows by offset, on contiguous positions."""
        return Diagonals(rule, 1 - self.positions.num_keys, self.positions.num_queries - 1, self.like.device)


class Part:
    """One term in the loop over tiles. ``grads`` has one sum for each tensor (None where none is wanted)."""

    stage: ClassVar[Stage] = "logits"

    def __init__(self, term: Any, tensors: list[Tensor], grads: list[Tensor | None], setting: Setting) -> None:
        self.term, self.tensors, self.grads, self.setting = term, tensors, grads, setting
        scaled = getattr(term, "scaled", False)
        self.scaled, self.number = scaled, setting.scale if scaled else 1.0
        self.setup()

    def setup(self) -> None:
        """Prepare what all tiles share."""

    def open_heads(self, heads: slice, scratch: Scratch) -> None:
        """A group of heads begins; all batch rows follow."""

    def close_heads(self, heads: slice) -> None:
        """A group of heads ends (backward only)."""

    def open(self, group: Group) -> None:
        """One batch row of a group of heads begins."""

    def close(self, group: Group) -> None:
        """One batch row of a group of heads ends (backward only)."""

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """Change logits or weights (``pairs`` [G I J]) or, from weights, ``out`` [G I E]."""
        raise NotImplementedError

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """Sum own gradients; change ``grad`` [G I J] where the part stands between it and what comes before."""
        raise NotImplementedError

    def rows_scaled(self, tile: Tile, pairs: Tensor) -> Tensor:
        """``pairs`` times each query's scale, where the term is inside the scale and that is not one number."""
        return pairs * tile.row_scale if self.scaled and tile.row_scale is not None else pairs


def _heads(table: Tensor, heads: slice) -> Tensor:
    """The part of a table [H|1 ..] that serves some heads."""
    return table[heads] if table.shape[0] > 1 else table


def _table_grad(grad: Tensor | None, heads: slice, rows: Tensor, part: Tensor) -> None:
    """grad[heads, rows] += part [G|1 rows ..], summed over the group where the heads share one table."""
    assert grad is not None
    target = _heads(grad, heads)
    target.index_add_(1, rows, part.sum(0, keepdim=True) if target.shape[0] < part.shape[0] else part)


def _products(x: Float[Tensor, "G N D"], table: Float[Tensor, "H W D"]) -> Float[Tensor, "G N W"]:
    """x . table for every row; one product for the whole group where heads share the table."""
    return x @ (table[0] if table.shape[0] == 1 else table).transpose(-1, -2)


def _transposed_products(y: Float[Tensor, "G N W"], x: Float[Tensor, "G N D"], shared: bool) -> Float[Tensor, "G2 W D"]:
    """The gradient of `_products` for its table."""
    if shared:
        return (y.flatten(0, 1).T @ x.flatten(0, 1))[None]
    return y.transpose(-1, -2) @ x


# --- one number for each head and row: RelativeBias, RelativeScale ----------------------------------------------------


class Toeplitz(Part):
    """Numbers by offset, laid out once for a block of queries, so that a tile's share is a plain slice."""

    def setup(self) -> None:
        """Lay out the table."""
        self.diagonals = self.setting.diagonals(self.term.rule)
        self.rows = F.pad(self.diagonals.rows, (self.setting.block - 1, 0))

    def open_heads(self, heads: slice, scratch: Scratch) -> None:
        """Lay out the numbers of these heads."""
        numbers = _heads(self.tensors[0], heads)[:, self.rows] * self.number
        self.laid = numbers.unfold(-1, len(self.rows) - self.setting.block + 1, 1).flip(1)
        shape = (heads.stop - heads.start, *self.laid.shape[1:])
        self.dlaid = None if self.grads[0] is None else self.laid.new_zeros(shape)

    def share(self, tile: Tile, laid: Tensor) -> Tensor:
        """The tile's slice of an array [G block L]."""
        start = -(tile.queries.start + self.diagonals.shift) - self.diagonals.first
        return laid[:, : tile.num_queries, start : start + tile.num_keys]

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dlaid is None:
            return
        length, block = len(self.rows), self.setting.block
        wide = self.dlaid.new_zeros(*self.dlaid.shape[:2], length)
        skewed = wide.as_strided(self.dlaid.shape, (block * length, length - 1, 1), block - 1)
        skewed.copy_(self.dlaid)
        _table_grad(self.grads[0], heads, self.rows, wide.sum(1) * self.number)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs += self.rows_scaled(tile, self.share(tile, self.laid))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.dlaid is not None:
            share = self.share(tile, self.dlaid)
            share += self.rows_scaled(tile, grad)


class Numbers(Part):
    """Numbers by row, gathered."""

    def numbers(self, tile: Tile) -> Tensor:
        """The number of every pair [G|1 I J]."""
        return _heads(self.tensors[0], tile.group.heads)[:, tile.rows(self.term.rule)] * self.number

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs += self.rows_scaled(tile, self.numbers(tile))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.grads[0] is not None:
            part = self.rows_scaled(tile, grad).flatten(1) * self.number
            _table_grad(self.grads[0], tile.group.heads, tile.rows(self.term.rule).flatten(), part)


class ScaleToeplitz(Toeplitz):
    """content *= a[offset]; ``pairs`` in backward is the content before."""

    stage = "scale"

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs *= self.share(tile, self.laid)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.dlaid is not None:
            assert pairs is not None
            self.share(tile, self.dlaid).addcmul_(grad, pairs)
        grad *= self.share(tile, self.laid)


class ScaleNumbers(Numbers):
    """content *= a[row]; ``pairs`` in backward is the content before."""

    stage = "scale"

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs *= self.numbers(tile)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert pairs is not None
        super().backward(tile, grad * pairs)
        grad *= self.numbers(tile)


# --- a number given for each pair: PairBias, WeightScale, LowRankBias -------------------------------------------------


def _sum_to(part: Tensor, target: Tensor) -> Tensor:
    return part.sum(0, keepdim=True) if target.shape[0] < part.shape[0] else part


class Pairs(Part):
    """The tile's slice of a given tensor [B|1 H|1 I J]."""

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs.add_(self.rows_scaled(tile, tile.pick(self.tensors[0])), alpha=self.number)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.grads[0] is not None:
            target = tile.pick(self.grads[0])
            target.add_(_sum_to(self.rows_scaled(tile, grad), target), alpha=self.number)


class PairWeights(Part):
    """weights *= w; ``pairs`` in backward are the weights before."""

    stage = "weights"

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs *= tile.pick(self.tensors[0])

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.grads[0] is not None:
            assert pairs is not None
            target = tile.pick(self.grads[0])
            target += _sum_to(grad * pairs, target)
        grad *= tile.pick(self.tensors[0])


class LowRank(Part):
    """f_i . g_j."""

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        query, key = (tile.group.pick(t) for t in self.tensors)
        product = query[:, tile.queries] @ key[:, : tile.num_keys].transpose(-1, -2)
        pairs.add_(self.rows_scaled(tile, product), alpha=self.number)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        query, key = (tile.group.pick(t) for t in self.tensors)
        query, key = query[:, tile.queries], key[:, : tile.num_keys]
        grad = self.rows_scaled(tile, grad)
        if self.grads[0] is not None:
            target = tile.group.pick(self.grads[0])[:, tile.queries]
            target.add_(_sum_to(grad @ key, target), alpha=self.number)
        if self.grads[1] is not None:
            target = tile.group.pick(self.grads[1])[:, : tile.num_keys]
            target.add_(_sum_to(grad.transpose(-1, -2) @ query, target), alpha=self.number)


# --- a vector for each row, met by the query: RelativeQuery -----------------------------------------------------------


class QueryDiagonals(Part):
    """q_i . a[offset]: products with the rows of the band, laid out by diagonals."""

    def setup(self) -> None:
        """Lay out the table."""
        self.diagonals = self.setting.diagonals(self.term.rule)
        self.table = self.tensors[0].index_select(1, self.diagonals.band_rows)
        self.dtable = None if self.grads[0] is None else torch.zeros_like(self.table)

    def side(self, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """The queries that the term meets, and where their gradient is summed."""
        return (tile.scaled, tile.dscaled) if self.scaled else (tile.q, tile.dq)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        band = self.diagonals.band(tile)
        table = _heads(self.table, tile.group.heads)[:, band.columns]
        band.add(pairs, _products(self.side(tile)[0], table), tile.group.scratch)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        band = self.diagonals.band(tile)
        table = _heads(self.table, tile.group.heads)[:, band.columns]
        compact = band.collapse(grad, tile.group.scratch)
        x, dx = self.side(tile)
        if dx is not None:
            dx += _products(compact, table.transpose(-1, -2))
        if self.dtable is not None:
            target = _heads(self.dtable, tile.group.heads)[:, band.columns]
            target += _transposed_products(compact, x, len(table) == 1)

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dtable is not None:
            target = _heads(self.dtable, heads)
            _table_grad(self.grads[0], heads, self.diagonals.band_rows, target)
            target.zero_()


class QueryRows(QueryDiagonals):
    """q_i . a[row]: products with every table row, gathered."""

    def setup(self) -> None:
        """Lay out the table."""
        self.table, self.dtable = self.tensors[0], self.grads[0]

    def close_heads(self, heads: slice) -> None:
        """Nothing is left to do: the gradient is the table's own."""

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        products = _products(self.side(tile)[0], _heads(self.table, tile.group.heads))
        pairs += products.gather(-1, tile.rows(self.term.rule).expand(pairs.shape))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        table = _heads(self.table, tile.group.heads)
        products = grad.new_zeros(*grad.shape[:2], table.shape[1])
        products.scatter_add_(-1, tile.rows(self.term.rule).expand(grad.shape), grad)
        x, dx = self.side(tile)
        if dx is not None:
            dx += _products(products, table.transpose(-1, -2))
        if self.dtable is not None:
            target = _heads(self.dtable, tile.group.heads)
            target += _transposed_products(products, x, len(table) == 1)


# --- a vector for each row, met by the key: RelativeKey ---------------------------------------------------------------


class KeyDiagonals(Part):
    """k_j . a[offset]: a chunk of keys meets a window of offsets, and only those that a tile's queries see it at.

    Key u of a chunk meets query i of a tile at column i + chunk - 1 - u of the window, which depends only on how far
    the chunk leads the tile: all windows are laid out once for a group of heads, and a tile takes a slice of them.
    """

    def setup(self) -> None:
        """Lay out the table, and say which rows each window holds."""
        self.diagonals = self.setting.diagonals(self.term.rule)
        self.table = self.tensors[0] * self.number
        left, right, block = self.diagonals.left, self.diagonals.right, self.setting.block
        num_queries, shift, device = self.setting.positions.num_queries, self.diagonals.shift, self.table.device
        whole = block if num_queries > block else KEY_CHUNK  # leads of all tiles lie on one grid
        self.chunk = next(size for size in range(KEY_CHUNK, 0, -1) if whole % size == 0)
        lowest = max(left + 2 - self.chunk, 1 - self.chunk - shift - num_queries)
        highest = min(block - 1 + right, self.setting.positions.num_keys - shift)
        self.first_lead = lowest + (-shift - lowest) % self.chunk
        leads = torch.arange(self.first_lead, max(highest, self.first_lead) + 1, self.chunk, device=device)
        columns = torch.arange(block + self.chunk - 1, device=device)
        index = leads[:, None] + self.chunk - 1 - columns - self.diagonals.first
        self.rows = self.diagonals.rows[
            index.clamp(0, len(self.diagonals.rows) - 1)
        ]  # [N W]; beyond: padding keys only

    def open_heads(self, heads: slice, scratch: Scratch) -> None:
        """Lay out the windows of these heads, [N W D] or [N G W D]."""
        table = _heads(self.table, heads)
        picked = table.index_select(1, self.rows.flatten()).unflatten(1, self.rows.shape)
        self.shared = len(table) == 1
        self.windows = picked[0] if self.shared else picked.transpose(0, 1).contiguous()
        self.dwindows = None if self.grads[0] is None else torch.zeros_like(self.windows)

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dwindows is not None:
            part = self.dwindows[None] if self.shared else self.dwindows.transpose(0, 1)
            _table_grad(self.grads[0], heads, self.rows.flatten(), part.flatten(1, 2) * self.number)

    def open(self, group: Group) -> None:
        """Prepare this group's keys."""
        table = _heads(self.table, group.heads)
        ends = table[:, self.diagonals.rows[[0, -1]]]
        self.far = _products(group.k, ends)  # [G J 2]: what a key says to all who are farther than the band
        chunks = F.pad(group.k, (0, 0, 0, -group.k.shape[1] % self.chunk)).unflatten(1, (-1, self.chunk))
        self.chunks = chunks.transpose(0, 1).contiguous()  # [C G chunk D]
        self.dfar, self.dchunks = torch.zeros_like(self.far), torch.zeros_like(self.chunks)

    def close(self, group: Group) -> None:
        """Hand this group's gradients on."""
        dk = self.dchunks.transpose(0, 1).flatten(1, 2)[:, : group.k.shape[1]]
        table = _heads(self.table, group.heads)
        rows = self.diagonals.rows[[0, -1]]
        if group.dk is not None:
            group.dk.add_(dk)
            group.dk.add_(_products(self.dfar, table[:, rows].transpose(-1, -2)))
        if self.grads[0] is not None:
            part = _transposed_products(self.dfar, group.k, len(table) == 1)
            _table_grad(self.grads[0], group.heads, rows, part * self.number)

    def _cut(self, tile: Tile) -> tuple[slice, slice, slice]:
        """The keys of a tile that are not all far, in whole chunks but for the last; these chunks; their windows."""
        band = self.diagonals.band(tile)
        if not band.width:
            return slice(band.start, band.stop), slice(0, 0), slice(0, 0)
        first, last = band.start // self.chunk, -(-band.stop // self.chunk)
        keys = slice(first * self.chunk, min(last * self.chunk, tile.num_keys))
        lead = (keys.start - band.first_query - self.first_lead) // self.chunk
        return keys, slice(first, last), slice(lead, lead + last - first)

    def _merged(self, chunks: Tensor) -> Tensor:
        """[C G n x] as the batch of products that share a window: [C (G n) x] or [(C G) n x]."""
        return chunks.flatten(1, 2) if self.shared else chunks.flatten(0, 1)

    def _tables(self, windows: Tensor, which: slice, num_queries: int) -> Tensor:
        """The columns that so many queries need of some windows, [C W D] or [(C G) W D]."""
        some = windows[which][..., : num_queries + self.chunk - 1, :]
        return some if self.shared else some.flatten(0, 1)

    def _meet(self, pairs: Tensor, products: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The tile's keys [G I keys] beside the products [C G chunk W] that belong to them, as views of equal shape."""
        chunks, groups, size, width = products.shape
        strides = (size * width, 1, groups * size * width, width - 1)
        seen = products.as_strided(
            (groups, pairs.shape[1], chunks, size), strides, products.storage_offset() + size - 1
        )
        whole, rest = pairs.shape[2] // size, pairs.shape[2] % size
        found = []
        if whole:
            found.append((pairs[..., : whole * size].unflatten(-1, (whole, size)), seen[:, :, :whole]))
        if rest:
            found.append((pairs[..., whole * size :], seen[:, :, whole, :rest]))
        return found

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        keys, chunks, which = self._cut(tile)
        if keys.start:
            pairs[..., : keys.start] += self.rows_scaled(tile, self.far[:, None, : keys.start, 0])
        if keys.stop < tile.num_keys:
            pairs[..., keys.stop :] += self.rows_scaled(tile, self.far[:, None, keys.stop : tile.num_keys, 1])
        if chunks.stop > chunks.start:
            k, tables = self._merged(self.chunks[chunks]), self._tables(self.windows, which, tile.num_queries)
            shape = (*self.chunks[chunks].shape[:3], tables.shape[1])
            products = tile.group.scratch("keys", *shape)
            torch.bmm(k, tables.transpose(-1, -2), out=self._merged(products))
            for here, seen in self._meet(pairs[..., keys], products):
                scale = tile.row_scale if self.scaled else None
                here += seen if scale is None else seen * scale.view(-1, *[1] * (here.dim() - 2))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        keys, chunks, which = self._cut(tile)
        grad = self.rows_scaled(tile, grad)
        if keys.start:
            self.dfar[:, : keys.start, 0] += grad[..., : keys.start].sum(1)
        if keys.stop < tile.num_keys:
            self.dfar[:, keys.stop : tile.num_keys, 1] += grad[..., keys.stop :].sum(1)
        if chunks.stop > chunks.start:
            tables = self._tables(self.windows, which, tile.num_queries)
            shape = (*self.chunks[chunks].shape[:3], tables.shape[1])
            products = tile.group.scratch("keys", *shape).zero_()
            for here, seen in self._meet(grad[..., keys], products):
                seen.copy_(here)
            merged = self._merged(products)
            self._merged(self.dchunks[chunks]).baddbmm_(merged, tables)
            if self.dwindows is not None:
                into = self._tables(self.dwindows, which, tile.num_queries)
                into.baddbmm_(merged.transpose(-1, -2), self._merged(self.chunks[chunks]))


class KeyRows(Part):
    """k_j . a[row]: products of every key with every table row once for each group, gathered in the tile."""

    def open(self, group: Group) -> None:
        """Prepare this group's keys."""
        self.products = _products(group.k, _heads(self.tensors[0], group.heads))
        self.dproducts = torch.zeros_like(self.products)

    def close(self, group: Group) -> None:
        """Hand this group's gradients on."""
        table = _heads(self.tensors[0], group.heads)
        if group.dk is not None:
            group.dk.add_(_products(self.dproducts, table.transpose(-1, -2)))
        if self.grads[0] is not None:
            target = _heads(self.grads[0], group.heads)
            target += _transposed_products(self.dproducts, group.k, len(table) == 1)

    def _rows(self, tile: Tile, pairs: Tensor) -> Tensor:
        return tile.rows(self.term.rule).T.expand(len(pairs), -1, -1)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        picked = self.products[:, : tile.num_keys].gather(-1, self._rows(tile, pairs)).transpose(-1, -2)
        pairs.add_(self.rows_scaled(tile, picked), alpha=self.number)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        part = (self.rows_scaled(tile, grad) * self.number).transpose(-1, -2)
        self.dproducts[:, : tile.num_keys].scatter_add_(-1, self._rows(tile, grad), part)


# --- a vector for each row, added to the value: RelativeValue ---------------------------------------------------------


class ValueDiagonals(QueryDiagonals):
    """out += (weights summed by offset) a."""

    stage = "value"

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        assert out is not None
        band = self.diagonals.band(tile)
        mass = band.collapse(pairs, tile.group.scratch)
        out += _products(mass, _heads(self.table, tile.group.heads)[:, band.columns].transpose(-1, -2))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert pairs is not None and dout is not None
        band = self.diagonals.band(tile)
        table = _heads(self.table, tile.group.heads)[:, band.columns]
        band.add(grad, _products(dout, table), tile.group.scratch)
        if self.dtable is not None:
            mass = band.collapse(pairs, tile.group.scratch)
            target = _heads(self.dtable, tile.group.heads)[:, band.columns]
            target += _transposed_products(mass, dout, len(table) == 1)


class ValueRows(QueryRows):
    """out += (weights summed by row) a."""

    stage = "value"

    def _mass(self, tile: Tile, weights: Tensor) -> Tensor:
        mass = weights.new_zeros(*weights.shape[:2], self.table.shape[1])
        return mass.scatter_add_(-1, tile.rows(self.term.rule).expand(weights.shape), weights)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        assert out is not None
        out += _products(self._mass(tile, pairs), _heads(self.table, tile.group.heads).transpose(-1, -2))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert pairs is not None and dout is not None
        table = _heads(self.table, tile.group.heads)
        grad += _products(dout, table).gather(-1, tile.rows(self.term.rule).expand(grad.shape))
        if self.dtable is not None:
            target = _heads(self.dtable, tile.group.heads)
            target += _transposed_products(self._mass(tile, pairs), dout, len(table) == 1)
