"""TISA: its scoring function, the public module's weights, errors."""

from __future__ import annotations

import pytest
import torch

import locant


def tisa(**options):
    return locant.load("tisa", num_heads=3, **options).double()


def test_the_start_is_that_of_the_public_module():
    encoding = locant.load("tisa", num_heads=4000, kernels=5)
    for parameter, mean, std in (
        (encoding.amplitude, 0.1, 0.01),
        (encoding.sharpness, 0.1, 0.01),
        (encoding.center, 0.0, 5.0),
    ):
        assert parameter.mean().item() == pytest.approx(mean, abs=5 * std / 20000**0.5)
        assert parameter.std().item() == pytest.approx(std, rel=0.05)


def test_zero_sharpness_is_a_constant_and_the_sign_of_sharpness_is_irrelevant():
    encoding, offsets = tisa(), torch.arange(-9, 10)
    want = encoding.scores(offsets)
    with torch.no_grad():
        encoding.sharpness.neg_()
    assert torch.equal(encoding.scores(offsets), want)
    torch.nn.init.zeros_(encoding.sharpness)
    torch.testing.assert_close(encoding.scores(offsets), encoding.amplitude.sum(0)[:, None].expand(3, 19))


def test_sharp_kernels_pick_single_offsets():
    encoding = tisa(kernels=1)
    with torch.no_grad():
        encoding.amplitude.fill_(2.0)
        encoding.sharpness.fill_(50.0)
        encoding.center.copy_(torch.tensor([[-1.0, 0.0, 3.0]]))
    found = encoding.scores(torch.arange(-2, 5))
    assert [row.argmax().item() - 2 for row in found] == [-1, 0, 3]
    torch.testing.assert_close(found.sum(1), torch.full((3,), 2.0, dtype=torch.float64))


def test_public_weights_are_mirrored_and_moved_by_one():
    kernels = {
        name: torch.randn(2, 3, dtype=torch.float64)
        for name in ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets")
    }
    encoding = tisa(kernels=2)
    encoding.load_state_dict(type(encoding).public_state(kernels))
    a, b, c = (kernels[n][..., None] for n in ("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"))
    public = lambda k: (a * torch.exp(-b.abs() * (k - c) ** 2)).sum(0)  # noqa: E731
    offsets = torch.arange(-6, 7)
    torch.testing.assert_close(encoding.scores(offsets), public(-offsets - 1.0))  # F[i, j] = f(i - j - 1)


def test_far_offsets_do_not_overflow_in_half_precision():
    encoding = locant.load("tisa", num_heads=3).to(torch.float16)
    found = encoding.scores(torch.tensor([-5000, -300, 0, 300, 5000]))
    assert found.dtype == torch.float32 and found.isfinite().all() and found[:, 0].abs().max() < 1e-6


def test_no_kernel_is_refused():
    with pytest.raises(ValueError, match="tisa: kernels=0 leaves no scoring function"):
        locant.load("tisa", num_heads=3, kernels=0)
