"""`make test-gpu`: the backends for GPUs where there is one, by the runs that the CPU compares in slow motion."""

from __future__ import annotations

import pytest
import torch

from tests.scripts import graphs, process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # kernels are compiled
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CASES = ("shaw", "t5", "huang_m1", "huang_m3")


# Compiling takes the time: FlexAttention takes seconds for each kind of call, so it is asked those of the default tier.
@pytest.mark.parametrize(("backend", "tier"), [("triton", "default"), ("triton", "slow"), ("flex", "default")])
def test_outputs_and_every_gradient_equal_reference(backend: str, tier: str):
    lines = process("tests.kernel_runs", backend, "cuda", tier).splitlines()
    wanted = {"triton": "equal, refused", "flex": "refused, refused"}[backend]
    assert lines[-2] == f"deterministic: {wanted}" and lines[-1].endswith(" runs, 0 differ")


def test_the_conformance_suite_holds_for_triton():
    assert process("tests.kernel_conformance", "triton", "cuda", *CASES).endswith(f"{len(CASES)} cases, 0 differ\n")


def test_torch_compile_takes_a_call_as_one_graph_of_any_length():
    assert graphs("cuda", "blocked", "triton").keys() == {"blocked", "triton"}


def test_one_flex_kernel_serves_every_length_of_a_family():
    assert process("tests.flex_families", "cuda").splitlines()[-1] == "21 calls, 6 families, no compile twice"
