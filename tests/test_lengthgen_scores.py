"""Exact match, ranks, and the distance between attentions."""

from __future__ import annotations

import math

import pytest
import torch

from locant.lengthgen import (
    by_length,
    edit_distance,
    final_answer,
    head_distances,
    is_right,
    jensen_shannon,
    kl,
    layer_distance,
    mean_reciprocal_rank,
    model_distance,
    overall,
    ranks,
    symmetric_kl,
)


def test_only_the_final_answer_counts_and_white_space_does_not():
    pad = "Thinking step by step:  in 8, 5 comp 8 + 5  . Thus,  The answer is 1 3."
    assert is_right("The answer is 1 3 .", pad) and is_right(pad, "The answer is 1 3.")
    assert not is_right("The answer is 1 4.", pad) and not is_right("", pad)
    assert final_answer("a b") == ("a", "b")


def test_exact_match_by_length_and_over_all():
    found = by_length([4, 2, 4, 2, 4], [True, True, False, True, False])
    assert [(one.length, one.num_examples) for one in found] == [(2, 2), (4, 3)]
    assert found[1].exact_match == pytest.approx(1 / 3) and overall(found) == pytest.approx(3 / 5)
    with pytest.raises(ValueError, match="2 lengths for 1 judgements"):
        by_length([1, 2], [True])
    with pytest.raises(ValueError, match="0 buckets hold 0 examples"):
        overall([])


@pytest.mark.parametrize(("a", "b", "steps"), [("x y z", "x z", 1), ("", "x y", 2), ("a b", "b a", 2), ("a", "a", 0)])
def test_edit_distance_counts_symbols(a: str, b: str, steps: int):
    assert edit_distance(a, b) == edit_distance(b, a) == steps


def test_equal_scores_share_a_rank():
    assert ranks({"a": 0.9, "b": 0.5, "c": 0.5, "d": 0.1}) == {"a": 1, "b": 2.5, "c": 2.5, "d": 4}


def test_reciprocal_ranks_are_averaged_over_problems():
    problems = {"copy": {"none": 0.9, "rope": 0.1}, "sum": {"none": 0.2, "rope": 0.3}}
    assert mean_reciprocal_rank(problems) == {"none": 0.75, "rope": 0.75}
    with pytest.raises(ValueError, match="2 problems score 2 different sets of names"):
        mean_reciprocal_rank({"copy": {"none": 1.0}, "sum": {"rope": 1.0}})


def weights(seed: int, heads: int = 3) -> torch.Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(2, heads, 5, 5, dtype=torch.float64)
    return logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)


def test_the_true_divergence_is_bounded_and_the_public_one_is_not():
    p, q = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert float(jensen_shannon(p, q)) == pytest.approx(math.log(2))
    assert torch.isinf(jensen_shannon(p, q, public=True))
    near = torch.tensor([1 - 1e-20, 1e-20], dtype=torch.float64)
    assert float(jensen_shannon(near, near.flip(0), public=True)) > 5 * math.log(2)


def test_divergences_against_their_definitions():
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)
    expected = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert float(kl(p, q)) == pytest.approx(expected) and float(kl(p, p)) == 0
    assert float(symmetric_kl(p, q)) == pytest.approx(float(kl(p, q) + kl(q, p)) / 2)
    assert float(jensen_shannon(p, q)) == pytest.approx(float(jensen_shannon(q, p)))


def test_all_pairs_of_heads_find_what_the_public_pairs_cannot():
    p = weights(1)
    assert layer_distance(p, p) == pytest.approx(0, abs=1e-12)  # the same head of both
    assert layer_distance(p, p, public_pairs=True) > 1e-3
    swapped = p[:, [1, 2, 0]]
    assert layer_distance(p, swapped) == pytest.approx(0, abs=1e-12)
    assert head_distances(p, weights(2, heads=4)).shape == (3, 4)


def test_layers_are_compared_one_by_one():
    p, q = [weights(1), weights(2)], [weights(1), weights(3)]
    found = model_distance(p, q, "symmetric_kl")
    assert found[0] == pytest.approx(0, abs=1e-12) and found[1] > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head_distances(weights(1), weights(2), "cosine"), "divergence='cosine'"),
        (lambda: head_distances(weights(1), weights(2)[:1]), r"shapes \(2, 3, 5, 5\) and \(1, 3, 5, 5\)"),
        (lambda: layer_distance(weights(1, 1), weights(2, 1), public_pairs=True), r"\(1, 1\) heads have no pair"),
        (lambda: model_distance([weights(1)], []), "1 layers beside 0"),
    ],
)
def test_attentions_that_cannot_be_compared_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
