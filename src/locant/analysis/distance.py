"""Attention by distance: Huang et al. 2020, the figure of attention weights over relative positions.

mean(k): mean of A[i, i + k] over the pairs that exist        mass(k): the same sum over the number of queries
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locant.analysis.biases import Companion, companions
from locant.analysis.diagonals import offsets
from locant.analysis.model import Host
from locant.analysis.passes import run
from locant.analysis.plain import check_finite, reduced
from locant.analysis.windows import check_windows

RADIUS = 40  # offsets that are reported
SIDE = 48  # largest side of a reported map


@dataclass(frozen=True)
class ByDistance:
    """Attention by distance of some heads: ``mean`` [.. K] (nan where no pair), ``mass`` [.. K], pairs ``counts`` [K].

    ``mean_distance`` [..]: sum of abs(k) mass(k) over the sum of mass(k), every offset counted. ``mean`` is per pair,
    ``mass`` per query: it sums to 1 over all k.
    """

    offsets: Int[Tensor, "K"]
    mean: Float[Tensor, "... K"]
    mass: Float[Tensor, "... K"]
    counts: Int[Tensor, "K"]
    mean_distance: Float[Tensor, "..."]


@dataclass(frozen=True)
class AttentionByDistance:
    """Protocol (c) on real text: [L H K] over ``windows`` windows, small maps, and what terms hold by offset."""

    length: int
    windows: int
    offsets: Int[Tensor, "K"]
    mean: Float[Tensor, "L H K"]
    mass: Float[Tensor, "L H K"]
    counts: Int[Tensor, "K"]
    mean_distance: Float[Tensor, "L H"]
    maps: Float[Tensor, "L H m m"]
    companions: tuple[Companion, ...]


def by_distance(
    weights: Float[Tensor, "B H n n"],
    *,
    valid: Bool[Tensor, "B n"] | None = None,
    causal: bool = False,
    radius: int | None = None,
) -> ByDistance:
    """Attention probabilities of a batch by offset; ``valid`` marks real tokens, others count neither way.

    ``radius`` cuts what is returned, not what is averaged. Raises: ValueError for weights that are not finite or no
    square, and where no token is valid.
    """
    if weights.dim() != 4 or weights.shape[-1] != weights.shape[-2]:
        raise ValueError(f"distance: the weights have shape {tuple(weights.shape)}; give [batch, heads, n, n]")
    batch, _, n, _ = weights.shape
    valid = torch.ones(batch, n, dtype=torch.bool, device=weights.device) if valid is None else valid
    pairs = valid[:, :, None] & valid[:, None, :]
    if causal:
        pairs = pairs.tril()
    queries = int(valid.sum())
    if not queries:
        raise ValueError(f"distance: none of {batch} x {n} tokens is valid; give at least one real token")
    kept = torch.where(pairs[:, None], weights, 0.0)  # a fully padded row may hold anything
    check_finite("distance", "the attention", kept)
    total = kept.sum(0)  # [H n n]
    index = (torch.arange(n)[None, :] - torch.arange(n)[:, None] + n - 1).flatten().to(weights.device)

    def along(x: Tensor) -> Tensor:
        flat = x.flatten(-2).double()
        return flat.new_zeros(*flat.shape[:-1], 2 * n - 1).index_add_(-1, index, flat).cpu()

    sums, counts = along(total), along(pairs.sum(0)).round().long()
    k, mass = offsets(n), sums / queries
    mean_distance = (k.abs() * mass).sum(-1) / mass.sum(-1)
    r = n - 1 if radius is None else min(radius, n - 1)
    cut = slice(n - 1 - r, n + r)
    return ByDistance(k[cut], (sums / counts)[..., cut], mass[..., cut], counts[cut], mean_distance)


def uniform_distance(n: int, *, causal: bool = False) -> float:
    """Mean distance of equal weights on all keys (on those up to the query where ``causal``)."""
    return (n - 1) / 4 if causal else (n * n - 1) / (3 * n)


def attention_by_distance(
    host: Host,
    windows: Int[Tensor, "N n"],
    *,
    radius: int = RADIUS,
    progress: Callable[[int, int], None] | None = None,
) -> AttentionByDistance:
    """Protocol (c) on a model: one pass for each window, layers reduced one after the other.

    Raises: ValueError for windows that are padded or too long for the model.
    """
    check_windows("distance", host, windows)
    sums: dict[int, list[Tensor]] = {}
    counts: list[ByDistance] = []

    def visit(layer: int, weights: Tensor) -> None:
        found = by_distance(weights, causal=host.causal, radius=radius)
        parts = [found.mean, found.mass, found.mean_distance, reduced(weights.sum(0).double(), SIDE)]
        sums[layer] = [old + new for old, new in zip(sums[layer], parts, strict=True)] if layer in sums else parts
        counts[:] = [found]

    for done in range(len(windows)):
        run(host, windows[done : done + 1], visit=visit)
        if progress is not None:
            progress(done + 1, len(windows))
    mean, mass, mean_distance, maps = (
        torch.stack([sums[layer][part] for layer in sorted(sums)]) / len(windows) for part in range(4)
    )
    return AttentionByDistance(
        length=windows.shape[1],
        windows=len(windows),
        offsets=counts[0].offsets,
        mean=mean,
        mass=mass,
        counts=counts[0].counts * len(windows),
        mean_distance=mean_distance,
        maps=maps.float(),
        companions=every_companion(host, radius),
    )


def every_companion(host: Host, radius: int = RADIUS) -> tuple[Companion, ...]:
    """`companions` of all layers; layers that hold the same as the one before are left out."""
    found: list[tuple[Companion, ...]] = []
    for layer in range(host.num_layers):
        here = companions(host, layer, radius)
        same = found and len(here) == len(found[-1])
        if same and all(torch.equal(a.values, b.values) for a, b in zip(here, found[-1], strict=True)):
            continue
        found.append(here)
    return tuple(companion for layer in found for companion in layer)
