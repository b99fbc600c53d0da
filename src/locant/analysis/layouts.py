"""Model families as data: where each keeps what an analysis of positions reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Projections = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # W_q [H*D M], b_q [H*D], W_k, b_k


@dataclass(frozen=True)
class Layout:
    """One family; paths are below the stack of layers, and a path that leads nowhere in a model is left out.

    ``stacks`` and ``attention``: class names. ``words``, ``table``, ``types``: embeddings that are added;
    ``scale_words``: a map of the words alone. ``steps``: what the sum passes on its way into the first attention, in
    order. ``step_flag``: a setting that must be true for the steps to come first. ``read``: the query and key weights
    of an attention module. ``bias``: a bucketed bias, below the stack or the first attention module. ``asks``: the
    family computes attention by itself and returns the weights only where asked.
    """

    name: str
    stacks: tuple[str, ...]
    attention: tuple[str, ...]
    read: Callable[[Any], Projections]
    words: str
    table: str | None = None
    types: str | None = None
    scale_words: str | None = None
    steps: tuple[str, ...] = ()
    step_flag: str | None = None
    bias: str | None = None
    asks: bool = False


def linear(query: str, key: str) -> Callable[[Any], Projections]:
    """Two linear modules."""

    def read(module: Any) -> Projections:
        q, k = getattr(module, query), getattr(module, key)
        return q.weight, q.bias, k.weight, k.bias

    return read


def packed(name: str) -> Callable[[Any], Projections]:
    """One module with weights (in, out), query, key and value side by side."""

    def read(module: Any) -> Projections:
        fused = getattr(module, name)
        (q, k, _), (b, c, _) = fused.weight.T.chunk(3), fused.bias.chunk(3)
        return q, b, k, c

    return read


def by_head(name: str, query_bias: str, heads: str) -> Callable[[Any], Projections]:
    """One linear module whose rows hold query, key and value of head after head; a bias for the query alone."""

    def read(module: Any) -> Projections:
        weight = getattr(module, name).weight.unflatten(0, (getattr(module, heads), 3, -1))
        return weight[:, 0].flatten(0, 1), getattr(module, query_bias), weight[:, 1].flatten(0, 1), None

    return read


_EMBEDDINGS = dict(
    words="embeddings.word_embeddings", table="embeddings.position_embeddings", types="embeddings.token_type_embeddings"
)
_NORM = "embeddings.LayerNorm"
_QUERY_KEY = linear("query", "key")
_PROJ = linear("q_proj", "k_proj")


def _like_bert(name: str, *stacks: str, attention: str, **more: Any) -> Layout:
    return Layout(name, stacks, (attention,), **{"read": _QUERY_KEY, **_EMBEDDINGS, "steps": (_NORM,), **more})


LAYOUTS: tuple[Layout, ...] = (
    _like_bert("bert", "BertModel", attention="BertSelfAttention"),
    _like_bert("roberta", "RobertaModel", attention="RobertaSelfAttention"),
    _like_bert("xlm-roberta", "XLMRobertaModel", attention="XLMRobertaSelfAttention"),
    _like_bert("camembert", "CamembertModel", attention="CamembertSelfAttention"),
    _like_bert("electra", "ElectraModel", attention="ElectraSelfAttention", steps=(_NORM, "embeddings_project")),
    _like_bert(
        "albert", "AlbertModel", attention="AlbertAttention", steps=(_NORM, "encoder.embedding_hidden_mapping_in")
    ),
    _like_bert("distilbert", "DistilBertModel", attention="DistilBertSelfAttention", read=linear("q_lin", "k_lin")),
    _like_bert(
        "mpnet",
        "MPNetModel",
        attention="MPNetSelfAttention",
        read=linear("q", "k"),
        bias="encoder.relative_attention_bias",
        asks=True,
    ),
    _like_bert(
        "deberta",
        "DebertaModel",
        attention="DisentangledSelfAttention",
        read=by_head("in_proj", "q_bias", "num_attention_heads"),
        steps=("embeddings.embed_proj", _NORM),
        asks=True,
    ),
    _like_bert(
        "deberta-v2",
        "DebertaV2Model",
        attention="DisentangledSelfAttention",
        read=linear("query_proj", "key_proj"),
        steps=("embeddings.embed_proj", _NORM),
        asks=True,
    ),
    Layout("gpt2", ("GPT2Model",), ("GPT2Attention",), packed("c_attn"), words="wte", table="wpe", steps=("h.0.ln_1",)),
    Layout(
        "opt",
        ("OPTDecoder",),
        ("OPTAttention",),
        _PROJ,
        words="embed_tokens",
        table="embed_positions",
        scale_words="project_in",
        steps=("layers.0.self_attn_layer_norm",),
        step_flag="do_layer_norm_before",
    ),
    Layout(
        "bart",
        ("BartEncoder", "BartDecoder"),
        ("BartAttention",),
        _PROJ,
        words="embed_tokens",
        table="embed_positions",
        steps=("layernorm_embedding",),
    ),
    Layout("llama", ("LlamaModel",), ("LlamaAttention",), _PROJ, words="embed_tokens"),
    Layout(
        "t5", ("T5Stack",), ("T5Attention",), linear("q", "k"), words="embed_tokens", bias="relative_attention_bias"
    ),
)
