"""Set A, whole models: layer 0's q, k, v rebuilt from the stored weights, and its attention compared.

What later layers return follows from other parts of the host as well; for families that locant attaches to,
`attached.py` compares those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import locant
from locant.terms import PairBias
from tests.golden.cases import Case, Comparison
from tests.golden.parts import (
    NOTHING,
    compare_weights,
    heads,
    keys_allowed,
    layer_norm,
    linear,
    with_state,
)
from tests.golden.registry import LATER, check

# BERT and its relatives in transformers v4, with absolute and relative positions


def bert_encoding(case: Case, prefix: str) -> locant.Encoding:
    """What position_embedding_type names, with the stored table; v4 counts offsets backwards (query - key)."""
    kind, num_heads = case.config["position_embedding_type"], case.config["num_attention_heads"]
    if kind == "absolute":
        return NOTHING
    name = {"relative_key": "shaw", "relative_key_query": "huang_m4"}[kind]
    stored = case.weights[f"{prefix}.distance_embedding.weight"].flip(0)[None]
    if case.key[1] == "AlbertModel":  # ALBERT leaves its position terms outside 1/sqrt(D)
        stored = stored * math.sqrt(stored.shape[-1])
    length = case.config["max_position_embeddings"]
    encoding = locant.load(name, num_heads=num_heads, head_dim=stored.shape[-1], max_length=length)
    return with_state(encoding, table=stored)


def bert_ids(case: Case) -> Tensor:
    """Ids of the absolute table: RoBERTa counts the real tokens from pad_id + 1."""
    tokens = case.inputs["input_ids"]
    if case.key[1] == "RobertaModel":
        real = (tokens != case.config["pad_token_id"]).long()
        return real.cumsum(-1) * real + case.config["pad_token_id"]
    return case.inputs.get("position_ids", torch.arange(tokens.shape[1]))


def bert_embedding(case: Case) -> Tensor:
    """The input of layer 0, rebuilt."""
    tokens, eps = case.inputs["input_ids"], case.config["layer_norm_eps"]
    types = case.inputs.get("token_type_ids", torch.zeros_like(tokens))
    x = F.embedding(tokens, case.weights["embeddings.word_embeddings.weight"])
    x = x + F.embedding(types, case.weights["embeddings.token_type_embeddings.weight"])
    if case.config["position_embedding_type"] == "absolute":
        table = case.weights["embeddings.position_embeddings.weight"]
        absolute = locant.load("absolute", model_dim=table.shape[1], max_length=len(table))
        x = with_state(absolute, table=table).embed(x, locant.Positions.from_ids(bert_ids(case), length=len(table)))
    x = layer_norm(case.weights, "embeddings.LayerNorm", x, eps)
    mapping = "encoder.embedding_hidden_mapping_in"
    return linear(case.weights, mapping, x) if f"{mapping}.weight" in case.weights else x


def bert_layer(case: Case, prefix: str) -> Iterator[Comparison]:
    """The embedding, and layer 0's attention."""
    x = bert_embedding(case)
    if "embedding_output" in case.outputs:
        yield Comparison("embedding_output", x, case.outputs["embedding_output"])
    num_heads = case.config["num_attention_heads"]
    q, k = (heads(linear(case.weights, f"{prefix}.{part}", x), num_heads) for part in ("query", "key"))
    causal, mask = case.config.get("is_decoder", False), keys_allowed(case)
    seeing = None if mask is None or not causal else mask[:, 0, 0].cumsum(-1) > 0  # left padding: some see nothing
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        bert_encoding(case, prefix),
        q,
        k,
        mask=mask,
        causal=causal,
        rows=seeing,
    )


@check("transformers", "BertModel", LATER)
@check("transformers", "RobertaModel", LATER)
def bert(case: Case) -> Iterator[Comparison]:
    """BERT's own names."""
    return bert_layer(case, "encoder.layer.0.attention.self")


@check("transformers", "AlbertModel", LATER)
def albert(case: Case) -> Iterator[Comparison]:
    """One layer's weights serve all layers."""
    return bert_layer(case, "encoder.albert_layer_groups.0.albert_layers.0.attention")


# XLNet and Transformer-XL


