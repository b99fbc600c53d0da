"""Monotonicity of scoring functions, the third indicator of Wang et al. 2021; the measure is ours."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from locant.analysis.plain import as_double, check_finite


def monotonicity(profile: Float[Tensor, "K"]) -> float | None:
    """Share of steps away from k = 0 that do not rise: 1 decays all the way, both sides averaged; None for n < 3.

    A rise by less than 1e-12 of the largest value is rounding.
    ``profile`` holds f(k) at k = -(n - 1) .. n - 1. Raises: ValueError for an even number of offsets, or numbers that
    are not finite.
    """
    if profile.dim() != 1 or profile.shape[0] % 2 == 0:
        raise ValueError(
            f"monotonicity: the profile has shape {tuple(profile.shape)}; give 2n - 1 values, -(n - 1) .. n - 1"
        )
    check_finite("monotonicity", "the profile", profile)
    f, n = as_double(profile), (profile.shape[0] + 1) // 2
    if n < 3:
        return None
    right, left = f[n:], f[: n - 1].flip(0)  # k = 1 .. n - 1 on either side
    rounding = 1e-12 * float(f.abs().max())
    return sum(float((side[1:] - side[:-1] <= rounding).double().mean()) for side in (left, right)) / 2
