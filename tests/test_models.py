"""The plain Transformer: padding, packing, caching and checkpointing change nothing that they should not."""

from __future__ import annotations

import pytest
import torch

import locant
from locant.models import Cache, ModelConfig, Transformer
from tests.names import DECODERS, ENCODERS
from tests.unchecked import unchecked


def build(name: str, *, causal: bool = False, **changes: object) -> Transformer:
    torch.manual_seed(3)
    options = {"version": "v2"} if name == "deberta" else {}
    config = ModelConfig(
        vocab_size=29,
        model_dim=24,
        num_layers=2,
        num_heads=3,
        max_length=32,
        causal=causal,
        dropout=0.0,
        encoding=name,
        options=options,
        **changes,  # pyright: ignore[reportArgumentType]
    )
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_on_either_side_changes_no_real_token(name: str) -> None:
    model = build(name)
    short, long = torch.randint(29, (1, 4)), torch.randint(29, (1, 7))
    alone = model(short)
    for side in ("left", "right"):
        pad = torch.zeros(1, 3, dtype=torch.long)
        row = torch.cat((pad, short) if side == "left" else (short, pad), 1)
        real = slice(3, 7) if side == "left" else slice(0, 4)
        mask = torch.zeros(2, 7, dtype=torch.bool)
        mask[0, real] = True
        mask[1] = True
        out = model(torch.cat((row, long)), mask=mask)
        torch.testing.assert_close(out[:1, real], alone, atol=1e-10, rtol=0)
        torch.testing.assert_close(out[1:], model(long), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ENCODERS)
def test_packed_documents_equal_their_own_runs(name: str) -> None:
    model = build(name)
    first, second = torch.randint(29, (1, 5)), torch.randint(29, (1, 3))
    out = model(torch.cat((first, second), 1), documents=torch.tensor([[0] * 5 + [1] * 3]))
    torch.testing.assert_close(out[:, :5], model(first), atol=1e-10, rtol=0)
    torch.testing.assert_close(out[:, 5:], model(second), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_decoding_in_chunks_equals_the_full_pass(name: str, chunk: int) -> None:
    model = build(name, causal=True)
    ids = torch.randint(29, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False  # rows of unequal length, padded on the left
    for given in (None, mask):
        full, cache = model(ids, mask=given), Cache()
        steps = [
            model(ids[:, s : s + chunk], mask=None if given is None else given[:, s : s + chunk], cache=cache)
            for s in range(0, 9, chunk)
        ]
        joined = torch.cat(steps, 1)
        keep = mask if given is not None else torch.ones_like(mask)
        torch.testing.assert_close(joined[keep], full[keep], atol=1e-10, rtol=0)


def test_explicit_ids_are_stored_with_the_cache() -> None:
    model = build("shaw", causal=True)
    ids, places = torch.randint(29, (2, 6)), torch.tensor([[0, 2, 3, 7, 8, 20], [1, 2, 3, 4, 5, 6]])
    cache = Cache()
    steps = [model(ids[:, s : s + 2], position_ids=places[:, s : s + 2], cache=cache) for s in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids, position_ids=places), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["t5", "tupe_r", "huang_m3", "absolute+shaw"])
def test_gradient_checkpointing_gives_equal_gradients(name: str) -> None:
    ids = torch.randint(29, (2, 7))
    gradients = []
    for switch in (False, True):
        model = build(name, gradient_checkpointing=switch).train()
        model(ids).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, replayed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, replayed, atol=1e-10, rtol=0)


def test_layers_may_have_different_encodings() -> None:
    model = build("shaw")
    config = ModelConfig(
        vocab_size=29, model_dim=24, num_heads=3, num_layers=3, encoding=("alibi", "absolute+shaw", "rope")
    )
    mixed = Transformer(config)
    assert [layer.name for layer in mixed.encoding] == ["alibi", "absolute+shaw", "rope"]
    assert mixed(torch.randint(29, (2, 5))).shape == (2, 5, 24)
    assert [layer.name for layer in model.encoding] == ["shaw", "shaw"]


def test_bad_input_is_refused_with_its_values() -> None:
    model, ids = build("shaw"), torch.randint(29, (2, 5))
    with pytest.raises(ValueError, match=r"position_ids has shape \(2, 4\) but ids have \(2, 5\)"):
        model(ids, position_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(TypeError, match=r"mask has dtype torch\.float32"):
        model(ids, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="causal=False"):
        model(ids, cache=Cache())
    with pytest.raises(ValueError, match="documents come with their own ids"):
        model(ids, documents=torch.zeros_like(ids), position_ids=torch.arange(5).expand(2, 5))
    for heads in (5, 0):
        with pytest.raises(ValueError, match=f"num_heads={heads} does not divide model_dim=24"):
            Transformer(ModelConfig(vocab_size=29, model_dim=24, num_heads=heads))
    with pytest.raises(ValueError, match=r"ids have shape \(5,\); give \[batch, tokens\]"):
        unchecked(Transformer.forward)(model, ids[0])
    with pytest.raises(ValueError, match="positions reach 33 but the table has 32 rows"):
        build("absolute")(torch.randint(29, (1, 33)))
    decoder, cache = build("shaw", causal=True), Cache()
    decoder(ids, cache=cache)
    with pytest.raises(ValueError, match="5 cached tokens disagree"):
        decoder(ids, position_ids=torch.arange(5, 10).expand(2, 5), cache=cache)
    with pytest.raises(ValueError, match="serves 3 layers but num_layers=2"):
        Transformer(ModelConfig(vocab_size=29, model_dim=24, num_heads=3, num_layers=2), locant.stack("none", 3))
