"""Backend `triton` equals `reference` in output and every gradient, interpreted on the CPU; else it says why not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from locant import Positions, explain
from locant.backends.call import Call
from locant.backends.triton import groups, lower
from locant.terms import (
    Clip,
    LogBucket,
    Operands,
    RelativeBias,
    RelativeGate,
    RelativeQuery,
    Rule,
    SignedLogBucket,
    Untied,
    WeightScale,
)
from tests.scripts import ROOT


@pytest.mark.slow
def test_interpreted_kernels_equal_reference():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_cases"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "runs, 0 differ" in done.stdout


def call(
    *terms: object, positions: Positions | None = None, dtype: torch.dtype = torch.float32, width: int = 8
) -> Call:
    q = torch.randn(2, 3, 7, width, dtype=dtype)
    return Call(Operands(q, q, q, positions or Positions.arange(7), 0.5), terms, None, False, 0.0, False)


def test_without_a_gpu_it_is_refused_with_the_reason():
    q = torch.randn(1, 2, 5, 4)
    why = explain(q, q, q).refused["triton"]
    assert "triton is not installed" in why or "tensors are on cpu" in why


def test_what_it_cannot_serve_is_refused_with_the_reason():
    query, packed = RelativeQuery(torch.randn(3, 9, 8), Clip(4)), Positions.packed(torch.zeros(2, 7, dtype=torch.long))
    assert lower.refuses(call(query)) is None
    assert lower.refuses(call(query, positions=packed)) is None
    gate = RelativeGate(torch.randn(1, 9, 8), Clip(4))
    assert "several vector gates" in (lower.refuses(call(gate, gate)) or "")
    assert "RelativeGate needs counted positions" in (lower.refuses(call(gate, positions=packed)) or "")
    assert "WeightScale" in (lower.refuses(call(WeightScale(torch.ones(3, 7, 7)))) or "")
    untied = RelativeBias(torch.randn(3, 11), Untied(Clip(4), 9, 10))
    assert "reads only the offset" in (lower.refuses(call(untied)) or "")
    assert "torch.float64" in (lower.refuses(call(query, dtype=torch.float64)) or "")
    assert "136 and 136 wide" in (lower.refuses(call(width=136)) or "")


@pytest.mark.parametrize(
    "rule",
    [Clip(5), Clip(3, "zero"), LogBucket(8, 30), SignedLogBucket(5), SignedLogBucket(16, 90), SignedLogBucket(9, 40)],
)
def test_beyond_its_reach_a_rule_gives_one_row(rule: Rule):
    far = lower.reach(rule)
    assert far is not None
    offsets = torch.arange(far, 5000)
    assert len(rule.row(offsets).unique()) == len(rule.row(-offsets).unique()) == 1


def test_groups_cover_every_head_once():
    for bytes_of_head in (1, 1 << 28, 1 << 29, 1 << 31):
        seen = [first for g in groups(5, 3, bytes_of_head) for first in range(g.first, g.first + g.size)]
        assert seen == list(range(15))
