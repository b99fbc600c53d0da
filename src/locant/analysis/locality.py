"""Locality and symmetry of attention-like matrices: Chen et al. 2023 (Findings of EMNLP).

    locality = (1/n) sum_ij M[i, j] 2^-|i - j|
    symmetry = 1 - mean of v'_t,     v_t = |M[i, i - t] - M[i, i + t]|, t = 1 .. min(i, n - 1 - i)

where v' is v scaled to 0 .. 1 within its row.

Note: the row scaling makes the published symmetry blind to magnitude and sensitive to rounding; ``symmetry_raw`` (ours)
divides each difference by its sum instead: 1 - mean of v_t / (M[i, i - t] + M[i, i + t]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.diagonals import defined_mean, diagonal_means, explained, optional_tensor
from locant.analysis.model import Host
from locant.analysis.monotonicity import monotonicity
from locant.analysis.passes import run
from locant.analysis.patterns import softmax_logits
from locant.analysis.plain import as_double, check_square
from locant.analysis.translation_invariance import no_positions, position_logits

NEGLIGIBLE = 1e-9  # of the largest entry: differences that `rounded` takes for 0


@dataclass(frozen=True)
class LocalitySymmetry:
    """The two published numbers and the stable variant; None where undefined."""

    locality: float | None
    symmetry: float | None
    symmetry_raw: float | None


@dataclass(frozen=True)
class HeadLocality:
    """The three numbers of each head [H] (nan: undefined) of one source of position-only logits, after softmax."""

    layer: int
    source: str
    locality: Float[Tensor, "H"]
    symmetry: Float[Tensor, "H"]
    symmetry_raw: Float[Tensor, "H"]
    mean: LocalitySymmetry


@dataclass(frozen=True)
class IdenticalWords:
    """Attention in sequences of one repeated word, averaged over words, layers and heads: content cannot differ.

    ``monotonicity``: how steadily its mean over diagonals decays. ``r2``: how much of it depends on the offset alone.
    """

    words: int
    length: int
    locality: float | None
    symmetry: float | None
    symmetry_raw: float | None
    monotonicity: float | None
    r2: float | None
    map: Float[Tensor, "n n"]
    per_layer: tuple[LocalitySymmetry, ...]


@dataclass(frozen=True)
class Locality:
    """Protocol (e): by position-only logits where a model has them, and by identical words."""

    logits: tuple[HeadLocality, ...] | None
    identical_words: IdenticalWords


def locality(matrix: Float[Tensor, "n n"]) -> float:
    """How much of each row lies near the diagonal; in 0 .. 1 for rows that sum to 1.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    n = check_square("locality", matrix)
    index = torch.arange(n, dtype=torch.float64)
    return float((as_double(matrix) * torch.exp2(-(index[None, :] - index[:, None]).abs())).sum() / n)


def uniform_locality(n: int, *, causal: bool = False) -> float:
    """Locality of equal weights on all keys (up to the query where ``causal``): what to hold others against."""
    index = torch.arange(n, dtype=torch.float64)
    seen = torch.ones(n, n, dtype=torch.float64)
    seen = seen.tril() if causal else seen
    return float((seen / seen.sum(-1, keepdim=True) * torch.exp2(-(index[None, :] - index[:, None]).abs())).sum() / n)


