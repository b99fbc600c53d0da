"""A vector for each row, met by the query or added to the value: RelativeQuery, RelativeValue."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.backends.blocked.parts import Part, add_rows, of_heads, products_of, table_products
from locant.backends.blocked.tile import Tile


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
        table = of_heads(self.table, tile.group.heads)[:, band.columns]
        band.add(pairs, products_of(self.side(tile)[0], table), tile.group.scratch)

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        band = self.diagonals.band(tile)
        table = of_heads(self.table, tile.group.heads)[:, band.columns]
        compact = band.collapse(grad, tile.group.scratch)
        x, dx = self.side(tile)
        if dx is not None:
            dx += products_of(compact, table.transpose(-1, -2))
        if self.dtable is not None:
            target = of_heads(self.dtable, tile.group.heads)[:, band.columns]
            target += table_products(compact, x, len(table) == 1)

    def close_heads(self, heads: slice) -> None:
        """Hand the gradients of these heads to the table."""
        if self.dtable is not None:
            target = of_heads(self.dtable, heads)
            add_rows(self.grads[0], heads, self.diagonals.band_rows, target)
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
        products = products_of(self.side(tile)[0], of_heads(self.table, tile.group.heads))
        pairs += products.gather(-1, tile.rows(self.term.rule).expand(pairs.shape))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        table = of_heads(self.table, tile.group.heads)
        products = grad.new_zeros(*grad.shape[:2], table.shape[1])
        products.scatter_add_(-1, tile.rows(self.term.rule).expand(grad.shape), grad)
        x, dx = self.side(tile)
        if dx is not None:
            dx += products_of(products, table.transpose(-1, -2))
        if self.dtable is not None:
            target = of_heads(self.dtable, tile.group.heads)
            target += table_products(products, x, len(table) == 1)


class ValueDiagonals(QueryDiagonals):
    """out += (weights summed by offset) a."""

    stage = "value"

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        assert out is not None
        band = self.diagonals.band(tile)
        mass = band.collapse(pairs, tile.group.scratch)
        out += products_of(mass, of_heads(self.table, tile.group.heads)[:, band.columns].transpose(-1, -2))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert pairs is not None and dout is not None
        band = self.diagonals.band(tile)
        table = of_heads(self.table, tile.group.heads)[:, band.columns]
        band.add(grad, products_of(dout, table), tile.group.scratch)
        if self.dtable is not None:
            mass = band.collapse(pairs, tile.group.scratch)
            target = of_heads(self.dtable, tile.group.heads)[:, band.columns]
            target += table_products(mass, dout, len(table) == 1)


class ValueRows(QueryRows):
    """out += (weights summed by row) a."""

    stage = "value"

    def _mass(self, tile: Tile, weights: Tensor) -> Tensor:
        mass = weights.new_zeros(*weights.shape[:2], self.table.shape[1])
        return mass.scatter_add_(-1, tile.rows(self.term.rule).expand(weights.shape), weights)

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        assert out is not None
        out += products_of(self._mass(tile, pairs), of_heads(self.table, tile.group.heads).transpose(-1, -2))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        assert pairs is not None and dout is not None
        table = of_heads(self.table, tile.group.heads)
        grad += products_of(dout, table).gather(-1, tile.rows(self.term.rule).expand(grad.shape))
        if self.dtable is not None:
            target = of_heads(self.dtable, tile.group.heads)
            target += table_products(self._mass(tile, pairs), dout, len(table) == 1)
