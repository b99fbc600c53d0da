"""Pair encodings of a graph: one number, or several, for each pair of nodes [n, n, R] or [n, n].

Black, Wan, Mishne, Nayyeri & Wang 2024, arXiv:2402.14202. With A the adjacency, D the degrees, L = D - A and L+ its
pseudo-inverse:

    R_uv = L+_uu + L+_vv - 2 L+_uv          resistance; the same form on exp(-t L): squared diffusion distance

All mathematics is done once for each graph, in float64, by scipy; graphs are undirected. Between two components there
is no path: `UNREACHABLE` (infinity) stands there, which `locant.graphs.PairEncoder` turns into a learned number. The
public code writes 512 instead (``unreachable=512``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

UNREACHABLE = math.inf
PUBLIC_UNREACHABLE = 512.0


def adjacency_matrix(graph: Any) -> np.ndarray:
    """A of a networkx graph, or of a square matrix, in float64 [n, n].

    Raises: TypeError for something else; ValueError for a directed graph (an asymmetric matrix), negative or infinite
    weights, loops, and graphs without nodes.
    """
    if hasattr(graph, "is_directed"):
        import networkx as nx

        if graph.is_directed():
            raise ValueError(
                f"graphs: a directed graph of {len(graph)} nodes came, but its encodings need symmetric pairs; "
                "give graph.to_undirected()"
            )
        matrix = nx.to_numpy_array(graph).astype(float)
    elif isinstance(graph, np.ndarray | Tensor):
        matrix = graph.double().numpy(force=True).copy() if isinstance(graph, Tensor) else graph.astype(float)
    else:
        raise TypeError(f"graphs: {type(graph).__name__} is no graph; give a networkx graph, or an adjacency matrix")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"graphs: the adjacency has shape {matrix.shape}; give a square matrix of 1 node or more")
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError(f"graphs: weights reach from {matrix.min()} to {matrix.max()}; give finite ones, 0 or more")
    if (matrix != matrix.T).any():
        count = int((matrix != matrix.T).sum()) // 2
        raise ValueError(
            f"graphs: the adjacency is directed: {count} pairs differ from their mirror image; give A + A.T, or the "
            "undirected graph"
        )
    if (loops := np.flatnonzero(np.diag(matrix))).size:
        raise ValueError(f"graphs: node {loops[0]} is its own neighbor; take loops out")
    return matrix


def laplacian(graph: Any) -> Float[Tensor, "n n"]:
    """L = D - A, not normalized."""
    matrix = adjacency_matrix(graph)
    return torch.from_numpy(np.diag(matrix.sum(1)) - matrix)


def spectrum(graph: Any) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues of L from small to large, and eigenvectors as columns (up to sign, and rotation of equal ones).

    As many of them are 0, exactly, as there are components. Raises: ValueError where weights lie so far apart that
    float64 cannot tell others from 0.
    """
    values, vectors = torch.linalg.eigh(laplacian(graph))
    zeros = int(components(graph).max()) + 1
    values[:zeros] = 0
    noise = len(values) * torch.finfo(values.dtype).eps * float(values[-1])
    if (values[zeros:].abs() <= noise).any():
        raise ValueError(
            f"graphs: {float(values[zeros]):.1e} is no eigenvalue beside {float(values[-1]):.1e} in float64; weights "
            "lie too far apart, give others"
        )
    return values, vectors


def components(graph: Any) -> Int[Tensor, " n"]:
    """The number of the component of each node."""
    from scipy.sparse.csgraph import connected_components

    return torch.from_numpy(connected_components(adjacency_matrix(graph) > 0, directed=False)[1])


def _apart(graph: Any, pairs: Tensor, unreachable: float) -> Tensor:
    part = components(graph)
    return torch.where(part[:, None] == part[None, :], pairs, unreachable)


