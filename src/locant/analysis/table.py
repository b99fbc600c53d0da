"""What the rows of a position table know: Wang & Chen 2020 (EMNLP), and spectrum and similarity of the rows.

Regression: 5-fold ordinary least squares from row to position, mean absolute error of the rounded prediction. Order:
512 random pairs of rows side by side, is the second the later one? Logistic regression (L2 penalty, C = 1), error rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from locant.analysis.diagonals import diagonal_means, offsets
from locant.analysis.model import Host, position_vectors
from locant.analysis.monotonicity import monotonicity
from locant.analysis.plain import as_double, check_finite, reduced
from locant.analysis.translation_invariance import no_positions

ROWS, PAIRS, FOLDS = 512, 512, 5  # as in the public code
SIDE = 128  # largest side of a reported map


@dataclass(frozen=True)
class Regression:
    """Mean absolute error in positions; ``training_mean_error``: of always answering the mean of the training rows."""

    error: float
    training_mean_error: float
    folds: int


@dataclass(frozen=True)
class Order:
    """Error rate of telling the later row; ``majority``: of always answering the more frequent label.

    ``skipped_folds``: folds left out because their training pairs had one label. None where all were.
    """

    error: float | None
    majority: float | None
    folds: int
    skipped_folds: int


@dataclass(frozen=True)
class Spectrum:
    """Singular values of the centered table; how many hold 99 % of the energy, and how many are not 0."""

    values: Float[Tensor, "r"]
    rank_99: int
    rank: int


@dataclass(frozen=True)
class Table:
    """Protocol (g). ``pca`` [n 3]: rows on their first three axes. Maps and profiles by dot product and cosine."""

    n: int
    width: int
    regression: Regression
    order: Order
    monotonicity: float | None
    spectrum: Spectrum
    pca: Float[Tensor, "n 3"]
    offsets: Int[Tensor, "K"]
    dot_map: Float[Tensor, "m m"]
    dot_profile: Float[Tensor, "K"]
    cosine_map: Float[Tensor, "m m"]
    cosine_profile: Float[Tensor, "K"]


def _checked(rows: Tensor, folds: int) -> Tensor:
    x = as_double(rows)
    check_finite("position table", "the table", x)
    if x.dim() != 2 or x.shape[0] < folds:
        raise ValueError(
            f"position table: {tuple(x.shape)} rows cannot be cut into {folds} folds; give at least {folds} rows"
        )
    return x[:ROWS]


def _folds(count: int, folds: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """(training, test) indices of each fold of a random order."""
    parts = torch.randperm(count, generator=generator).tensor_split(folds)
    return [(torch.cat([*parts[:i], *parts[i + 1 :]]), parts[i]) for i in range(folds)]


def position_regression(rows: Float[Tensor, "n E"], *, folds: int = FOLDS, seed: int = 0) -> Regression:
    """How well a linear map of a row tells its position.

    Raises: ValueError for fewer rows than folds, or rows that are not finite.
    """
    x = _checked(rows, folds)
    y = torch.arange(len(x), dtype=torch.float64)
    errors, baseline = [], []
    for train, test in _folds(len(x), folds, torch.Generator().manual_seed(seed)):
        center, mean = x[train].mean(0), y[train].mean()
        weights = torch.linalg.pinv(x[train] - center) @ (y[train] - mean)
        predicted = ((x[test] - center) @ weights + mean).round()
        errors.append((predicted - y[test]).abs().mean())
        baseline.append((mean.round() - y[test]).abs().mean())
    return Regression(float(torch.stack(errors).mean()), float(torch.stack(baseline).mean()), folds)


def order_classification(rows: Float[Tensor, "n E"], *, pairs: int = PAIRS, folds: int = FOLDS, seed: int = 0) -> Order:
    """How well logistic regression on two rows tells which is later.

    Raises: ValueError for fewer rows or pairs than folds, or rows that are not finite.
    """
    x = _checked(rows, folds)
    if pairs < folds or len(x) < 2:
        raise ValueError(f"order: {pairs} pairs of {len(x)} rows cannot be cut into {folds} folds; give more")
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(x), (pairs,), generator=generator)
    second = (first + torch.randint(1, len(x), (pairs,), generator=generator)) % len(x)
    features, label = torch.cat((x[first], x[second]), 1), (second > first).double()
    errors, majority, skipped = [], [], 0
    for train, test in _folds(pairs, folds, generator):
        if len(label[train].unique()) < 2:
            skipped += 1
            continue
        weights, bias = logistic_regression(features[train], label[train])
        said = (features[test] @ weights + bias > 0).double()
        errors.append((said != label[test]).double().mean())
        frequent = (label[train].mean() > 0.5).double()
        majority.append((frequent != label[test]).double().mean())
    mean = float(torch.stack(errors).mean()) if errors else None
    return Order(mean, float(torch.stack(majority).mean()) if majority else None, folds, skipped)


def logistic_regression(
    x: Float[Tensor, "N F"], y: Float[Tensor, "N"], *, strength: float = 1.0
) -> tuple[Float[Tensor, "F"], Float[Tensor, ""]]:
    """Weights and bias that minimize |w|^2 / 2 + strength * sum of log losses (the bias is free)."""
    weights = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=200, tolerance_grad=1e-8, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x @ weights[:-1] + weights[-1], y, reduction="sum")
        total = strength * loss + weights[:-1].square().sum() / 2
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    found = weights.detach()
    return found[:-1], found[-1]


def spectrum(rows: Float[Tensor, "n E"]) -> Spectrum:
    """Singular values of the table without its mean row; all 0 (rank 0) where all rows are equal.

    Raises: ValueError for rows that are not finite, or none.
    """
    x = as_double(rows)
    check_finite("position table", "the table", x)
    if not x.shape[0]:
        raise ValueError(f"position table: got {tuple(x.shape)} rows; give at least 1")
    centered = x - x.mean(0)
    values = torch.linalg.svdvals(centered)
    floor = max(x.shape) * torch.finfo(torch.float64).eps * float(x.norm())
    values = torch.where(values <= floor, 0.0, values)
    energy = values.square().cumsum(0)
    if not float(values.sum()):
        return Spectrum(values, 0, 0)
    return Spectrum(values, int((energy < 0.99 * energy[-1]).sum()) + 1, int((values > 0).sum()))


def principal_axes(rows: Float[Tensor, "n E"], axes: int = 3) -> Float[Tensor, "n A"]:
    """Rows on their first principal axes, zeros where there are fewer."""
    x = as_double(rows)
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    found = (u * s)[:, :axes]
    return F.pad(found, (0, axes - found.shape[1]))


def analyze_table(rows: Float[Tensor, "n E"], *, seed: int = 0) -> Table:
    """Protocol (g) on the rows of a table.

    Raises: ValueError for fewer rows than folds, or rows that are not finite.
    """
    x = as_double(rows)
    unit = x / x.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    regression, order = position_regression(x, seed=seed), order_classification(x, seed=seed)
    dot, cosine = x @ x.T, unit @ unit.T
    cosine_profile = diagonal_means(cosine)
    return Table(
        n=x.shape[0],
        width=x.shape[1],
        regression=regression,
        order=order,
        monotonicity=monotonicity(cosine_profile),
        spectrum=spectrum(x),
        pca=principal_axes(x),
        offsets=offsets(x.shape[0]),
        dot_map=reduced(dot, SIDE),
        dot_profile=diagonal_means(dot),
        cosine_map=reduced(cosine, SIDE),
        cosine_profile=cosine_profile,
    )


def table(host: Host, *, seed: int = 0) -> Table:
    """Protocol (g) on a model's position table.

    Raises: ValueError for a model without one, or with fewer rows than folds.
    """
    vectors = position_vectors(host)
    if vectors is None:
        raise ValueError(no_positions(host))
    return analyze_table(vectors.table, seed=seed)
