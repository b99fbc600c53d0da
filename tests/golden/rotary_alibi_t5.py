"""Set A, whole models, continued: ALiBi and rotary positions, and T5 on both sides."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

import locant
from tests.golden.cases import Case, Comparison
from tests.golden.parts import (
    NOTHING,
    compare_weights,
    counted,
    heads,
    keys_allowed,
    layer_norm,
    linear,
    merge,
    rms_norm,
    run_attention,
    with_state,
)
from tests.golden.registry import LATER, check

T5_ATOL = 3e-5  # T5 does not divide by sqrt(D): larger logits


# Decoders with ALiBi or rotary positions


@check("transformers", "BloomModel", (*LATER, "embedding_output"))
def bloom(case: Case) -> Iterator[Comparison]:
    """ALiBi on positions counted over the real tokens."""
    config, w, x = case.config, case.weights, case.outputs["embedding_output"]
    x = layer_norm(w, "h.0.input_layernorm", x, config["layer_norm_epsilon"])
    fused = linear(w, "h.0.self_attention.query_key_value", x)
    q, k, _ = fused.unflatten(-1, (config["n_head"], 3, -1)).permute(3, 0, 2, 1, 4)
    mask = case.inputs.get("attention_mask", torch.ones(x.shape[:2])).bool()
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        locant.load("alibi", num_heads=config["n_head"]),
        q,
        k,
        count=lambda queries, keys: locant.Positions.from_mask(mask[:, :keys], queries),
        mask=mask[:, None, None],
        causal=True,
        rows=mask,
    )


@check("transformers", "MptModel", (*LATER, "embedding_output"))
def mpt(case: Case) -> Iterator[Comparison]:
    """ALiBi without any bias in the host's layers; the class ignores its own alibi_bias_max and always takes 8."""
    config, w, x = case.config, case.weights, case.outputs["embedding_output"]
    attention = config["attn_config"]
    x = layer_norm(w, "blocks.0.norm_1", x, config["layer_norm_epsilon"])
    fused = linear(w, "blocks.0.attn.Wqkv", x)
    if attention["clip_qkv"]:
        fused = fused.clamp(-attention["clip_qkv"], attention["clip_qkv"])
    q, k, _ = (heads(part, config["n_heads"]) for part in fused.chunk(3, -1))
    mask = keys_allowed(case)
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        locant.load("alibi", num_heads=config["n_heads"]),
        q,
        k,
        mask=mask,
        causal=True,
        scale=attention["softmax_scale"],
        rows=None if mask is None else mask[:, 0, 0],
    )


@check("transformers", "LlamaModel", (*LATER, "embedding_output"))
def llama(case: Case) -> Iterator[Comparison]:
    """Rotary positions in two halves, grouped queries; ids count from 0 whatever is padded."""
    config, w, prefix = case.config, case.weights, "layers.0.self_attn"
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "default", f"rope_type {rope['rope_type']} is not rebuilt here"
    x = rms_norm(w, "layers.0.input_layernorm", case.outputs["embedding_output"], config["rms_norm_eps"])
    q = heads(linear(w, f"{prefix}.q_proj", x), config["num_attention_heads"])
    k = heads(linear(w, f"{prefix}.k_proj", x), config["num_key_value_heads"])
    mask = keys_allowed(case)
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        locant.load("rope", head_dim=q.shape[-1], base=rope["rope_theta"], layout="halves"),
        q,
        k,
        count=counted(case),
        mask=mask,
        causal=True,
        rows=None if mask is None else mask[:, 0, 0],
    )


@check("transformers", "RoFormerModel", (*LATER, "embedding_output"))
def roformer(case: Case) -> Iterator[Comparison]:
    """Rotary positions in neighboring pairs."""
    x, num_heads = case.outputs["embedding_output"], case.config["num_attention_heads"]
    if "embeddings_project.weight" in case.weights:
        x = linear(case.weights, "embeddings_project", x)
    parts = (f"encoder.layer.0.attention.self.{part}" for part in ("query", "key"))
    q, k = (heads(linear(case.weights, part, x), num_heads) for part in parts)
    yield from compare_weights(
        "attentions.0",
        case.outputs["attentions.0"],
        locant.load("rope", head_dim=q.shape[-1], layout="interleaved"),
        q,
        k,
        mask=keys_allowed(case),
        causal=case.config.get("is_decoder", False),
    )


