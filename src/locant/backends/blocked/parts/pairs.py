"""A number given for each pair: PairBias, WeightScale, LowRankBias."""

from __future__ import annotations

from torch import Tensor

from locant.backends.blocked.parts import Part
from locant.backends.blocked.tile import Tile


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
