"""Every architecture of transformers with a tiny random configuration: config fields shrunk by rule, corrected by row."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

WIDTH, HEADS, GROUPS, HEAD, VOCABULARY, ROWS = 48, 6, 2, 8, 61, 64

# (pattern of a field's whole name, its tiny value); the first that matches decides.
RULES: tuple[tuple[str, Any], ...] = (
    (r".*vocab(ulary)?_size.*|codebook_size|num_embeddings|audio_vocab_size", VOCABULARY),
    (
        r"(num_|n_)?(key_value_heads|kv_heads|query_groups)|num_kv_heads|multi_query_group_num|.*num_key_value_heads",
        GROUPS,
    ),
    (r".*(attention_heads|num_heads|n_heads?|attn_heads)|num_attn_heads", HEADS),
    (
        r"(.*_)?num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|layers|depth|num_blocks|.*_layers_num",
        2,
    ),
    (
        r"(attn_|attention_)?head_dim|d_kv|.*attention_head_(size|dim)|v_head_dim|qk_(rope|nope)_head_dim|global_head_dim",
        HEAD,
    ),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank", 16),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|model_dim|hidden_dim|.*_hidden_(size|dim)|.*_embed_dim|width", WIDTH),
    (r"embedding_size|word_embed_proj_dim|emb_dim|out_hidden_size|projection_dim|.*_proj(ection)?_dim", WIDTH),
    (r".*moe_intermediate_size|expert_dim", 16),
    (r".*intermediate_(size|dim)|.*ffn_dim|d_ff|n_inner|mlp_dim|.*ffn_hidden_size|.*feedforward_dim|d_inner", 40),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k|experts_top_k|moe_k|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_groups?", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq(uence)?_len(gth)?", ROWS),
    (r"image_size|img_size|pretrain_image_size|crop_size", 16),
    (r"patch_size|encoder_stride", 4),
    (r"sliding_window(_size)?|attention_chunk_size|local_attention", 4),
    (r"first_k_dense_replace", 1),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads", 4),
    (r"mamba_d_head|mamba_head_dim|linear_(key|value)_head_dim", 8),
)

# What the rules get wrong, by model type.
ROWS_BY_TYPE: dict[str, dict[str, Any]] = {}

# What a stack is called with beside the inputs that every stack of its kind takes, by class name.
INPUTS: dict[str, dict[str, Any]] = {}


def architectures() -> dict[str, str]:
    """Model type and class name of every architecture with an Auto class, base models first."""
    found: dict[str, str] = {}
    names = [n for n in dir(modeling_auto) if n.endswith("MAPPING_NAMES") and n.startswith("MODEL_")]
    for name in sorted(names, key=lambda n: (n != "MODEL_MAPPING_NAMES", "CAUSAL_LM" not in n, n)):
        for model_type, classes in getattr(modeling_auto, name).items():
            found.setdefault(model_type, classes if isinstance(classes, str) else classes[0])
    return {k: found[k] for k in sorted(found) if k in CONFIG_MAPPING}


def shrunk(name: str, value: Any) -> Any:
    """The tiny value of one config field, or the value as it is."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, tiny in RULES:
        if re.fullmatch(pattern, name):
            return min(tiny, value) if value > 0 else value
    if name.endswith(("_token_id", "_token_index", "_id")) and value >= VOCABULARY:
        return 5 + sum(map(ord, name)) % 50
    return value


def _layer_types(fields: dict[str, Any], defaults: PretrainedConfig) -> dict[str, Any]:
    if isinstance(getattr(type(defaults), "layer_types", None), property):
        return {}
    kinds = getattr(defaults, "layer_types", None)
    if not isinstance(kinds, (list, tuple)) or not kinds or not all(isinstance(k, str) for k in kinds):
        return {}
    distinct = list(dict.fromkeys(kinds))
    chosen = distinct if len(distinct) > 1 else distinct * 2
    given: dict[str, Any] = {"layer_types": chosen}
    for count in ("num_hidden_layers", "n_layer", "num_layers"):
        if hasattr(defaults, count):
            given[count] = len(chosen)
    return given


def tiny_fields(cls: type[PretrainedConfig]) -> dict[str, Any]:
    """Constructor arguments of a tiny configuration."""
    defaults = cls()
    fields: dict[str, Any] = {}
    for name, value in vars(defaults).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, PretrainedConfig):
            fields[name] = {**tiny_fields(type(value)), "model_type": value.model_type}
        elif (small := shrunk(name, value)) is not value:
            fields[name] = small
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = HEADS
    return {**fields, **_layer_types(fields, defaults), **ROWS_BY_TYPE.get(cls.model_type, {})}


def tiny_config(model_type: str) -> PretrainedConfig:
    """A tiny configuration of a model type."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**tiny_fields(cls))


def model_class(name: str) -> Any:
    """A model class of transformers by name."""
    import transformers

    return getattr(transformers, name)


def parameter_count(model_type: str, name: str) -> int:
    """Number of parameters of the tiny model, without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(name)(tiny_config(model_type)).parameters())
