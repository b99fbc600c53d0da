"""ALiBi: slopes, encoders and decoders, heads that look one way, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer
from locant.encodings.alibi import slopes


def bias(encoding, positions):
    q = torch.zeros(1, encoding.num_heads, positions.num_queries, 4)
    (term,) = encoding.terms(positions, Layer(q, q))
    return term.pairs(positions)[0].double()


def test_slopes_of_powers_of_two_and_of_other_counts():
    assert slopes(8) == [2.0**-n for n in range(1, 9)]
    assert slopes(12) == [2.0**-n for n in range(1, 9)] + [2.0 ** (-n / 2) for n in (1, 3, 5, 7)]
    assert slopes(1) == [2.0**-8] and slopes(4, exponent=4.0) == [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("heads", range(1, 65))
def test_the_other_wording_of_the_rule_gives_the_same_slopes(heads):
    above = 1 << (heads - 1).bit_length()  # MPT: all slopes of the power above, odd places first, then even ones
    every = [2.0 ** (-8 * (n + 1) / above) for n in range(above)]
    want = every if above == heads else (every[1::2] + every[0::2])[:heads]
    assert slopes(heads) == pytest.approx(want, rel=1e-14)


def test_an_encoder_punishes_both_sides():
    # https://github.com/ofirpress/attention_with_linear_biases/issues/5: the causal trick is wrong for encoders
    found = bias(locant.load("alibi", num_heads=3), Positions.arange(6))
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    for head, slope in enumerate(slopes(3)):
        assert torch.equal(found[head], -slope * distance.double())


def test_half_of_the_heads_look_left_and_half_right():
    found = bias(locant.load("alibi", num_heads=4, asymmetric=True), Positions.arange(5))
    assert (
        (found[:2].triu(1) <= 0).all() and (found[:2][:, 0, 1:] == -1e4).all() and (found[2:][:, 1:, 0] == -1e4).all()
    )
    assert found[0, 4, 0] == -4 * slopes(4)[0] and found[2, 0, 4] == -4 * slopes(4)[2]


def test_trainable_slopes_start_at_the_rule_and_may_turn_negative():
    # https://github.com/Dao-AILab/flash-attention/issues/1585: the sign is that of a penalty
    encoding = locant.load("alibi", num_heads=2, trainable=True)
    assert encoding.slope.tolist() == slopes(2)
    with torch.no_grad():
        encoding.slope.copy_(torch.tensor([-1.0, 2.0]))
    found = bias(encoding, Positions.arange(3))
    assert found[0, 0].tolist() == [0, 1, 2] and found[1, 0].tolist() == [0, -2, -4]


@pytest.mark.parametrize("options", [{"num_heads": 0}, {"num_heads": 3, "asymmetric": True}], ids=str)
def test_heads_that_cannot_be_served_are_refused(options):
    with pytest.raises(ValueError, match=f"alibi: num_heads={options['num_heads']} cannot be served"):
        locant.load("alibi", **options)
