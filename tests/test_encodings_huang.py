"""Huang Methods 1 to 4: identities between them, starts, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer

SIZES = {"num_heads": 3, "head_dim": 8}


def attend(encoding, q, k, v):
    positions = Positions.arange(q.shape[2], k.shape[2])
    return locant.attention(q, k, v, encoding.terms(positions, Layer(q, k)), positions, backend="reference")


def operands():
    return tuple(torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (7, 11, 11))


def wide(name, **options):
    return locant.load(name, **SIZES, clip=4, **options).double()


@pytest.mark.parametrize("name", ["huang_m1", "huang_m2", "huang_m3"])
def test_multiplying_methods_start_as_no_position_unless_spread(name):
    q, k, v = operands()
    torch.testing.assert_close(attend(wide(name), q, k, v), locant.attention(q, k, v), rtol=0, atol=1e-12)
    assert wide(name, std=0.02).table.std() > 0.005


def test_method_2_with_a_mirrored_table_is_method_1():
    one, two = wide("huang_m1", std=0.5), wide("huang_m2")
    with torch.no_grad():
        two.table.copy_(torch.cat((one.table.flip(1), one.table[:, 1:]), 1))
    q, k, v = operands()
    torch.testing.assert_close(attend(one, q, k, v), attend(two, q, k, v), rtol=0, atol=1e-12)


def test_method_3_with_equal_channels_is_method_2():
    two, three = wide("huang_m2", std=0.5), wide("huang_m3", share_heads=False)
    with torch.no_grad():
        three.table.copy_(two.table[..., None])
    q, k, v = operands()
    torch.testing.assert_close(attend(two, q, k, v), attend(three, q, k, v), rtol=0, atol=1e-12)


def test_a_gate_of_zeros_is_uniform_over_what_may_be_seen():
    three = wide("huang_m3")
    torch.nn.init.zeros_(three.table)
    q, k, v = operands()
    mask = torch.ones(7, 11, dtype=torch.bool)
    mask[:, 3:] = False
    positions = Positions.arange(7, 11)
    out = locant.attention(q, k, v, three.terms(positions, Layer(q, k)), positions, mask=mask, backend="reference")
    torch.testing.assert_close(out, v[:, :, None, :3].mean(3).expand(out.shape))


def test_the_mask_comes_after_the_gate():
    q, k, v = operands()
    one = wide("huang_m1")
    torch.nn.init.constant_(one.table, -1.0)
    mask = torch.arange(11) < 10
    positions = Positions.arange(7, 11)
    out = locant.attention(q, k, v, one.terms(positions, Layer(q, k)), positions, mask=mask, backend="reference")
    torch.testing.assert_close(out, locant.attention(-q, k[:, :, :10], v[:, :, :10]))


def test_counts_of_bert_base_are_the_papers():
    sizes = {"num_heads": 12, "head_dim": 64, "max_length": 512}
    count = {n: sum(w.numel() for w in locant.stack(n, 12, **sizes).parameters()) for n in ("huang_m1", "huang_m2")}
    assert count == {"huang_m1": 73_728, "huang_m2": 147_312}
    for share, want in ((True, 785_664), (False, 9_427_968)):
        for name in ("huang_m3", "huang_m4", "shaw"):
            layers = locant.stack(name, 12, **sizes, share_heads=share)
            assert sum(w.numel() for w in layers.parameters()) == want


@pytest.mark.parametrize("name", ["huang_m1", "huang_m2", "huang_m3", "huang_m4"])
@pytest.mark.parametrize("options", [{"clip": 0}, {"max_length": 1}], ids=str)
def test_a_radius_below_one_is_refused(name, options):
    with pytest.raises(ValueError, match=f"{name}: clip=0 tells no offsets apart; give clip >= 1"):
        locant.load(name, **SIZES, **options)
