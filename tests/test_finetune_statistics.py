"""How many seeds a difference takes: against the exact power of the test, and intervals against scipy's own."""

from __future__ import annotations

import math

import numpy
import pytest
from scipy import stats

from locant.compare.summary import Spread, spread
from locant.finetune.statistics import ALPHA, POWER, gap, seeds_needed


def power(n: int, apart: float, variances: list[float]) -> float:
    """Of the two-sided t-test, by the noncentral distribution."""
    freedom = len(variances) * (n - 1)
    away = apart / math.sqrt(sum(variances) / n)
    edge = stats.t.ppf(1 - ALPHA / 2, freedom)
    return float(stats.nct.sf(edge, freedom, away) + stats.nct.cdf(-edge, freedom, away))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0, 2.5])
def test_so_many_seeds_have_the_power_and_fewer_have_not(groups: int, ratio: float) -> None:
    variances = [4.0] * groups
    n = seeds_needed(2.0 * ratio, variances)
    assert n is not None
    assert power(n, 2.0 * ratio, variances) > POWER - 0.04
    assert n == 2 or power(n - 1, 2.0 * ratio, variances) < POWER + 0.01


def test_seeds_that_no_number_of_can_help() -> None:
    assert seeds_needed(0.0, [1.0, 1.0]) is None
    assert seeds_needed(1e-4, [1.0, 1.0]) is None, "beyond what is counted"
    assert seeds_needed(1.0, [0.0, 0.0]) == 2


def test_intervals_are_those_of_welch_and_of_one_mean() -> None:
    a, b = [61.2, 58.4, 60.1, 63.3], [57.0, 58.8, 55.2]
    found = gap(spread(a), spread(b))
    want = stats.ttest_ind(a, b, equal_var=False).confidence_interval(1 - ALPHA)
    assert found is not None and found.difference == pytest.approx(numpy.mean(a) - numpy.mean(b))
    assert (found.low, found.high) == (pytest.approx(want.low), pytest.approx(want.high))
    assert found.shown is bool(want.low > 0)
    alone = gap(spread(a), 60.0)
    level = stats.ttest_1samp(a, 60.0).confidence_interval(1 - ALPHA)
    assert alone is not None and not alone.shown
    assert (alone.low, alone.high) == (pytest.approx(level.low - 60.0), pytest.approx(level.high - 60.0))


def test_one_seed_says_nothing_about_chance() -> None:
    found = gap(spread([61.0]), spread([57.0, 58.0]))
    assert found is not None and (found.difference, found.low, found.seeds_needed) == (pytest.approx(3.5), None, None)
    assert not found.shown
    assert gap(Spread(None, None, 0), 3.0) is None
    same = gap(spread([1.0, 1.0]), 1.0)
    assert same is not None and same.low == same.high == 0.0
