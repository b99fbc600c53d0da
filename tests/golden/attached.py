"""Set A, whole models that locant attaches to: every stored output, through transformers v5 and `locant.hf.attach`.

The stored state dict goes into the v5 class, its position parameters move into the encoding that takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    T5Model,
)

import locant.hf
from locant.hf.attachment import attachments
from tests.golden.cases import ATOL, Case, Comparison
from tests.golden.registry import Check
from tests.golden.rotary_alibi_t5 import T5_ATOL

ATTACHED: dict[tuple[str, str], Check] = {}


def whole(name: str) -> Callable[[Check], Check]:
    """Register who runs a whole model of transformers."""

    def register(function: Check) -> Check:
        ATTACHED["transformers", name] = function
        return function

    return register


def host(model: type[nn.Module], config: type[PreTrainedConfig], case: Case, **options: Any) -> Any:
    """The v5 class with the stored weights; what only v4 knew is left out."""
    stated = {name: value for name, value in case.config.items() if name != "position_embedding_type"}
    built = model(config(**stated, attn_implementation="sdpa"), **options).eval()  # pyright: ignore[reportCallIssue]
    weights = {name: t for name, t in case.weights.items() if "distance_embedding" not in name}
    lost = built.load_state_dict(weights, strict=False)
    tied = {name for name in lost.missing_keys if name.endswith(("embed_tokens.weight", "position_ids"))}
    assert not lost.unexpected_keys and set(lost.missing_keys) == tied, f"{case.id}: {lost}"
    return built


def fill(model: nn.Module, tables: list[Tensor]) -> None:
    """Put one table into the encoding of each attention module."""
    layers = [layer for _, _, attachment in attachments(model) for layer in attachment.layers()]
    assert len(layers) == len(tables), f"{len(layers)} layers for {len(tables)} tables"
    for layer, table in zip(layers, tables, strict=True):
        layer.load_state_dict({"table": table})


def compare(
    model: Callable[..., Any], inputs: Mapping[str, Any], stored: Mapping[str, Tensor], rows: Tensor, atol: float = ATOL
) -> Iterator[Comparison]:
    """Hidden states of the fast path, then all of both with weights; ``stored`` says ``attentions.N`` for layer N."""
    for asked in ({}, {"output_attentions": True}):
        with torch.no_grad():
            out = model(**inputs, **asked)
        for name, expected in stored.items():
            field, _, layer = name.partition(".")
            if layer and asked:
                weights = out[field][int(layer)].transpose(1, 2)[rows]
                yield Comparison(name, weights, expected.transpose(1, 2)[rows], atol)
            elif not layer:
                yield Comparison(
                    f"{name} ({'with weights' if asked else 'fast'})", out[field][rows], expected[rows], atol
                )


def plain_outputs(case: Case) -> dict[str, Tensor]:
    """Stored outputs of one pass over all tokens."""
    aside = ("embedding_output", "last_hidden_state_token_by_token")
    return {name: t for name, t in case.outputs.items() if name not in aside}


def token_by_token(
    model: Callable[..., Any], tokens: Tensor, expected: Tensor, atol: float, **inputs: Any
) -> Iterator[Comparison]:
    """One token at a time with the cache."""
    cache, steps = None, []
    for step in range(tokens.shape[1]):
        with torch.no_grad():
            out = model(tokens[:, step : step + 1], step, cache, **inputs)
        cache = out.cache
        steps.append(out.last_hidden_state)
    yield Comparison("last_hidden_state_token_by_token", torch.cat(steps, 1), expected, atol)


def from_zero(tokens: Tensor) -> Tensor:
    """Ids as the public classes count them, over padding too."""
    return torch.arange(tokens.shape[1])[None]


# BERT, RoBERTa, ALBERT


def attach_stored(model: nn.Module, case: Case, tables: list[str], spare: int = 0) -> None:
    """The encoding that position_embedding_type names, with the stored tables; ALBERT leaves q.a unscaled."""
    length = case.config["max_position_embeddings"]
    kind = case.config["position_embedding_type"]
    if kind == "absolute":
        locant.hf.attach(model, "absolute", max_length=length - spare)
        stored = case.weights["embeddings.position_embeddings.weight"][spare:]
        fill(model, [stored] * len(tables))
        return
    albert = case.key[1] == "AlbertModel"
    stored = [case.weights[f"{name}.distance_embedding.weight"].flip(0)[None] for name in tables]
    if kind == "relative_key":
        options: dict[str, Any] = {"scaled": False} if albert else {}
        locant.hf.attach(model, "shaw", max_length=length, **options)
    else:
        assert kind == "relative_key_query", f"{case.id}: unknown position_embedding_type {kind!r}"
        locant.hf.attach(model, "huang_m4", max_length=length)
        stored = [table * table.shape[-1] ** (0.5 * albert) for table in stored]
    fill(model, stored)


def bert_like(model: Any, case: Case) -> Iterator[Comparison]:
    """All outputs, and those with a cache where they are stored."""
    inputs = dict(case.inputs)
    inputs.setdefault("position_ids", from_zero(inputs["input_ids"]))
    rows = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if "RobertaModel" in case.key and case.config["position_embedding_type"] == "absolute":
        rows = inputs["attention_mask"].bool()  # its padded tokens read the padding row of the table
    yield from compare(model, inputs, plain_outputs(case), rows)
    if "last_hidden_state_token_by_token" in case.outputs:
        expected, mask = case.outputs["last_hidden_state_token_by_token"], inputs.get("attention_mask")

        def step(tokens: Tensor, past: int, cache: Any) -> Any:
            seen = None if mask is None else mask[:, : past + 1]
            return model(tokens, attention_mask=seen, cache=cache, use_cache=True)

        yield from token_by_token(step, inputs["input_ids"], expected, ATOL)


@whole("BertModel")
def bert(case: Case) -> Iterator[Comparison]:
    """One table for each layer."""
    model = host(BertModel, BertConfig, case, add_pooling_layer="pooler.dense.weight" in case.weights)
    names = [f"encoder.layer.{i}.attention.self" for i in range(case.config["num_hidden_layers"])]
    attach_stored(model, case, names)
    yield from bert_like(model, case)


@whole("RobertaModel")
def roberta(case: Case) -> Iterator[Comparison]:
    """The absolute table starts after the padding row."""
    model = host(RobertaModel, RobertaConfig, case, add_pooling_layer="pooler.dense.weight" in case.weights)
    names = [f"encoder.layer.{i}.attention.self" for i in range(case.config["num_hidden_layers"])]
    attach_stored(model, case, names, spare=case.config["pad_token_id"] + 1)
    yield from bert_like(model, case)


@whole("AlbertModel")
def albert(case: Case) -> Iterator[Comparison]:
    """One table for each group of layers."""
    model = host(AlbertModel, AlbertConfig, case, add_pooling_layer="pooler.weight" in case.weights)
    groups, inner = case.config["num_hidden_groups"], case.config["inner_group_num"]
    prefix = "encoder.albert_layer_groups.{}.albert_layers.{}.attention"
    attach_stored(model, case, [prefix.format(g, i) for g in range(groups) for i in range(inner)])
    yield from bert_like(model, case)


# Llama


@whole("LlamaModel")
def llama(case: Case) -> Iterator[Comparison]:
    """Rotary positions are relative: counted over the mask or from 0, real tokens get the same numbers."""
    model = host(LlamaModel, LlamaConfig, case)
    rope = case.config["rope_parameters"]
    assert rope["rope_type"] == "default", f"{case.id}: rope_type {rope['rope_type']} is not rebuilt here"
    locant.hf.attach(model, "rope", layout="halves", base=float(rope["rope_theta"]))
    tokens = case.inputs["input_ids"]
    rows = case.inputs.get("attention_mask", torch.ones_like(tokens)).bool()
    yield from compare(model, case.inputs, plain_outputs(case), rows)
    yield from compare(model, {"position_ids": from_zero(tokens), **case.inputs}, plain_outputs(case), rows)


# T5


def t5_table(case: Case, side: str) -> list[Tensor]:
    """The stored table, once for each layer."""
    stored = case.weights[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].T
    layers = case.config["num_layers"] if side == "encoder" else case.config["num_decoder_layers"]
    return [stored] * layers


def attach_t5(model: nn.Module, case: Case) -> None:
    """Buckets as the config states them."""
    buckets, far = (case.config[f"relative_attention_{name}"] for name in ("num_buckets", "max_distance"))
    locant.hf.attach(model, "t5", num_buckets=buckets, max_distance=far)


@whole("T5EncoderModel")
def t5_encoder(case: Case) -> Iterator[Comparison]:
    """One table for all layers."""
    model = host(T5EncoderModel, T5Config, case)
    attach_t5(model, case)
    fill(model, t5_table(case, "encoder"))
    rows = torch.ones_like(case.inputs["input_ids"], dtype=torch.bool)
    inputs = {"position_ids": from_zero(case.inputs["input_ids"]), **case.inputs}
    yield from compare(model, inputs, plain_outputs(case), rows, T5_ATOL)


@whole("T5Model")
def t5(case: Case) -> Iterator[Comparison]:
    """Both stacks: each has its own table, the decoder's serves the past."""
    model = host(T5Model, T5Config, case)
    attach_t5(model, case)
    fill(model, t5_table(case, "encoder") + t5_table(case, "decoder"))
    tokens, answer = case.inputs["input_ids"], case.inputs["decoder_input_ids"]
    stored = {name: t for name, t in plain_outputs(case).items() if not name.startswith("encoder_")}
    every = torch.ones_like(answer, dtype=torch.bool)
    yield from compare(model, case.inputs, stored, every, T5_ATOL)
    encoder = {"input_ids": tokens, "position_ids": from_zero(tokens)}
    if "attention_mask" in case.inputs:
        encoder["attention_mask"] = case.inputs["attention_mask"]
    own = {n.removeprefix("encoder_"): t for n, t in case.outputs.items() if n.startswith("encoder_")}
    for comparison in compare(model.encoder, encoder, own, torch.ones_like(tokens, dtype=torch.bool), T5_ATOL):
        yield Comparison(f"encoder_{comparison.name}", comparison.actual, comparison.expected, T5_ATOL)
    if "last_hidden_state_token_by_token" in case.outputs:
        encoded = (case.outputs["encoder_last_hidden_state"],)

        def step(token: Tensor, past: int, cache: Any) -> Any:
            given = dict(attention_mask=case.inputs.get("attention_mask"), encoder_outputs=encoded)
            return model(decoder_input_ids=token, cache=cache, use_cache=True, **given)

        yield from token_by_token(step, answer, case.outputs["last_hidden_state_token_by_token"], T5_ATOL)
