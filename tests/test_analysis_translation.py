"""R^2 of diagonals, its nulls, and kernels fitted to scoring functions: known answers and degenerate inputs."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import math

import pytest
import torch

from locant.analysis.diagonals import diagonal_means, explained, invariance, shuffled, summary
from locant.analysis.kernels import fit_kernels
from locant.analysis.model import position_vectors, projection, read_model
from locant.analysis.translation_invariance import (
    head_invariance,
    position_logits,
    position_table,
    table_invariance,
    translation_invariance,
)
from locant.encodings.tisa import Tisa
from tests.analysis_models import family
from tests.hf_models import HEADS, host, noisy
from tests.unchecked import unchecked


def toeplitz(n, generator=None):
    values = torch.randn(2 * n - 1, dtype=torch.float64, generator=generator)
    index = torch.arange(n)
    return values[index[None] - index[:, None] + n - 1], values


def variance_explained(matrix, off_diagonal=False):
    """The formula, cell by cell."""
    n = len(matrix)
    cells = [(j - i, matrix[i, j].item()) for i in range(n) for j in range(n) if i != j or not off_diagonal]
    groups = {k: [x for offset, x in cells if offset == k] for k, _ in cells}
    mean = sum(x for _, x in cells) / len(cells)
    residual = sum((x - sum(groups[k]) / len(groups[k])) ** 2 for k, x in cells)
    return 1 - residual / sum((x - mean) ** 2 for _, x in cells)


# R^2


@pytest.mark.parametrize("n", [2, 3, 7, 41])
def test_an_exactly_toeplitz_matrix_is_explained_in_full(n):
    matrix, values = toeplitz(n)
    full, off = explained(matrix)
    assert full == pytest.approx(1, abs=1e-12) and off == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(diagonal_means(matrix), values)


def test_r2_equals_the_formula():
    matrix = torch.randn(9, 9)
    full, off = explained(matrix)
    assert full == pytest.approx(variance_explained(matrix), abs=1e-6)
    assert off == pytest.approx(variance_explained(matrix, off_diagonal=True), abs=1e-6)
    assert full != pytest.approx(off, abs=1e-3)


def test_two_positions_are_three_groups_of_four_cells():
    matrix = torch.tensor([[1.0, 5.0], [7.0, 3.0]])
    assert explained(matrix) == (pytest.approx(1 - 2 / 20), 1.0)


@pytest.mark.parametrize("matrix", [torch.ones(5, 5) * 3e-9, torch.zeros(4, 4), torch.full((1, 1), 7.0)])
def test_what_does_not_vary_is_undefined(matrix):
    assert explained(matrix) == (None, None)
    assert invariance(matrix).r2 is None and invariance(matrix).null_shuffled is None
    assert diagonal_means(matrix).tolist() == pytest.approx([matrix[0, 0].item()] * (2 * len(matrix) - 1))


@pytest.mark.parametrize(
    "matrix, message",
    [
        (torch.zeros(0, 0), r"shape \(0, 0\)"),
        (torch.zeros(3, 4), r"shape \(3, 4\)"),
        (torch.tensor([[1.0, math.nan], [2.0, math.inf]]), r"holds 2 of 4 numbers that are not finite"),
    ],
)
def test_what_is_no_finite_square_is_refused(matrix, message):
    for function in (explained, diagonal_means):
        with pytest.raises(ValueError, match=message):
            unchecked(function)(matrix)


def test_random_rows_give_the_stated_null():
    n, width = 300, 200
    rows = torch.randn(n, width, dtype=torch.float64)
    found = table_invariance(rows)
    assert found.null == pytest.approx(width / (width + n)) and found.null_off_diagonal == pytest.approx(2 / n)
    assert found.r2 == pytest.approx(found.null, abs=0.02)
    assert found.null_shuffled == pytest.approx(found.null, abs=0.02)
    assert found.r2_off_diagonal == pytest.approx(found.null_off_diagonal, abs=0.01)
    assert found.centered.r2 == pytest.approx(found.null, abs=0.02)
    assert found.first is not None and found.first.n == 128


def test_shuffled_positions_lose_what_the_order_explained():
    matrix, _ = toeplitz(40)
    full, off = shuffled(matrix)
    assert full is not None and off is not None and full < 0.2 and off < 0.2


def test_a_common_vector_hides_the_order_and_centering_brings_it_back():
    angle = torch.arange(60, dtype=torch.float64)[:, None] * torch.tensor([[0.1, 0.37]], dtype=torch.float64)
    rows = torch.cat((angle.sin(), angle.cos()), 1)
    assert table_invariance(rows).r2 == pytest.approx(1, abs=1e-12)
    drifting = rows + torch.linspace(0, 3, 60, dtype=torch.float64)[:, None]
    assert table_invariance(drifting).r2 < 0.9
    assert table_invariance(rows + 5).cosine.r2 is not None


def test_a_table_that_is_empty_or_broken_is_refused():
    with pytest.raises(ValueError, match=r"shape \(0, 8\)"):
        table_invariance(torch.zeros(0, 8))
    with pytest.raises(ValueError, match=r"the position table holds 1 of 6"):
        table_invariance(torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]]))


# heads


def test_heads_are_summarized_with_their_mean_map():
    matrix, values = toeplitz(50)
    noise = torch.randn(50, 50, dtype=torch.float64)
    constant = torch.ones(50, 50, dtype=torch.float64)
    found = head_invariance(lambda h: (matrix, matrix + noise, constant)[h], 3, 2, "terms")
    assert found.r2[0] == pytest.approx(1) and found.r2[2].isnan()
    assert found.max == pytest.approx(1) and found.min == pytest.approx(found.r2[1].item())
    assert found.mean == pytest.approx((1 + found.r2[1].item()) / 2)
    assert found.mean_map_r2 == pytest.approx(explained((2 * matrix + noise + constant) / 3)[0])
    assert found.offsets.tolist() == list(range(-40, 41))
    torch.testing.assert_close(found.profile[0], values[9:90])
    assert summary([None, None]) == (None, None, None)


def test_a_model_reports_every_treatment_of_its_table():
    found = translation_invariance(read_model(host("bert")))
    assert found.position_table is not None
    sources = ["raw", "raw_bias", "layernorm", "layernorm_bias", "layernorm_meanword", "layernorm_meanword_bias"]
    assert [head.source for head in found.heads] == sources
    assert [kernel.source for kernel in found.kernels] == ["layernorm_bias"]
    table = found.position_table
    assert len({table.raw.r2, table.layernorm.r2, table.layernorm_meanword.r2}) == 3


def test_a_sinusoidal_input_is_exactly_invariant_until_attention_reads_it():
    found = translation_invariance(read_model(noisy(host("bert"), "sinusoidal")))
    assert found.position_table is not None
    assert found.position_table.raw.r2 == pytest.approx(1, abs=1e-9)
    assert found.heads[0].mean is not None and found.heads[0].mean < 0.9


@pytest.mark.parametrize("name, layers", [("tisa", 2), ("t5", 1), ("alibi", 1), ("attenuated", 1)])
def test_relative_biases_are_exactly_invariant_in_each_layer_that_differs(name, layers):
    found = translation_invariance(read_model(noisy(host("bert"), name)))
    assert found.position_table is None
    assert [head.source for head in found.heads] == ["terms"] * layers
    assert all(head.min == pytest.approx(1, abs=1e-9) for head in found.heads)


def test_untied_positions_are_not_invariant():
    found = translation_invariance(read_model(noisy(host("bert"), "tupe_a")))
    assert [(head.layer, head.source) for head in found.heads] == [(0, "terms")]
    assert found.heads[0].max < 0.9
    added = translation_invariance(read_model(noisy(host("bert"), "bert_ad")))
    assert added.heads[0].source == "terms"  # it adds to q and k, and is seen all the same


def test_a_model_without_such_positions_says_what_to_look_at():
    for model, name in ((family("llama"), "llama"), (noisy(host("bert"), "shaw"), "'shaw' attached")):
        with pytest.raises(ValueError, match=rf"{name}.* look at distance"):
            translation_invariance(read_model(model))


def test_one_treatment_is_what_attention_sees():
    assert [s for _, s, _ in position_logits(read_model(host("gpt2")), 9, every_treatment=False)] == ["layernorm_bias"]


def test_albert_keeps_the_width_of_its_table():
    reader = read_model(host("albert"))
    vectors = position_vectors(reader)
    found = position_table(vectors)
    assert (found.raw.width, found.layernorm.width) == (14, 24)
    assert vectors.raw.shape == (29, 24)


# kernels


def planted(kernels, heads=4):
    encoding = Tisa(heads, kernels=kernels)
    with torch.no_grad():
        encoding.amplitude.normal_(0, 2)
        encoding.sharpness.uniform_(0.002, 0.4)
        encoding.center.normal_(0, 6)
    return encoding.scores(torch.arange(-63, 64)).detach().double()


def test_planted_kernels_are_found():
    curve = planted(2) + torch.tensor([[5.0], [-3.0], [0.0], [100.0]])
    found = fit_kernels(curve)
    assert bool((found.r2[:, 3:] > 0.999).all())
    assert bool((found.r2[:, 1:] >= found.r2[:, :-1]).all())
    assert all(need is not None and need <= 3 for need in found.needed)
    torch.testing.assert_close(found.scores(torch.arange(-63, 64)), curve, atol=0.2, rtol=0.05)


def test_one_kernel_is_recovered_with_its_numbers():
    k = torch.arange(-63, 64, dtype=torch.float64)
    curve = torch.stack([4 - 3 * torch.exp(-0.02 * (k - 5) ** 2), torch.exp(-0.5 * (k + 1) ** 2)])
    found = fit_kernels(curve, kernels=1)
    assert found.r2[:, 0].tolist() == pytest.approx([1, 1], abs=1e-8) and found.needed == (1, 1)
    assert found.amplitude[:, 0].tolist() == pytest.approx([-3, 1], rel=1e-4)
    assert found.sharpness[:, 0].tolist() == pytest.approx([0.02, 0.5], rel=1e-4)
    assert found.center[:, 0].tolist() == pytest.approx([5, -1], abs=1e-3)
    assert found.constant.tolist() == pytest.approx([4, 0], abs=1e-4)


def test_noise_needs_more_kernels_than_there_are():
    found = fit_kernels(torch.randn(2, 127, dtype=torch.float64))
    assert found.needed == (None, None)


def test_a_constant_scoring_function_has_nothing_to_explain():
    found = fit_kernels(torch.stack([torch.full((21,), 3.0), torch.linspace(0, 1, 21)]))
    assert bool(found.r2[0].isnan().all()) and found.needed[0] is None
    torch.testing.assert_close(found.scores(torch.arange(-10, 11))[0], torch.full((21,), 3.0, dtype=torch.float64))
    assert found.needed[1] is not None


def test_kernels_refuse_what_they_cannot_fit():
    with pytest.raises(ValueError, match="kernels=0 fits nothing"):
        fit_kernels(torch.randn(2, 21), kernels=0)
    with pytest.raises(ValueError, match="has 20 offsets; give 2n - 1"):
        fit_kernels(torch.randn(2, 20))
    with pytest.raises(ValueError, match="scoring function holds 1 of 3"):
        fit_kernels(torch.tensor([[1.0, math.nan, 2.0]]))


def test_tisa_weights_are_read_back_from_a_model():
    model = noisy(host("bert"), "tisa", kernels=1)
    found = translation_invariance(read_model(model))
    assert len(found.kernels) == 2 and all(need == 1 for kernel in found.kernels for need in kernel.needed)
    assert len(found.kernels[0].needed) == HEADS


def test_the_cosine_variant_forgets_how_long_rows_are():
    rows = torch.randn(13, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    long = rows * torch.arange(1, 14, dtype=torch.float64)[:, None]
    assert table_invariance(long).cosine.r2 == pytest.approx(table_invariance(rows).cosine.r2, rel=1e-12)
    assert table_invariance(long).r2 != pytest.approx(table_invariance(rows).r2, rel=1e-2)


def test_sources_with_bias_hold_the_biases_of_the_projections():
    reader = read_model(host("bert"))
    sources = {name: logits(1) for _, name, logits in position_logits(reader)}
    for name, x in position_vectors(reader).treatments().items():
        for source, bias in ((name, False), (f"{name}_bias", True)):
            assert torch.equal(sources[source], projection(reader).logits(x, x, 1, bias))
        assert not torch.allclose(sources[name], sources[f"{name}_bias"])


def test_what_kernels_explain_is_weighted_by_the_pairs_at_each_offset():
    n = 17
    noise = torch.randn(2, 2 * n - 1, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found, k = fit_kernels(noise, kernels=2), torch.arange(-(n - 1), n)
    weight = (n - k.abs()).double() / n**2
    residual = (weight * (noise - found.scores(k)) ** 2).sum(-1)
    spread = (weight * (noise - (weight * noise).sum(-1, keepdim=True)) ** 2).sum(-1)
    assert (1 - residual / spread).tolist() == pytest.approx(found.r2[:, -1].tolist(), abs=1e-9)