# T5


def t5_bias(case: Case, side: str) -> locant.Encoding:
    """The stored bias table of the encoder or the decoder."""
    table = case.weights[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].T
    encoding = locant.load(
        "t5",
        num_heads=case.config["num_heads"],
        num_buckets=case.config["relative_attention_num_buckets"],
        max_distance=case.config["relative_attention_max_distance"],
        causal=side == "decoder",
    )
    return with_state(encoding, table=table)


def t5_projected(case: Case, prefix: str, part: str, x: Tensor) -> Tensor:
    """One of q, k, v."""
    return heads(linear(case.weights, f"{prefix}.{part}", x), case.config["num_heads"])


def t5_normed(case: Case, name: str, x: Tensor) -> Tensor:
    """T5's norm before each part."""
    return rms_norm(case.weights, name, x, case.config["layer_norm_epsilon"])


def t5_self(case: Case, side: str, tokens: str, output: str, mask: Tensor | None) -> Iterator[Comparison]:
    """Self-attention of the first block."""
    x = F.embedding(case.inputs[tokens], case.weights["shared.weight"])
    if "embedding_output" in case.outputs and side == "encoder":
        yield Comparison("embedding_output", x, case.outputs["embedding_output"])
    x, prefix = t5_normed(case, f"{side}.block.0.layer.0.layer_norm", x), f"{side}.block.0.layer.0.SelfAttention"
    q, k = (t5_projected(case, prefix, part, x) for part in "qk")
    causal, encoding = side == "decoder", t5_bias(case, side)
    yield from compare_weights(
        output, case.outputs[output], encoding, q, k, mask=mask, causal=causal, scale=1.0, atol=T5_ATOL
    )


def t5_cross(case: Case) -> Iterator[Comparison]:
    """Cross-attention of the first block has no position term."""
    x = F.embedding(case.inputs["decoder_input_ids"], case.weights["shared.weight"])
    normed, prefix = t5_normed(case, "decoder.block.0.layer.0.layer_norm", x), "decoder.block.0.layer.0.SelfAttention"
    q, k, v = (t5_projected(case, prefix, part, normed) for part in "qkv")
    attended = run_attention(
        t5_bias(case, "decoder"),
        q,
        k,
        v,
        positions=locant.Positions.arange(x.shape[1]),
        mask=keys_allowed(case, "decoder_attention_mask"),
        causal=True,
        scale=1.0,
        backend="auto",
    )
    x = x + linear(case.weights, f"{prefix}.o", merge(attended))
    prefix = "decoder.block.0.layer.1.EncDecAttention"
    q = t5_projected(case, prefix, "q", t5_normed(case, "decoder.block.0.layer.1.layer_norm", x))
    k = t5_projected(case, prefix, "k", case.outputs["encoder_last_hidden_state"])
    ids = locant.Positions.from_ids(torch.arange(q.shape[2]), torch.arange(k.shape[2]))
    yield from compare_weights(
        "cross_attentions.0",
        case.outputs["cross_attentions.0"],
        NOTHING,
        q,
        k,
        count=lambda queries, keys: ids,
        mask=keys_allowed(case),
        scale=1.0,
        atol=T5_ATOL,
    )


@check("transformers", "T5EncoderModel", LATER)
def t5_encoder(case: Case) -> Iterator[Comparison]:
    """Buckets on both sides, no 1/sqrt(D)."""
    yield from t5_self(case, "encoder", "input_ids", "attentions.0", keys_allowed(case))


@check("transformers", "T5Model", ("*attentions.[1-9]*", "*last_hidden_state*"))
def t5(case: Case) -> Iterator[Comparison]:
    """The decoder's buckets serve the past only."""
    yield from t5_self(case, "encoder", "input_ids", "encoder_attentions.0", keys_allowed(case))
    mask = keys_allowed(case, "decoder_attention_mask")
    yield from t5_self(case, "decoder", "decoder_input_ids", "decoder_attentions.0", mask)
    yield from t5_cross(case)
