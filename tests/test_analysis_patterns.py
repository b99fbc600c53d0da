"""Head patterns and attention by distance: synthetic logits, heads built to look at a neighbor, companions of terms."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import math

import pytest
import torch

from locant.analysis.biases import companions, content_free_logits
from locant.analysis.distance import attention_by_distance, by_distance, every_companion
from locant.analysis.model import read_model
from locant.analysis.patterns import (
    NAMES,
    attention_patterns,
    head_pattern,
    head_patterns,
    pattern_numbers,
    softmax_logits,
)
from tests.analysis_models import family, looking_at_neighbors
from tests.hf_models import HEADS, LAYERS, attached, host, noisy, tokens
from tests.unchecked import unchecked


def logits(f, n=128):
    index = torch.arange(n, dtype=torch.float64)
    return f(index[None] - index[:, None])


# patterns


@pytest.mark.parametrize(
    "f, label",
    [
        (lambda k: -((k + 1) ** 2), "previous"),
        (lambda k: -((k - 1) ** 2), "next"),
        (lambda k: -0.1 * k**2, "local"),
        (lambda k: -0.04 * k.abs(), "broad"),
        (lambda k: 0 * k, "whole"),
        (lambda k: 0.05 * k.abs(), "other"),
    ],
)
def test_synthetic_logits_get_their_names(f, label):
    assert head_pattern(logits(f)).label == label


def test_the_seven_numbers_are_their_definitions():
    weights, n = torch.randn(20, 20, dtype=torch.float64).softmax(-1), 20
    found = dict(zip(NAMES, pattern_numbers(weights).tolist(), strict=True))
    rows = range(5, 15)  # w = 5
    for name, k in (("previous", -1), ("next", 1), ("self", 0)):
        assert found[name] == pytest.approx(sum(weights[i, i + k].item() for i in rows) / 10)
    entropy = -sum(x * math.log(x) for x in weights.flatten().tolist()) / n / math.log(n)
    assert found["entropy"] == pytest.approx(entropy)
    assert found["near"] == pytest.approx(sum(weights[i, i - 5 : i + 6].sum().item() for i in rows) / 10)
    assert found["wide"] == pytest.approx(sum(weights[i, max(0, i - 5) : i + 6].sum().item() for i in rows) / 10)
    assert found["wide_uniform"] == pytest.approx(11 / 20)


def test_a_causal_head_that_sees_all_alike_is_whole():
    assert head_pattern(torch.zeros(40, 40), causal=True).label == "whole"
    assert head_pattern(torch.zeros(40, 40), causal=True).entropy == pytest.approx(1)
    assert head_pattern(logits(lambda k: -((k + 1) ** 2), 40), causal=True).label == "previous"


def test_degenerate_heads():
    assert set(vars(head_pattern(torch.randn(7, 7))).values()) == {None}
    assert head_pattern(torch.full((8, 8), 3.5)).label == "whole"
    with pytest.raises(ValueError, match="the logits holds 1 of 64"):
        head_pattern(torch.zeros(8, 8).index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(math.nan)))
    with pytest.raises(ValueError, match="got 7 positions"):
        pattern_numbers(torch.full((7, 7), 1 / 7))
    with pytest.raises(ValueError, match="the attention holds 81 of 81"):
        pattern_numbers(torch.full((9, 9), math.nan))


def test_heads_built_to_look_at_neighbors_are_recognized():
    reader = read_model(looking_at_neighbors())
    want = ["previous", "next", "whole"]
    (found,) = head_patterns(reader, 24)
    assert [head.label for head in found.heads] == want and found.source == "terms"
    measured = attention_patterns(reader, tokens(3, 24))
    assert [[head.label for head in layer.heads] for layer in measured] == [want] * LAYERS
    assert measured[1].heads[0].previous == pytest.approx(1, abs=1e-6)


def test_an_untied_special_token_is_left_out():
    model = noisy(host("bert"), "tupe_a")
    reader = read_model(model)
    (found,) = head_patterns(reader, 21)
    whole = content_free_logits(reader, 0, 21)
    for head in range(HEADS):
        numbers = pattern_numbers(softmax_logits(whole[head, 1:, 1:]))
        assert found.heads[head].near == pytest.approx(numbers[4].item())


def test_patterns_without_positions_of_their_own_are_refused():
    with pytest.raises(ValueError, match=r"LlamaModel \(llama\) has no position table"):
        head_patterns(read_model(family("llama")), 12)
    assert len(attention_patterns(read_model(family("llama")), tokens(2, 12))) == LAYERS


def test_windows_below_eight_tokens_have_no_label():
    found = attention_patterns(read_model(family("llama")), tokens(2, 7))
    assert [layer.layer for layer in found] == list(range(LAYERS))
    assert {head.label for layer in found for head in layer.heads} == {None} and found[0].heads[0].near is None


# distance


def test_attention_by_distance_is_its_definition():
    weights = torch.rand(2, 3, 5, 5).softmax(-1)
    valid = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = by_distance(weights, valid=valid)
    for k in range(-4, 5):
        pairs = [
            (b, i, i + k) for b in range(2) for i in range(5) if 0 <= i + k < 5 and valid[b, i] and valid[b, i + k]
        ]
        assert found.counts[k + 4] == len(pairs)
        for h in range(3):
            total = sum(weights[b, h, i, j].item() for b, i, j in pairs)
            assert found.mass[h, k + 4].item() == pytest.approx(total / 8)
            assert found.mean[h, k + 4].item() == pytest.approx(total / len(pairs))
    mass = found.mass[1]
    assert found.mean_distance[1].item() == pytest.approx(
        sum(abs(k) * mass[k + 4].item() for k in range(-4, 5)) / mass.sum().item()
    )


def test_the_mass_of_unpadded_rows_sums_to_one():
    found = by_distance(torch.rand(2, 3, 9, 9).softmax(-1))
    torch.testing.assert_close(found.mass.sum(-1), torch.ones(3, dtype=torch.float64))
    assert by_distance(torch.rand(1, 3, 9, 9).softmax(-1), radius=2).offsets.tolist() == [-2, -1, 0, 1, 2]


def test_degenerate_distances():
    one = by_distance(torch.ones(1, 2, 1, 1))
    assert one.mean.tolist() == [[1.0], [1.0]] and one.mean_distance.tolist() == [0, 0]
    causal = by_distance(torch.ones(1, 1, 4, 4).tril() / torch.arange(1, 5)[:, None], causal=True)
    assert causal.counts.tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert bool(causal.mean[0, 4:].isnan().all()) and causal.mass[0, 4:].tolist() == [0, 0, 0]
    padded = torch.ones(1, 1, 3, 3) / 3
    padded[0, 0, 2] = math.nan  # the row of a pad may hold anything
    assert bool(by_distance(padded, valid=torch.tensor([[True, True, False]])).mass.isfinite().all())
    with pytest.raises(ValueError, match="none of 2 x 3 tokens is valid"):
        by_distance(torch.ones(2, 1, 3, 3), valid=torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"the attention holds 3 of 9"):
        by_distance(padded)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 3, 2\)"):
        unchecked(by_distance)(torch.ones(1, 1, 3, 2))


def test_a_head_that_looks_at_the_previous_token_has_its_mass_there():
    found = attention_by_distance(read_model(looking_at_neighbors()), tokens(2, 17), radius=5)
    at = {k: i for i, k in enumerate(found.offsets.tolist())}
    assert found.mean[0, 0, at[-1]].item() == pytest.approx(1, abs=1e-6)
    assert found.mean[1, 1, at[1]].item() == pytest.approx(1, abs=1e-6)
    assert found.mean[0, 2].tolist() == pytest.approx([1 / 17] * 11, abs=1e-6)
    assert found.counts[at[-2]] == 2 * 15
    # the first token has none before it, and looks at all alike: 16 of 17 rows one step away, one row 8 on average
    assert found.mean_distance[0, 0].item() == pytest.approx((16 * 1 + 8) / 17, abs=1e-5)
    assert found.maps.shape == (LAYERS, HEADS, 17, 17)


# companions


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("shaw", ["relative query:norm"]),
        ("huang_m1", ["relative scale:scale"]),
        ("huang_m3", ["relative gate:norm"]),
        ("huang_m4", ["relative query:norm", "relative key:norm"]),
        ("tisa", ["relative bias:bias"]),
        ("alibi", ["relative bias:bias"]),
        ("tupe_a", []),
        ("absolute", []),
        ("rope", []),
        ("deberta", ["relative query:norm", "relative key:norm"]),
    ],
)
def test_terms_have_their_companions(name, kinds):
    reader = read_model(noisy(host("bert"), name, **({"clip": 6} if name == "shaw" else {})))
    assert [f"{c.name}:{c.kind}" for c in companions(reader, 0, 9)] == kinds


def test_companions_hold_the_tables_of_the_model():
    model = noisy(host("bert"), "shaw", clip=3)
    (found,) = companions(read_model(model), 1, 5)
    table = attached(model).encodings[1].table.detach()
    want = table[0].norm(dim=-1)[[0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6]]
    torch.testing.assert_close(found.values[0].float(), want)
    assert found.offsets.tolist() == list(range(-5, 6)) and found.profile is None


def test_a_bias_comes_with_its_profile():
    model = noisy(host("bert"), "t5")
    (found,) = every_companion(read_model(model), 4)
    table = attached(model).encodings[0].table.detach().double()
    torch.testing.assert_close(found.values, table[:, [4, 3, 2, 1, 0, 17, 18, 19, 20]])
    torch.testing.assert_close(found.profile, found.values.softmax(-1))


@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_the_bias_of_a_host_is_its_own(name):
    model = family(name)
    (found,) = every_companion(read_model(model), 9)
    if name == "t5":
        bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(19, 19)[0]
    else:
        bias = model.encoder.compute_position_bias(torch.zeros(1, 19, 24))[0]
    torch.testing.assert_close(found.values.float(), bias[:, 9].detach())
