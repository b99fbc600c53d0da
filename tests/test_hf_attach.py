"""locant.hf.attach and detach: every family, every encoding, and that the host is itself again afterwards."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file
from torch import nn
from transformers.models.bert.modeling_bert import BertEncoder

import locant
import locant.hf
from locant.encoding import Encoding, Properties
from locant.hf import interface
from locant.hf.attachment import attachments
from locant.hf.families import FAMILIES, find_sites
from tests.hf_models import (
    BERT_SIZES,
    HEADS,
    HOSTS,
    LAYERS,
    LLAMA_SIZES,
    ROWS,
    T5_SIZES,
    WIDTH,
    attached,
    first,
    host,
    noisy,
    stir,
    tokens,
)
from tests.names import ENCODERS

VOCABULARY_SMALL = 11


def snapshot(model: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    return [n for n, _ in model.named_modules()], {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("family", HOSTS)
def test_layer_zero_is_attention_with_the_terms_of_the_encoding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = noisy(host(family), "huang_m4", clip=3), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    module: Any = find_sites(model)[0].attention[0][1]
    seen: dict[str, Any] = {}
    module.register_forward_pre_hook(
        lambda m, a, kw: seen.update(x=a[0] if a else kw["hidden_states"]) if not seen else None, with_kwargs=True
    )
    outs: list[torch.Tensor] = []
    inner = interface.attention_forward

    def record(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        outs.append(result[0])
        return result

    monkeypatch.setitem(T.AttentionInterface._global_mapping, "locant", record)
    model(ids, attention_mask=mask)
    attachment = attached(model)
    heads, width = attachment.spec.sizes["num_heads"], attachment.spec.sizes["head_dim"]
    q, k, v = _written_out_qkv(module, seen["x"], heads, width)
    table, causal = attachment.layers()[0].table.double(), attachment.spec.sizes["causal"]
    logits = torch.zeros(2, heads, 7, 7, dtype=torch.float64)
    for b in range(2):
        for i in range(7):
            for j in range(7):
                a = table[0, max(-3, min(3, j - i)) + 3]
                logits[b, :, i, j] = (
                    (q[b, :, i] * k[b, :, j]).sum(-1) + q[b, :, i] @ a + k[b, :, j] @ a
                ) * module.scaling
                if (causal and j > i) or not mask[b, j]:
                    logits[b, :, i, j] = -1e30
    want = (logits.softmax(-1) @ v).transpose(1, 2)
    got = outs[0].double()
    real = mask.bool()
    assert (got - want)[real].abs().max() < 1e-5


@pytest.mark.parametrize("name", ENCODERS)
def test_attention_of_layer_zero_is_that_of_the_core(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = noisy(host("bert"), name), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    seen: list[Any] = []
    inner = interface.attention_forward

    def record(module: Any, *qkv: Any, **rest: Any) -> Any:
        out = inner(module, *qkv, **rest)
        seen.append((module, qkv[:3], out[0]))
        return out

    monkeypatch.setitem(T.AttentionInterface._global_mapping, "locant", record)
    model(ids, attention_mask=mask.long())
    module, (q, k, v), got = seen[0]
    encoding, positions = attached(model).layers()[0], locant.Positions.from_mask(mask)
    q, k = encoding.query_key(q, k, encoding.prepare(positions))
    terms = encoding.terms(positions, locant.Layer(q, k, None, module.query, module.key))
    logits = ((q * 8**-0.5 * encoding.logit_factor) @ k.transpose(-1, -2)).double()
    if terms or encoding.logit_factor != 1:
        want = locant.attention(
            q, k, v, terms, positions, mask=mask[:, None, None], logit_factor=encoding.logit_factor, backend="reference"
        )
    else:
        want = logits.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1).float() @ v
    assert torch.allclose(got[mask], want.transpose(1, 2)[mask], atol=1e-5)


LINEARS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"))


def _written_out_qkv(module: Any, x: torch.Tensor, heads: int, width: int) -> list[torch.Tensor]:
    x = x.detach().double()
    if hasattr(module, "c_attn"):
        fused = x @ module.c_attn.weight.double() + module.c_attn.bias.double()
        parts = list(fused.chunk(3, -1))
    else:
        parts = []
        for name in next(names for names in LINEARS if hasattr(module, names[0])):
            linear = getattr(module, name)
            parts.append(x @ linear.weight.double().T + (0 if linear.bias is None else linear.bias.double()))
    split = [p.unflatten(-1, (-1, width)).transpose(1, 2) for p in parts]
    return [p.repeat_interleave(heads // p.shape[1], 1) for p in split]


@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoding_in_bert(name: str) -> None:
    model, ids = T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)), tokens(2, 9)
    stir(model, 1)
    noisy(model, name)
    assert "bert.embeddings.position_embeddings.weight" not in model.state_dict()
    loss = model(ids, labels=ids).loss
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without, f"DDP would stop at {without}"
    grads = {n: p.grad for n, p in model.named_parameters() if ".locant." in n and p.grad is not None}
    quiet = [n for n, g in grads.items() if not g.abs().max()]
    assert not quiet, quiet
    swapped = ids[:, [1, 0, *range(2, 9)]]
    moved = first(model(swapped))[:, [1, 0, *range(2, 9)]]
    same = torch.allclose(moved, first(model(ids)), atol=1e-5)
    assert same == (name == "none"), "only an encoder without positions is permutation-equivariant"


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("name", ["none", "shaw", "bert_r", "tupe_r"])
def test_detach_restores_the_host_bit_for_bit(family: str, name: str) -> None:
    model, ids = host(family), tokens(2, 8)
    before, want, kernel = snapshot(model), first(model(ids)), model.config._attn_implementation
    noisy(model, name)
    first(model(ids))
    locant.hf.detach(model)
    after = snapshot(model)
    assert after[0] == before[0]
    assert all(torch.equal(after[1][k], v) for k, v in before[1].items()) and after[1].keys() == before[1].keys()
    assert model.config._attn_implementation == kernel
    assert torch.equal(first(model(ids)), want)
    assert not any(m._forward_pre_hooks or hasattr(m, "locant_index") for m in model.modules())
    ours = [h for m in model.modules() for h in m._forward_hooks.values() if h.__module__.startswith("locant")]
    assert not ours


@pytest.mark.parametrize("family", HOSTS)
def test_kept_host_with_nothing_attached_is_the_host_bit_for_bit(family: str) -> None:
    model, ids = host(family), tokens(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    want = [first(model(ids)), first(model(ids, attention_mask=mask))]
    locant.hf.attach(model, "none", keep_absolute=True)
    assert torch.equal(first(model(ids)), want[0])
    assert torch.equal(first(model(ids, attention_mask=mask)), want[1])


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("name", ["huang_m4", "huang_m3", "t5"])
def test_kept_host_with_a_neutral_encoding_is_the_host(family: str, name: str) -> None:
    model, ids = host(family), tokens(2, 8)
    want = first(model(ids))
    locant.hf.attach(model, name, keep_absolute=True)
    for layer in dict.fromkeys(attached(model).layers()):
        layer.neutralize()
    scale = want.abs().max().clamp(min=1)
    assert (first(model(ids)) - want).abs().max() / scale < 1e-6


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_kernel_of_the_host_comes_back(kernel: str) -> None:
    model, ids = host("bert", attn_implementation=kernel), tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    want = first(model(ids, attention_mask=mask))
    locant.hf.attach(model, "none", keep_absolute=True)
    assert torch.allclose(first(model(ids, attention_mask=mask)), want, atol=2e-6)
    locant.hf.detach(model)
    assert model.config._attn_implementation == kernel
    assert torch.equal(first(model(ids, attention_mask=mask)), want)


def test_a_kept_table_of_roberta_follows_its_own_rule_beside_an_input_encoding() -> None:
    model, ids = host("roberta"), tokens(2, 7)
    ids[0, 5:] = ids[1, 2] = 1  # pad_token_id, also within the text: the host skips it
    rows = model.embeddings.create_position_ids_from_input_ids(ids, 1)
    encoding = locant.load("sinusoidal", model_dim=WIDTH)
    x = encoding.embed(model.embeddings.word_embeddings(ids), locant.Positions.arange(7))
    want = first(model(inputs_embeds=x, position_ids=rows))
    locant.hf.attach(model, "sinusoidal", keep_absolute=True)
    assert torch.allclose(first(model(ids)), want, atol=1e-5)


def test_absolute_with_the_weights_of_the_host_is_the_host() -> None:
    for family in ("bert", "electra", "distilbert", "gpt2"):
        model, ids = host(family), tokens(2, 8)
        want = first(model(ids))
        table = next(p for n, p in model.named_parameters() if "position_embeddings" in n or "wpe" in n).clone()
        locant.hf.attach(model, "absolute")
        with torch.no_grad():
            attached(model).layers()[0].table.copy_(table)
        assert torch.allclose(first(model(ids)), want, atol=2e-5), family


def test_rope_in_llama_is_the_rotary_of_the_host() -> None:
    model, ids = host("llama"), tokens(2, 8)
    want = first(model(ids))
    locant.hf.attach(model, "rope")
    assert torch.allclose(first(model(ids)), want, atol=1e-5)
    locant.hf.detach(model)
    locant.hf.attach(model, "none")
    assert not torch.allclose(first(model(ids)), want, atol=1e-2), "the rotary of the host was not switched off"


def test_t5_bias_in_t5_is_the_bias_of_the_host() -> None:
    model, ids = host("t5"), tokens(2, 8)
    want = first(model(ids))
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.clone()
    locant.hf.attach(model, "t5", num_buckets=32, max_distance=128)
    assert not any("relative_attention_bias" in n for n, _ in model.named_parameters())
    with torch.no_grad():
        attached(model).layers()[0].table.copy_(table.T)
    assert torch.allclose(first(model(ids)), want, atol=1e-5)


def test_both_stacks_of_t5_are_served_and_cross_attention_is_not() -> None:
    torch.manual_seed(0)
    model = stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval()
    ids, more = tokens(2, 9), tokens(2, 5, seed=2)
    want = first(model(ids, decoder_input_ids=more))
    tables = [
        s.block[0].layer[0].SelfAttention.relative_attention_bias.weight.clone() for s in (model.encoder, model.decoder)
    ]
    locant.hf.attach(model, "t5")
    assert [path for path, _, _ in attachments(model)] == ["encoder", "decoder"]
    for table, (_, _, attachment) in zip(tables, attachments(model), strict=True):
        with torch.no_grad():
            attachment.layers()[0].table.copy_(table.T)
    assert torch.allclose(first(model(ids, decoder_input_ids=more)), want, atol=2e-5)
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    locant.hf.detach(model)
    assert torch.equal(out, model.generate(ids, max_new_tokens=4, do_sample=False))
    with pytest.raises(ValueError, match="has 2 stacks of layers"):
        locant.hf.attach(model, locant.load("alibi", num_heads=HEADS))


def test_cross_attention_of_bert_stays_as_it_is() -> None:
    model = host("bert", is_decoder=True, add_cross_attention=True)
    ids, other = tokens(2, 6), torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))
    want = first(model(ids, encoder_hidden_states=other, use_cache=False))
    locant.hf.attach(model, "shaw", keep_absolute=True)
    assert len(attached(model).layers()) == LAYERS
    for layer in attached(model).layers():
        layer.neutralize()
    assert torch.allclose(first(model(ids, encoder_hidden_states=other, use_cache=False)), want, atol=1e-5)
    out = model(ids, encoder_hidden_states=other, output_attentions=True, use_cache=False)
    assert out.cross_attentions[0].shape == (2, HEADS, 6, 4)


def test_shared_terms_are_computed_once_for_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = noisy(host("bert", num_hidden_layers=4), "t5+tupe_a")
    calls: list[str] = []
    for part in attached(model).stack.parts():
        inner = part.prepare

        def prepare(positions: Any, inner: Any = inner, part: Any = part) -> Any:
            calls.append(part.name)
            return inner(positions)

        monkeypatch.setattr(part, "prepare", prepare)
    model(tokens(2, 5))
    assert calls == ["t5", "tupe_a"]


def test_layers_find_their_own_encoding() -> None:
    for family in ("bert", "distilbert", "gpt2"):
        model, ids = noisy(host(family), "shaw", clip=4), tokens(2, 7)
        layers = attached(model).layers()
        assert len({id(layer) for layer in layers}) == LAYERS
        want = model(ids, output_attentions=True).attentions
        with torch.no_grad():
            layers[1].table.mul_(2)
        got = model(ids, output_attentions=True).attentions
        assert torch.equal(got[0], want[0]) and not torch.allclose(got[1], want[1], atol=1e-3), family


def test_albert_shares_its_layer_and_so_its_encoding() -> None:
    model = noisy(host("albert"), "shaw")
    assert len(attached(model).layers()) == 1 and model.config.num_hidden_layers == 3
    locant.hf.detach(model)
    with pytest.raises(ValueError, match="runs 3 layers through 1 attention module"):
        locant.hf.attach(model, "shaw", share_layers=False)
    noisy(model, "absolute+shaw")
    widths = {n: tuple(p.shape) for n, p in model.named_parameters() if ".locant." in f".{n}"}
    assert (ROWS, 14) in widths.values(), "positions are added where tokens are embedded, with width 14"


def test_projections_of_the_host_serve_deberta_version_two() -> None:
    for family in ("bert", "gpt2", "llama", "distilbert", "t5"):
        model, ids = noisy(host(family), "deberta", version="v2", clip=4), tokens(2, 7)
        attention = find_sites(model)[0].attention[0][1]
        heads = attached(model).spec.sizes["num_heads"]
        width = attached(model).spec.sizes["head_dim"]
        rows = torch.randn(5, attached(model).spec.sizes["model_dim"])
        query, key = interface.projections(attention, find_sites(model)[0].family.projections, heads, width)
        assert query is not None and key is not None
        want = _written_out_qkv(attention, rows[None], heads, width)
        for got, written in ((query(rows), want[0]), (key(rows), want[1])):
            assert torch.allclose(got.double(), written[0].transpose(0, 1).flatten(1), atol=1e-5), family
        first(model(ids))


def test_a_copy_trains_alone() -> None:
    model, ids = noisy(host("bert"), "tupe_r+shaw"), tokens(2, 7)
    want = first(model(ids))
    other = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    first(other(ids)).square().mean().backward()
    optimizer.step()
    assert torch.equal(first(model(ids)), want)
    assert not torch.allclose(first(other.eval()(ids)), want, atol=1e-4)
    locant.hf.detach(other)
    assert attachments(model) and not attachments(other)
    assert torch.equal(first(model(ids)), want)


def test_models_that_share_a_config_object_do_not_disturb_each_other() -> None:
    config = T.BertConfig(**BERT_SIZES)
    models = [stir(T.BertModel(config), 1).eval() for _ in range(3)]
    ids = tokens(2, 7)
    plain, want = first(models[1](ids)), first(models[2](ids))
    noisy(models[0], "shaw")
    noisy(models[1], "alibi")
    assert config._attn_implementation == "sdpa"
    assert torch.equal(first(models[2](ids)), want)
    shaw = first(models[0](ids))
    locant.hf.detach(models[1])
    assert torch.equal(first(models[0](ids)), shaw)
    assert torch.equal(first(models[1](ids)), plain)


def test_each_added_tensor_is_in_the_state_dict_once() -> None:
    for name in ("t5", "deberta", "absolute+shaw", "tupe_r"):
        model = noisy(host("bert"), name)
        state = model.state_dict()
        pointers = [t.data_ptr() for k, t in state.items() if "locant" in k]
        assert len(pointers) == len(set(pointers)) == len(list(attached(model).parameters()))
        other = noisy(host("bert"), name, seed=9)
        other.load_state_dict(state)
        ids = tokens(2, 6)
        assert torch.equal(first(model(ids)), first(other(ids))), name


def test_save_pretrained_of_an_attached_model_works(tmp_path: Any) -> None:
    model = noisy(host("bert"), "t5")
    model.save_pretrained(tmp_path)
    names = [n for n in load_file(tmp_path / "model.safetensors") if "locant" in n]
    assert names == ["locant.encodings.0.table"]


def test_different_encodings_in_different_layers() -> None:
    model = noisy(host("bert"), ["shaw", "none"])
    assert [d.name for d in locant.hf.describe(model).stacks[0].layers] == ["shaw", "none"]
    first(model(tokens(2, 6)))
    locant.hf.detach(model)
    with pytest.raises(ValueError, match="got 3 encodings for 2 layers"):
        locant.hf.attach(model, ["shaw", "none", "t5"])


def test_layers_of_different_kinds_where_tokens_are_embedded_narrower() -> None:
    model = host("electra")
    with pytest.raises(ValueError, match=r"embeds tokens with width 14 but its layers have 24; .* cannot use 'bert_r'"):
        locant.hf.attach(model, ["bert_r", "shaw"])
    with pytest.raises(ValueError, match=r"absolute\+shaw: no part takes the option 'clipp'=3"):
        locant.hf.attach(model, "absolute+shaw", clipp=3)
    noisy(model, "absolute+shaw", clip=3)
    assert first(model(tokens(1, 5))).isfinite().all()


def test_an_encoding_object_and_a_stack_are_taken_as_they_are() -> None:
    model, encoding = host("bert"), locant.load("t5", num_heads=HEADS)
    locant.hf.attach(model, encoding)
    assert attached(model).layers()[1] is encoding
    locant.hf.detach(model)
    stack = locant.stack("shaw", LAYERS, num_heads=HEADS, head_dim=WIDTH // HEADS, clip=3)
    locant.hf.attach(model, stack)
    assert attached(model).layers() == tuple(stack)
    locant.hf.detach(model)
    with pytest.raises(ValueError, match="the stack has 5 layers but BertModel has 2"):
        locant.hf.attach(model, locant.stack("none", 5))


def test_a_bare_encoder_gets_positions() -> None:
    torch.manual_seed(0)
    encoder = stir(T.BertModel(T.BertConfig(**BERT_SIZES)).encoder, 1).eval()
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    assert torch.allclose(first(encoder(x[:, order])), first(encoder(x))[:, order], atol=1e-5), (
        "no positions of its own"
    )
    for name in ("shaw", "absolute"):
        noisy(encoder, name)
        out = first(encoder(x))
        assert not torch.allclose(first(encoder(x[:, order])), out[:, order], atol=1e-2)
        explicit = first(encoder(x[:, order], positions=locant.Positions.from_ids(order)))
        assert torch.allclose(explicit, out[:, order], atol=1e-5)
        by_ids = first(encoder(x[:, order], position_ids=order[None]))
        assert torch.allclose(by_ids, out[:, order], atol=1e-5)
        padded = torch.cat((torch.zeros(2, 2, WIDTH), x), 1)
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[:, :2] = 0
        assert torch.allclose(first(encoder(padded, attention_mask=mask))[:, 2:], out, atol=1e-5)
        additive = (1 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
        ids = torch.cat((torch.zeros(2, dtype=torch.long), torch.arange(7)))[None]
        assert torch.allclose(first(encoder(padded, attention_mask=additive, position_ids=ids))[:, 2:], out, atol=1e-5)
        locant.hf.detach(encoder)


def test_a_bare_encoder_with_a_config_of_ones_own() -> None:
    fields = {k: v for k, v in BERT_SIZES.items() if k != "max_position_embeddings"}
    more = dict(hidden_act="gelu", layer_norm_eps=1e-6, is_decoder=False, add_cross_attention=False)
    config = SimpleNamespace(**fields, **more, chunk_size_feed_forward=0)
    encoder = stir(BertEncoder(config), 1).eval()
    noisy(encoder, "huang_m4", clip=3)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    assert first(encoder(x)).shape == x.shape
    locant.hf.detach(encoder)
    encoder.config.num_attention_heads = None
    for layer in encoder.layer:
        layer.attention.self.num_attention_heads = None
    with pytest.raises(ValueError, match=r"BertEncoder does not tell num_heads .* give num_heads=..."):
        locant.hf.attach(encoder, "shaw")
    locant.hf.attach(encoder, "shaw", num_heads=HEADS)


def test_output_attentions_gives_weights_that_explain_the_output() -> None:
    for family in HOSTS:
        model, ids = noisy(host(family), "shaw", clip=3), tokens(2, 6)
        out = model(ids, output_attentions=True)
        heads = attached(model).spec.sizes["num_heads"]
        assert out.attentions[0].shape == (2, heads, 6, 6), family
        assert torch.allclose(out.attentions[0].sum(-1), torch.ones(2, heads, 6), atol=1e-5)
        assert torch.allclose(first(out), first(model(ids)), atol=2e-5), family
        locant.hf.detach(model)
        locant.hf.attach(model, "none")
        assert model(ids, output_attentions=True).attentions[0].shape == (2, heads, 6, 6)


def test_a_backend_asked_for_by_name_serves_or_says_why_not() -> None:
    model, ids = noisy(host("bert"), "shaw", backend="sdpa"), tokens(2, 6)
    want = first(model(ids))
    with pytest.raises(ValueError, match="'sdpa' cannot: it does not return weights"):
        model(ids, output_attentions=True)
    locant.hf.detach(model)
    noisy(model, "shaw", backend="reference")
    assert torch.allclose(first(model(ids)), want, atol=1e-5)
    locant.hf.detach(model)
    noisy(model, "huang_m1", backend="sdpa")
    with pytest.raises(ValueError, match="'sdpa' cannot: RelativeScale does not lower"):
        model(ids)
    locant.hf.detach(model)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        locant.hf.attach(model, "shaw", backend="cuda")


def test_training_applies_dropout_of_the_host_and_eval_does_not() -> None:
    model, ids = noisy(host("bert", attention_probs_dropout_prob=0.5), "shaw"), tokens(2, 6)
    assert torch.equal(first(model(ids)), first(model(ids)))
    model.train()
    assert not torch.allclose(first(model(ids)), first(model(ids)), atol=1e-3)


@pytest.mark.parametrize("name", ["shaw", "alibi", "none", "rope", "sinusoidal", "xlnet"])
def test_bert_reads_past_its_table_with_a_relative_encoding(name: str) -> None:
    for family in ("bert", "roberta", "electra", "albert", "distilbert", "gpt2", "t5"):
        model = noisy(host(family), name)
        assert first(model(tokens(1, ROWS + 14))).isfinite().all(), family


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "gpt2", "llama"])
def test_too_long_for_a_table_is_one_error_before_any_kernel(family: str) -> None:
    for name in ("absolute", "tupe_a", "bert_ad"):
        model = noisy(host(family), name)
        first(model(tokens(1, ROWS)))
        with pytest.raises(
            ValueError, match=rf"positions reach {ROWS + 1} but the table has {ROWS} rows; truncate to {ROWS}"
        ):
            model(tokens(1, ROWS + 1))
        locant.hf.detach(model)
    if family != "llama":
        locant.hf.attach(model, "none", keep_absolute=True)
        first(model(tokens(1, ROWS)))
        with pytest.raises(
            ValueError, match=rf"kept table of {family} has {ROWS} positions but the input reaches {ROWS + 1}"
        ):
            model(tokens(1, ROWS + 1))


def test_a_longer_table_is_an_option() -> None:
    model = noisy(host("bert"), "absolute", max_length=ROWS + 6)
    assert first(model(tokens(1, ROWS + 6))).isfinite().all()


def test_usable_length_of_roberta_leaves_its_spare_rows_out() -> None:
    model = host("roberta")
    assert model.config.max_position_embeddings == ROWS + 2
    locant.hf.attach(model, "absolute")
    assert attached(model).spec.sizes["max_length"] == ROWS


def test_tokens_are_scaled_where_an_encoding_asks_for_it() -> None:
    model, ids = host("bert"), tokens(2, 6)
    locant.hf.attach(model, "sinusoidal", scale_tokens=True)
    scaled = first(model(ids))
    words = model.embeddings.word_embeddings(ids)
    locant.hf.detach(model)
    locant.hf.attach(model, "sinusoidal")
    assert torch.allclose(first(model(inputs_embeds=words * WIDTH**0.5)), scaled, atol=1e-5)


def test_other_families_on_the_attention_interface_work() -> None:
    sizes = {**LLAMA_SIZES, "head_dim": 8}
    for model in (
        T.MistralForCausalLM(T.MistralConfig(**sizes, sliding_window=None)),
        T.Qwen3ForCausalLM(T.Qwen3Config(**sizes)),
        T.Gemma3ForCausalLM(T.Gemma3TextConfig(**sizes)),
        T.XLMRobertaModel(T.XLMRobertaConfig(**BERT_SIZES)),
    ):
        stir(model, 1, std=0.1).eval()
        ids = tokens(2, 7)
        want = first(model(ids))
        noisy(model, "huang_m4")
        assert not torch.allclose(first(model(ids)), want, atol=1e-3)
        locant.hf.detach(model)
        assert torch.equal(first(model(ids)), want)
        if hasattr(model, "lm_head") and not isinstance(model, T.Gemma3ForCausalLM):
            locant.hf.attach(model, "rope")
            assert torch.allclose(first(model(ids)), want, atol=1e-4), type(model).__name__


def test_models_that_cannot_be_served_are_refused_with_what_was_looked_for() -> None:
    with pytest.raises(
        ValueError, match="Linear has no self-attention that locant can serve; looked for the families bert"
    ):
        locant.hf.attach(nn.Linear(3, 3), "shaw")
    xlnet = T.XLNetModel(T.XLNetConfig(vocab_size=VOCABULARY_SMALL, d_model=8, n_head=2, n_layer=1, d_inner=9))
    with pytest.raises(ValueError, match="It has XLNetRelativeAttention, which compute attention on their own"):
        locant.hf.attach(xlnet, "shaw")
    assert not hasattr(xlnet, "locant")


def test_a_rotary_module_of_unknown_form_is_refused_unless_kept() -> None:
    model = host("llama")
    model.model.rotary_emb = nn.Linear(1, 3)
    with pytest.raises(ValueError, match="rotary_emb of LlamaModel is no rotary module locant knows"):
        locant.hf.attach(model, "shaw")
    locant.hf.attach(model, "shaw", keep_absolute=True)


def test_a_host_without_known_positions_is_refused_unless_kept() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY_SMALL, WIDTH)
            self.encoder = T.BertModel(T.BertConfig(**BERT_SIZES)).encoder.layer
            self.config = self.encoder[0].attention.self.config  # pyright: ignore

        def get_input_embeddings(self) -> nn.Module:
            return self.words

        def forward(
            self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
        ) -> Any:
            x = self.words(input_ids) if inputs_embeds is None else inputs_embeds
            for layer in self.encoder:
                x = layer(x, **kwargs)
            return (x,)

    model = stir(Plain(), 1).eval()
    with pytest.raises(ValueError, match="Plain has no positions of its own that locant could switch off"):
        locant.hf.attach(model, "shaw")
    noisy(model, "shaw", keep_absolute=True)
    ids = tokens(1, 6) % VOCABULARY_SMALL
    assert not torch.allclose(first(model(ids.flip(1))).flip(1), first(model(ids)), atol=1e-3)


def test_attaching_twice_and_detaching_nothing_are_errors() -> None:
    model = host("bert")
    with pytest.raises(ValueError, match="BertModel has nothing attached"):
        locant.hf.detach(model)
    locant.hf.attach(model, "shaw")
    with pytest.raises(ValueError, match="BertModel already has 'shaw' attached"):
        locant.hf.attach(model, "t5")
    with pytest.raises(ValueError, match="the layers of BertEncoder are served from a model above it"):
        locant.hf.attach(model.encoder, "t5")
    locant.hf.attach(locant.hf.detach(model).encoder, "t5")
    with pytest.raises(ValueError, match="BertModel already has 't5' attached"):
        locant.hf.attach(model, "shaw")


def test_options_beside_what_is_built_already_are_errors() -> None:
    model = host("bert")
    with pytest.raises(ValueError, match="clip=3 was given beside an encoding that is built"):
        locant.hf.attach(model, locant.load("none"), clip=3)
    for option, value in (("clip", 3), ("share_layers", True)):
        with pytest.raises(ValueError, match=f"{option}={value} was given beside a Stack"):
            locant.hf.attach(model, locant.stack("none", LAYERS), **{option: value})


def test_a_refused_attach_leaves_the_model_as_it_was() -> None:
    model, ids = host("bert"), tokens(1, 5)
    before, want = snapshot(model), first(model(ids))
    wrongs: list[tuple[str, dict[str, Any]]] = [("shaww", {}), ("shaw", {"clipp": 3}), ("shaw", {"clip": 0})]
    for name, wrong in wrongs:
        with pytest.raises(ValueError, match="shaw"):
            locant.hf.attach(model, name, **wrong)
    assert snapshot(model)[0] == before[0] and torch.equal(first(model(ids)), want)


def test_changing_the_attention_implementation_afterwards_is_an_error() -> None:
    model = noisy(host("bert"), "shaw")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="BertModel was set to 'sdpa' after attaching, which would leave out 'shaw'"):
        model(tokens(1, 5))


def test_a_layer_by_itself_has_no_positions() -> None:
    model = noisy(host("bert"), "shaw")
    with pytest.raises(RuntimeError, match="BertSelfAttention 0 got no positions; call the model"):
        model.encoder.layer[0](torch.randn(1, 4, WIDTH))


def test_calling_without_tokens_is_an_error() -> None:
    model = noisy(host("bert"), "shaw")
    with pytest.raises(ValueError, match="called with attention_mask; input_ids"):
        model(attention_mask=torch.ones(1, 4))


def test_without_transformers_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers is not installed.*pip install 'locant\[hf\]'"):
        importlib.reload(locant.hf)


def test_both_functions_are_registered() -> None:
    interface.register()
    assert T.AttentionInterface._global_mapping["locant"] is interface.attention_forward
    assert T.AttentionMaskInterface._global_mapping["locant"] is interface.mask_function


def test_every_family_row_names_classes_that_exist_and_is_in_the_guide() -> None:
    guide = (Path(__file__).resolve().parents[1] / "docs" / "hugging_face.md").read_text(encoding="utf-8")
    modules = ["bert", "roberta", "electra", "albert", "distilbert", "gpt2", "llama", "t5"]
    assert [family.name for family in FAMILIES] == modules
    for family in FAMILIES:
        source = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
        for name in (*family.stacks, *family.attention, *family.encoders):
            assert hasattr(source, name), name
        assert f"| {family.name} | {family.own_positions} |" in guide


def test_gradient_checkpointing_gives_equal_gradients_or_is_refused() -> None:
    def gradients(checkpointing: bool, reentrant: bool = False) -> dict[str, torch.Tensor]:
        model = noisy(host("bert"), "t5+shaw").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        first(model(tokens(2, 7))).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    want, got = gradients(False), gradients(True)
    assert want.keys() == got.keys()
    assert all(torch.allclose(got[n], g, atol=1e-6) for n, g in want.items())
    with pytest.raises(RuntimeError, match=r"t5: what all layers share .* use_reentrant=False"):
        gradients(True, reentrant=True)


def test_moves_and_casts_reach_what_was_taken_out() -> None:
    model = noisy(host("bert"), "absolute")
    model.double()
    assert first(model(tokens(1, 5))).dtype == torch.float64
    locant.hf.detach(model)
    assert model.embeddings.position_embeddings.weight.dtype == torch.float64
    assert first(model(tokens(1, 5))).dtype == torch.float64


def test_half_precision_hosts_get_encodings_of_their_dtype() -> None:
    for name in ("t5", "rope", "tupe_r", "sinusoidal", "huang_m4"):
        model = host("bert").bfloat16()
        locant.hf.attach(model, name)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert first(model(tokens(1, 5))).dtype == torch.bfloat16


class Gate(Encoding):
    name = "reads_x"
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared")

    def terms(self, positions: Any, layer: Any) -> tuple[Any, ...]:
        self.seen = layer.x
        return ()


def test_an_encoding_may_read_the_input_of_its_layer() -> None:
    for family in HOSTS:
        model, gate = host(family), Gate()
        locant.hf.attach(model, gate)
        model(tokens(2, 5))
        assert gate.seen.shape == (2, 5, attached(model).spec.sizes["model_dim"]), family


def test_a_copy_and_an_unpickled_model_have_positions_when_forward_is_called_by_name(tmp_path: Path) -> None:
    """sentence-transformers calls it so, past all hooks."""
    model, ids = noisy(host("bert"), "huang_m4"), tokens(2, 7)
    want = first(model(ids))
    torch.save(model, tmp_path / "model.pt")
    unpickled = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copy.deepcopy(model), unpickled, pickle.loads(pickle.dumps(unpickled))):
        assert torch.equal(first(other.forward(ids)), want) and torch.equal(first(other(ids)), want)
        stir(other.locant, 8)
        assert torch.equal(first(other.forward(ids)), first(other(ids))), "it runs the model that it was copied from"
        assert list(inspect.signature(other.forward).parameters)[:2] == ["input_ids", "attention_mask"]
        locant.hf.detach(other)
        assert "forward" not in vars(other)
        assert torch.equal(first(other.forward(ids)), first(other(ids)))
    assert torch.equal(first(model.forward(ids)), want)
