"""A vector for each row, met by the key: RelativeKey."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from locant.backends.blocked.parts import Part, add_rows, of_heads, products_of, table_products
from locant.backends.blocked.tile import Group, Scratch, Tile

KEY_CHUNK = 32  # keys that share one window of offsets in `KeyDiagonals`


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
        table = of_heads(self.table, heads)
        picked = table.index_select(1, self.rows.flatten()).unflatten(1, self.rows.shape)
        self.shared = len(table) == 1
        self.windows = picked[0] if self.shared else picked.transpose(0, 1).contiguous()
        self.dwindows = None if self.grads[0] is None else torch.zeros_like(self.windows)

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dwindows is not None:
            part = self.dwindows[None] if self.shared else self.dwindows.transpose(0, 1)
            add_rows(self.grads[0], heads, self.rows.flatten(), part.flatten(1, 2) * self.number)

    def open(self, group: Group) -> None:
        """Prepare this group's keys."""
        table = of_heads(self.table, group.heads)
        ends = table[:, self.diagonals.rows[[0, -1]]]
        self.far = products_of(group.k, ends)  # [G J 2]: what a key says to all who are farther than the band
        chunks = F.pad(group.k, (0, 0, 0, -group.k.shape[1] % self.chunk)).unflatten(1, (-1, self.chunk))
        self.chunks = chunks.transpose(0, 1).contiguous()  # [C G chunk D]
        self.dfar, self.dchunks = torch.zeros_like(self.far), torch.zeros_like(self.chunks)

    def close(self, group: Group) -> None:
        """Hand this group's gradients on."""
        dk = self.dchunks.transpose(0, 1).flatten(1, 2)[:, : group.k.shape[1]]
        table = of_heads(self.table, group.heads)
        rows = self.diagonals.rows[[0, -1]]
        if group.dk is not None:
            group.dk.add_(dk)
            group.dk.add_(products_of(self.dfar, table[:, rows].transpose(-1, -2)))
        if self.grads[0] is not None:
            part = table_products(self.dfar, group.k, len(table) == 1)
            add_rows(self.grads[0], group.heads, rows, part * self.number)

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
        self.products = products_of(group.k, of_heads(self.tensors[0], group.heads))
        self.dproducts = torch.zeros_like(self.products)

    def close(self, group: Group) -> None:
        """Hand this group's gradients on."""
        table = of_heads(self.tensors[0], group.heads)
        if group.dk is not None:
            group.dk.add_(products_of(self.dproducts, table.transpose(-1, -2)))
        if self.grads[0] is not None:
            target = of_heads(self.grads[0], group.heads)
            target += table_products(self.dproducts, group.k, len(table) == 1)

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
