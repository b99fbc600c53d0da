"""Several seeds of one number: mean, deviation, and how many seeds a difference takes to be seen.

The number of seeds is that of a two-sided t-test at level ALPHA with power POWER. For two groups of n seeds each, with
means that differ by d and standard deviations s_a, s_b, it is the smallest n with

    n >= (t(1 - ALPHA/2; 2n - 2) + t(POWER; 2n - 2))^2 (s_a^2 + s_b^2) / d^2

and for one group against a fixed number, the smallest n with

    n >= (t(1 - ALPHA/2; n - 1) + t(POWER; n - 1))^2 s^2 / d^2,

where t(p; k) is the p-quantile of Student's distribution with k degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from locant.compare.summary import Spread

ALPHA, POWER = 0.05, 0.8
MOST = 100_000  # seeds; more are not counted


@dataclass(frozen=True)
class Gap:
    """``a`` minus ``b``: the interval (95 %, Welch's) is None below two seeds each, and so is the number of seeds."""

    difference: float
    low: float | None
    high: float | None
    seeds_needed: int | None  # of each, to detect a difference of this size

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def gap(a: Spread, b: Spread | float) -> Gap | None:
    """How two groups of seeds differ, or one from a fixed number; None where a mean is undefined."""
    other = b.mean if isinstance(b, Spread) else b
    if a.mean is None or other is None:
        return None
    groups = [a, b] if isinstance(b, Spread) else [a]
    variances = [(group.std**2, group.n) for group in groups if group.std is not None]
    if len(variances) < len(groups):
        return Gap(a.mean - other, None, None, None)
    apart, half = a.mean - other, _half_width(variances)
    return Gap(apart, apart - half, apart + half, seeds_needed(apart, [variance for variance, _ in variances]))


def seeds_needed(apart: float, variances: Sequence[float]) -> int | None:
    """Seeds for each of one or two groups (see the module); None where they do not differ, or for more than MOST."""
    from scipy.stats import t

    if not apart:
        return None
    ratio = sum(variances) / apart**2

    def enough(n: int) -> bool:
        freedom = len(variances) * (n - 1)
        return n >= float(t.ppf(1 - ALPHA / 2, freedom) + t.ppf(POWER, freedom)) ** 2 * ratio

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _half_width(groups: Sequence[tuple[float, int]]) -> float:
    """Half of the 95 % interval of a mean, or of the difference of two (Welch-Satterthwaite degrees of freedom)."""
    from scipy.stats import t

    parts = [variance / count for variance, count in groups]
    total = sum(parts)
    if not total:
        return 0.0
    freedom = total**2 / sum(part**2 / (count - 1) for part, (_, count) in zip(parts, groups, strict=True))
    return float(t.ppf(1 - ALPHA / 2, freedom)) * math.sqrt(total)
