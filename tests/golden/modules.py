"""Set A, single modules and functions of public libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import locant
from locant.encodings.alibi import slopes
from locant.encodings.xlnet import XLNet
from locant.terms import LogBucket, PairBias, RelativeBias, SignedLogBucket
from tests.golden.cases import Case, Comparison
from tests.golden.parts import compare_weights, heads, linear, merge, run_attention, with_state
from tests.golden.registry import check


def understands(case: Case, *names: str) -> None:
    """Refuse a case whose configuration says something that the check does not know."""
    unknown = set(case.config) - set(names)
    assert not unknown, f"{case.id}: nobody here knows what {sorted(unknown)} means for {' | '.join(case.key)}"


def bias_of(encoding: locant.Encoding, positions: locant.Positions) -> Tensor:
    """The content-free bias of an encoding, [H I J] (or [B H I J])."""
    positions = encoding.prepare(positions)
    nothing = torch.zeros(1, 1, 1, 1)
    (term,) = encoding.terms(positions, locant.Layer(nothing, nothing))
    assert isinstance(term, RelativeBias | PairBias)
    bias = term.pairs(positions) if isinstance(term, RelativeBias) else term.tensor(positions)
    return bias[0] if bias.shape[0] == 1 else bias


# Attention modules


def attention_module(
    case: Case, encoding: locant.Encoding, qkv: tuple[str, str, str], out: str, num_heads: int, mask: Tensor | None
) -> Iterator[Comparison]:
    """Weights and output of a whole attention module."""
    x = case.inputs["hidden_states"]
    q, k, v = (heads(linear(case.weights, name, x), num_heads) for name in qkv)
    expected = case.outputs
    given: dict[str, Any] = dict(positions=locant.Positions.arange(x.shape[1]), mask=mask)
    for backend in ("reference", "auto"):
        attended = run_attention(encoding, q, k, v, backend=backend, **given)
        yield Comparison(
            f"attn_output (by {backend})", linear(case.weights, out, merge(attended)), expected["attn_output"]
        )
    weights = run_attention(encoding, q, k, v, backend="reference", return_weights=True, **given)
    yield Comparison("attn_probs (by reference)", weights, expected["attn_probs"])
    if not getattr(encoding, "values", False):
        yield from compare_weights("attn_probs", expected["attn_probs"], encoding, q, k, mask=mask)


def additive(case: Case) -> Tensor | None:
    """An additive mask as True = may attend."""
    return case.inputs["additive_mask"] == 0 if "additive_mask" in case.inputs else None


@check("transformers", "Wav2Vec2BertSelfAttention")
def wav2vec2_bert(case: Case) -> Iterator[Comparison]:
    """Shaw's key form with its own limit on each side, or Transformer-XL in both directions."""
    num_heads, model_dim = case.config["num_attention_heads"], case.config["hidden_size"]
    sizes = dict(num_heads=num_heads, head_dim=model_dim // num_heads, model_dim=model_dim)
    kind = case.config.get("position_embeddings_type", "relative_key")
    if kind == "relative_key":
        left, right = (case.config[f"{side}_max_position_embeddings"] for side in ("left", "right"))
        clip = max(left, right)
        rows = torch.arange(-clip, clip + 1).clamp(-left, right) + left
        encoding = locant.load("shaw", **sizes, clip=clip)
        encoding = with_state(encoding, table=case.weights["distance_embedding.weight"][rows][None])
    else:
        assert kind == "relative", f"{case.id}: position_embeddings_type {kind!r} is not rebuilt here"
        encoding = XLNet(**sizes, layout="interleaved")
        encoding = with_state(
            encoding,
            projection=case.weights["linear_pos.weight"],
            content_bias=case.weights["pos_bias_u"],
            position_bias=case.weights["pos_bias_v"],
        )
        waves = encoding.waves(case.inputs["hidden_states"].shape[1] - 1)
        yield Comparison("relative_position_embeddings", waves[None], case.inputs["relative_position_embeddings"])
    names = ("linear_q", "linear_k", "linear_v")
    yield from attention_module(case, encoding, names, "linear_out", num_heads, additive(case))


@check("transformers", "VitsAttention")
def vits(case: Case) -> Iterator[Comparison]:
    """Shaw's key and value forms, nothing outside the window."""
    understands(case, "hidden_size", "num_attention_heads", "window_size")
    num_heads, window = case.config["num_attention_heads"], case.config["window_size"]
    width = case.config["hidden_size"] // num_heads
    encoding = locant.load("shaw", num_heads=num_heads, head_dim=width, clip=window, values=True, outside="zero")
    encoding = with_state(encoding, table=case.weights["emb_rel_k"], value_table=case.weights["emb_rel_v"])
    yield from attention_module(case, encoding, ("q_proj", "k_proj", "v_proj"), "out_proj", num_heads, additive(case))


@check("OpenNMT-py", "onmt.modules.MultiHeadedAttention")
def opennmt(case: Case) -> Iterator[Comparison]:
    """Shaw's key and value forms from one clipped table; True in the public mask means ignore."""
    understands(case, "head_count", "max_relative_positions", "model_dim")
    num_heads, clip = case.config["head_count"], case.config["max_relative_positions"]
    width = case.config["model_dim"] // num_heads
    encoding = locant.load("shaw", num_heads=num_heads, head_dim=width, clip=clip, values=True, tie_kv=True)
    encoding = with_state(encoding, table=case.weights["relative_positions_embeddings.weight"][None])
    ignored = case.inputs.get("key_padding_mask")
    mask = None if ignored is None else ~ignored[:, None]
    names = ("linear_query", "linear_keys", "linear_values")
    yield from attention_module(case, encoding, names, "final_linear", num_heads, mask)


# Bucket tables


@check("transformers", "T5Attention._relative_position_bucket")
def t5_buckets(case: Case) -> Iterator[Comparison]:
    """One table for each setting, which its name states."""
    for name, expected in case.outputs.items():
        setting = re.fullmatch(r"bidirectional_([01])_buckets_(\d+)_max_(\d+)", name)
        assert setting, f"{case.id}: {name!r} names no setting"
        both, num_buckets, max_distance = map(int, setting.groups())
        rule = LogBucket(num_buckets, max_distance, causal=not both)
        yield Comparison(name, rule.row(case.inputs["relative_position"]), expected)


@check("transformers", "make_log_bucket_position")
def deberta_buckets(case: Case) -> Iterator[Comparison]:
    """Signed buckets of query - key, before the table's offset and clamp, and the row of the table."""
    distance = case.inputs["relative_position"]
    for name, expected in case.outputs.items():
        setting = re.fullmatch(r"buckets_(\d+)_max_(\d+)", name)
        assert setting, f"{case.id}: {name!r} names no setting"
        size, far = map(int, setting.groups())
        rule = SignedLogBucket(size, far)
        yield Comparison(name, rule.bucket(distance), expected)
        yield Comparison(f"{name} (row)", rule.row(-distance), (expected + size).clamp(0, 2 * size - 1))


# x-transformers


@check("x-transformers", "AbsolutePositionalEmbedding")
def xt_absolute(case: Case) -> Iterator[Comparison]:
    """The table times dim**-0.5; with a start, ids count from there and stay at 0 before it."""
    understands(case, "dim", "length", "max_seq_len")
    table = case.weights["emb.weight"]
    dim, length = case.config["dim"], case.config["length"]
    encoding = locant.load("absolute", model_dim=dim, max_length=case.config["max_seq_len"])
    encoding = with_state(encoding, table=table * dim**-0.5)
    nothing = torch.zeros(length, dim)
    plain = encoding.embed(nothing[None], locant.Positions.arange(length))
    yield Comparison("embedding", plain[0], case.outputs["embedding"])
    if "seq_start_pos" in case.inputs:
        starts = case.inputs["seq_start_pos"]
        ids = (torch.arange(length) - starts[:, None]).clamp(min=0)
        padded = encoding.embed(nothing.expand(len(ids), -1, -1), locant.Positions.from_ids(ids))
        yield Comparison("embedding_left_padded", padded, case.outputs["embedding_left_padded"])


@check("x-transformers", "ScaledSinusoidalEmbedding")
def xt_sinusoidal(case: Case) -> Iterator[Comparison]:
    """Sines, then cosines, times a learned number."""
    understands(case, "dim", "length", "offset", "theta")
    encoding = locant.load(
        "sinusoidal", model_dim=case.config["dim"], base=float(case.config["theta"]), layout="halves"
    )
    ids = torch.arange(case.config["length"]) + case.config["offset"]
    positions = locant.Positions.from_ids(ids)
    waves = encoding.embed(torch.zeros(1, len(ids), case.config["dim"]), positions)[0]
    yield Comparison("embedding_unscaled", waves, case.outputs["embedding_unscaled"])
    yield Comparison("embedding", waves * case.weights["scale"], case.outputs["embedding"])


@check("x-transformers", "AlibiPositionalBias")
def xt_alibi(case: Case) -> Iterator[Comparison]:
    """Left and right alike; heads beyond ``heads`` get nothing."""
    understands(case, "heads", "total_heads", "query_length", "key_length")
    num_heads = case.config["heads"]
    positions = locant.Positions.arange(case.config["query_length"], case.config["key_length"])
    bias = bias_of(locant.load("alibi", num_heads=num_heads), positions)
    without = bias.new_zeros(case.config["total_heads"] - num_heads, *bias.shape[1:])
    yield Comparison("bias", torch.cat((bias, without)), case.outputs["bias"])
    yield Comparison("slopes", torch.tensor(slopes(num_heads)), case.outputs["slopes"].flatten()[:num_heads])


@check("x-transformers", "RelativePositionBias")
def xt_t5_bias(case: Case) -> Iterator[Comparison]:
    """T5's buckets, times a number."""
    understands(case, "heads", "query_length", "key_length", "num_buckets", "max_distance", "causal", "scale")
    config = case.config
    options = {name: config[name] for name in ("num_buckets", "max_distance", "causal")}
    encoding = locant.load("t5", num_heads=config["heads"], **options)
    encoding = with_state(encoding, table=case.weights["relative_attention_bias.weight"].T * config["scale"])
    positions = locant.Positions.arange(config["query_length"], config["key_length"])
    yield Comparison("bias", bias_of(encoding, positions), case.outputs["bias"])


@check("x-transformers", "RotaryEmbedding/apply_rotary_pos_emb")
def xt_rotary(case: Case) -> Iterator[Comparison]:
    """Neighboring pairs of the first channels turn."""
    understands(case, "head_dim", "rotary_dim", "theta", "base")
    width, base = case.config["rotary_dim"], float(case.config.get("theta", case.config.get("base", 10000)))
    encoding = locant.load("rope", head_dim=case.config["head_dim"], rotary_dim=width, base=base, layout="interleaved")
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    yield Comparison("inv_freq", frequencies, case.weights["inv_freq"])
    x, positions = case.inputs["x"], locant.Positions.from_ids(case.inputs["positions"])
    rotated, _ = encoding.query_key(x, x, positions)
    yield Comparison("rotated", rotated, case.outputs["rotated"])
