"""Node encodings of a graph: some numbers for each node [n, k], and what makes eigenvectors usable.

An eigenvector may be negated, and those of equal eigenvalues rotated among themselves, without being less an
eigenvector. Return probabilities and heat kernels do not change then, `SignInvariant` undoes the sign, `StableEncoding`
(SPE) both; raw eigenvectors need signs drawn anew in training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locant.graphs.distances import adjacency, spectrum


def laplacian_eigenvectors(graph: Any, count: int) -> tuple[Float[Tensor, " k"], Float[Tensor, "n k"]]:
    """The ``count`` smallest eigenvalues and their eigenvectors, the constant one among them.

    Raises: ValueError for more than there are nodes, or fewer than 1.
    """
    values, vectors = spectrum(graph)
    if not 1 <= count <= len(values):
        raise ValueError(
            f"graphs: {count} eigenvectors were asked for, but a graph of {len(values)} nodes has 1 to {len(values)}; "
            "pad with locant.graphs.pad_columns"
        )
    return values[:count], vectors[:, :count]


def random_walk(graph: Any, steps: int) -> Float[Tensor, "n S"]:
    """diag((D^-1 A)^s), s = 1 .. steps: the probability to be back. Nodes without edges stay: 0 for every s.

    Raises: ValueError below 1 step.
    """
    if steps < 1:
        raise ValueError(f"random walk: steps = {steps}, needed at least 1")
    matrix = adjacency(graph)
    degree = matrix.sum(1, keepdim=True)
    walk, found = torch.where(degree > 0, matrix / degree, 0.0), []
    reached = torch.eye(len(matrix), dtype=matrix.dtype)
    for _ in range(steps):
        reached = reached @ walk
        found.append(reached.diagonal())
    return torch.stack(found, 1)


def heat_kernel(graph: Any, times: tuple[float, ...]) -> Float[Tensor, "n T"]:
    """sum over eigenvalues w > 0 of exp(-t w) V^2: the diagonal of the heat kernel without its constant part.

    Raises: ValueError without times, or for one below 0.
    """
    if not times or not all(0 <= t < math.inf for t in times):
        raise ValueError(f"heat kernel: times = {times}, needed one or more numbers of 0 or above")
    values, vectors = spectrum(graph)
    moving = (values > 0).to(values.dtype)
    return torch.stack([(vectors**2 * (moving * torch.exp(-t * values))).sum(1) for t in times], 1)


def pad_columns(columns: Float[Tensor, "n k"], count: int) -> Float[Tensor, "n count"]:
    """Zeros for what a small graph lacks. Raises: ValueError where there are more than ``count`` already."""
    if columns.shape[1] > count:
        raise ValueError(f"graphs: {columns.shape[1]} columns do not fit into {count}; ask for more")
    return nn.functional.pad(columns, (0, count - columns.shape[1]))


def flip_signs(vectors: Float[Tensor, "n k"], generator: torch.Generator) -> Float[Tensor, "n k"]:
    """Raw eigenvectors with a sign drawn for each column: in training alone."""
    signs = torch.randint(0, 2, (vectors.shape[1],), generator=generator) * 2 - 1
    return vectors * signs.to(vectors)


class SignInvariant(nn.Module):
    """f(v) + f(-v) for each eigenvector column, with one network f for all of them (SignNet).

    Shapes: eigenvectors [... n k] -> [... n k out].     Unchanged by: the sign of every column.
    """

    def __init__(self, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, out_dim))

    def forward(self, vectors: Float[Tensor, "... n k"]) -> Float[Tensor, "... n k out"]:
        """The features of each node and column."""
        return self.inner(vectors[..., None]) + self.inner(-vectors[..., None])


class StableEncoding(nn.Module):
    """SPE: V diag(phi(w)) V^T with phi a network on the set of eigenvalues; pair features for each of ``out_dim``.

    Shapes: values [... k], vectors [... n k], mask [... k] (True = a real eigenvalue) -> [... n n out].
    Unchanged by: signs, and rotations within equal eigenvalues. The mean over eigenvalues counts real ones alone, so
    the other graphs of a batch change nothing; there is no batch normalization (the public code has both faults).
    """

    def __init__(self, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.each, self.mean = nn.Linear(1, hidden_dim), nn.Linear(1, hidden_dim)
        self.out = nn.Sequential(nn.GELU(), nn.Linear(hidden_dim, out_dim))

    def phi(
        self, values: Float[Tensor, "... k"], mask: Bool[Tensor, "... k"] | None = None
    ) -> Float[Tensor, "... k out"]:
        """One vector for each eigenvalue, which depends on it and on the mean of all."""
        real = torch.ones_like(values) if mask is None else mask.to(values.dtype)
        mean = (values * real).sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp(min=1)
        return self.out(self.each(values[..., None]) + self.mean(mean[..., None]))

    def forward(
        self,
        values: Float[Tensor, "... k"],
        vectors: Float[Tensor, "... n k"],
        mask: Bool[Tensor, "... k"] | None = None,
    ) -> Float[Tensor, "... n n out"]:
        """Pair features; their diagonal is a node encoding."""
        phi = self.phi(values, mask)
        if mask is not None:
            phi = phi * mask[..., None].to(phi.dtype)
        return torch.einsum("...uk,...ko,...vk->...uvo", vectors, phi, vectors)
