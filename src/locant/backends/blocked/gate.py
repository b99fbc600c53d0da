"""RelativeGate by tiles: sum_c q_c k_c a_c. Far from the diagonal the gate is constant: an ordinary product.

Near it, products are formed and summed pointwise: a batch of matrix-vector products is several times slower on a CPU.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from locant.backends.blocked.parts import Part, add_rows, of_heads
from locant.backends.blocked.tile import Band, Group, Tile

GATE_ELEMENTS = 1 << 17  # products [G queries W D] formed at once


class GateRows(Part):
    """A gate for each pair, gathered for a few queries at a time."""

    stage = "gate"

    def _gates(self, tile: Tile, some: slice) -> tuple[Tensor, Float[Tensor, "G I J D"]]:
        rows = tile.rows(self.term.rule)[some]
        table = of_heads(self.tensors[0], tile.group.heads)
        return rows.flatten(), table.index_select(1, rows.flatten()).unflatten(1, rows.shape)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        k = tile.group.k[:, None, : tile.num_keys]
        for some in _blocks(tile.num_queries, k.numel()):
            _, gates = self._gates(tile, some)
            torch.sum((gates * k).mul_(tile.scaled[:, some, None]), -1, out=pairs[:, some])

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        k = tile.group.k[:, None, : tile.num_keys]
        for some in _blocks(tile.num_queries, k.numel()):
            rows, gates = self._gates(tile, some)
            q, dpairs = tile.scaled[:, some, None], grad[:, some]
            assert tile.dscaled is not None and tile.group.dk is not None
            tile.dscaled[:, some] += (gates * k).mul_(dpairs[..., None]).sum(2)
            weighted = dpairs[..., None] * q  # [G some J D]
            tile.group.dk[:, : tile.num_keys] += (weighted * gates).sum(1)
            if self.grads[0] is not None:
                add_rows(self.grads[0], tile.group.heads, rows, (weighted * k).flatten(1, 2))


class GateDiagonals(Part):
    """Two ordinary products where all offsets share a gate; windows of keys and gates around the diagonal."""

    stage = "gate"

    def setup(self) -> None:
        """Lay out the table."""
        self.diagonals = self.setting.diagonals(self.term.rule)
        self.table = self.tensors[0].index_select(1, self.diagonals.band_rows)  # [H left .. right D]
        self.dtable = None if self.grads[0] is None else torch.zeros_like(self.table)

    def open(self, group: Group) -> None:
        """Prepare this group's keys."""
        self.margin = self.setting.block
        self.k = F.pad(group.k, (0, 0, self.margin, self.margin))
        self.dk = torch.zeros_like(self.k)

    def close(self, group: Group) -> None:
        """Hand this group's gradients on."""
        if group.dk is not None:
            group.dk.add_(self.dk[:, self.margin : self.margin + group.k.shape[1]])

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dtable is not None:
            target = of_heads(self.dtable, heads)
            add_rows(self.grads[0], heads, self.diagonals.band_rows, target)
            target.zero_()

    def _sides(self, band: Band) -> list[tuple[int, slice, slice]]:
        """(table column, keys wholly on this side, keys partly on it) of the far left and the far right."""
        middle = slice(band.start, band.stop)
        sides = []
        if band.start or band.columns.start == 0:
            sides.append((0, slice(0, band.start), middle))
        if band.stop < band.num_keys or band.columns.stop == self.table.shape[1]:
            sides.append((self.table.shape[1] - 1, slice(band.stop, band.num_keys), middle))
        return sides

    def _here(self, band: Band, column: int, device: torch.device) -> Tensor:
        """Which pairs of the middle lie on a far side."""
        offsets = band.offsets(device)
        return offsets <= self.diagonals.left if column == 0 else offsets >= self.diagonals.right

    def _near(self, band: Band) -> tuple[slice, slice]:
        """Offsets strictly between the far sides: as columns of the table, and of an array over lowest .. highest."""
        low, high = max(band.lowest, self.diagonals.left + 1), min(band.highest, self.diagonals.right - 1)
        return (
            slice(low - self.diagonals.left, high - self.diagonals.left + 1),
            slice(low - band.lowest, high - band.lowest + 1),
        )

    def _windows(self, padded: Tensor, band: Band, wide: slice, some: slice) -> Float[Tensor, "G I W D"]:
        """The keys (or their gradient) that each of some queries sees at the near offsets, as an overlapping view."""
        groups, length, width = padded.shape
        first = self.margin + band.first_query + some.start + band.lowest + wide.start
        shape = (groups, some.stop - some.start, wide.stop - wide.start, width)
        return padded.as_strided(shape, (length * width, width, width, 1), padded.storage_offset() + first * width)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        band = self.diagonals.band(tile)
        table, k = of_heads(self.table, tile.group.heads), tile.group.k
        columns, wide = self._near(band)
        middle = pairs[..., band.start : band.stop]
        if band.width:
            near = tile.group.scratch("wide", len(pairs), tile.num_queries, band.width + tile.num_queries - 1).zero_()
            gates = table[:, None, columns]
            for some in _blocks(tile.num_queries, len(pairs) * gates[0].numel()):
                products = gates * self._windows(self.k, band, wide, some)
                torch.sum(products.mul_(tile.scaled[:, some, None]), -1, out=near[:, some, wide])
            middle.copy_(band.skewed(near))
        for column, wholly, partly in self._sides(band):
            gated = tile.scaled * table[:, column, None]
            pairs[..., wholly] = gated @ k[:, wholly].transpose(-1, -2)
            if band.width:
                here = self._here(band, column, pairs.device)
                middle.copy_(torch.where(here, gated @ k[:, partly].transpose(-1, -2), middle))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert tile.dscaled is not None and tile.group.dk is not None
        band = self.diagonals.band(tile)
        heads = tile.group.heads
        table, dtable = of_heads(self.table, heads), None if self.dtable is None else of_heads(self.dtable, heads)
        for column, wholly, partly in self._sides(band):
            keys = slice(min(wholly.start, partly.start), max(wholly.stop, partly.stop))
            here = grad[..., keys].clone()
            here[..., partly.start - keys.start : partly.stop - keys.start] *= self._here(band, column, grad.device)
            seen = here @ tile.group.k[:, keys]
            gate = table[:, column, None]
            tile.dscaled.addcmul_(seen, gate)
            tile.group.dk[:, keys] += here.transpose(-1, -2) @ (tile.scaled * gate)
            if dtable is not None:
                part = (seen * tile.scaled).sum(1)
                dtable[:, column] += part.sum(0) if len(dtable) < len(part) else part
        if band.width:
            self._near_backward(tile, band, grad, table, dtable)

    def _near_backward(self, tile: Tile, band: Band, grad: Tensor, table: Tensor, dtable: Tensor | None) -> None:
        assert tile.dscaled is not None
        columns, wide = self._near(band)
        groups, width = len(grad), wide.stop - wide.start
        dnear = tile.group.scratch("wide", groups, tile.num_queries, band.width + tile.num_queries - 1).zero_()
        band.skewed(dnear).copy_(grad[..., band.start : band.stop])
        gates = table[:, None, columns]
        depth = self.k.shape[-1]
        for some in _blocks(tile.num_queries, groups * gates[0].numel()):
            count = some.stop - some.start
            keys = self._windows(self.k, band, wide, some)
            q, d = tile.scaled[:, some, None], dnear[:, some, wide]
            tile.dscaled[:, some] += (gates * keys).mul_(d[..., None]).sum(2)
            weighted = d[..., None] * q  # [G count W D]
            if dtable is not None:
                part = (weighted * keys).sum(1)
                dtable[:, columns] += part.sum(0) if len(dtable) < groups else part
            # Query t's window begins t keys later: laid out so, the windows add up by columns.
            length = width + count - 1
            laid = tile.group.scratch("laid", groups, count, length, depth).zero_()
            strides = (count * length * depth, (length + 1) * depth, depth, 1)
            torch.mul(weighted, gates, out=laid.as_strided(weighted.shape, strides, laid.storage_offset()))
            first = self.margin + band.first_query + some.start + band.lowest + wide.start
            self.dk[:, first : first + length] += laid.sum(1)


def _blocks(num_queries: int, elements: int) -> list[slice]:
    """Slices of queries, each with about `GATE_ELEMENTS` products."""
    size = max(1, GATE_ELEMENTS // max(elements, 1))
    return [slice(start, min(start + size, num_queries)) for start in range(0, num_queries, size)]
