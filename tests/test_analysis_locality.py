"""Locality, symmetry, monotonicity, identical words, word swaps: definitions and degenerate inputs."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import math
import random

import pytest
import torch

import locant
from locant.analysis.locality import (
    head_locality,
    identical_words,
    locality,
    locality_symmetry,
    some_words,
    symmetry,
    symmetry_raw,
)
from locant.analysis.model import read_model
from locant.analysis.monotonicity import monotonicity
from locant.analysis.word_swap import Labeled, Roles, role_probe, shuffle_probes, shuffle_window, swap_roles
from tests.analysis_models import family, looking_at_neighbors
from tests.hf_models import HEADS, LAYERS, host, noisy
from tests.unchecked import unchecked


def gaussian(n=40):
    index = torch.arange(n, dtype=torch.float64)
    return (-0.1 * (index[None] - index[:, None]) ** 2).softmax(-1)


# locality and symmetry


def test_locality_is_its_definition():
    matrix = torch.rand(7, 7, dtype=torch.float64)
    want = sum(matrix[i, j].item() * 2.0 ** -abs(i - j) for i in range(7) for j in range(7)) / 7
    assert locality(matrix) == pytest.approx(want)


def test_symmetry_raw_is_its_definition():
    m = torch.rand(7, 7, dtype=torch.float64)
    shares = [
        abs(m[i, i - t] - m[i, i + t]).item() / (m[i, i - t] + m[i, i + t]).item()
        for i in range(7)
        for t in range(1, min(i, 6 - i) + 1)
    ]
    assert symmetry_raw(m) == pytest.approx(1 - sum(shares) / len(shares))


@pytest.mark.parametrize(
    "matrix, want",
    [
        (torch.zeros(6, 6), (0, 1, 1)),
        (torch.eye(6), (1, 1, 1)),
        (torch.full((6, 6), 1 / 6), (None, 1, 1)),
        (torch.full((1, 1), 0.7), (0.7, None, None)),
        (torch.full((2, 2), 0.5), (0.75, None, None)),
    ],
)
def test_degenerate_matrices_give_the_stated_values(matrix, want):
    found = locality_symmetry(matrix)
    for value, stated in zip((found.locality, found.symmetry, found.symmetry_raw), want, strict=True):
        if stated is not None:
            assert value == pytest.approx(stated, abs=1e-6)
    assert (found.symmetry is None) == (len(matrix) < 3)


def test_three_and_four_positions_always_look_symmetric():
    for n in (3, 4):
        assert symmetry(torch.rand(n, n)) == 1


def test_the_stable_variants_bear_a_little_noise():
    matrix = gaussian()
    noisy_matrix = matrix * (1 + 1e-10 * torch.randn(40, 40, dtype=torch.float64))
    assert symmetry(matrix) == pytest.approx(1, abs=1e-9)
    assert symmetry(noisy_matrix) < 0.9
    assert symmetry(noisy_matrix, rounded=True) > 0.99
    assert symmetry_raw(noisy_matrix) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("function", [locality, symmetry, symmetry_raw])
def test_matrices_that_are_no_finite_square_are_refused(function):
    with pytest.raises(ValueError, match=r"shape \(3, 5\)"):
        unchecked(function)(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="holds 1 of 4"):
        function(torch.tensor([[0.0, math.nan], [1.0, 2.0]]))


def test_heads_that_look_near_score_high():
    (found,) = head_locality(read_model(looking_at_neighbors()), 24)
    assert found.locality[:2].tolist() == pytest.approx([0.5, 0.5], abs=0.03) and found.locality[2] < 0.2
    assert found.symmetry_raw[2].item() == pytest.approx(1) and found.symmetry_raw[0] < 0.95
    assert found.mean.locality == pytest.approx(found.locality.mean().item())
    with pytest.raises(ValueError, match="llama"):
        head_locality(read_model(family("llama")), 12)


# identical words


def test_identical_words_cannot_differ_by_content():
    model = host("bert")
    locant.hf.attach(model, "alibi")
    found = identical_words(read_model(model), torch.tensor([7, 9, 30]), 21)
    assert (found.words, found.length, len(found.per_layer)) == (3, 21, LAYERS)
    assert found.symmetry_raw == pytest.approx(1, abs=1e-5) and found.monotonicity == 1
    # in a sequence of one word all queries and keys are equal: attention is that of the bias alone
    (bias,) = head_locality(read_model(model), 21)
    assert found.locality == pytest.approx(bias.mean.locality, abs=1e-6)


def test_without_positions_identical_words_are_all_alike():
    model = host("bert")
    locant.hf.attach(model, "none")
    found = identical_words(read_model(model), some_words(read_model(model), 2), 9)
    torch.testing.assert_close(found.map, torch.full((9, 9), 1 / 9, dtype=torch.float64))
    assert found.symmetry is not None and found.symmetry_raw == pytest.approx(1, abs=1e-5)


def test_words_are_drawn_from_the_vocabulary_by_seed():
    reader = read_model(host("bert"))
    words = some_words(reader, 8, seed=3)
    assert torch.equal(words, some_words(reader, 8, seed=3)) and len(set(words.tolist())) == 8
    assert words.min() > 4 and words.max() < 43


def test_identical_words_refuse_what_has_no_answer():
    reader = read_model(host("bert"))
    for words, length, message in (
        (torch.tensor([], dtype=torch.long), 9, "got 0 words at length=9"),
        (torch.tensor([5]), 2, "at length=2"),
        (torch.tensor([5]), 30, "length of 3 to 29"),
    ):
        with pytest.raises(ValueError, match=message):
            identical_words(reader, words, length)
    reader.stack.config.vocab_size = 1
    with pytest.raises(ValueError, match="vocab_size=1"):
        some_words(reader, 3)


# monotonicity


@pytest.mark.parametrize(
    "profile, want",
    [
        ([1.0, 2, 3, 9, 3, 2, 1], 1.0),
        ([3.0, 2, 1, 9, 1, 2, 3], 0.0),
        ([1.0, 2, 3, 9, 1, 2, 3], 0.5),
        ([5.0] * 7, 1.0),
        ([2.0, 3.0, 2.0], None),
        ([2.0], None),
    ],
)
def test_monotonicity_counts_steps_that_do_not_rise(profile, want):
    assert monotonicity(torch.tensor(profile)) == want


def test_monotonicity_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        monotonicity(torch.zeros(4))
    with pytest.raises(ValueError, match="holds 1 of 3"):
        monotonicity(torch.tensor([0.0, math.nan, 1.0]))


# word swaps


def test_a_window_is_shuffled_and_nothing_else():
    words = "the small dog saw a very large cat".split()
    starts = set()
    for seed in range(30):
        changed = shuffle_window(words, 3, random.Random(seed))
        assert isinstance(changed, list)
        places = [i for i, (a, b) in enumerate(zip(words, changed, strict=True)) if a != b]
        assert 2 <= len(places) <= 3 and max(places) - min(places) <= 2
        assert sorted(changed) == sorted(words)
        starts.add(min(places))
    assert len(starts) > 3
    assert shuffle_window(words[:2], 3, random.Random(0)) is None
    assert shuffle_window(["a", "a", "a"], 3, random.Random(0)) is None
    with pytest.raises(ValueError, match="x=1 words"):
        shuffle_window(words, 1, random.Random(0))


def test_roles_are_exchanged():
    sentence = Roles(tuple("the dog bit a large man today".split()), (0, 2), (3, 6))
    assert swap_roles(sentence) == "a large man bit the dog today".split()
    assert swap_roles(Roles(sentence.words, (3, 6), (0, 2))) == swap_roles(sentence)
    for first, second in (((0, 3), (2, 5)), ((0, 2), (5, 9)), ((1, 1), (2, 3))):
        with pytest.raises(ValueError, match=r"do not fit a sentence of 7 words"):
            swap_roles(Roles(sentence.words, first, second))


def test_a_bag_of_words_does_not_notice_and_a_reader_does():
    pairs = [Labeled("a b c d e f", "a b c d e f", 0), Labeled("a b c d e f", "q r s t u v", 1), Labeled("x", "x y", 0)]

    def bag(given):
        return [0 if set(b.split()) & set(a.split()) else 1 for a, b in given]

    def order(given):
        return [0 if b in a else 1 for a, b in given]

    found = shuffle_probes(bag, pairs, sizes=(3, 4))
    assert [(s.name, s.accuracy, s.change, s.n, s.skipped) for s in found] == [
        ("shuffle_3", 1, 0, 2, 1),
        ("shuffle_4", 1, 0, 2, 1),
    ]
    assert shuffle_probes(order, pairs, sizes=(3,))[0].change == -0.5
    assert shuffle_probes(bag, pairs, sizes=(9,))[0].accuracy is None
    roles = [Roles(tuple("dog bit man".split()), (0, 1), (2, 3))]
    assert role_probe(bag, roles, contradiction=1, entailment=0).change == -1
    assert role_probe(order, roles, contradiction=1, entailment=0).change == 0


def test_swaps_refuse_empty_sets_and_short_answers():
    with pytest.raises(ValueError, match="got 0 pairs"):
        shuffle_probes(lambda given: [], [])
    with pytest.raises(ValueError, match="got 0 sentences"):
        role_probe(lambda given: [], [], 1, 0)
    with pytest.raises(ValueError, match="returned 0 labels for 1 pairs"):
        shuffle_probes(lambda given: [], [Labeled("a", "a b c", 0)], sizes=(3,))


def test_heads_count():
    assert len(head_locality(read_model(noisy(host("bert"), "attenuated")), 12)[0].locality) == HEADS
