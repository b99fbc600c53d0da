"""Learned absolute positions: beyond the table, real-valued ids, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from tests.unchecked import build


def absolute(**options):
    return locant.load("absolute", model_dim=6, max_length=5, **options)


def test_tokens_get_the_row_of_their_id():
    encoding, x = absolute(), torch.randn(2, 3, 6)
    ids = torch.tensor([[4, 0, 2], [1, 1, 3]])
    assert torch.equal(encoding.embed(x, Positions.from_ids(ids)), x + encoding.table[ids])


def test_interpolation_keeps_the_ends_and_is_the_table_at_factor_one():
    # https://github.com/dwzhu-pku/LongEmbed/issues/7: linear interpolation, the end rows fixed
    encoding = absolute(extend="interpolate")
    rows = encoding.rows(Positions.arange(9))
    torch.testing.assert_close(rows[[0, 2, 4, 8]], encoding.table[[0, 1, 2, 4]])
    torch.testing.assert_close(rows[1], (encoding.table[0] + encoding.table[1]) / 2)
    assert torch.equal(encoding.rows(Positions.arange(5)), encoding.table)


def test_real_valued_ids_lie_between_rows():
    encoding = absolute()
    rows = encoding.rows(Positions.from_ids(torch.tensor([0.0, 0.25, 3.5])))
    table = encoding.table
    torch.testing.assert_close(
        rows, torch.stack((table[0], 0.75 * table[0] + 0.25 * table[1], (table[3] + table[4]) / 2))
    )


def test_the_error_past_the_table_names_limit_length_and_remedies():
    with pytest.raises(ValueError, match=r"absolute: positions reach 6 but the table has 5 rows; truncate to 5 .*=6"):
        absolute().embed(torch.zeros(1, 6, 6), Positions.arange(6))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_length": 0}, "max_length=0 leaves no rows"),
        ({"extend": "wrap"}, "unknown extend='wrap'; choose 'raise', 'clip' or 'interpolate'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"absolute: {message}"):
        build("absolute", **{"model_dim": 6, **options})
