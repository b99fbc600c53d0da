"""Transformer-XL and XLNet: the shift in both directions, identities, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer
from tests.unchecked import build

SIZES = {"num_heads": 3, "head_dim": 8, "model_dim": 10}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_the_shift_serves_both_directions(backend):
    # https://github.com/ZhengkunTian/OpenTransformer/issues/25: the causal shift mixes rows of an encoder
    encoding = locant.load("xlnet", **SIZES, biases=False).double()
    q, k = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.zeros(2, 3, 5, 8, dtype=torch.float64)
    positions = Positions.arange(5)
    one_hot = torch.eye(5, dtype=torch.float64).expand(2, 3, 5, 5)
    weights = locant.attention(q, k, one_hot, encoding.terms(positions, Layer(q, k)), positions, backend=backend)
    table = encoding.table(4)  # rows for offsets -4 .. 4
    for i in range(5):
        logits = torch.stack([(q[:, :, i] * table[:, j - i + 4]).sum(-1) for j in range(5)], -1) / 8**0.5
        torch.testing.assert_close(weights[:, :, i], logits.softmax(-1), rtol=0, atol=1e-12)


def test_without_biases_it_is_shaw_with_a_projected_wave():
    xlnet = locant.load("xlnet", **SIZES, biases=False).double()
    shaw = locant.load("shaw", num_heads=3, head_dim=8, clip=8, share_heads=False).double()
    with torch.no_grad():
        shaw.table.copy_(xlnet.table(8))
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64) for _ in range(3))
    outs = [locant.attention(q, k, v, e.terms(Positions.arange(9), Layer(q, k))) for e in (xlnet, shaw)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


def test_biases_start_at_zero():
    encoding = locant.load("xlnet", **SIZES)
    assert not encoding.content_bias.any() and not encoding.position_bias.any() and encoding.projection.std() > 0.01


@pytest.mark.parametrize(
    "options, message",
    [({"clamp": 0}, "clamp=0 tells no offsets apart"), ({"layout": "quarters"}, "unknown layout='quarters'")],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"xlnet: {message}"):
        build("xlnet", **SIZES, **options)
