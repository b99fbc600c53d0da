"""Rotary positions: layouts, precision, real-valued ids, moves, errors."""

from __future__ import annotations

import copy

import pytest
import torch

import locant
from locant import Positions
from tests.unchecked import build


def test_layouts_are_equal_after_the_documented_permutation():
    # https://github.com/huggingface/transformers/issues/25199
    q, k = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # channel pairs (2c, 2c+1) become (c, c + d/2)
    interleaved, halves = (locant.load("rope", head_dim=8, layout=name) for name in ("interleaved", "halves"))
    a, b = interleaved.query_key(q, k, Positions.arange(7))
    c, d = halves.query_key(q[..., order], k[..., order], Positions.arange(7))
    torch.testing.assert_close(a @ b.transpose(-1, -2), c @ d.transpose(-1, -2))
    torch.testing.assert_close(a[..., order], c)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_angles_keep_their_precision_in_half_models(dtype):
    # https://github.com/EleutherAI/gpt-neox/issues/1003: tables built in half precision are off by 0.78 at 2048
    rope = locant.load("rope", head_dim=8).to(dtype)
    x = torch.randn(1, 1, 2048, 8).to(dtype)
    have = rope.rotate(x, torch.arange(2048))
    want = rope.rotate(x.double(), torch.arange(2048))
    assert have.dtype == dtype and (have.double() - want).abs().max() < 0.05
    ones = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=dtype).expand(1, 1, 2048, 8)  # rotates to the table itself
    assert (
        rope.rotate(ones, torch.arange(2048)).double() - rope.rotate(ones.double(), torch.arange(2048))
    ).abs().max() < 1e-2


def test_equal_ids_turn_nothing_and_zero_is_the_identity():
    rope, x = locant.load("rope", head_dim=8), torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(rope.rotate(x, torch.zeros(5, dtype=torch.long)), x)
    same = torch.full((5,), 7)
    q, k = rope.rotate(x, same), rope.rotate(x, same)
    torch.testing.assert_close(q @ k.transpose(-1, -2), x @ x.transpose(-1, -2))


def test_real_valued_ids_turn_by_fractions():
    rope, x = locant.load("rope", head_dim=2), torch.tensor([1.0, 0.0]).expand(1, 1, 1, 2)
    turned = rope.rotate(x, torch.tensor([0.5]))
    torch.testing.assert_close(turned[0, 0, 0], torch.tensor([0.8775825619, 0.4794255386]))  # cos and sin of 0.5


def test_ids_of_each_row_turn_that_row():
    rope, x = locant.load("rope", head_dim=8), torch.randn(2, 3, 4, 8)
    ids = torch.tensor([[0, 1, 2, 3], [5, 1, 0, 9]])
    for b in range(2):
        torch.testing.assert_close(rope.rotate(x, ids)[b : b + 1], rope.rotate(x[b : b + 1], ids[b]))


def test_fewer_key_heads_are_turned_too():
    q, k = locant.load("rope", head_dim=8).query_key(
        torch.randn(1, 6, 4, 8), torch.randn(1, 2, 4, 8), Positions.arange(4)
    )
    assert q.shape == (1, 6, 4, 8) and k.shape == (1, 2, 4, 8)


def test_nothing_is_kept_on_an_old_device_or_dtype():
    # https://github.com/lucidrains/rotary-embedding-torch/pull/48: run, move, run; deepcopy
    rope, x = locant.load("rope", head_dim=8), torch.randn(1, 2, 5, 8)
    want = rope.rotate(x, torch.arange(5))
    moved = copy.deepcopy(rope).to("meta")
    assert moved.rotate(x.to("meta"), torch.arange(5, device="meta")).is_meta
    assert torch.equal(copy.deepcopy(rope).rotate(x, torch.arange(5)), want) and not list(rope.buffers())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"head_dim": 9}, "rotary_dim=9 cannot be turned in pairs within head_dim=9; give an even rotary_dim, 2 to 8"),
        ({"rotary_dim": 10}, "rotary_dim=10 cannot be turned in pairs within head_dim=8"),
        ({"rotary_dim": 0}, "rotary_dim=0 cannot"),
        ({"layout": "split"}, "unknown layout='split'"),
        ({"base": 0}, "base=0 gives no wavelengths"),
    ],
)
def test_wrong_options_are_refused(options, message):
    # https://github.com/lucidrains/rotary-embedding-torch/issues/45: an odd width is refused, or one channel is left
    with pytest.raises(ValueError, match=f"rope: {message}"):
        build("rope", **{"head_dim": 8, **options})
    assert (
        locant.load("rope", head_dim=9, rotary_dim=8)
        .rotate(torch.ones(1, 1, 3, 9), torch.arange(3))[..., 8]
        .eq(1)
        .all()
    )


def test_a_factor_reads_longer_input_at_the_trained_scale():
    plain, divided = locant.load("rope", head_dim=8), locant.load("rope", head_dim=8, factor=2.5)
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    want = plain.rotate(x, torch.arange(7, dtype=torch.float64) / 2.5)
    torch.testing.assert_close(divided.rotate(x, torch.arange(7)), want)
    assert not torch.allclose(divided.rotate(x, torch.arange(7)), plain.rotate(x, torch.arange(7)), atol=1e-2)
    with pytest.raises(ValueError, match=r"rope: factor=0\.0 leaves no order"):
        locant.load("rope", head_dim=8, factor=0.0)