@check("transformers", "XLNetModel", LATER)
def xlnet(case: Case) -> Iterator[Comparison]:
    """Sinusoid of the offset with u and v, and the segment term, which is content."""
    x = case.outputs["embedding_output"]
    yield Comparison(
        "embedding_output", F.embedding(case.inputs["input_ids"], case.weights["word_embedding.weight"]), x
    )
    w = {name: case.weights[f"layer.0.rel_attn.{name}"] for name in ("q", "k", "r", "r_w_bias", "r_r_bias")}
    num_heads, head_dim = w["r_w_bias"].shape
    q, k = (torch.einsum("bim,mhd->bhid", x, w[name]) for name in ("q", "k"))
    biases = bool(w["r_w_bias"].any() or w["r_r_bias"].any())
    clamp = case.config["clamp_len"] if case.config["clamp_len"] > 0 else None
    encoding = locant.load(
        "xlnet", num_heads=num_heads, head_dim=head_dim, model_dim=x.shape[-1], biases=biases, clamp=clamp
    )
    parameters = {"projection": w["r"].flatten(1).T}
    if biases:
        parameters |= {"content_bias": w["r_w_bias"], "position_bias": w["r_r_bias"]}
    length, causal = x.shape[1], case.config["attn_type"] == "uni"
    ids = torch.arange(length).expand(x.shape[0], -1)
    if case.config["bi_data"]:  # the second half of the batch is read backwards
        ids = torch.where(torch.arange(len(ids))[:, None] < len(ids) // 2, ids, length - 1 - ids)
    mask = keys_allowed(case)
    if mask is not None:  # a padded query still sees itself
        mask = mask.expand(-1, -1, length, -1)
        mask = (mask.tril() if causal else mask) | torch.eye(length, dtype=torch.bool)
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        with_state(encoding, **parameters),
        q,
        k,
        count=lambda queries, keys: locant.Positions.from_ids(
            ids[:, keys - queries : keys], ids[:, :keys], length=length
        ),
        mask=mask if mask is not None or not causal else torch.ones(length, length, dtype=torch.bool).tril(),
        extra=segments(case, q),
    )


def segments(case: Case, q: Tensor) -> tuple[PairBias, ...]:
    """(q + s) . g, g by whether two tokens are of one segment."""
    if "token_type_ids" not in case.inputs:
        return ()
    types = case.inputs["token_type_ids"]
    s, g = (case.weights[f"layer.0.rel_attn.{name}"] for name in ("r_s_bias", "seg_embed"))
    same, other = torch.einsum("bhid,shd->sbhi", q + s[:, None], g)[..., None]
    return (PairBias(torch.where((types[:, :, None] != types[:, None])[:, None], other, same), scaled=True),)


@check("transformers", "TransfoXLModel (models.deprecated)", LATER)
def transfo_xl(case: Case) -> Iterator[Comparison]:
    """Causal, with a memory that starts as zeros and holds the first segment where there was one."""
    config, w = case.config, case.weights
    assert not config["cutoffs"] and config["div_val"] == 1 and not config["same_length"], "not rebuilt here"
    embed = lambda ids: F.embedding(ids, w["word_emb.emb_layers.0.weight"]) * math.sqrt(config["d_model"])  # noqa: E731
    x = embed(case.inputs["input_ids"])
    memory = x.new_zeros(x.shape[0], config["mem_len"], x.shape[-1])
    if "input_ids_first_segment" in case.inputs and config["mem_len"]:
        memory = torch.cat((memory, embed(case.inputs["input_ids_first_segment"])), 1)[:, -config["mem_len"] :]
    source = torch.cat((memory, x), 1)
    prefix = "layers.0.dec_attn"
    if config["pre_lnorm"]:
        source = layer_norm(w, f"{prefix}.layer_norm", source, config["layer_norm_epsilon"])
    q, k, _ = (heads(part, config["n_head"]) for part in linear(w, f"{prefix}.qkv_net", source).chunk(3, -1))
    encoding = locant.load(
        "xlnet",
        num_heads=config["n_head"],
        head_dim=config["d_head"],
        model_dim=config["d_model"],
        clamp=config["clamp_len"] if config["clamp_len"] > 0 else None,
    )
    encoding = with_state(
        encoding,
        projection=w[f"{prefix}.r_net.weight"],
        content_bias=w[f"{prefix}.r_w_bias" if config["untie_r"] else "r_w_bias"],
        position_bias=w[f"{prefix}.r_r_bias" if config["untie_r"] else "r_r_bias"],
    )
    expected = case.outputs["attentions.0"]
    yield from compare_weights("attentions.0", expected, encoding, q[:, :, -x.shape[1] :], k, causal=True)


