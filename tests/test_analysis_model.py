"""What is read from a model is what the model computes, in every family; and the model stays as it was."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import locant.hf
from locant.analysis.biases import terms_of
from locant.analysis.model import (
    check_weights,
    enter_attention,
    position_vectors,
    projection,
    read_model,
    scale_of,
    submodule,
    word_vectors,
)
from locant.analysis.passes import run
from locant.backends import Call, reference
from locant.positions import Positions
from locant.terms import Operands
from tests.analysis_models import FAMILIES, family
from tests.hf_models import HEADS, LAYERS, ROWS, WIDTH, host, noisy, tokens

WITH_TABLE = tuple(f for f in FAMILIES if f not in ("llama", "t5", "t5-full", "mistral"))


@contextmanager
def inputs_of(module):
    """What a module is called with."""
    seen = []
    handle = module.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    yield seen
    handle.remove()


def first_input(reader, ids):
    with inputs_of(reader.attention[0]) as seen:
        run(reader, ids)
    args, kwargs = seen[0]
    return (args[0] if args else kwargs["hidden_states"]).double()


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_those_of_the_model(name):
    reader = read_model(family(name))
    assert reader.num_layers == (3 if name == "albert" else LAYERS)
    heads = {"llama": 6, "mistral": 4}.get(name, HEADS)
    assert reader.num_heads == heads and reader.causal == (name in ("gpt2", "llama", "opt", "opt-post", "mistral"))
    assert reader.trained_length == (ROWS if name in WITH_TABLE else None)


@pytest.mark.parametrize("name", WITH_TABLE)
def test_vectors_are_what_the_first_attention_reads(name):
    reader, ids = read_model(family(name)), tokens(2, 11)
    vectors = position_vectors(reader, 11)
    types = submodule(reader.stack, reader.layout.types)
    first_type = types.weight[0].double() if isinstance(types, nn.Embedding) else 0.0
    with torch.no_grad():
        summed = word_vectors(reader, ids) + vectors.table + first_type
        torch.testing.assert_close(enter_attention(reader, summed), first_input(reader, ids), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", [f for f in FAMILIES if f not in ("llama", "mistral")])
def test_projections_and_terms_give_the_models_own_weights(name):
    reader, ids = read_model(family(name)), tokens(2, 11)
    found = {}
    run(reader, ids, visit=lambda layer, weights: found.setdefault(layer, weights))
    x = first_input(reader, ids)
    weights = projection(reader)
    q = torch.einsum("bnm,hmd->bhnd", x, weights.query) + weights.query_bias[:, None]
    k = torch.einsum("bnm,hmd->bhnd", x, weights.key) + weights.key_bias[:, None]
    terms, _ = terms_of(reader, 0, Positions.arange(11))
    operands = Operands(q, k, k, Positions.arange(11), weights.scale)
    causal = torch.ones(11, 11, dtype=torch.bool).tril()[None, None] if reader.causal else None
    _, want = reference.run(Call(operands, terms, causal, False, 0.0, True))
    torch.testing.assert_close(found[0].double(), want, atol=2e-5, rtol=1e-4)
    assert sorted(found) == list(range(reader.num_layers))
    rows = found[reader.num_layers - 1].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_grouped_keys_are_repeated_for_their_queries():
    reader = read_model(family("llama"))
    weights = projection(reader)
    assert weights.query.shape == weights.key.shape == (6, 48, 8)
    assert torch.equal(weights.key[0], weights.key[2]) and not torch.equal(weights.key[0], weights.key[3])


def test_the_scale_knows_the_encoding():
    plain, attached = read_model(host("bert")), read_model(noisy(host("bert"), "tupe_a"))
    assert scale_of(attached, 1) == pytest.approx(scale_of(plain, 1) / 2**0.5)


@pytest.mark.parametrize("name", ["huang_m4", "tisa", "rope", "absolute", "tupe_r"])
def test_attached_models_show_the_weights_they_use(name):
    model, ids = noisy(host("bert"), name), tokens(2, 9)
    found = {}
    run(read_model(model), ids, visit=lambda layer, weights: found.update({layer: weights}))
    want = model(input_ids=ids, output_attentions=True).attentions
    for layer, weights in enumerate(want):
        torch.testing.assert_close(found[layer], weights)


def test_attached_input_encodings_are_position_vectors():
    model = noisy(host("bert"), "absolute")
    vectors = position_vectors(read_model(model), 7)
    table = locant.hf.attachments(model)[0][2].encodings[0].table
    torch.testing.assert_close(vectors.table, table[:7].detach().double())
    kept = noisy(host("bert"), "absolute", keep_absolute=True)
    both = position_vectors(read_model(kept), 7).table - kept.embeddings.position_embeddings.weight[:7].double()
    torch.testing.assert_close(both.detach().float(), locant.hf.attachments(kept)[0][2].encodings[0].table[:7].detach())
    assert position_vectors(read_model(noisy(host("bert"), "huang_m4")), 7) is None


def test_reserved_rows_are_left_out():
    for name in ("roberta", "mpnet", "bart", "opt"):
        reader = read_model(family(name))
        assert reader.spare_rows == 2 and position_vectors(reader).table.shape[0] == ROWS
        torch.testing.assert_close(position_vectors(reader, 1).table[0], reader.table.weight[2].detach().double())


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(kernel):
    model = host("bert")
    model.config._attn_implementation = kernel
    model(tokens(1, 5), output_hidden_states=True)  # transformers puts hooks of its own in, once
    model.train()
    model.encoder.layer[1].eval()
    modes = [module.training for module in model.modules()]
    before, hooks = copy.deepcopy(model.state_dict()), count_hooks(model)
    reader = read_model(model)
    found = []
    run(reader, tokens(1, 7), visit=lambda layer, weights: found.append(weights), hidden=True, shift=3)
    assert len(found) == LAYERS and model.config._attn_implementation == kernel
    assert [module.training for module in model.modules()] == modes and count_hooks(model) == hooks
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_model_is_left_as_it_was_after_an_error():
    model = host("bert")
    kernel = model.config._attn_implementation

    def fail(layer, weights):
        raise RuntimeError(f"stop at {layer}")

    run(read_model(model), tokens(1, 5), visit=lambda *found: None)
    hooks = count_hooks(model)
    with pytest.raises(RuntimeError, match="stop at 0"):
        run(read_model(model), tokens(1, 5), visit=fail)
    assert model.config._attn_implementation == kernel and count_hooks(model) == hooks


def test_no_weights_are_kept_for_all_layers():
    out = run(read_model(host("bert")), tokens(1, 5), visit=lambda *found: None).output
    assert out.attentions is None


def test_models_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match=r"Linear is of no family that can be read \(bert, "):
        read_model(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="length=30 but the model has 29 positions"):
        position_vectors(read_model(host("bert")), 30)


def test_weights_that_are_not_finite_are_named():
    model = host("bert")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self\.key\.weight holds 1 of 576"):
        check_weights(read_model(model))
    with pytest.raises(ValueError, match=r"embeddings\.word_embeddings\.weight is on the meta device"):
        check_weights(read_model(host("bert").to("meta")))


def test_a_module_that_hides_its_weights_is_told():
    model = host("bert")
    reader = read_model(model)
    handle = model.encoder.layer[0].attention.self.register_forward_hook(lambda m, args, out: (out[0], None))
    with pytest.raises(ValueError, match="BertSelfAttention returned no attention weights"):
        run(reader, tokens(1, 5), visit=lambda *found: None)
    handle.remove()


def test_widths_agree():
    for name in ("electra", "albert"):
        vectors = position_vectors(read_model(family(name)))
        assert vectors.table.shape == (ROWS, 14) and vectors.layernorm.shape == (ROWS, WIDTH)
