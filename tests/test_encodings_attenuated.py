"""Hand-made encodings: the public row form, sides, the start of the table, what is refused."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import math

import pytest
import torch

import locant
from locant.encodings.attenuated import Attenuated
from locant.testing.case import Host
from tests.golden.modules import bias_of
from tests.unchecked import build


def row_form(n, w):
    """softmax over j of -w (j - i)^2, pair by pair."""
    cells = [[math.exp(-w * (j - i) ** 2) for j in range(n)] for i in range(n)]
    return torch.tensor([[cell / sum(row) for cell in row] for row in cells], dtype=torch.float64)


@pytest.mark.parametrize("w", [0.5, 0.1, 0.003])
def test_rows_sum_to_one_as_in_the_public_code(w):
    encoding = Attenuated(num_heads=3, w=w, edges="row")
    have = bias_of(encoding, locant.Positions.arange(11))
    torch.testing.assert_close(have.squeeze(), row_form(11, w), atol=1e-14, rtol=0)


def test_the_open_form_equals_the_row_form_away_from_both_ends():
    open_form = bias_of(Attenuated(num_heads=3), locant.Positions.arange(23)).squeeze()
    rows = row_form(23, 0.5)
    torch.testing.assert_close(open_form[..., 9:14, :].reshape(-1, 5, 23)[0], rows[9:14], atol=1e-14, rtol=0)
    assert (open_form.reshape(-1, 23, 23)[0, 0] - rows[0]).abs().max() > 0.15


@pytest.mark.parametrize("w, total", [(0.5, 2.5066282880429055), (1e-3, 56.04991216397929), (9e-4, 59.08179503)])
def test_the_sum_over_all_offsets(w, total):
    assert Attenuated(num_heads=1, w=w).total() == pytest.approx(total, abs=1e-7)
    brute = 1 + 2 * sum(math.exp(-w * k * k) for k in range(1, 2000))
    assert Attenuated(num_heads=1, w=w).total() == pytest.approx(brute, rel=1e-13)


def test_the_row_form_is_blind_to_padding_packing_and_shift():
    encoding = Attenuated(num_heads=2, w=0.2, w_right=0.7, edges="row")
    alone = bias_of(encoding, locant.Positions.arange(5)).reshape(5, 5)
    mask = torch.tensor([[False, False, True, True, True, True, True]])
    padded = bias_of(encoding, locant.Positions.from_mask(mask)).reshape(7, 7)
    torch.testing.assert_close(padded[2:, 2:], alone)
    packed = bias_of(encoding, locant.Positions.packed(torch.tensor([[3, 3, 8, 8, 8, 8, 8]]))).reshape(7, 7)
    torch.testing.assert_close(packed[2:, 2:], alone)
    shifted = bias_of(encoding, locant.Positions.arange(5).shift(9)).reshape(5, 5)
    torch.testing.assert_close(shifted, alone)


def test_w_zero_is_no_position_at_all():
    host, x = Host(2, 4, 6).double(), torch.randn(1, 7, 6, dtype=torch.float64)
    plain = host(locant.load("none"), x, locant.Positions.arange(7))
    for edges in ("open", "row"):
        have = host(Attenuated(num_heads=2, w=0.0, edges=edges), x, locant.Positions.arange(7))
        torch.testing.assert_close(have, plain)


def test_the_table_starts_as_one_side_of_the_bell_and_trains():
    encoding = Attenuated(num_heads=3, form="table", max_length=12)
    assert encoding.table.shape == (3, 12)
    want = torch.tensor([5.7035e-01, 3.4593e-01, 7.7188e-02, 6.3360e-03])
    torch.testing.assert_close(encoding.table[1, :4].detach(), want, atol=1e-5, rtol=0)
    host, x = Host(3, 4, 6), torch.randn(1, 5, 6)
    host(encoding, x, locant.Positions.arange(5)).square().sum().backward()
    assert (encoding.table.grad[:, :5] != 0).all() and (encoding.table.grad[:, 5:] == 0).all()
    assert Attenuated(num_heads=3, form="table", max_length=12, share_heads=True).table.shape == (1, 12)
    stack = locant.stack("attenuated", 3, num_heads=2, head_dim=4, max_length=6, form="table")
    assert sum(p.numel() for p in stack.parameters()) == 3 * 2 * 6


@pytest.mark.parametrize(
    "options, message",
    [
        ({"form": "gausian"}, r"unknown form='gausian'; choose one of 'gaussian'"),
        ({"edges": "periodic"}, r"unknown edges='periodic'; choose 'open' or 'row'"),
        ({"w": -0.5}, r"w=-0\.5 and w_right=None must be finite"),
        ({"w_right": math.nan}, r"w=0\.5 and w_right=nan must be finite"),
        ({"window": 3}, r"form='gaussian' came with window=3"),
        ({"form": "window"}, r"form='window' came with window=None"),
        ({"form": "window", "window": 4}, r"window=4 has no middle"),
        ({"form": "window", "window": 3, "w_right": 0.1}, r"w_right=0\.1 has no effect with form='window'"),
        ({"share_heads": True}, r"share_heads=True has no effect with form='gaussian'"),
        ({"form": "table", "edges": "row"}, r"edges='row' and max_length=512"),
        ({"form": "table", "max_length": 1}, r"max_length=1; a table knows no edges"),
    ],
)
def test_options_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build("attenuated", num_heads=2, **options)
