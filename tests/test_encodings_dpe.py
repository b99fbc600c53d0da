"""DPE: it starts as the sinusoid, learns the target's order beside the translation, and serves encoders alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers as T

import locant
from locant import Positions, hf
from locant.encodings.dpe import Dpe
from tests.hf_models import attached, first, host, noisy, tokens
from tests.unchecked import build

NAN = math.nan


def dpe(**options: Any) -> Dpe:
    torch.manual_seed(5)
    return Dpe(model_dim=12, num_heads=3, head_dim=4, **options)


def test_it_starts_as_the_sinusoid():
    x = torch.randn(2, 7, 12)
    plain = locant.load("sinusoidal", model_dim=12)
    for positions in (Positions.arange(7), Positions.from_ids(torch.tensor([0, 3, 4, 9, 10, 11, 40]))):
        torch.testing.assert_close(dpe().embed(x, positions), plain.embed(x, positions), atol=1e-6, rtol=0)


def test_words_in_their_own_order_have_no_loss_at_the_start():
    encoding = dpe().train()
    encoding.embed(torch.randn(2, 5, 12), Positions.arange(5))
    ordered = torch.arange(5.0).expand(2, -1)
    assert encoding.auxiliary_loss(encoding.aux, ordered).item() < 1e-10
    assert encoding.auxiliary_loss(encoding.aux, ordered.flip(-1)).item() > 0.1


@pytest.mark.parametrize("loss", ["mse", "l1", "cosine"])
def test_the_order_loss_is_its_equation(loss):
    encoding = dpe(loss=loss)
    aux = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[2.0, NAN, 0.5, 0.0], [NAN, NAN, 7.25, NAN]])
    total, count = 0.0, 0
    for b in range(2):
        for t in range(4):
            if math.isnan(place := targets[b, t].item()):
                continue
            want = [math.sin(place * 10000 ** (-(c - c % 2) / 12) + (c % 2) * math.pi / 2) for c in range(12)]
            have = aux[b, t].tolist()
            if loss == "mse":
                total += sum((x - y) ** 2 for x, y in zip(have, want, strict=True)) / 12
            elif loss == "l1":
                total += sum(abs(x - y) for x, y in zip(have, want, strict=True)) / 12
            else:
                dot = sum(x * y for x, y in zip(have, want, strict=True))
                total += 1 - dot / math.sqrt(sum(x * x for x in have) * sum(y * y for y in want))
            count += 1
    assert encoding.auxiliary_loss(aux, targets).item() == pytest.approx(total / count, rel=1e-5)


def test_words_without_a_partner_take_the_nearest_ones_place_where_asked():
    aux = torch.randn(1, 6, 12)
    targets = torch.tensor([[NAN, 4.0, NAN, NAN, NAN, 1.0]])
    filled = torch.tensor([[4.0, 4.0, 4.0, 4.0, 1.0, 1.0]])  # of two as near, the one before
    have = dpe(unaligned="neighbour").auxiliary_loss(aux, targets)
    assert have.item() == pytest.approx(dpe().auxiliary_loss(aux, filled).item(), rel=1e-6)
    assert have.item() != pytest.approx(dpe().auxiliary_loss(aux, targets).item(), rel=1e-3)


@pytest.mark.parametrize("unaligned", ["mask", "neighbour"])
def test_a_sentence_without_any_partner_has_no_loss_and_finite_gradients(unaligned):
    aux = torch.randn(2, 3, 12, requires_grad=True)
    loss = dpe(unaligned=unaligned).auxiliary_loss(aux, torch.full((2, 3), NAN))
    loss.backward()
    assert loss.item() == 0 and aux.grad is not None and bool((aux.grad == 0).all())


def test_the_loss_teaches_another_order():
    encoding, x = dpe().train(), torch.randn(4, 6, 12)
    optimizer = torch.optim.Adam(encoding.parameters(), lr=1e-2)
    reverse = torch.arange(5.0, -1, -1).expand(4, -1)
    losses = []
    for _ in range(60):
        encoding.embed(x, Positions.arange(6))
        losses.append(encoding.auxiliary_loss(encoding.aux, reverse))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 5


def test_nothing_is_left_for_the_loss_in_evaluation():
    encoding = dpe().train()
    encoding.embed(torch.randn(1, 3, 12), Positions.arange(3))
    assert encoding.aux is not None
    encoding.eval().embed(torch.randn(1, 3, 12), Positions.arange(3))
    assert encoding.aux is None


def test_a_model_in_training_is_copied_without_what_a_forward_left():
    encoding = dpe().train()
    encoding.embed(torch.randn(1, 3, 12), Positions.arange(3))
    assert encoding.aux is not None and encoding.aux.requires_grad
    again = copy.deepcopy(encoding)
    assert again.aux is None and encoding.aux is not None and again.training
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), encoding.parameters(), strict=True))


@torch.no_grad()
def test_a_row_of_padding_alone_stays_finite():
    encoding = dpe()
    torch.nn.init.normal_(encoding.correct.weight)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert encoding.embed(torch.randn(2, 3, 12), Positions.from_mask(mask)).isfinite().all()


def test_decoders_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"dpe: reads all tokens .* causal=True; use it in an encoder"):
        hf.attach(host("gpt2"), "dpe")
    with pytest.raises(ValueError, match="causal=True"):
        hf.attach(host("gpt2"), "dpe+shaw")
    with pytest.raises(ValueError, match="causal=True"):
        locant.load("dpe", model_dim=12, num_heads=3, head_dim=4, causal=True)


@torch.no_grad()
def test_an_encoder_decoder_gets_it_on_the_source_side():
    torch.manual_seed(1)
    config = T.MarianConfig(
        vocab_size=101, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T.MarianMTModel(config).eval()
    hf.attach(model.model.encoder, "dpe")
    hf.attach(model.model.decoder, "sinusoidal")
    for parameter in model.model.encoder.locant.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    short, long = tokens(1, 4, seed=1), tokens(1, 7, seed=2)
    said = tokens(1, 5, seed=3)
    batch = torch.cat((torch.nn.functional.pad(short, (0, 3)), long))
    mask = torch.tensor([[1] * 4 + [0] * 3, [1] * 7])
    out = model(batch, attention_mask=mask, decoder_input_ids=said.expand(2, -1)).logits
    torch.testing.assert_close(out[:1], model(short, decoder_input_ids=said).logits, atol=2e-6, rtol=0)
    written = model.generate(long, max_new_tokens=6, num_beams=2, do_sample=False)
    slow = model.generate(long, max_new_tokens=6, num_beams=2, do_sample=False, use_cache=False)
    assert torch.equal(written, slow)


@torch.no_grad()
def test_it_is_saved_and_loaded(tmp_path):
    model, ids = noisy(host("bert"), "dpe"), tokens(2, 6)
    want = first(model(ids))
    hf.save(model, tmp_path / "saved")
    again = hf.load(host("bert"), tmp_path / "saved").eval()
    torch.testing.assert_close(first(again(ids)), want)
    assert len(list(attached(again).parameters())) == len(list(attached(model).parameters()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": 0}, "layers=0 leaves no network"),
        ({"lam": 0.0}, "lam=0.0 is no share"),
        ({"lam": 1.5}, "lam=1.5 is no share"),
        ({"loss": "huber"}, "unknown loss='huber'"),
        ({"unaligned": "zero"}, "unknown unaligned='zero'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"dpe: {message}"):
        build("dpe", **{"model_dim": 12, "num_heads": 3, "head_dim": 4, **options})


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"dpe: targets have shape \(2, 5\) but .* \(2, 4\)"):
        dpe().auxiliary_loss(torch.zeros(2, 4, 12), torch.zeros(2, 5))
