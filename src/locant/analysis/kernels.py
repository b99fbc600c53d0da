"""Gaussian kernels fitted to scoring functions: how many explain what a head learned about offsets.

    f(k) ~ constant + sum_s a_s exp(-|b_s| (k - c_s)^2),     weights n - |k| (the pairs at each offset)

Wennberg & Henter 2021, section 4. The constant is free, because softmax does not see it. Kernels are added one by one,
each from the best of a grid, and all are then refined together (Levenberg-Marquardt, all heads at once).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.diagonals import offsets
from locant.analysis.plain import as_double, check_finite

MOST = 5  # kernels, as in the public code
ENOUGH = 0.95  # share of the variance that counts as explained


@dataclass(frozen=True)
class Kernels:
    """Fits of 1 .. S kernels to f(k) of each head.

    ``r2`` [H S]: weighted share of variance explained by 1 .. S kernels (nan where f is constant). ``needed``: how many
    explain 95 %, None where S do not. ``amplitude``, ``sharpness``, ``center`` [H S], ``constant`` [H]: the last fit.
    """

    layer: int
    source: str
    r2: Float[Tensor, "H S"]
    needed: tuple[int | None, ...]
    amplitude: Float[Tensor, "H S"]
    sharpness: Float[Tensor, "H S"]
    center: Float[Tensor, "H S"]
    constant: Float[Tensor, "H"]

    def scores(self, offset: Int[Tensor, "K"]) -> Float[Tensor, "H K"]:
        """The fitted f(k)."""
        return _curve(self.amplitude, self.sharpness.log(), self.center, self.constant, offset.double())[0]


def fit_kernels(
    profile: Float[Tensor, "H K"], *, kernels: int = MOST, layer: int = 0, source: str = "terms"
) -> Kernels:
    """Fit kernels to scoring functions at offsets -(n - 1) .. n - 1.

    Raises: ValueError for an even number of offsets, kernels < 1, or numbers that are not finite.
    """
    if kernels < 1:
        raise ValueError(f"kernels: kernels={kernels} fits nothing; give kernels >= 1")
    if profile.shape[-1] % 2 == 0:
        raise ValueError(
            f"kernels: the profile has {profile.shape[-1]} offsets; give 2n - 1 of them, -(n - 1) .. n - 1"
        )
    y = as_double(profile)
    check_finite("kernels", "the scoring function", y)
    heads, n = y.shape[0], (y.shape[1] + 1) // 2
    k = offsets(n).double()
    weight = (n - k.abs()) / (n - k.abs()).sum()
    mean = (weight * y).sum(-1, keepdim=True)
    spread = (weight * (y - mean) ** 2).sum(-1)
    flat = spread <= 1e-24 * y.abs().amax(-1) ** 2
    unit = torch.where(flat, torch.ones_like(spread), spread).sqrt()[:, None]
    target = (y - mean) / unit  # each head with mean 0 and variance 1: one damping fits all

    empty = torch.zeros(heads, 0, dtype=torch.float64)
    a, s, c, d = empty, empty, empty, torch.zeros(heads, dtype=torch.float64)
    errors = []
    for _ in range(kernels):
        residual = target - _curve(a, s, c, d, k)[0]
        amplitude, log_sharpness, center = _best_of_grid(residual, weight, k, n)
        a, s, c = (torch.cat((old, new[:, None]), 1) for old, new in ((a, amplitude), (s, log_sharpness), (c, center)))
        a, s, c, d, error = _refine(a, s, c, d, k, target, weight)
        errors.append(error)
    r2 = 1 - torch.stack(errors, 1).cummin(1).values
    r2[flat] = float("nan")
    needed = tuple(next((i + 1 for i, share in enumerate(row) if share >= ENOUGH), None) for row in r2.tolist())
    return Kernels(layer, source, r2, needed, a * unit, s.exp(), c, d * unit[:, 0] + mean[:, 0])


def _curve(a: Tensor, s: Tensor, c: Tensor, d: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [H K], single kernels [H S K] and distances from the centers [H S K]; s is the logarithm of b."""
    away = k - c[..., None]
    single = torch.exp(-s.exp()[..., None] * away**2)
    return d[:, None] + (a[..., None] * single).sum(1), single, away


def _best_of_grid(residual: Tensor, weight: Tensor, k: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of a grid that takes most of the residual, beside a constant of its own."""
    reach = min(n - 1, 64)
    centers = torch.unique(torch.cat((torch.arange(-16, 17), torch.arange(-reach, reach + 1, 4)))).double()
    widths = torch.logspace(math.log10(0.5), math.log10(max(2.0 * n, 1.0)), 14, dtype=torch.float64)
    log_sharpness = (-2 * widths.log() - math.log(2)).repeat(len(centers))
    center = centers.repeat_interleave(len(widths))
    grid = torch.exp(-log_sharpness.exp()[:, None] * (k - center[:, None]) ** 2)
    grid = grid - (weight * grid).sum(-1, keepdim=True)
    power = (weight * grid**2).sum(-1).clamp(min=1e-12)
    product = (weight * residual) @ grid.T
    best = (product**2 / power).argmax(-1)
    rows = torch.arange(len(residual))
    return product[rows, best] / power[best], log_sharpness[best], center[best]


def _refine(
    a: Tensor, s: Tensor, c: Tensor, d: Tensor, k: Tensor, target: Tensor, weight: Tensor, steps: int = 60
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Levenberg-Marquardt for every head at once; a step that does not help is not taken."""
    heads, kernels = a.shape
    point = torch.cat((a, s, c, d[:, None]), 1)

    def split(p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return p[:, :kernels], p[:, kernels : 2 * kernels], p[:, 2 * kernels : 3 * kernels], p[:, -1]

    def error_of(p: Tensor) -> Tensor:
        return (weight * (target - _curve(*split(p), k)[0]) ** 2).sum(-1)

    error, damping = error_of(point), torch.full((heads,), 1e-2, dtype=torch.float64)
    for _ in range(steps):
        amplitude, log_sharpness, center, constant = split(point)
        value, single, away = _curve(amplitude, log_sharpness, center, constant, k)
        sharp = log_sharpness.exp()[..., None]
        slope = amplitude[..., None] * single
        jacobian = torch.cat(
            (single, -slope * sharp * away**2, 2 * slope * sharp * away, torch.ones_like(value)[:, None]), 1
        )
        weighted = jacobian * weight
        normal, gradient = weighted @ jacobian.transpose(1, 2), (weighted @ (target - value)[..., None])[..., 0]
        diagonal = normal.diagonal(dim1=1, dim2=2)
        damped = normal + torch.diag_embed(damping[:, None] * diagonal + 1e-12)
        moved = point + torch.linalg.solve(damped, gradient)
        moved[:, kernels : 2 * kernels] = moved[:, kernels : 2 * kernels].clamp(-18, 6)
        trial = error_of(moved)
        better = trial < error
        gain = torch.where(better, error - trial, torch.zeros_like(error))
        point = torch.where(better[:, None], moved, point)
        error = torch.where(better, trial, error)
        damping = torch.where(better, damping / 3, damping * 4).clamp(1e-10, 1e8)
        if bool((gain <= 1e-12).all() & (damping > 1e3).all()):
            break
    return (*split(point), error)
