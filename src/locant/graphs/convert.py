"""Node encodings to pair encodings and back, and the equivariant layers that do it.

To pairs: psi(u, v) = m(phi_u) + m(phi_v), a symmetric function of the two. To nodes: 2-IGN, layers that mix a matrix
with its 15 equivariant images (means, not sums), then a layer to the 5 images that are vectors (Maron et al. 2019).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def symmetric_pairs(nodes: Float[Tensor, "n k"]) -> Float[Tensor, "n n R"]:
    """(phi_u + phi_v, phi_u * phi_v, k at a time): {{a, b}} is fixed by sum and product, so nothing is lost.

    For k = 1 the two numbers determine the unordered pair. For k > 1 all products phi_u[i] phi_v[j] + phi_u[j] phi_v[i]
    stand there, which determine it, too.
    """
    total = nodes[:, None] + nodes[None, :]
    outer = nodes[:, None, :, None] * nodes[None, :, None, :]
    products = (outer + outer.transpose(-1, -2))[..., *torch.triu_indices(nodes.shape[1], nodes.shape[1])]
    return torch.cat((total, products), -1)


class NodeToPair(nn.Module):
    """psi(u, v) = m(phi_u) + m(phi_v) with an MLP m. Shapes: [B n k] -> [B n n out]."""

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(in_dim, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, out_dim))

    def forward(self, nodes: Float[Tensor, "B n k"]) -> Float[Tensor, "B n n out"]:
        """The symmetric sum."""
        each = self.inner(nodes)
        return each[:, :, None] + each[:, None, :]


def _to_vectors(x: Float[Tensor, "B C n n"]) -> tuple[Tensor, ...]:
    """The vectors that a matrix holds: diagonal, mean diagonal, row means, column means, mean of all."""
    diagonal = x.diagonal(dim1=-2, dim2=-1)
    ones = torch.ones_like(diagonal)
    return (
        diagonal,
        diagonal.mean(-1, keepdim=True) * ones,
        x.mean(-1),
        x.mean(-2),
        x.mean((-2, -1))[..., None] * ones,
    )


def images_2_to_1(x: Float[Tensor, "B C n n"]) -> Float[Tensor, "B C 5 n"]:
    """The 5 equivariant images of a matrix that are vectors, in the public order."""
    return torch.stack(_to_vectors(x), 2)


def images_2_to_2(x: Float[Tensor, "B C n n"]) -> Float[Tensor, "B C 15 n n"]:
    """The 15 equivariant images of a matrix that are matrices, in the public order."""
    n = x.shape[-1]
    diagonal, trace, rows, columns, total = _to_vectors(x)

    def wide(vector: Tensor) -> Tensor:
        return vector[..., None, :].expand(*vector.shape[:-1], n, n)

    def tall(vector: Tensor) -> Tensor:
        return vector[..., :, None].expand(*vector.shape[:-1], n, n)

    eye = torch.diag_embed
    return torch.stack(
        (
            eye(diagonal),
            eye(trace),
            eye(rows),
            eye(columns),
            eye(total),
            tall(columns),
            tall(rows),
            wide(columns),
            wide(rows),
            x,
            x.transpose(-1, -2),
            tall(diagonal),
            wide(diagonal),
            wide(trace),
            wide(total),
        ),
        2,
    )


class Ign2To2(nn.Module):
    """15 in out coefficients, one bias everywhere and one on the diagonal. Shapes: [B C n n] -> [B E n n]."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(in_dim, out_dim, 15) * (2 / (in_dim + out_dim)) ** 0.5)
        self.bias, self.diagonal_bias = nn.Parameter(torch.zeros(out_dim)), nn.Parameter(torch.zeros(out_dim))

    def forward(self, x: Float[Tensor, "B C n n"]) -> Float[Tensor, "B E n n"]:
        """Permuting the nodes before or after is the same."""
        out = torch.einsum("ceb,xcbij->xeij", self.coefficients, images_2_to_2(x))
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return out + self.bias[:, None, None] + self.diagonal_bias[:, None, None] * eye


class Ign2To1(nn.Module):
    """5 in out coefficients and a bias: the node encoding of a pair encoding. Shapes: [B C n n] -> [B E n]."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(in_dim, out_dim, 5) * (2 / (in_dim + out_dim)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(self, x: Float[Tensor, "B C n n"]) -> Float[Tensor, "B E n"]:
        """Permuting the nodes before or after is the same."""
        return torch.einsum("ceb,xcbi->xei", self.coefficients, images_2_to_1(x)) + self.bias[:, None]


class PairToNode(nn.Module):
    """2-IGN: a 2-to-2 layer, GELU, a 2-to-1 layer. Shapes: [B n n R] -> [B n out].

    Means are over all n, so graphs of one batch are of one size: padding would count. Raises: ValueError for pairs
    that are not finite, as those between components.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.first, self.second = Ign2To2(in_dim, hidden_dim), Ign2To1(hidden_dim, out_dim)

    def forward(self, pairs: Float[Tensor, "B n n R"]) -> Float[Tensor, "B n out"]:
        """One vector for each node."""
        if apart := int((~pairs.isfinite()).sum()):
            raise ValueError(
                f"pair to node: {apart} pairs are not finite and would spread to all nodes; encode with unreachable=512"
            )
        hidden = nn.functional.gelu(self.first(pairs.permute(0, 3, 1, 2)))
        return self.second(hidden).transpose(1, 2)
