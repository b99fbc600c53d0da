"""One number for each head and row: RelativeBias, RelativeScale."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from locant.backends.blocked.parts import Part, add_rows, of_heads
from locant.backends.blocked.tile import Scratch, Tile


class Toeplitz(Part):
    """Numbers by offset, laid out once for a block of queries, so that a tile's share is a plain slice."""

    def setup(self) -> None:
        """Lay out the table."""
        self.diagonals = self.setting.diagonals(self.term.rule)
        self.rows = F.pad(self.diagonals.rows, (self.setting.block - 1, 0))

    def open_heads(self, heads: slice, scratch: Scratch) -> None:
        """Lay out the numbers of these heads."""
        numbers = of_heads(self.tensors[0], heads)[:, self.rows] * self.number
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
        add_rows(self.grads[0], heads, self.rows, wide.sum(1) * self.number)

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
        return of_heads(self.tensors[0], tile.group.heads)[:, tile.rows(self.term.rule)] * self.number

    def forward(self, tile: Tile, pairs: Tensor, out: Tensor | None = None) -> None:
        """See `Part`."""
        pairs += self.rows_scaled(tile, self.numbers(tile))

    def backward(self, tile: Tile, grad: Tensor, pairs: Tensor | None = None, dout: Tensor | None = None) -> None:
        """See `Part`."""
        if self.grads[0] is not None:
            part = self.rows_scaled(tile, grad).flatten(1) * self.number
            add_rows(self.grads[0], tile.group.heads, tile.rows(self.term.rule).flatten(), part)


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