# DeBERTa


def deberta_weights(case: Case, encoding: locant.Encoding, q: Tensor, k: Tensor, **project) -> Iterator[Comparison]:
    """Only unpadded queries: padded ones see everything alike in the public code."""
    mask = keys_allowed(case)
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        encoding,
        q,
        k,
        mask=mask,
        rows=None if mask is None else mask[:, 0, 0],
        project=project,
    )


@check("transformers", "DebertaModel", (*LATER, "embedding_output"))
def deberta(case: Case) -> Iterator[Comparison]:
    """Version 1: one fused projection, laid out head by head as (q, k, v); keys have no bias."""
    config, w, prefix = case.config, case.weights, "encoder.layer.0.attention.self"
    assert config["relative_attention"] and not config.get("talking_head"), "not rebuilt here"
    x, num_heads = case.outputs["embedding_output"], config["num_attention_heads"]
    q, k, _ = heads(F.linear(x, w[f"{prefix}.in_proj.weight"]), num_heads).chunk(3, -1)
    q = q + w[f"{prefix}.q_bias"].view(num_heads, 1, -1)
    size = config["max_relative_positions"]
    encoding = locant.load(
        "deberta",
        num_heads=num_heads,
        head_dim=q.shape[-1],
        model_dim=x.shape[-1],
        clip=size if size > 0 else config["max_position_embeddings"],
        c2p="c2p" in config["pos_att_type"],
        p2c="p2c" in config["pos_att_type"],
    )
    names = {
        "key_projection.weight": "pos_proj.weight",
        "query_projection.weight": "pos_q_proj.weight",
        "query_projection.bias": "pos_q_proj.bias",
    }
    own = {ours: w[f"{prefix}.{theirs}"] for ours, theirs in names.items() if f"{prefix}.{theirs}" in w}
    yield from deberta_weights(case, with_state(encoding, table=w["encoder.rel_embeddings.weight"], **own), q, k)


@check("transformers", "DebertaV2Model", (*LATER, "embedding_output"))
def deberta_v2(case: Case) -> Iterator[Comparison]:
    """Version 2: logarithmic buckets, LayerNorm on the table and shared projections are options of the host.

    Projections of its own serve the table through the layer's hooks: version 2 gives the key one a bias.
    """
    config, w, prefix = case.config, case.weights, "encoder.layer.0.attention.self"
    assert config["relative_attention"], "not rebuilt here"
    x, num_heads = case.outputs["embedding_output"], config["num_attention_heads"]
    q, k = (heads(linear(w, f"{prefix}.{part}_proj", x), num_heads) for part in ("query", "key"))
    far = config["max_relative_positions"]
    far = far if far > 0 else config["max_position_embeddings"]
    buckets = config["position_buckets"]
    normed = "layer_norm" in config["norm_rel_ebd"]
    encoding = locant.load(
        "deberta",
        version="v2",
        num_heads=num_heads,
        head_dim=q.shape[-1],
        model_dim=x.shape[-1],
        max_length=far,
        clip=buckets if buckets > 0 else far,
        log_buckets=buckets > 0,
        c2p="c2p" in config["pos_att_type"],
        p2c="p2c" in config["pos_att_type"],
        layer_norm=normed,
        layer_norm_eps=config["layer_norm_eps"],
    )
    table = {"table": w["encoder.rel_embeddings.weight"]}
    if normed:
        table |= {f"norm__{name}": w[f"encoder.LayerNorm.{name}"] for name in ("weight", "bias")}
    own = "" if config["share_att_key"] else "pos_"
    project = {
        f"project_{part}": lambda rows, part=part: linear(w, f"{prefix}.{own}{part}_proj", rows)
        for part in ("query", "key")
    }
    yield from deberta_weights(case, with_state(encoding, **table), q, k, **project)
