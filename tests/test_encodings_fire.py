from __future__ import annotations

import pytest
import torch
from torch import Tensor

import locant
from locant.encodings.fire import Fire
from tests.unchecked import build


def fire(seed: int = 0, **options) -> Fire:
    torch.manual_seed(seed)
    encoding = locant.load("fire", num_heads=3, width=5, **{"max_length": 8, **options})
    assert isinstance(encoding, Fire)
    return encoding.double()


def bias(encoding: Fire, positions: locant.Positions) -> Tensor:
    return encoding.bias(positions).detach()


def test_within_the_trained_length_it_is_a_function_of_the_offset():
    found = bias(fire(causal=True), locant.Positions.arange(9))  # i <= L
    for offset in range(9):
        diagonal = found.diagonal(-offset, -2, -1)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal), atol=1e-12, rtol=0)


def test_past_the_trained_length_the_query_decides():
    found = bias(fire(causal=True), locant.Positions.arange(20))
    diagonal = found.diagonal(-3, -2, -1)
    assert (diagonal[:, -1] - diagonal[:, 0]).abs().max() > 1e-3
    inside = bias(fire(causal=True), locant.Positions.arange(9))
    torch.testing.assert_close(found[:, :9, :9], inside)


def test_keys_past_the_query_have_distance_zero_under_a_causal_mask():
    found = bias(fire(causal=True), locant.Positions.arange(7))
    torch.testing.assert_close(found[:, 2, 3:], found[:, 2, 2:3].expand(-1, 4))


def test_for_encoders_the_near_end_counts_as_the_far_one():
    found = bias(fire(), locant.Positions.arange(20))
    torch.testing.assert_close(found, found.flip(-1, -2))  # i -> N - 1 - i
    assert (found[:, 3] - bias(fire(), locant.Positions.arange(13))[:, 3, :1]).abs().max() > 0


def test_for_encoders_padding_does_not_count_as_tokens():
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, :13] = True
    alone, ids = bias(fire(), locant.Positions.arange(13)), torch.arange(20)
    for padded in (
        locant.Positions.from_mask(mask),
        locant.Positions(ids, ids, span=19, length=20, key_real=mask),  # ids that go on over the padding
    ):
        torch.testing.assert_close(bias(fire(), padded)[0, :, :13, :13], alone)


def test_for_encoders_each_document_has_an_end_of_its_own():
    documents = torch.tensor([[0] * 13 + [1] * 7])
    found = bias(fire(max_length=3), locant.Positions.packed(documents))[0]
    torch.testing.assert_close(found[:, :13, :13], bias(fire(max_length=3), locant.Positions.arange(13)))
    torch.testing.assert_close(found[:, 13:, 13:], bias(fire(max_length=3), locant.Positions.arange(7)))


def test_real_valued_ids_are_read_as_they_are():
    ids = torch.arange(11)
    for causal in (True, False):
        want = bias(fire(causal=causal), locant.Positions.from_ids(ids))
        torch.testing.assert_close(bias(fire(causal=causal), locant.Positions.from_ids(ids.float())), want)


def test_the_parameters_of_a_base_model_are_counted_as_published():
    sizes = dict(num_heads=12, max_length=512, causal=True)
    assert sum(p.numel() for p in locant.load("fire", **sizes).parameters()) == 462
    assert sum(p.numel() for p in locant.stack("fire", 12, **sizes).parameters()) == 5544
    shared = locant.stack("fire", 12, share_layers=True, **sizes)
    assert sum(p.numel() for p in shared.parameters()) == 462  # FIRE-S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads=0, max_length=8 and width=5"),
        ({"max_length": 0}, "num_heads=3, max_length=0 and width=5"),
        ({"width": 0}, "num_heads=3, max_length=8 and width=0"),
        ({"activation": "gelu"}, "unknown activation='gelu'; choose 'relu' or 'leaky_relu'"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=f"fire: {message}"):
        build("fire", **{"num_heads": 3, "width": 5, "max_length": 8, **options})
