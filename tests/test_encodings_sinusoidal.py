"""Sinusoidal positions: precision, odd widths, layouts, real-valued ids, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from tests.unchecked import build


def test_every_position_keeps_a_row_of_its_own_before_the_cast():
    # https://github.com/nkalyanv99/UNI-D2/pull/6: whole numbers above 256 merge in bfloat16
    encoding = locant.load("sinusoidal", model_dim=32).to(torch.bfloat16)
    waves = encoding.waves(torch.arange(2048))
    assert waves.dtype == torch.float64 and len(waves.unique(dim=0)) == 2048
    out = encoding.embed(torch.zeros(1, 2048, 32, dtype=torch.bfloat16), Positions.arange(2048))
    assert (out[0].double() - waves).abs().max() < 1e-2 and out.dtype == torch.bfloat16


@pytest.mark.parametrize("width", [1, 2, 9])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("grid", ["exclusive", "inclusive"])
def test_any_width_works(width, layout, grid):
    # https://github.com/lucidrains/rotary-embedding-torch/issues/45: an odd width fails elsewhere
    waves = locant.load("sinusoidal", model_dim=width, layout=layout, grid=grid).waves(torch.arange(7))
    assert waves.shape == (7, width) and waves.isfinite().all()
    assert waves[0].tolist().count(0.0) == (width + 1) // 2  # the sines of position 0


def test_layouts_are_a_permutation_of_channels():
    ids = torch.arange(20)
    interleaved = locant.load("sinusoidal", model_dim=10).waves(ids)
    halves = locant.load("sinusoidal", model_dim=10, layout="halves").waves(ids)
    assert torch.equal(halves, torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), -1))


def test_fractions_and_negative_ids_are_defined():
    encoding = locant.load("sinusoidal", model_dim=4)
    waves = encoding.waves(torch.tensor([-1.5, 0.5]))
    torch.testing.assert_close(waves[:, 0], torch.tensor([-1.5, 0.5], dtype=torch.float64).sin())
    x = torch.zeros(1, 2, 4)
    assert encoding.embed(x, Positions.from_ids(torch.tensor([-1.5, 0.5]))).shape == (1, 2, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layout": "mixed"}, "unknown layout='mixed'"),
        ({"grid": "half"}, "unknown grid='half'"),
        ({"model_dim": 0}, "model_dim=0 leaves no channels"),
        ({"base": -1}, "base=-1 gives no wavelengths"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"sinusoidal: {message}"):
        build("sinusoidal", **{"model_dim": 6, **options})
