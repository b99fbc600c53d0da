"""What rows of a table know, position probes, the course of a training run: planted answers and degenerate inputs."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import math

import pytest
import torch

import locant
import locant.hf
from locant.analysis.course import correlate, over_checkpoints
from locant.analysis.diagonals import explained
from locant.analysis.model import UNLIMITED, position_vectors, read_model
from locant.analysis.passes import run
from locant.analysis.probe import chance_distance, position_probe, read_positions
from locant.analysis.table import (
    analyze_table,
    logistic_regression,
    order_classification,
    position_regression,
    principal_axes,
    spectrum,
    table,
)
from tests.analysis_models import family
from tests.hf_models import LAYERS, ROWS, host, noisy, tokens
from tests.unchecked import unchecked

# tables


def test_a_sinusoidal_table_tells_its_positions():
    positions = locant.Positions.arange(200)
    rows = locant.load("sinusoidal", model_dim=64).embed(torch.zeros(1, 200, 64), positions)[0]
    found = analyze_table(rows)
    assert found.regression.error < 0.5 < found.regression.training_mean_error
    assert found.order.error < 0.05 < found.order.majority
    assert found.cosine_map.shape == (128, 128) and found.pca.shape == (200, 3)


def test_random_rows_tell_nothing():
    rows = torch.randn(200, 20, dtype=torch.float64)
    assert position_regression(rows).error > 40
    assert order_classification(rows).error > 0.3


def test_a_line_is_read_exactly():
    rows = torch.arange(37, dtype=torch.float64)[:, None] * torch.tensor([[0.1, -0.3, 0.2]]) + 5
    found = analyze_table(rows)
    assert found.regression.error == 0 and (found.spectrum.rank_99, found.spectrum.rank) == (1, 1)
    steps = found.pca[1:, 0] - found.pca[:-1, 0]
    assert steps.abs().tolist() == pytest.approx([math.sqrt(0.14)] * 36)
    assert found.pca[:, 1:].abs().max() < 1e-9


def test_equal_rows_know_nothing():
    found = analyze_table(torch.full((25, 6), 0.3))
    assert found.regression.error == found.regression.training_mean_error
    assert found.order.error == found.order.majority
    assert (found.spectrum.rank_99, found.spectrum.rank) == (0, 0) and found.spectrum.values.max() == 0
    assert found.monotonicity == 1


def test_the_spectrum_counts_the_energy():
    rows = torch.zeros(6, 4, dtype=torch.float64)
    rows[0, 0], rows[1, 0] = 10, -10
    rows[2, 1], rows[3, 1] = 2, -2
    rows[4, 2], rows[5, 2] = 0.5, -0.5
    found = spectrum(rows)
    assert found.values.tolist() == pytest.approx([200**0.5, 8**0.5, 0.5**0.5, 0])
    assert (found.rank_99, found.rank) == (2, 3)
    with pytest.raises(ValueError, match=r"\(0, 4\) rows"):
        spectrum(torch.zeros(0, 4))


def test_logistic_regression_is_at_its_minimum():
    x, y = torch.randn(60, 7, dtype=torch.float64), (torch.rand(60) > 0.4).double()
    weights, bias = logistic_regression(x, y, strength=2.0)
    error = (x @ weights + bias).sigmoid() - y
    assert (weights + 2 * x.T @ error).abs().max() < 1e-4 and error.sum().abs() < 1e-4


def test_axes_are_padded_where_there_are_fewer():
    assert principal_axes(torch.randn(9, 2)).shape == (9, 3)


def test_a_fold_with_one_label_is_left_out():
    rows = torch.randn(5, 3, dtype=torch.float64)
    found = [order_classification(rows, pairs=5, seed=seed) for seed in range(12)]
    assert {one.skipped_folds for one in found} >= {0, 1}
    assert all((one.error is None) == (one.skipped_folds == 5) for one in found)


def test_too_few_or_broken_rows_are_refused():
    for rows, message in (
        (torch.zeros(4, 3), r"\(4, 3\) rows cannot be cut into 5 folds"),
        (torch.full((9, 3), math.nan), "holds 27 of 27"),
    ):
        for function in (position_regression, order_classification):
            with pytest.raises(ValueError, match=message):
                function(rows)
    with pytest.raises(ValueError, match="4 pairs of 9 rows"):
        order_classification(torch.randn(9, 3), pairs=4)
    with pytest.raises(ValueError, match=r"\(llama\) has no position table"):
        table(read_model(family("llama")))
    assert table(read_model(host("albert"))).width == 14


# probes


def test_planted_positions_are_read_and_noise_is_not():
    n = 16
    planted = torch.eye(n).repeat(8, 1, 1) + 0.1 * torch.randn(8, n, n)
    found = read_positions(planted[:5], planted[5:], steps=150, rates=(1e-2,))
    assert found.distance < 0.1 and found.accuracy > 0.95
    assert found.mean_prediction.tolist() == pytest.approx(list(range(n)), abs=1.0)
    linear = read_positions(planted[:5], planted[5:], hidden=False, steps=150, rates=(1e-4, 3e-2))
    assert linear.accuracy > 0.95 and linear.rate == 3e-2
    noise = torch.randn(24, n, 12)
    assert read_positions(noise[:12], noise[12:], steps=60).distance == pytest.approx(chance_distance(n), rel=0.25)


def test_chance_is_that_of_uniform_guesses():
    assert chance_distance(1024) == pytest.approx(341.333, abs=1e-3)
    assert chance_distance(5) == pytest.approx(sum(abs(i - j) for i in range(5) for j in range(5)) / 25)
    one = torch.randn(4, 1, 3)
    assert read_positions(one[:2], one[2:], steps=1).distance == 0


def test_without_positions_an_encoder_stays_at_chance_in_every_layer():
    model = host("bert")
    locant.hf.attach(model, "none")
    found = position_probe(read_model(model), tokens(24, 12, seed=1), tokens(16, 12, seed=2), steps=80)
    assert found.layers == (0, 1, 2) and found.chance == pytest.approx(chance_distance(12))
    assert found.distance.min() > 0.7 * found.chance and found.linear_distance.min() > 0.7 * found.chance


def test_a_table_is_read_from_the_first_layer_on():
    model = host("bert")
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.mul_(8)
    found = position_probe(read_model(model), tokens(16, 12, seed=1), tokens(6, 12, seed=2), layers=(0,), steps=200)
    assert found.distance[0] < 0.1 * found.chance and found.accuracy[0] > 0.9


def test_causality_alone_tells_where_a_token_is():
    model = host("gpt2")
    locant.hf.attach(model, "none")
    found = position_probe(
        read_model(model), tokens(48, 12, seed=1), tokens(16, 12, seed=2), layers=(0, LAYERS), steps=250
    )
    assert found.distance[0] > 0.7 * found.chance  # layer 0 holds words alone
    assert found.distance[1] < 0.85 * found.distance[0]


def test_probes_refuse_too_little():
    states = torch.randn(4, 5, 3)
    for train, test, message in (
        (states[:1], states, "got 1 training and 4 test sequences"),
        (states, states[:, :4], r"\(4, 5, 3\) but test states \(4, 4, 3\)"),
        (states * math.nan, states, "the hidden states holds 60 of 60"),
    ):
        with pytest.raises(ValueError, match=message):
            unchecked(read_positions)(train, test)
    reader = read_model(host("bert"))
    with pytest.raises(ValueError, match="layer 3 does not exist; this model has 0"):
        position_probe(reader, tokens(2, 5), tokens(2, 5), layers=(3,))
    with pytest.raises(ValueError, match="5 tokens but test windows 6"):
        unchecked(position_probe)(reader, tokens(2, 5), tokens(2, 6))


# over training


def test_invariance_over_checkpoints_goes_with_the_loss():
    def model(share):
        built = host("bert")
        position = locant.load("sinusoidal", model_dim=24).embed(
            torch.zeros(1, ROWS, 24), locant.Positions.arange(ROWS)
        )
        with torch.no_grad():
            noise = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(3))
            built.embeddings.position_embeddings.weight.copy_(share * position[0] + (1 - share) * noise)
        return built

    shares = (0.5, 0.7, 0.9, 1.0)
    found = over_checkpoints((step, model(share), 9 - share) for step, share in enumerate(shares))
    r2 = [point.r2 for point in found.checkpoints]
    assert r2 == sorted(r2) and r2[-1] == pytest.approx(1, abs=1e-6)
    assert found.with_loss["r2"].spearman == pytest.approx(-1) and found.with_loss["r2"].pearson < -0.8
    assert found.with_loss["r2_off_diagonal"].n == found.with_loss["heads_r2"].n == 4
    assert [point.step for point in found.checkpoints] == [0, 1, 2, 3] and found.length == ROWS
    last = found.checkpoints[-1]
    table = position_vectors(read_model(model(1.0))).table
    assert last.r2_off_diagonal == explained(table @ table.T)[1]


def test_checkpoints_without_table_or_loss():
    found = over_checkpoints([(0, noisy(host("bert"), "tisa"), None), (5, host("gpt2"), None)])
    first, second = found.checkpoints
    assert (first.r2, first.loss) == (None, None) and first.heads_r2 == pytest.approx(1, abs=1e-9)
    assert second.r2 is not None and found.with_loss["r2"] == correlate([], [])
    assert first.words_r2 is not None and first.words_null is not None and first.words_null < first.words_r2
    assert found.length == UNLIMITED
    assert first.heads_null is not None and first.heads_null < 0.2, "a bias is explained by its offset in any order"
    with pytest.raises(ValueError, match="got 0 of them"):
        over_checkpoints([])


def test_correlations_of_few_or_constant_values_are_undefined():
    assert correlate([1.0, 2.0], [3.0, 4.0]).pearson is None
    assert correlate([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]).spearman is None
    found = correlate([1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 16.0])
    assert found.spearman == pytest.approx(1) and found.pearson == pytest.approx(0.98437, abs=1e-4) and found.n == 4
    with pytest.raises(ValueError, match="got 2 and 3 values"):
        correlate([1.0, 2.0], [1.0, 2.0, 3.0])


def test_a_probe_is_judged_by_the_held_out_sequences():
    planted = torch.eye(6).expand(8, 6, 6)
    found = read_positions(planted, planted.flip(1)[:3])
    assert found.distance > 2 and found.mean_prediction.tolist() == pytest.approx([5, 4, 3, 2, 1, 0])


def test_each_layer_is_read_from_its_own_states():
    reader, train, test = read_model(host("bert")), tokens(6, 9), tokens(3, 9, seed=1)
    found = position_probe(reader, train, test, layers=(0, LAYERS), steps=15)
    for at, layer in enumerate((0, LAYERS)):
        states = [run(reader, windows, hidden=True).hidden[layer] for windows in (train, test)]
        assert read_positions(*states, steps=15).mean_prediction.tolist() == found.mean_prediction[at].tolist()
    assert found.mean_prediction[0].tolist() != found.mean_prediction[1].tolist()
