"""Translation invariance of what models learn about positions: Wennberg & Henter 2021, section 3.

For a table P the matrix is P P^T; for its effect on attention it is S_h = (X W_q)(X W_k)^T / sqrt(D) of the first
layer, X the position vectors; for encodings inside attention it is what they add to the logits. R^2 says how much of a
matrix depends on j - i alone, f(k) what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.biases import content_free_logits
from locant.analysis.diagonals import (
    Invariance,
    diagonal_means,
    explained,
    invariance,
    offsets,
    optional_tensor,
    shuffled,
    summary,
)
from locant.analysis.kernels import Kernels, fit_kernels
from locant.analysis.model import UNLIMITED, Host, PositionVectors, position_vectors, projection
from locant.analysis.plain import as_double, check_finite, reduced

RADIUS = 40  # offsets of the scoring functions that are reported
SIDE = 128  # largest side of a reported map
FIRST = 128  # length of most pretraining steps of BERT: rows beyond it saw little


@dataclass(frozen=True)
class TableInvariance:
    """R^2 of X X^T for n position vectors of one treatment, as they are, centered and normalized, beside their nulls.

    ``profile`` [2n - 1]: mean of X X^T over each diagonal. ``map``: block means of X X^T. ``first``: the first 128
    rows.
    """

    n: int
    width: int
    r2: float | None
    r2_off_diagonal: float | None
    null: float | None
    null_off_diagonal: float | None
    null_shuffled: float | None
    null_shuffled_off_diagonal: float | None
    centered: Invariance
    cosine: Invariance
    first: Invariance | None
    offsets: Int[Tensor, "K"]
    profile: Float[Tensor, "K"]
    map: Float[Tensor, "m m"]


@dataclass(frozen=True)
class PositionTable:
    """`TableInvariance` of each treatment; ``raw`` alone is what papers report, ``layernorm`` what attention sees."""

    raw: TableInvariance
    layernorm: TableInvariance | None
    layernorm_meanword: TableInvariance | None


@dataclass(frozen=True)
class HeadInvariance:
    """R^2 of position-only logits, head by head (nan: undefined), and the scoring functions f(k).

    ``source``: the treatment of the position vectors, with ``_bias`` where the projections' biases are in, or ``terms``
    for what an encoding adds. ``mean_map_r2``: R^2 of the mean over heads. ``profile`` [H K]: f(k) at ``offsets``.
    ``spread``: standard deviation of a head's logits, its importance before the softmax.
    """

    layer: int
    source: str
    n: int
    r2: Float[Tensor, "H"]
    r2_off_diagonal: Float[Tensor, "H"]
    null_shuffled: Float[Tensor, "H"]
    spread: Float[Tensor, "H"]
    mean: float | None
    min: float | None
    max: float | None
    mean_map_r2: float | None
    offsets: Int[Tensor, "K"]
    profile: Float[Tensor, "H K"]
    maps: Float[Tensor, "H m m"]


@dataclass(frozen=True)
class TranslationInvariance:
    """Protocol (a): the table, its effect on attention, and Gaussian kernels fitted to the scoring functions."""

    position_table: PositionTable | None
    heads: tuple[HeadInvariance, ...]
    kernels: tuple[Kernels, ...]


def table_invariance(rows: Float[Tensor, "n M"], *, seed: int = 0) -> TableInvariance:
    """R^2 of the Gram matrix of position vectors, beside the nulls.

    Raises: ValueError for vectors that are not finite, or none at all.
    """
    x = as_double(rows)
    check_finite("translation invariance", "the position table", x)
    n, width = x.shape
    if not n:
        raise ValueError(f"translation invariance: the position table has shape {tuple(rows.shape)}; give n >= 1 rows")
    gram, centered = x @ x.T, x - x.mean(0)
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    plain = invariance(gram, width=width, seed=seed)
    return TableInvariance(
        **vars(plain),
        width=width,
        centered=invariance(centered @ centered.T, width=width, seed=seed),
        cosine=invariance(unit @ unit.T, width=width, seed=seed),
        first=invariance(gram[:FIRST, :FIRST], width=width, seed=seed) if n > FIRST else None,
        offsets=offsets(n),
        profile=diagonal_means(gram),
        map=reduced(gram, SIDE),
    )


def position_table(vectors: PositionVectors, *, seed: int = 0) -> PositionTable:
    """`table_invariance` of each treatment; ``raw`` takes the rows as stored (ALBERT: before the factor matrix)."""
    layernorm, meanword = vectors.layernorm, vectors.layernorm_meanword
    return PositionTable(
        raw=table_invariance(vectors.table, seed=seed),
        layernorm=None if layernorm is None else table_invariance(layernorm, seed=seed),
        layernorm_meanword=None if meanword is None else table_invariance(meanword, seed=seed),
    )


def head_invariance(
    logits: Callable[[int], Float[Tensor, "n n"]], num_heads: int, layer: int, source: str, *, seed: int = 0
) -> HeadInvariance:
    """R^2 of position-only logits; ``logits(h)`` gives one head's matrix, so that one is held at a time.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    found, nulls, spreads, profiles, maps = [], [], [], [], []
    mean_map: Tensor | float = 0.0
    for head in range(num_heads):
        matrix = as_double(logits(head))
        found.append(explained(matrix))
        nulls.append(shuffled(matrix, seed)[0])
        spreads.append(float(matrix.std(correction=0)))
        profiles.append(diagonal_means(matrix))
        maps.append(reduced(matrix, SIDE // 2))
        mean_map = mean_map + matrix / num_heads
    assert isinstance(mean_map, Tensor)
    n = mean_map.shape[0]
    radius = min(RADIUS, n - 1)
    mean, least, most = summary([full for full, _ in found])
    return HeadInvariance(
        layer=layer,
        source=source,
        n=n,
        r2=optional_tensor([full for full, _ in found]),
        r2_off_diagonal=optional_tensor([off for _, off in found]),
        null_shuffled=optional_tensor(nulls),
        spread=torch.tensor(spreads, dtype=torch.float64),
        mean=mean,
        min=least,
        max=most,
        mean_map_r2=explained(mean_map)[0],
        offsets=offsets(radius + 1),
        profile=torch.stack(profiles)[:, n - 1 - radius : n + radius],
        maps=torch.stack(maps),
    )


Source = tuple[int, str, Callable[[int], Tensor]]  # layer, source, head -> [n n]


def position_logits(host: Host, length: int | None = None, *, every_treatment: bool = True) -> Iterator[Source]:
    """Each source of position-only logits: (layer, source, function from head to its matrix).

    A table acts in the first layer, once for each treatment (``every_treatment=False``: only what attention sees). An
    encoding inside attention acts in each layer (once where all layers add the same); position 0 is left out where it
    is an untied [CLS], whose row and column are no positions.
    """
    limit = host.trained_length
    n = min(length or limit or UNLIMITED, limit or length or UNLIMITED)
    vectors = position_vectors(host, n)
    if vectors is not None:
        weights = projection(host)
        named = vectors.treatments()
        chosen = named if every_treatment else dict([list(named.items())[min(1, len(named) - 1)]])
        for name, x in chosen.items():
            for bias in (False, True) if every_treatment else (True,):
                source = f"{name}_bias" if bias else name
                yield 0, source, lambda h, x=x, bias=bias: weights.logits(x, x, h, bias)
    before = None
    for layer in range(host.num_layers):
        logits = content_free_logits(host, layer, n)
        if logits is None or (before is not None and torch.equal(before, logits)):
            continue
        before = logits
        encoding = host.encoding_of(layer)
        untied = any(getattr(part, "untie_cls", False) for part in (encoding.parts() if encoding else ()))
        yield layer, "terms", lambda h, logits=logits, first=int(untied): logits[h, first:, first:]


def translation_invariance(
    host: Host, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> TranslationInvariance:
    """Protocol (a) on a model: its table, the heads' position-only logits, kernels fitted to what attention sees.

    Raises: ValueError for a model without positions that act on their own, with what can be asked instead.
    """
    vectors = position_vectors(host)
    table = None if vectors is None else position_table(vectors, seed=seed)
    heads, kernels = [], []
    for layer, source, logits in position_logits(host):
        found = head_invariance(logits, host.num_heads, layer, source, seed=seed)
        heads.append(found)
        if source in ("terms", "layernorm_bias") or (source == "raw_bias" and not host.layout.steps):
            profile = torch.stack([diagonal_means(logits(h)) for h in range(host.num_heads)])
            kernels.append(fit_kernels(profile, layer=layer, source=source))
        if progress is not None:
            progress(layer + 1, host.num_layers + 1)
    if not heads:
        raise ValueError(no_positions(host))
    return TranslationInvariance(table, tuple(heads), tuple(kernels))


def no_positions(host: Host) -> str:
    """Why an analysis of position vectors or biases has nothing to look at."""
    own = "" if host.attachment is None else f" with {host.attachment.stack.name!r} attached"
    return (
        f"analysis: {type(host.stack).__name__} ({host.layout.name}){own} has no position table and no bias that acts "
        "without content (rotations and content-dependent terms act through q and k); look at distance, locality, "
        "phase_shift or probe instead"
    )
