"""Color refinement with pair encodings: the exact yardstick of what a graph transformer with them can tell apart.

    c_{t+1}(v) = hash(c_t(v), {{ (c_t(u), psi(v, u)) : u }})

Two graphs whose stable colors have equal histograms get equal outputs from every graph transformer with psi as bias and
a pooled readout, whatever its weights (Black et al. 2024). With psi the adjacency this is the usual 1-WL test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.graphs.distances import adjacency, pair_encoding

GAP = 1e-10  # numbers that are no farther apart count as equal; rounding of double precision stays below 1e-13 on BREC


def _levels(pairs: Sequence[Tensor], gap: float) -> list[list[list[int]]]:
    """The pair encodings as whole numbers: equal ones, up to the gap, get equal numbers in all graphs.

    Sorted numbers part where the next is farther than the gap. Rounding would part two that differ by one bit wherever
    they happen to lie on the edge of what is rounded up.
    """
    flat = torch.cat([p.double().reshape(-1, p.shape[-1] if p.dim() == 3 else 1) for p in pairs])
    order = flat.argsort(0)
    steps = (
        flat.gather(0, order).diff(dim=0) > gap
    )  # infinite ones are apart from finite ones, and equal: inf - inf is nan
    ranks = torch.zeros_like(order).scatter_(0, order[1:], steps.long().cumsum(0))
    _, numbers = torch.unique(ranks, dim=0, return_inverse=True)
    out, start = [], 0
    for p in pairs:
        n = len(p)
        out.append(numbers[start : start + n * n].view(n, n).tolist())
        start += n * n
    return out


def refine(
    pairs: Sequence[Float[Tensor, "..."]],
    colors: Sequence[Sequence[Hashable]] | None = None,
    *,
    gap: float = GAP,
) -> list[Counter[int]]:
    """Histograms of the stable colors of several graphs, refined together so that they can be compared.

    ``pairs``: psi of each graph, [n n] or [n n R]. ``colors``: labels of the nodes to begin with (default: all equal).
    Raises: ValueError without graphs, for one tensor in place of several, and where labels and nodes differ in number.
    """
    if isinstance(pairs, Tensor):
        raise ValueError(
            f"refine: one tensor {tuple(pairs.shape)} came, needed the pairs of each graph; give [psi, ...]"
        )
    if not pairs:
        raise ValueError(f"refine: {len(pairs)} graphs came, needed at least 1")
    levels = _levels(pairs, gap)
    sizes = [len(p) for p in pairs]
    begin = colors if colors is not None else [[0] * n for n in sizes]
    if [len(one) for one in begin] != sizes:
        raise ValueError(f"refine: {[len(one) for one in begin]} labels for graphs of {sizes} nodes; give one each")
    now, count = _numbered([list(one) for one in begin])
    while True:
        fresh = [
            [(c[v], tuple(sorted(zip(c, rows[v], strict=True)))) for v in range(len(c))]
            for c, rows in zip(now, levels, strict=True)
        ]
        now, found = _numbered(fresh)
        if found == count:
            return [Counter(c) for c in now]
        count = found


def _numbered(colors: Sequence[Sequence[Hashable]]) -> tuple[list[list[int]], int]:
    numbers: dict[Hashable, int] = {}
    out = [[numbers.setdefault(color, len(numbers)) for color in one] for one in colors]
    return out, len(numbers)


def separates(first: Any, second: Any, encoding: str | Callable[[Any], Tensor]) -> bool:
    """Whether refinement with a pair encoding (a name of `PAIRS`, or a function) tells two graphs apart."""
    encode = (lambda graph: pair_encoding(graph, encoding)) if isinstance(encoding, str) else encoding
    one, other = refine([encode(first), encode(second)])
    return one != other


def classes(graphs: Sequence[Any], encoding: str | Callable[[Any], Tensor]) -> list[list[int]]:
    """Indices of the graphs, those together that refinement cannot tell apart."""
    encode = (lambda graph: pair_encoding(graph, encoding)) if isinstance(encoding, str) else encoding
    groups: dict[frozenset, list[int]] = {}
    for index, histogram in enumerate(refine([encode(graph) for graph in graphs])):
        groups.setdefault(frozenset(histogram.items()), []).append(index)
    return list(groups.values())


def one_wl(first: Any, second: Any) -> bool:
    """Whether the usual 1-WL test tells two graphs apart."""
    return separates(first, second, adjacency)
