from __future__ import annotations

import pytest
import torch

import locant
from locant.encodings.sandwich import Sandwich
from locant.encodings.sinusoidal import Sinusoidal
from tests.unchecked import build


def sandwich(**options) -> Sandwich:
    encoding = locant.load("sandwich", **{"num_heads": 4, **options})
    assert isinstance(encoding, Sandwich)
    return encoding


def test_it_is_the_inner_product_of_sinusoids():
    waves = locant.load("sinusoidal", model_dim=30)
    assert isinstance(waves, Sinusoidal)
    table = waves.waves(torch.arange(17))
    gram, ids = table @ table.T, torch.arange(17)
    found = sandwich(width=30, first=0).product(ids[None] - ids[:, None])
    torch.testing.assert_close(found, gram)
    assert (sandwich(width=30).product(ids[None] - ids[:, None]) - gram).abs().max() > 0.1  # the sum from c = 1


def test_a_token_is_not_penalized_at_its_own_place_and_both_sides_are_alike():
    found = sandwich().penalties(torch.arange(-40, 41))
    assert torch.equal(found[:, 40], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(found, found.flip(-1))
    assert (found[:, :40] < 0).all()


def test_heads_differ_by_the_stated_ratio():
    ids = torch.arange(1, 9)
    divided, multiplied = sandwich().penalties(ids), sandwich(ratio="multiply").penalties(ids)
    torch.testing.assert_close(divided[0], 4 * divided[3])
    torch.testing.assert_close(multiplied[3], 4 * multiplied[0])
    torch.testing.assert_close(divided * multiplied, divided[3:] * multiplied[3:] * torch.ones(4, 1).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 7}, "width=7 has no pairs"),
        ({"width": 0}, "width=0 has no pairs"),
        ({"num_heads": 0}, "num_heads=0 cannot be served"),
        ({"ratio": "plus"}, "unknown ratio='plus'; choose 'divide' or 'multiply'"),
        ({"first": 2}, "first=2 is no start"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"sandwich: {message}"):
        build("sandwich", **{"num_heads": 4, **options})
