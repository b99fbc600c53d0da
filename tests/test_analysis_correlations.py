"""Word and position in the first attention: sums are the model's logits, maps are the published products."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import pytest
import torch

from locant.analysis.correlations import correlations, exact_parts
from locant.analysis.model import position_vectors, projection, read_model, word_vectors
from locant.analysis.passes import run
from tests.analysis_models import family
from tests.hf_models import HEADS, host, noisy, tokens


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra", "albert", "distilbert", "gpt2", "opt", "opt-post", "bart"]
)
def test_the_four_exact_products_sum_to_the_models_logits(name):
    reader, ids = read_model(family(name)), tokens(1, 9)
    with torch.no_grad():
        parts = exact_parts(reader, word_vectors(reader, ids), position_vectors(reader, 9).table)
    weights, found = projection(reader), {}
    run(reader, ids, visit=lambda layer, a: found.setdefault(layer, a))
    for head in range(HEADS):
        total = sum(
            weights.scale
            * (u @ weights.query[head] + (weights.query_bias[head] if a == "word" else 0))
            @ (v @ weights.key[head] + (weights.key_bias[head] if b == "word" else 0)).transpose(-1, -2)
            for a, u in parts.items()
            for b, v in parts.items()
        )[0]
        if reader.causal:
            total = total.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), float("-inf"))
        torch.testing.assert_close(total.softmax(-1), found[0][0, head].double(), atol=2e-5, rtol=1e-4)


def test_raw_maps_are_the_published_products():
    model, ids = host("bert"), tokens(5, 7)
    found = correlations(read_model(model), ids)
    words, places = (
        e.weight.detach().double() for e in (model.embeddings.word_embeddings, model.embeddings.position_embeddings)
    )
    attention = model.encoder.layer[0].attention.self
    q, k = (m.weight.detach().double().view(HEADS, 8, 24) for m in (attention.query, attention.key))
    for name, pick in {
        "word_word": lambda s, i: (words[s[i]], words),
        "word_position": lambda s, i: (words[s[i]], None),
        "position_word": lambda s, i: (places[i], words),
        "position_position": lambda s, i: (places[i], None),
    }.items():
        want = torch.zeros(7, 7, dtype=torch.float64)
        for s in ids:
            for i in range(7):
                for j in range(7):
                    u, v = pick(s, i)[0], words[s[j]] if pick(s, i)[1] is not None else places[j]
                    want[i, j] += sum((q[h] @ u) @ (k[h] @ v) for h in range(HEADS)) / (8**0.5 * HEADS * len(ids))
        torch.testing.assert_close(getattr(found.raw, name).map, want, atol=2e-5, rtol=1e-5)


def test_numbers_of_the_maps():
    found = correlations(read_model(host("bert")), tokens(3, 9))
    maps = [getattr(found.raw, name) for name in vars(found.raw)]
    assert sum(one.share for one in maps) == pytest.approx(1)
    for one in maps:
        assert one.mean == pytest.approx(one.map.mean().item()) and one.std == pytest.approx(
            one.map.std(correction=0).item()
        )
        assert one.head_std.shape == one.head_r2.shape == (HEADS,) and 0 <= one.r2 <= 1
    assert (found.sentences, found.length) == (3, 9) and found.exact is not None
    assert (found.raw.position_position.map - found.exact.position_position.map).abs().max() > 0.01


def test_positions_alone_do_not_depend_on_the_text():
    reader = read_model(host("gpt2"))
    one, other = (correlations(reader, tokens(4, 9, seed=s)).raw.position_position.map for s in (1, 2))
    torch.testing.assert_close(one, other)


def test_words_without_meaning_leave_their_maps_flat():
    model = host("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.zero_()
    found = correlations(read_model(model), tokens(2, 9)).raw
    assert found.word_word.std == 0 and found.word_position.std == 0 and found.word_word.r2 is None
    assert found.position_position.share == pytest.approx(1)


def test_progress_ends_at_the_number_of_sentences():
    seen = []
    correlations(read_model(host("bert")), tokens(11, 5), progress=lambda *step: seen.append(step))
    assert seen == [(8, 11), (11, 11)]


def test_one_sentence_is_no_average():
    with pytest.warns(UserWarning, match="got 1 sentence"):
        correlations(read_model(host("bert")), tokens(1, 9))


def test_bad_windows_and_models_are_refused():
    padded = tokens(2, 9)
    padded[1, 6:] = 0
    for ids, message in (
        (padded, "window 1 begins or ends with the padding token 0"),
        (tokens(2, 30), "30 tokens but the model has 29"),
        (tokens(2, 9)[:, :0], r"shape \(2, 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            correlations(read_model(host("bert")), ids)
    with pytest.raises(ValueError, match="BertModel adds no position vectors"):
        correlations(read_model(noisy(host("bert"), "tisa")), tokens(2, 9))