def _pairs(matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Left and right neighbors at equal distance, for every row that has any."""
    m, n = as_double(matrix), matrix.shape[0]
    found = []
    for i in range(1, n - 1):
        reach = min(i, n - 1 - i)
        found.append((m[i, i - reach : i].flip(0), m[i, i + 1 : i + reach + 1]))
    return found


def symmetry(matrix: Float[Tensor, "n n"], *, rounded: bool = False) -> float | None:
    """The published symmetry; None for n < 3. ``rounded`` takes differences below 1e-9 of the largest entry for 0.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    check_square("symmetry", matrix)
    tiny, least = 10 * torch.finfo(torch.float64).eps, NEGLIGIBLE * float(matrix.abs().max())
    scaled = []
    for left, right in _pairs(matrix):
        v = (left - right).abs()
        if rounded:
            v = torch.where(v < least, 0.0, v)
        spread = float(v.max() - v.min())
        scaled.append((v - v.min()) / (1.0 if spread < tiny else spread))
    return 1 - float(torch.cat(scaled).mean()) if scaled else None


def symmetry_raw(matrix: Float[Tensor, "n n"]) -> float | None:
    """1 - mean of |left - right| / (left + right) over pairs at equal distance (0/0 is 0); None for n < 3.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    check_square("symmetry", matrix)
    shares = []
    for left, right in _pairs(matrix):
        total = left + right
        shares.append(torch.where(total == 0, 0.0, (left - right).abs() / torch.where(total == 0, 1.0, total)))
    return 1 - float(torch.cat(shares).mean()) if shares else None


def locality_symmetry(matrix: Float[Tensor, "n n"]) -> LocalitySymmetry:
    """All three numbers of a matrix.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    return LocalitySymmetry(locality(matrix), symmetry(matrix), symmetry_raw(matrix))


def head_locality(host: Host, length: int = 128) -> tuple[HeadLocality, ...]:
    """The three numbers of each head's position-only logits, after softmax.

    Raises: ValueError for a model without positions that act on their own.
    """
    found = []
    for layer, source, logits in position_logits(host, length, every_treatment=False):
        heads = [locality_symmetry(softmax_logits(logits(h), causal=host.causal)) for h in range(host.num_heads)]
        columns = {name: optional_tensor([getattr(h, name) for h in heads]) for name in vars(heads[0])}
        mean = LocalitySymmetry(**{name: defined_mean(column) for name, column in columns.items()})
        found.append(HeadLocality(layer, source, **columns, mean=mean))
    if not found:
        raise ValueError(no_positions(host))
    return tuple(found)


def some_words(host: Host, count: int, seed: int = 0) -> Int[Tensor, "W"]:
    """Token ids to repeat, drawn from the vocabulary above its first tenth (where special tokens lie).

    Raises: ValueError for a model that tells no vocabulary.
    """
    size = getattr(getattr(host.stack, "config", None), "vocab_size", 0)
    if size < 2:
        raise ValueError(f"identical words: the model tells vocab_size={size}; give the token ids to repeat")
    low = size // 10 + 1
    return low + torch.randperm(size - low, generator=torch.Generator().manual_seed(seed))[:count]


def identical_words(
    host: Host,
    words: Int[Tensor, "W"],
    length: int = 128,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> IdenticalWords:
    """Feed each word repeated ``length`` times, without special tokens, and average the attention.

    Raises: ValueError for no words, fewer than 3 positions, or a length past the model's table.
    """
    limit = host.trained_length
    if not words.numel() or length < 3 or (limit is not None and length > limit):
        raise ValueError(
            f"identical words: got {words.numel()} words at length={length}; give 1 word or more and a length of 3 to "
            f"{limit or 'any'}"
        )
    layers: dict[int, Tensor] = {}

    def visit(layer: int, weights: Tensor) -> None:
        here = weights.mean((0, 1)).double().cpu()
        layers[layer] = layers[layer] + here if layer in layers else here

    for done, word in enumerate(words.tolist()):
        run(host, torch.full((1, length), word), visit=visit)
        if progress is not None:
            progress(done + 1, len(words))
    maps = [layers[layer] / len(words) for layer in sorted(layers)]
    mean = torch.stack(maps).mean(0)
    whole = locality_symmetry(mean)
    return IdenticalWords(
        words=len(words),
        length=length,
        **vars(whole),
        monotonicity=monotonicity(diagonal_means(mean)),
        r2=explained(mean)[0],
        map=mean,
        per_layer=tuple(locality_symmetry(one) for one in maps),
    )
