"""How much of a matrix its diagonals explain: Wennberg & Henter 2021, section 3 (translation invariance).

    T[i, j] = mean of M over the diagonal j - i,     R^2 = 1 - sum (M - T)^2 / sum (M - mean M)^2

which is one-way analysis of variance with 2n - 1 groups. The mean over a diagonal is the scoring function f(k), with
k = j - i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.plain import as_double, check_square, defined

SHUFFLES = 5  # orders of the positions that the null is averaged over


@dataclass(frozen=True)
class Invariance:
    """R^2 of the diagonals of one n x n matrix, with and without the main diagonal; None where it does not vary.

    ``null`` and ``null_off_diagonal``: what rows drawn at random would give, where a formula is known.
    ``null_shuffled`` and ``null_shuffled_off_diagonal``: the same matrix with its positions in random order.
    """

    n: int
    r2: float | None
    r2_off_diagonal: float | None
    null: float | None
    null_off_diagonal: float | None
    null_shuffled: float | None
    null_shuffled_off_diagonal: float | None


def offsets(n: int) -> Int[Tensor, "K"]:
    """The offsets j - i of an n x n matrix: -(n - 1) .. n - 1."""
    return torch.arange(-(n - 1), n)


def _groups(n: int) -> Int[Tensor, "cells"]:
    index = torch.arange(n)
    return (index[None, :] - index[:, None] + n - 1).flatten()


def diagonal_means(matrix: Float[Tensor, "I I"]) -> Float[Tensor, "K"]:
    """f(k): the mean of each diagonal, k = -(n - 1) .. n - 1, in float64.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    n = check_square("translation invariance", matrix)
    sums = torch.zeros(2 * n - 1, dtype=torch.float64).index_add_(0, _groups(n), as_double(matrix).flatten())
    return sums / (n - offsets(n).abs())


def explained(matrix: Float[Tensor, "I I"]) -> tuple[float | None, float | None]:
    """R^2 of the diagonals, with the main diagonal and without; None where there is no variance to explain.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    n = check_square("translation invariance", matrix)
    cells = as_double(matrix).flatten()
    residual = (cells - diagonal_means(matrix)[_groups(n)]) ** 2
    floor = 1e-24 * n * n * float(cells.abs().max()) ** 2  # below it a constant matrix differs by rounding alone
    off = _groups(n) != n - 1
    return _ratio(cells, residual, floor), _ratio(cells[off], residual[off], floor)


def _ratio(cells: Tensor, residual: Tensor, floor: float) -> float | None:
    if not len(cells):
        return None
    total = float(((cells - cells.mean()) ** 2).sum())
    if total <= floor:
        return None
    return min(1.0, max(0.0, 1 - float(residual.sum()) / total))


def shuffled(matrix: Float[Tensor, "I I"], seed: int = 0) -> tuple[float | None, float | None]:
    """Mean R^2 of the matrix with its positions in random order (rows and columns alike): a null that keeps the cells.

    Raises: ValueError for a matrix that is not square, or not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(matrix.shape[0], generator=generator) for _ in range(SHUFFLES)]
    found = [explained(matrix[order][:, order]) for order in orders]
    return _mean([full for full, _ in found]), _mean([off for _, off in found])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def invariance(matrix: Float[Tensor, "I I"], *, width: int | None = None, seed: int = 0) -> Invariance:
    """R^2 of a matrix's diagonals beside its nulls.

    ``width`` D: the matrix is the Gram matrix of rows of D numbers; independent rows then give about D/(D + n) through
    the main diagonal alone, and 2/n without it. Raises: ValueError for a matrix that is not square, or not finite.
    """
    n = matrix.shape[-1]
    full, off = explained(matrix)
    full_shuffled, off_shuffled = shuffled(matrix, seed)
    return Invariance(
        n=n,
        r2=full,
        r2_off_diagonal=off,
        null=None if width is None else width / (width + n),
        null_off_diagonal=None if width is None or n < 2 else min(1.0, 2 / n),
        null_shuffled=full_shuffled,
        null_shuffled_off_diagonal=off_shuffled,
    )


def summary(values: list[float | None]) -> tuple[float | None, float | None, float | None]:
    """Mean, least and greatest of the values that are defined."""
    known = [value for value in values if value is not None]
    return (_mean(values), min(known), max(known)) if known else (None, None, None)


def optional_tensor(values: list[float | None]) -> Float[Tensor, "N"]:
    """Numbers as a tensor, nan where undefined."""
    return torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64)


def defined_mean(values: Tensor) -> float | None:
    """The mean of what is defined; None where nothing is."""
    return defined(values.nanmean())
