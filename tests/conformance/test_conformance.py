"""Every check of the conformance suite, on every case."""

from __future__ import annotations

import pytest

import locant
from locant.catalog import encoding_class
from locant.testing import CHECKS
from tests.conformance.cases import BY_ID, CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conforms(check, case):
    check(case)


def test_every_encoding_has_a_case_and_a_paper():
    served = {case.id.split("/")[0] for case in CASES} | {case.id.split("+")[0] for case in CASES}
    names = locant.names() + locant.names("transforms")
    assert sorted(set(names) - served) == []
    assert [name for name in names if not encoding_class(name).paper.source] == []
    assert len(BY_ID) == len(CASES)