def spectral(graph: Any, function: Callable[[Tensor], Tensor]) -> Float[Tensor, "n n"]:
    """V diag(f(w)) V^T, the same for every choice of eigenvectors."""
    values, vectors = spectrum(graph)
    return (vectors * function(values)) @ vectors.T


def pseudoinverse(graph: Any) -> Float[Tensor, "n n"]:
    """L+; 0 between components."""
    return spectral(graph, lambda w: torch.where(w > 0, 1 / w, 0.0))


def squared_distance(kernel: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """K_uu + K_vv - 2 K_uv."""
    diagonal = kernel.diagonal()
    return diagonal[:, None] + diagonal[None, :] - 2 * kernel


def adjacency(graph: Any) -> Float[Tensor, "n n"]:
    """A."""
    return torch.from_numpy(adjacency_matrix(graph))


def shortest_path(graph: Any, unreachable: float = UNREACHABLE) -> Float[Tensor, "n n"]:
    """Edges of the shortest path; weights of edges do not count."""
    from scipy.sparse.csgraph import shortest_path as scipy_shortest_path

    hops = scipy_shortest_path((adjacency_matrix(graph) > 0).astype(float), directed=False, unweighted=True)
    return _apart(graph, torch.from_numpy(hops), unreachable)


def resistance(graph: Any, unreachable: float = UNREACHABLE) -> Float[Tensor, "n n"]:
    """Effective resistance, every edge a conductor of its weight."""
    return _apart(graph, squared_distance(pseudoinverse(graph)), unreachable)


def diffusion(graph: Any, time: float = 0.5, unreachable: float = UNREACHABLE) -> Float[Tensor, "n n"]:
    """Squared diffusion distance. Raises: ValueError for a time that is not above 0."""
    if not 0 < time < math.inf:
        raise ValueError(f"diffusion: time = {time}, needed a number above 0")
    return _apart(graph, squared_distance(spectral(graph, lambda w: torch.exp(-time * w))), unreachable)


def powers(matrix: Float[Tensor, "n n"], count: int) -> Float[Tensor, "n n count"]:
    """M, M^2, .. M^count, not normalized. Raises: ValueError below 1."""
    if count < 1:
        raise ValueError(f"powers: count = {count}, needed at least 1")
    found = [matrix]
    for _ in range(count - 1):
        found.append(found[-1] @ matrix)
    return torch.stack(found, -1)


def resistance_to_pseudoinverse(pairs: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """L+ = -J R J / 2 with J = I - 11^T / n: a connected graph's resistances hold all that L+ holds.

    Raises: ValueError for pairs that are not all reachable.
    """
    if not bool(torch.isfinite(pairs).all()):
        raise ValueError(
            f"graphs: {int((~torch.isfinite(pairs)).sum())} pairs have no finite resistance; convert each component "
            "of a graph on its own"
        )
    n = len(pairs)
    center = torch.eye(n, dtype=pairs.dtype) - torch.full((n, n), 1 / n, dtype=pairs.dtype)
    return -center @ pairs @ center / 2


PAIRS: Mapping[str, Callable[[Any], Tensor]] = {
    "adjacency": adjacency,
    "shortest_path": shortest_path,
    "resistance": resistance,
    "diffusion": diffusion,
    "laplacian": laplacian,
    "pseudoinverse": pseudoinverse,
    "adjacency_powers": lambda graph: powers(adjacency(graph), 3),
    "laplacian_powers": lambda graph: powers(laplacian(graph), 3),
    "pseudoinverse_powers": lambda graph: powers(pseudoinverse(graph), 3),
}


def pair_encoding(graph: Any, name: str) -> Float[Tensor, "n n R"]:
    """One of `PAIRS` by name, always with a last axis. Raises: ValueError for an unknown name."""
    if name not in PAIRS:
        raise ValueError(f"graphs: unknown pair encoding {name!r}; choose one of {', '.join(PAIRS)}")
    found = PAIRS[name](graph)
    return found if found.dim() == 3 else found[..., None]
