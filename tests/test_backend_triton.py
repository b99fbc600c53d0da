"""Backend `triton` equals `reference` in output and every gradient, interpreted on the CPU; else it says why not."""

from __future__ import annotations

import importlib.util

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
from tests.scripts import graphs, process

CASES = ("shaw", "t5", "huang_m1", "huang_m3")  # a vector, pairs that layers share, a scale, a gate


@pytest.fixture
def triton() -> None:
    """Triton comes with torch for GPUs; on the CPU it is installed for its interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


def test_interpreted_kernels_equal_reference(triton):
    lines = process("tests.kernel_runs", "triton", "cpu", "default").splitlines()
    assert lines[-2:] == ["deterministic: equal, refused", "19 runs, 0 differ"]


@pytest.mark.slow
def test_interpreted_kernels_equal_reference_in_every_run(triton):
    assert process("tests.kernel_runs", "triton", "cpu", "slow").endswith(" runs, 0 differ\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_compile_for_a_gpu(triton):
    assert process("tests.kernel_compile", "64", "bfloat16").endswith("12 runs, 0 do not compile\n")


@pytest.mark.slow
def test_the_conformance_suite_holds_for_interpreted_kernels(triton):
    assert process("tests.kernel_conformance", "triton", "cpu", *CASES).endswith("4 cases, 0 differ\n")


@pytest.mark.slow
def test_torch_compile_takes_a_call_of_interpreted_kernels_as_one_graph_of_any_length(triton):
    assert graphs("cpu", "triton").keys() == {"triton"}


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
