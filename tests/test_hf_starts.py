"""locant.hf.attach(init=...): paper, neutral and fitted starts, what a fit explains, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

import locant
import locant.hf
from locant.hf import starts
from tests.hf_models import BERT_SIZES, HEADS, ROWS, T5_SIZES, WIDTH, attached, first, host, stir, tokens
from tests.names import DECODER_ONLY, home

SIZES: dict[str, Any] = dict(num_heads=HEADS, head_dim=8, model_dim=WIDTH, max_length=ROWS)
NEUTRAL = [
    name
    for name in locant.names()
    if locant.load(name, **SIZES, causal=name in DECODER_ONLY).properties.neutral is not None
]
OTHERS = [name for name in locant.names() if name not in NEUTRAL]
FITTED = [
    "bert_ad",
    "deberta",
    "huang_m1",
    "huang_m2",
    "huang_m3",
    "huang_m4",
    "shaw",
    "t5",
    "tisa",
    "tupe_a",
    "tupe_r",
    "xlnet",
]


def flat_host(**sizes: Any) -> Any:
    """A BERT whose word vectors are all alike: its hidden states, and so its logits, follow from positions only."""
    torch.manual_seed(0)
    model = stir(T.BertModel(T.BertConfig(**{**BERT_SIZES, **sizes})), 1).eval()
    with torch.no_grad():
        words = model.embeddings.word_embeddings.weight
        words.copy_(words[5].expand_as(words))
    return model


def wavy_host() -> Any:
    """A BERT whose table is a sinusoid, so that much of what it does follows from offsets."""
    model = host("bert")
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.copy_(
            2 * locant.load("sinusoidal", model_dim=WIDTH).waves(torch.arange(ROWS))
        )
    return model


# --- neutral ---


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_start_beside_the_host_changes_nothing(name: str) -> None:
    model, ids = host(home(name)), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    want = first(model(ids, attention_mask=mask))
    locant.hf.attach(model, name, init="neutral", keep_absolute=True)
    got = first(model(ids, attention_mask=mask))
    assert (got - want)[mask.bool()].abs().max() < 1e-6 * want.abs().max().clamp(min=1)
    quiet = [n for n, p in attached(model).named_parameters() if p.grad is not None]
    assert not quiet, f"a start leaves no gradients behind: {quiet}"


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama", "t5"])
def test_a_neutral_start_beside_any_host_changes_nothing(family: str) -> None:
    model, ids = host(family), tokens(2, 9)
    want = first(model(ids))
    locant.hf.attach(model, "tupe_r", init="neutral", keep_absolute=True)
    assert (first(model(ids)) - want).abs().max() < 1e-6 * want.abs().max().clamp(min=1)


def test_a_neutral_start_instead_of_the_table_is_the_host_without_it() -> None:
    model, ids = host("bert"), tokens(2, 9)
    want = first(locant.hf.attach(copy.deepcopy(model), "none")(ids))
    locant.hf.attach(model, "huang_m4", init="neutral")
    assert torch.allclose(first(model(ids)), want, atol=1e-6)


def test_neutral_starts_learn() -> None:
    model = host("bert")
    locant.hf.attach(model, "huang_m4", init="neutral", keep_absolute=True)
    first(model(tokens(2, 9))).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in attached(model).parameters())


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_neutral_value_is_refused_and_nothing_is_touched(name: str) -> None:
    model = host(home(name))
    before = [n for n, _ in model.named_modules()]
    with pytest.raises(ValueError, match=rf"attach: {name} has no parameter value at which it changes nothing"):
        locant.hf.attach(model, name, init="neutral")
    assert [n for n, _ in model.named_modules()] == before


@pytest.mark.parametrize("name", ["tupe_a", "deberta", "bert_ad"])
def test_the_scale_of_the_host_is_kept_only_where_asked_for(name: str, tmp_path: Any) -> None:
    ids = tokens(2, 9)
    starting = host("bert")
    locant.hf.attach(starting, name, init="neutral", keep_absolute=True)
    want = first(starting(ids))
    scaled = locant.hf.attach(host("bert"), name, init="neutral", keep_absolute=True, keep_scale=False)
    assert not torch.allclose(first(scaled(ids)), want, atol=1e-3)
    kept = locant.hf.attach(host("bert"), name, keep_scale=True, keep_absolute=True)
    for layer in dict.fromkeys(attached(kept).layers()):
        layer.neutralize()
    assert torch.allclose(first(kept(ids)), want, atol=1e-6)
    locant.hf.save(starting, tmp_path / "position")
    assert torch.equal(first(locant.hf.load(host("bert"), tmp_path / "position")(ids)), want)


# --- fit ---


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_explains_more_than_the_neutral_start(name: str) -> None:
    torch.manual_seed(0)
    model = locant.hf.attach(wavy_host(), name, init="fit")
    report = locant.hf.fit_report(model)
    assert [fit.layer for fit in report.layers] == [0, 1] and report.held_out == 6 and report.sequences == 18
    assert all(fit.explained is not None and fit.lost is not None and fit.lost > 0.1 for fit in report.layers)
    assert max(fit.explained or 0 for fit in report.layers) > 0.05
    assert all(p.requires_grad and p.grad is None for p in attached(model).parameters())
    assert report.inputs == "words drawn from the vocabulary" and f"{report.layers[0].explained:.3f}" in str(report)


def test_what_can_express_the_table_explains_nearly_all_of_it() -> None:
    # words are alike, so the logits of the host are a matrix of positions, which tupe_a with its own table can be
    torch.manual_seed(0)
    model = flat_host(num_hidden_layers=1)
    locant.hf.attach(model, "tupe_a", init="fit", untie_cls=False)
    (fit,) = locant.hf.fit_report(model).layers
    assert fit.explained is not None and fit.explained > 0.97


def test_a_relative_host_is_found_again() -> None:
    # the host's logits come from a bias by offset; fitted to it, a bias by offset must give its outputs
    torch.manual_seed(0)
    model = stir(T.T5EncoderModel(T.T5Config(**T5_SIZES)), 1).eval()
    ids = tokens(3, 21)
    want = first(model(ids))
    blind = first(locant.hf.attach(copy.deepcopy(model), "none")(ids))
    locant.hf.attach(model, "t5", init="fit", num_buckets=32, max_distance=128)
    report = locant.hf.fit_report(model)
    assert all(fit.explained is not None and fit.explained > 0.99 for fit in report.layers)
    assert (first(model(ids)) - want).abs().max() < 0.05 * (blind - want).abs().max()


def test_rotary_hosts_are_fitted_too() -> None:
    torch.manual_seed(0)
    model = host("llama")
    locant.hf.attach(model, "huang_m3", init="fit", share_heads=False)  # a gate can be the cosines of a rotation
    assert (locant.hf.fit_report(model).layers[0].explained or 0) > 0.2


def test_explained_is_what_the_docs_say() -> None:
    torch.manual_seed(0)
    model, ids = host("bert"), tokens(8, 11)
    blind = locant.hf.attach(copy.deepcopy(model), "none")
    inputs = starts.given_inputs(ids)
    plain = locant.hf.attach(copy.deepcopy(model), "none", keep_absolute=True)
    (host_calls,), (blind_calls,) = starts.record(plain, inputs), starts.record(blind, inputs)
    locant.hf.attach(model, "tisa", init="fit", fit_inputs=ids)
    (calls,), rows = starts.record(model, inputs), [3, 7]
    for fit, want, without, now in zip(locant.hf.fit_report(model).layers, host_calls, blind_calls, calls, strict=True):

        def logits(call: Any, rows: list[int] = rows) -> torch.Tensor:
            plain = call.q[rows] @ call.k[rows].transpose(-1, -2) * 8**-0.5
            return plain - plain.mean(-1, keepdim=True)

        offset = torch.arange(11)[None] - torch.arange(11)[:, None]
        layer = attached(model).layers()[fit.layer]
        bias = layer.scores(torch.arange(-10, 11)).detach()[:, offset + 10]
        left = logits(now).detach() + (bias - bias.mean(-1, keepdim=True)) - logits(want)
        lost = logits(without) - logits(want)
        assert fit.explained == pytest.approx(1 - float(left.square().sum() / lost.square().sum()), abs=1e-4)
        assert fit.lost == pytest.approx(float(lost.square().mean().sqrt()), rel=1e-4)


def test_padding_and_causal_masks_are_left_out_of_a_fit() -> None:
    ids, mask = tokens(8, 11), torch.ones(8, 11, dtype=torch.long)
    mask[::2, 7:] = 0
    results = []
    for junk in (0, 5):
        torch.manual_seed(0)
        given = ids.masked_fill(mask == 0, junk)
        model = locant.hf.attach(
            host("bert"), "t5", init="fit", fit_inputs={"input_ids": given, "attention_mask": mask}
        )
        results.append(attached(model).layers()[0].table.detach())
    assert torch.allclose(*results, atol=1e-4)
    torch.manual_seed(0)
    model = locant.hf.attach(host("gpt2"), "shaw", init="fit")
    table = attached(model).layers()[0].table
    assert table[:, : ROWS - 1].any() and not table[:, ROWS:].any(), "what a causal model never sees stays neutral"


def test_given_batches_and_ids_say_the_same() -> None:
    ids = tokens(24, 11)
    tables, explained = [], []
    for given in (ids, {"input_ids": ids}, [ids[:12], ids[12:]]):
        torch.manual_seed(0)
        model = locant.hf.attach(host("bert"), "shaw", init="fit", fit_inputs=given)
        tables.append(attached(model).layers()[0].table.detach())
        assert locant.hf.fit_report(model).inputs == "the given inputs"
        explained.append(locant.hf.fit_report(model).layers[0].explained)
    assert torch.equal(tables[0], tables[1]) and explained[0] == pytest.approx(explained[2], abs=0.02)
    assert not tables[0][:, : ROWS - 1 - 10].any(), "offsets that no input has stay neutral"


def test_both_stacks_of_t5_are_fitted() -> None:
    torch.manual_seed(0)
    model = stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval()
    locant.hf.attach(model, "t5", init="fit")
    report = locant.hf.fit_report(model)
    assert [(fit.path, fit.layer) for fit in report.layers] == [(p, i) for p in ("encoder", "decoder") for i in (0, 1)]


def test_a_fit_leaves_modes_config_and_host_alone() -> None:
    torch.manual_seed(0)
    model = host("bert").train()
    modes = [m.training for m in model.modules()]
    before, ids = {k: v.clone() for k, v in model.state_dict().items()}, tokens(2, 8)
    want = first(model.eval()(ids))
    model.train()
    locant.hf.attach(model, "huang_m4", init="fit")
    assert all(p.grad is None for p in model.parameters())
    locant.hf.detach(model)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(first(model.eval()(ids)), want)


def test_frozen_hosts_are_fitted_and_stay_frozen() -> None:
    torch.manual_seed(0)
    model = host("bert").requires_grad_(False)
    locant.hf.attach(model, "huang_m4", init="fit")
    assert not any(p.requires_grad for n, p in model.named_parameters() if ".locant." not in f".{n}")
    assert (locant.hf.fit_report(model).layers[0].explained or 0) > 0.02


def test_starts_refuse_with_the_reason() -> None:
    model = host("bert")
    with pytest.raises(ValueError, match=r"unknown init='zero'; choose 'paper', 'neutral', 'fit'"):
        locant.hf.attach(model, "shaw", init="zero")
    with pytest.raises(ValueError, match=r"init='fit' with keep_absolute=True has nothing to fit"):
        locant.hf.attach(model, "shaw", init="fit", keep_absolute=True)
    for name in ("rope", "none", "alibi"):
        with pytest.raises(ValueError, match=f"attach: {name} has no parameters that init='fit' could fit"):
            locant.hf.attach(model, name, init="fit")
    for name in ("absolute", "bert_r"):
        with pytest.raises(ValueError, match="attach: absolute acts on the input, not on a layer's logits"):
            locant.hf.attach(model, name, init="fit")
    with pytest.raises(ValueError, match=r"fit_inputs were given but init='paper' fits nothing"):
        locant.hf.attach(model, "shaw", fit_inputs=tokens(2, 5))
    with pytest.raises(TypeError, match=r"fit_inputs holds a str; give token ids"):
        locant.hf.attach(model, "shaw", init="fit", fit_inputs=["text"])
    with pytest.raises(ValueError, match=r"fit_report: nothing was fitted in BertModel"):
        locant.hf.fit_report(locant.hf.attach(model, "shaw"))


def test_a_bare_encoder_needs_inputs() -> None:
    from transformers.models.bert.modeling_bert import BertEncoder

    encoder: nn.Module = BertEncoder(T.BertConfig(**BERT_SIZES)).eval()
    with pytest.raises(ValueError, match=r"BertEncoder embeds no words, so init='fit' needs inputs"):
        locant.hf.attach(encoder, "shaw", init="fit")


def test_a_fit_that_fails_leaves_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = host("bert"), tokens(2, 8)
    want = first(model(ids))

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(starts, "_solve", fail)
    with pytest.raises(RuntimeError, match="no"):
        locant.hf.attach(model, "shaw", init="fit")
    assert torch.equal(first(model(ids)), want) and not locant.hf.attachments(model)


def test_a_report_of_too_few_sequences_says_so() -> None:
    model = locant.hf.attach(host("bert"), "t5", init="fit", fit_inputs=tokens(3, 7))
    report = locant.hf.fit_report(model)
    assert "3 sequences, too few to hold one out, so nothing was measured; give 4 or more" in str(report)
    assert all(fit.explained is None and fit.lost is None for fit in report.layers)


def test_inputs_that_a_model_does_not_run_on_are_named() -> None:
    model = T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES))
    with pytest.raises(
        ValueError, match=r"T5ForCond.* does not run on input_ids of fit_inputs .*decoder_input_ids, too"
    ):
        locant.hf.attach(model, "t5", init="fit", fit_inputs=tokens(4, 7))
    assert not locant.hf.attachments(model)
    ids = tokens(4, 7)
    locant.hf.attach(model, "t5", init="fit", fit_inputs={"input_ids": ids, "decoder_input_ids": ids})
