"""A call survives as tensors and text; torch.compile keeps tiles and kernel whole, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from locant import Positions, attention, explain
from locant.backends import operator
from locant.backends.call import Call
from locant.terms import (
    Clip,
    Distance,
    LogBucket,
    LowRankBias,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    Rule,
    SignedLogBucket,
    Untied,
    WeightScale,
)
from tests.scripts import graphs
from tests.unchecked import unchecked

B, H, Q, J, D, E = 2, 3, 5, 9, 4, 6


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def call_of(terms, positions: Positions | None = None, scale: float | torch.Tensor = 0.3, **changes) -> Call:
    positions = Positions.arange(Q, J) if positions is None else positions
    settings = {"allowed": None, "plain_causal": False, "dropout": 0.0, "return_weights": False, **changes}
    operands = Operands(
        normal(B, H, positions.num_queries, D), normal(B, H, J, D), normal(B, H, J, E), positions, scale
    )
    return Call(operands, tuple(terms), **settings)


def same(have, want) -> None:
    """Equal in every field, tensors by identity."""
    assert type(have) is type(want)
    for field in fields(want):
        a, b = getattr(have, field.name), getattr(want, field.name)
        assert a is b if isinstance(b, torch.Tensor) else a == b, field.name


RULES = (
    Clip(3),
    Clip(2, outside="zero"),
    Distance(4),
    LogBucket(8, 20, causal=True),
    SignedLogBucket(4, 32, flip=True),
    SignedLogBucket(5),
    Untied(Clip(2), 5, 6),
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule_and_term_with_it_comes_back(rule: Rule):
    rows = rule.num_rows
    terms = (
        RelativeBias(normal(H, rows), rule, scaled=True),
        RelativeScale(normal(1, rows), rule),
        RelativeGate(normal(1, rows, D), rule),
        RelativeQuery(normal(H, rows, D), rule, scaled=False),
        RelativeKey(normal(1, rows, D), rule),
        RelativeValue(normal(1, rows, E), rule),
    )
    call = call_of(terms, dropout=0.25)
    tensors, text = operator.pack(call)
    back, wanted = operator.unpack(tensors, text)
    assert wanted == (True,) * 9
    assert (back.dropout, back.operands.scale, back.allowed) == (0.25, 0.3, None)
    for have, want in zip(back.terms, terms, strict=True):
        same(have, want)


def test_pairs_masks_ids_and_row_scales_come_back():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9])
    positions = Positions.packed(documents)
    special = torch.rand(B, J) > 0.5
    positions = Positions(
        **{
            **{f.name: getattr(positions, f.name) for f in fields(positions)},
            "query_special": special,
            "key_special": special,
        }
    )
    low, pair = LowRankBias(normal(1, H, J, 2), normal(1, 1, J, 2), scaled=False), normal(H, J, J)
    scale, allowed = torch.rand(B, 1, J), torch.rand(B, 1, J, J) > 0.2
    terms = (low, PairBias(lambda _: pair, scaled=True), WeightScale(pair.detach()))
    back, wanted = operator.unpack(*operator.pack(call_of(terms, positions, scale, allowed=allowed)))
    assert wanted == (True, True, True, True, True, True, False)
    assert back.operands.scale is scale and back.allowed is allowed
    for name in ("query", "key", *operator.ID_NAMES):
        assert getattr(back.operands.positions, name) is getattr(positions, name)
    same(back.terms[0], low)
    assert torch.equal(back.terms[1].bias[0], pair) and back.terms[1].scaled  # pyright: ignore
    assert torch.equal(back.terms[2].scale[0], pair)  # pyright: ignore


def test_the_causal_mask_is_made_anew_and_not_carried():
    call = call_of(
        (), Positions.arange(J), allowed=torch.ones(J, J, dtype=torch.bool).tril()[None, None], plain_causal=True
    )
    tensors, text = operator.pack(call)
    assert len(tensors) == 3
    back, _ = operator.unpack(tensors, text)
    assert back.plain_causal and back.allowed is not None and torch.equal(back.allowed, call.allowed)


@dataclass(frozen=True)
class Numbers(Rule):
    numbers: tuple[int, ...]


def test_a_rule_that_cannot_be_written_is_named():
    with pytest.raises(TypeError, match="Numbers has a field that is a tuple"):
        unchecked(operator.pack)(call_of((RelativeBias(normal(1, 3), Numbers((1, 2))),)))


@pytest.mark.parametrize("backend", ["blocked", "native"])
def test_torch_itself_finds_the_operator_sound(backend: str):
    q, k, v = normal(B, H, Q, D).float(), normal(B, H, J, D).float(), normal(B, H, J, E).float()
    terms = (RelativeQuery(normal(1, 7, D).float(), Clip(3)), RelativeBias(normal(H, 7).detach().float(), Clip(3)))
    if backend in explain(q, k, v, terms).refused:
        pytest.skip("no C++ compiler here")
    call = Call(Operands(q, k, v, Positions.arange(Q, J), 0.5), terms, None, False, 0.3, False)
    tensors, text = operator.pack(call)
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.locant, backend), (leaves, torch.tensor(7), text), test_utils=names)


def test_torch_compile_takes_a_call_as_one_graph_of_any_length():
    q = torch.zeros(1, 1, 2, 2)
    backends = [name for name in ("blocked", "native") if name not in explain(q, q, q).refused]
    assert graphs("cpu", *backends).keys() == set(backends)


def test_an_exported_program_needs_no_operator_of_ours():
    q, k, v = normal(B, H, J, D), normal(B, H, J, D), normal(B, H, J, E)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, (RelativeScale(torch.ones(1, 7), Clip(3)),), backend="auto")

    names = {str(node.target) for node in torch.export.export(Layer(), (q, k, v)).graph.nodes}
    assert not any("locant" in name for name in names)
