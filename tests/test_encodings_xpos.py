from __future__ import annotations

import pytest
import torch

import locant
from locant.encodings.xpos import Xpos
from tests.unchecked import build


def xpos(**options) -> Xpos:
    encoding = locant.load("xpos", **{"head_dim": 8, **options})
    assert isinstance(encoding, Xpos)
    return encoding


def test_a_base_beyond_measure_is_rotary():
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 9, 8)
    positions = locant.Positions.arange(5, 9)
    rope = locant.load("rope", head_dim=8, layout="interleaved")
    for mine, theirs in zip(xpos(base=1e12).query_key(q, k, positions), rope.query_key(q, k, positions), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_product_fades_with_the_distance():
    x = torch.ones(1, 1, 400, 8, dtype=torch.float64)
    q, k = xpos(base=40.0).query_key(x, x, locant.Positions.arange(400))
    size = (q @ k.transpose(-1, -2))[0, 0, -1].abs()
    assert size[:100].max() < 0.2 * size[-20:].max() and torch.isfinite(size).all()


def test_any_shift_of_the_ids_cancels():
    q, k = torch.randn(2, 3, 5, 8).double(), torch.randn(2, 3, 5, 8).double()
    ids, products = torch.tensor([[0, 1, 2, 3, 4], [3, 4, 9, 12, 13]]), []
    for shift in (0, 100_000):
        a, b = xpos().query_key(q, k, locant.Positions.from_ids(ids + shift))
        products.append(a @ b.transpose(-1, -2))
    torch.testing.assert_close(*products, atol=1e-10, rtol=0)


def test_powers_that_the_dtype_cannot_hold_are_refused():
    x = torch.zeros(1, 1, 2, 8)
    far = locant.Positions.from_ids(torch.tensor([0, 100_000]))
    with pytest.raises(ValueError, match=r"xpos: offsets reach 100000, over which torch.float32 .* holds 70"):
        xpos().query_key(x, x, far)
    with pytest.raises(ValueError, match=r"xpos: offsets reach 9000, over which torch.float16"):
        xpos().query_key(x.half(), x.half(), locant.Positions.from_ids(torch.tensor([0, 9000])))
    assert xpos(base=2048.0).query_key(x, x, far)[0].isfinite().all()


def test_an_encoder_is_told_so_when_it_is_built():
    with pytest.raises(ValueError, match="xpos: is defined under a causal mask alone, but causal=False"):
        xpos(causal=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, "head_dim=7 cannot be turned in pairs"),
        ({"base": 0.0}, "base=0.0 and gamma=0.4 give no decay"),
        ({"gamma": -1.0}, "base=512.0 and gamma=-1.0"),
        ({"layout": "thirds"}, "unknown layout='thirds'; choose 'interleaved' or 'halves'"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"xpos: {message}"):
        build("xpos", **{"head_dim": 8, **options})
