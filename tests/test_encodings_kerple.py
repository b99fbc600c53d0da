from __future__ import annotations

import pytest
import torch
from torch import Tensor

import locant
from locant.encodings.kerple import Kerple
from locant.terms import PairBias, RelativeBias
from tests.unchecked import build

LAYER = locant.Layer(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


def bias(encoding: locant.Encoding, positions: locant.Positions) -> Tensor:
    (term,) = encoding.terms(positions, LAYER)
    assert isinstance(term, RelativeBias | PairBias)
    return term.pairs(positions) if isinstance(term, RelativeBias) else term.tensor(positions)


def kerple(**options) -> Kerple:
    encoding = locant.load("kerple", num_heads=5, **options)
    assert isinstance(encoding, Kerple)
    return encoding


@pytest.mark.parametrize("form", ["log", "power"])
def test_both_ways_to_stay_positive_start_at_the_same_numbers(form):
    r1, r2 = torch.tensor([0.003, 0.5, 1.9, 0.01, 1.0]), torch.tensor([0.02, 0.999, 0.3, 0.0, 0.7])
    found = []
    for positivity in ("softplus", "clamp"):
        encoding = kerple(form=form, positivity=positivity)
        encoding.set_rates(r1, r2)
        found.append(torch.stack([rate.detach() for rate in encoding.rates()]))
        torch.testing.assert_close(
            found[-1], torch.stack((r1.clamp(min=0.01), r2.clamp(min=0.01))), atol=1e-6, rtol=1e-5
        )
    torch.testing.assert_close(*found)


def test_the_start_is_drawn_from_the_published_ranges():
    torch.manual_seed(3)
    encoding = locant.load("kerple", num_heads=2000)
    assert isinstance(encoding, Kerple)
    for rate, top in zip(encoding.rates(), (2.0, 1.0), strict=True):
        assert 0.0099 <= rate.min() and rate.max() <= top * 1.0001
        assert abs(rate.mean() - top / 2) < 4 * top / 12**0.5 / 2000**0.5


def test_a_power_of_one_is_alibi():
    encoding = kerple(form="power", positivity="clamp")
    with torch.no_grad():
        encoding.r1.copy_(torch.tensor([0.5, 0.25, 0.3, 1.5, 0.02]))
        encoding.r2.fill_(1.0)
    alibi = locant.load("alibi", num_heads=5, trainable=True)
    alibi.load_state_dict({"slope": encoding.r1.detach()})
    positions = locant.Positions.arange(7, 11)
    torch.testing.assert_close(bias(encoding, positions), bias(alibi, positions))


def test_a_small_second_rate_is_linear():
    encoding = kerple(positivity="softplus")
    encoding.double()
    with torch.no_grad():
        encoding.r2.copy_(torch.full((5,), 1e-9, dtype=torch.float64).expm1().log())
        encoding.r1.copy_(torch.full((5,), 2e9, dtype=torch.float64))  # softplus is the identity there
    positions = locant.Positions.arange(9)
    torch.testing.assert_close(
        bias(encoding, positions)[0, 0], -2.0 * positions.offsets().abs().double(), rtol=1e-7, atol=0
    )


def test_a_clamped_number_has_no_gradient_and_a_free_one_has():
    for positivity, moves in (("clamp", False), ("softplus", True)):
        encoding = kerple(positivity=positivity)
        with torch.no_grad():
            encoding.r1.fill_(-0.5)
        bias(encoding, locant.Positions.arange(6)).sum().backward()
        assert encoding.r1.grad is not None
        assert bool((encoding.r1.grad != 0).all()) is moves
        assert float(encoding.r1[0].detach()) == -0.5  # the parameter itself is left alone


def test_real_valued_ids_are_read_as_they_are():
    encoding = kerple()
    ids = torch.arange(9)
    want = bias(encoding, locant.Positions.from_ids(ids))
    torch.testing.assert_close(bias(encoding, locant.Positions.from_ids(ids.float())), want)
    halves = bias(encoding, locant.Positions.from_ids(ids[None].expand(2, -1) / 2))
    assert halves.shape == (2, 5, 9, 9)
    torch.testing.assert_close(halves[1, :, ::2, ::2], want[0, :, :5, :5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "linear"}, "unknown form='linear'; choose 'log' or 'power'"),
        ({"positivity": "abs"}, "unknown positivity='abs'; choose 'softplus' or 'clamp'"),
        ({"num_heads": 0}, "num_heads=0 leaves nothing"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"kerple: {message}"):
        build("kerple", **{"num_heads": 3, **options})
