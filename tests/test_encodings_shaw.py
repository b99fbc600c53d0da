"""Shaw's vectors: identities between their forms, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer
from tests.unchecked import build

SIZES = {"num_heads": 3, "head_dim": 8}


def attend(encoding, q, k, v):
    positions = Positions.arange(q.shape[2], k.shape[2])
    terms = encoding.terms(positions, Layer(q, k))
    return locant.attention(q, k, v, terms, positions, backend="reference")


def operands():
    return tuple(torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (7, 11, 11))


def test_constant_tables_are_no_position():
    encoding = locant.load("shaw", **SIZES, clip=4, values=True).double()
    c = torch.randn(8, dtype=torch.float64)
    with torch.no_grad():
        encoding.table.copy_(c)
        encoding.value_table.copy_(2 * c)
    q, k, v = operands()
    torch.testing.assert_close(attend(encoding, q, k, v), locant.attention(q, k, v) + 2 * c, rtol=0, atol=1e-12)


def test_method_4_is_shaw_for_keys_and_for_queries():
    q, k, v = operands()
    m4 = locant.load("huang_m4", **SIZES, clip=4).double()
    shaw = locant.load("shaw", **SIZES, clip=4).double()
    back = locant.load("shaw", **SIZES, clip=4).double()
    with torch.no_grad():
        shaw.table.copy_(m4.table)
        back.table.copy_(m4.table.flip(1))
    positions, turned = (
        Positions.from_ids(torch.arange(4, 11), torch.arange(11)),
        Positions.from_ids(torch.arange(11), torch.arange(4, 11)),
    )
    forward = shaw.terms(positions, Layer(q, k))[0].apply
    backward = back.terms(turned, Layer(k, q))[0].apply
    both = sum(t.apply(operand(q, k, v, positions)) for t in m4.terms(positions, Layer(q, k)))
    want = forward(operand(q, k, v, positions)) + backward(operand(k, q, q, turned)).transpose(-1, -2)
    torch.testing.assert_close(both, want, rtol=0, atol=1e-12)


def operand(q, k, v, positions):
    return locant.terms.Operands(q, k, v, positions, 8**-0.5)


def test_the_default_radius_follows_the_length():
    assert locant.load("shaw", **SIZES, max_length=6).table.shape == (1, 11, 8)
    assert locant.load("shaw", **SIZES, max_length=6, share_heads=False, untie_cls=True).table.shape == (3, 13, 8)
    assert locant.load("shaw", **SIZES, clip=4, tie_kv=True, values=True).value_table is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clip": 0}, "clip=0 tells no offsets apart"),
        ({"max_length": 1}, "clip=0 tells no offsets apart; give clip >= 1 \\(or max_length >= 2\\)"),
        ({"keys": False}, "keys=False and values=False leave nothing"),
        ({"tie_kv": True}, "tie_kv=True needs keys and values, got keys=True and values=False"),
        ({"outside": "zero", "untie_cls": True}, "outside='zero' and untie_cls=True both claim extra rows"),
        ({"outside": "wrap"}, "unknown outside='wrap'; choose 'clip' or 'zero'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"shaw: {message}"):
        build("shaw", **SIZES, **options)
