"""The conformance suite as an outside author meets it: a case, an object, and what failures say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import locant
from locant import Encoding, Paper, Properties
from locant.terms import Clip, RelativeBias
from locant.testing import CHECKS, EQUATIONS, Case, check_encoding, check_oracle, check_parameters, check_range
from locant.testing.verdict import Verdict
from tests.conformance.cases import BY_ID


class Window(Encoding):
    """An outside author's encoding: one number for each clipped offset."""

    name = "window"
    paper = Paper("none", "eq. 1")
    properties = Properties(True, False, "clip", "separate", neutral="table = 0")

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, 5))

    def terms(self, positions, layer):
        return (RelativeBias(self.table, Clip(2)),)

    def neutralize(self):
        nn.init.zeros_(self.table)


def window(p, q, k, i, j, h):
    return q @ k / 8**0.5 + p["table"][h, max(-2, min(2, j - i)) + 2]


def test_an_outside_encoding_is_certified_by_one_case():
    assert check_encoding(Case("window", Window, window, parameters=15, reach=2)) == [c.__name__ for c in CHECKS]


def test_an_object_alone_is_checked_without_its_equation():
    held = check_encoding(locant.load("tisa", num_heads=3))
    assert held == [c.__name__ for c in CHECKS if c not in EQUATIONS]
    held = check_encoding(Window())
    assert "check_range" not in held and "check_shift" in held


def test_all_failures_are_told_with_case_check_and_numbers():
    wrong = Case("window", Window, lambda *pair: window(*pair) + 0.1 * pair[4], parameters=14, reach=2)
    with pytest.raises(AssertionError) as told:
        check_encoding(wrong, checks=[check_oracle, check_range, check_parameters])
    first, second = str(told.value).splitlines()
    assert first.startswith("window: oracle: output (counted): largest difference 0.") and "(allowed 1." in first
    assert second == "window: parameters: 15 parameters, the formula says 14"


@pytest.mark.parametrize(
    "check, message",
    [
        (check_oracle, "window: oracle: the case has no logit"),
        (check_parameters, "window: parameters: the case has no parameter count"),
        (check_range, "window: range: claims 'clip'; give the case its reach"),
    ],
)
def test_a_case_that_says_too_little_is_told_what_to_give(check, message):
    with pytest.raises(AssertionError, match=message):
        check(Case("window", Window))


@pytest.mark.parametrize("edge", [1, 3])
def test_a_reach_off_by_one_is_noticed(edge):
    with pytest.raises(AssertionError, match=f"window: range: .*distance.* {edge}"):
        check_range(Case("window", Window, reach=edge))


def test_cases_build_the_same_numbers_twice():
    case = BY_ID["tupe_r"]
    first, second = case.build(), case.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.buckets.std() > 0.3 and first.buckets.dtype == torch.float64


def test_nan_and_wrong_shapes_are_differences():
    verdict, ones = Verdict("case", "check"), torch.ones(2, 3)
    verdict.close("same", ones, ones, 0.0)
    with pytest.raises(
        AssertionError, match=r"case: check: it: largest difference inf .* at \(1, 2\): got nan, expected 1"
    ):
        verdict.close(
            "it", ones.clone().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan"))), ones, 1.0
        )
    with pytest.raises(AssertionError, match=r"shape \(2, 3\), expected \(3, 2\)"):
        verdict.close("it", ones, ones.T, 1.0)
    with pytest.raises(AssertionError, match="largest difference 0, expected more than 1e-06"):
        verdict.far("it", ones, ones)
    with pytest.raises(AssertionError, match="largest difference nan"):
        verdict.far("it", ones * float("nan"), ones)
