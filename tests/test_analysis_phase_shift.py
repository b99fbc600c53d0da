"""Phase shift: controls that may not move, models that must, scores against plain loops."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import functools
import math

import pytest
import torch
import transformers as T
from torch.nn import functional as F

from locant.analysis.model import read_model
from locant.analysis.passes import how_to_shift, rolled_tables, run, shifted_ids
from locant.analysis.phase_shift import (
    Choice,
    MinimalPair,
    acceptability,
    average_ranks,
    blimp_pairs,
    drift,
    few_shot,
    fitting_shifts,
    is_relative,
    matthews,
    perplexity,
    phase_shift,
    shift_matrix,
)
from locant.analysis.scoring import Scorer, make_scorer
from tests.analysis_models import family
from tests.hf_models import BERT_SIZES, HEADS, LAYERS, VOCABULARY, WIDTH, host, noisy, stir, tokens

# controls

RELATIVE = ("none", "shaw", "huang_m4", "t5", "tisa", "alibi", "rope", "attenuated")


@pytest.mark.parametrize("name", RELATIVE)
def test_relative_encodings_do_not_notice(name):
    found = phase_shift(read_model(noisy(host("bert"), name)), tokens(2, 9), shifts=(3, 11))
    assert found.relative and found.control is True
    assert found.drift.l2.max() <= 1e-5 and found.drift.cosine.min() > 1 - 1e-6


@pytest.mark.parametrize("name", ["llama", "t5", "mistral"])
def test_relative_hosts_do_not_notice(name):
    assert phase_shift(read_model(family(name)), tokens(2, 9), shifts=(3, 11)).control is True


@pytest.mark.parametrize("name", ["absolute", "sinusoidal", "tupe_a", "tupe_r"])
def test_absolute_encodings_do_notice(name):
    found = phase_shift(read_model(noisy(host("bert"), name)), tokens(2, 9), shifts=(3, 11))
    assert not found.relative and found.control is None
    assert found.drift.l2[1:, -1].min() > 1e-3 and found.drift.l2[0].max() == 0


@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "distilbert", "electra", "gpt2", "opt", "mpnet", "bart"])
def test_hosts_with_a_table_do_notice(name):
    reader = read_model(family(name))
    assert how_to_shift(reader) == ("table rolled" if name == "bart" else "position_ids")
    found = drift(reader, tokens(2, 9), (0, 4))
    assert found.cosine.shape == (2, reader.num_layers + 1)
    assert found.l2[1].min() > 1e-3 and found.l2[0].max() == 0


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "opt", "mpnet"])
def test_rolling_the_table_equals_moving_the_ids(name):
    reader, ids = read_model(family(name)), tokens(2, 9)
    by_ids = run(reader, ids, shift=5).output[0]
    rolled = rolled_tables(reader, reader.stack, 5)
    with torch.no_grad():
        by_table = torch.func.functional_call(reader.stack, rolled, (), {"input_ids": ids})[0]
    torch.testing.assert_close(by_table, by_ids, atol=1e-6, rtol=1e-6)
    assert (by_ids - run(reader, ids).output[0]).abs().max() > 1e-3


def test_the_ids_that_a_host_is_given_are_used():
    for name, first in (("roberta", 2), ("mpnet", 2), ("opt", 0), ("bert", 0)):
        assert shifted_ids(read_model(family(name)), 3, 4).tolist() == [[first + 4, first + 5, first + 6]]


def test_special_tokens_may_stay():
    reader, ids = read_model(host("bert")), tokens(1, 9)
    assert shifted_ids(reader, 4, 5, specials=False).tolist() == [[0, 6, 7, 8]]
    still, moved, all_moved = (
        run(reader, ids, hidden=True, shift=s, shift_specials=f).hidden[0][0]
        for s, f in ((0, True), (5, False), (5, True))
    )
    assert torch.equal(still[0], moved[0]) and torch.equal(moved[1:], all_moved[1:])
    bart = read_model(family("bart"))
    table = next(iter(rolled_tables(bart, bart.stack, 5, specials=False).values()))
    assert torch.equal(table[2], bart.table.weight[2]) and torch.equal(table[3], bart.table.weight[8])


def test_a_gap_is_no_document_border():
    reader, ids = read_model(host("gpt2")), tokens(1, 9)
    seen = {}
    run(reader, ids, shift=5, shift_specials=False, visit=lambda layer, weights: seen.setdefault(layer, weights))
    assert (seen[0][0, :, 5, 0] > 0).all()


# shifts


def test_shifts_that_some_example_cannot_take_are_reported():
    reader = read_model(host("bert"))
    assert fitting_shifts(reader, 19, (5, 10, 11, 50)) == ((0, 5, 10), (11, 50))
    assert fitting_shifts(reader, 9)[0] == (0, 5, 10, 15, 20)
    assert fitting_shifts(reader, 29) == ((0,), ())
    assert fitting_shifts(read_model(family("t5")), 9)[0] == tuple(range(0, 401, 50))
    found = phase_shift(reader, tokens(2, 19), shifts=(5, 11))
    assert found.shifts == (0, 5) and found.dropped == (11,)
    only = phase_shift(reader, tokens(1, 29))
    assert only.shifts == (0,) and only.drift.l2.max() == 0


def test_shifts_that_cannot_be_are_refused():
    reader = read_model(host("bert"))
    for longest, shifts, message in ((30, (1,), "30 tokens but the model has 29"), (5, (-2,), "got the shift -2")):
        with pytest.raises(ValueError, match=message):
            fitting_shifts(reader, longest, shifts)
    with pytest.raises(ValueError, match="9 tokens moved by 21 reach position 30 but the model has 29"):
        run(reader, tokens(1, 9), shift=21)


def test_what_may_not_move_is_known():
    assert is_relative(read_model(family("llama"))) and is_relative(read_model(noisy(host("bert"), "tisa")))
    assert not is_relative(read_model(family("deberta")))
    assert not is_relative(read_model(noisy(host("bert"), "tisa", keep_absolute=True)))


# likelihoods


def test_causal_scores_are_those_of_the_model():
    model, ids = host("gpt2"), tokens(1, 9)
    scorer = make_scorer(read_model(model))
    assert scorer.kind == "causal"
    loss = model(ids, labels=ids).loss
    assert -scorer.token_scores(ids[0].tolist()).mean() == pytest.approx(loss.item(), rel=1e-5)
    found = perplexity(scorer, ids.tolist(), (0, 6))
    assert found.mean[0].item() == pytest.approx(math.exp(loss.item()), rel=1e-5)
    assert found.delta[0] == 0 and found.delta[1] != 0 and found.worst == max(found.delta.tolist())


MASKED = {
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)),
    "roberta": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**BERT_SIZES)),
    "electra": lambda: T.ElectraForMaskedLM(T.ElectraConfig(**BERT_SIZES, embedding_size=12)),
    "albert": lambda: T.AlbertForMaskedLM(T.AlbertConfig(**BERT_SIZES, embedding_size=12)),
    "distilbert": lambda: T.DistilBertForMaskedLM(T.DistilBertConfig(vocab_size=VOCABULARY, dim=WIDTH, n_heads=HEADS)),
    "mpnet": lambda: T.MPNetForMaskedLM(T.MPNetConfig(**BERT_SIZES)),
    "deberta-v2": lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**BERT_SIZES)),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_scores_mask_one_token_at_a_time(name):
    model, ids = stir(MASKED[name](), seed=1).eval(), tokens(1, 6)[0].tolist()
    scorer = make_scorer(read_model(model), mask_id=3)
    assert scorer.kind == "masked"
    found = scorer.token_scores(ids)
    for place in range(6):
        masked = torch.tensor([ids])
        masked[0, place] = 3
        logits = model(masked).logits[0, place]
        assert found[place].item() == pytest.approx(F.log_softmax(logits.double(), -1)[ids[place]].item(), abs=1e-5)
    some = Scorer(scorer.host, "masked", 3, special=(ids[0],)).token_scores(ids)
    assert len(some) == 6 - ids.count(ids[0])


@pytest.mark.parametrize("name", ["bart", "t5-full"])
def test_sequence_to_sequence_scores_are_of_the_decoder(name):
    model, ids = family(name), tokens(1, 7)
    scorer = make_scorer(read_model(model))
    assert scorer.kind == "seq2seq"
    loss = model(input_ids=ids, labels=ids).loss if name == "t5-full" else None
    found = scorer.token_scores(ids[0].tolist())
    assert len(found) == 7
    if loss is not None:
        assert -found.mean() == pytest.approx(loss.item(), rel=1e-5)
    moved = scorer.token_scores(ids[0].tolist(), 5)
    assert bool((moved != found).any()) == (name == "bart")


def test_models_without_likelihoods_are_refused():
    with pytest.raises(ValueError, match="BertModel has no language-model head"):
        make_scorer(read_model(host("bert")))
    with pytest.raises(ValueError, match="BertForMaskedLM is a masked model but mask_id=None"):
        make_scorer(read_model(family("bert-mlm")))
    with pytest.raises(ValueError, match=r"the sequence \[7\] has no token to score"):
        make_scorer(read_model(host("gpt2"))).token_scores([7])


def test_ranks_share_ties():
    columns = torch.tensor([[3.0, 1, 5], [1, 1, 5], [2, 0, 5]])
    assert average_ranks(columns).T.tolist() == [[3, 1, 2], [2.5, 2.5, 1], [2, 2, 2]]


def test_a_model_indifferent_to_position_ranks_all_shifts_alike():
    found = perplexity(make_scorer(read_model(noisy(family("gpt2"), "alibi"))), tokens(3, 7).tolist(), (0, 3, 9))
    assert found.mean_rank.tolist() == [2, 2, 2] and found.worst == 0


class Rule(Scorer):
    """Scores sequences by a rule: the sum of their ids at even shifts, its opposite at odd ones."""

    def token_scores(self, ids, shift=0):
        return torch.tensor([float(x) for x in ids], dtype=torch.float64) * (-1 if shift % 2 else 1)


def rule():
    return Rule(read_model(host("gpt2")), "causal")


def test_acceptability_counts_pairs_by_paradigm():
    pairs = [
        MinimalPair((5, 6), (1, 2), "a"),
        MinimalPair((1, 1), (3, 9), "a"),
        MinimalPair((4, 1), (2, 3), "b"),
    ]
    found = acceptability(rule(), pairs, (0, 1))
    assert found.per_paradigm["a"].tolist() == [0.5, 0.5] and found.per_paradigm["b"].tolist() == [0.5, 0.5]
    found = acceptability(rule(), pairs[:1] + pairs[2:], (0, 1))
    assert found.accuracy.tolist() == [0.75, 0.25] and found.delta.tolist() == [0, -0.5] and found.worst == 0.5


def test_few_shot_reads_the_option_alone():
    items = [Choice((9, 9), ((5, 1), (2, 2)), 0), Choice((1,), ((5,), (5,)), 1)]
    assert few_shot(rule(), items, (0, 1)).accuracy.tolist() == [0.75, 0.25]
    reader = read_model(host("gpt2"))
    found = few_shot(make_scorer(reader), [Choice((5, 6, 7), ((8,), (9, 10)), 0)], (0, 4))
    assert found.accuracy.tolist()[0] in (0, 1)


def test_rows_of_blimp_are_encoded():
    rows = [{"sentence_good": "a b", "sentence_bad": "b a", "UID": "island", "field": "syntax"}]
    (pair,) = blimp_pairs(rows, lambda text: [ord(x) for x in text.split()])
    assert pair == MinimalPair((97, 98), (98, 97), "island")
    with pytest.raises(ValueError, match="a row has sentence_good but no 'sentence_bad'"):
        blimp_pairs([{"sentence_good": "a"}], list)


def test_empty_sets_are_refused():
    scorer = make_scorer(read_model(host("gpt2")))
    for call in (
        functools.partial(perplexity, scorer, [], (0,)),
        functools.partial(acceptability, scorer, [], (0,)),
        functools.partial(few_shot, scorer, [], (0,)),
    ):
        with pytest.raises(ValueError, match="got 0 "):
            call()
    with pytest.raises(ValueError, match="got 1 few-shot items; each needs options"):
        few_shot(scorer, [Choice((1,), ((2,),), 4)], (0,))
    with pytest.raises(ValueError, match="this one is 'masked'"):
        few_shot(make_scorer(read_model(family("bert-mlm")), mask_id=3), [Choice((1,), ((2,),), 0)], (0,))


def test_the_whole_protocol_on_a_model_with_a_head():
    pairs = [MinimalPair(tuple(range(5, 12)), tuple(range(12, 5, -1)), "order")]
    reader = read_model(host("gpt2"))
    found = phase_shift(reader, tokens(2, 9), shifts=(4,), scorer=make_scorer(reader), pairs=pairs)
    assert found.how == "position_ids" and found.perplexity.per_text.shape == (2, 2)
    assert found.acceptability.pairs == 1 and found.drift.l2.shape == (2, LAYERS + 1)


# trained at one shift, tested at another


def test_the_matrix_shows_a_model_that_learned_its_shift():
    found = shift_matrix(
        lambda shift, seed: (shift, seed),
        lambda model, shift: (1.0 if model[0] == shift else 0.25) + 0.1 * model[1],
        (0, 50, 100),
        (0, 1, 2),
    )
    assert found.mean.diagonal().tolist() == pytest.approx([1.1] * 3) and found.mean[0, 2] == pytest.approx(0.35)
    assert found.std[1, 1] == pytest.approx(0.1) and found.undefined == 0
    alone = shift_matrix(lambda shift, seed: shift, lambda model, shift: None, (0, 5), (7,))
    assert alone.undefined == 4 and alone.mean.abs().max() == 0 and bool(alone.std.isnan().all())
    with pytest.raises(ValueError, match="got 0 shifts and 3 seeds"):
        shift_matrix(lambda *x: x, lambda *x: 0.0, ())


def test_matthews_is_undefined_for_constant_labels():
    assert matthews([1, 0, 1, 1], [1, 0, 1, 0]) == pytest.approx((2 * 1 - 1 * 0) / math.sqrt(3 * 2 * 2 * 1))
    assert matthews([1, 1], [1, 0]) is None and matthews([1, 0], [1, 1]) is None
    with pytest.raises(ValueError, match="got 1 predictions for 2 labels"):
        matthews([1], [1, 0])


def test_drift_is_the_mean_over_windows_at_every_shift():
    reader, both = read_model(host("bert")), tokens(2, 9)
    whole, one, other = (drift(reader, windows, (0, 4)) for windows in (both, both[:1], both[1:]))
    for name in ("cosine", "l2"):
        mean = (getattr(one, name) + getattr(other, name)) / 2
        assert torch.allclose(getattr(whole, name), mean, atol=1e-12) and not torch.allclose(mean[0], mean[1])


def test_perplexity_is_over_all_tokens_not_over_texts():
    class Costly(Rule):
        def token_scores(self, ids, shift=0):
            return -torch.tensor([float(x) for x in ids], dtype=torch.float64)

    found = perplexity(Costly(read_model(host("gpt2")), "causal"), [(1, 1, 1), (2,)], (0,))
    assert found.mean.tolist() == pytest.approx([math.exp(5 / 4)])
    assert found.per_text.tolist()[0] == pytest.approx([math.e, math.exp(2)])


def test_few_shot_sums_the_tokens_of_the_option_and_nothing_of_the_prompt():
    items = [Choice((1, 9, 9), ((5, 1), (4,)), 0), Choice((7,), ((2, 2, 2), (5,)), 0)]
    assert few_shot(rule(), items, (0,)).accuracy.tolist() == [1.0]


def test_rows_of_the_matrix_are_trained_and_columns_tested():
    found = shift_matrix(lambda k, seed: k, lambda model, k: float(model > k), (0, 5), (0,))
    assert found.mean.tolist() == [[0.0, 0.0], [1.0, 0.0]]
