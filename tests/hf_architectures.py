"""Every architecture of transformers with a tiny random configuration: fields shrunk by rule, corrected by row."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

WIDTH, HEADS, GROUPS, HEAD, VOCABULARY, ROWS = 48, 6, 2, 8, 61, 64

# (pattern of a field's whole name, its tiny value); the first that matches decides.
RULES: tuple[tuple[str, Any], ...] = (
    (r".*vocab(ulary)?_size.*|num_embeddings|audio_vocab_size", VOCABULARY),
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
    (r"rotary_dim", 4),
    (r"first_k_dense_replace", 1),
    (r"mamba_n_heads|mamba_num_heads|linear_num_(key|value)_heads", 4),
    (r"mamba_d_head|mamba_head_dim|linear_(key|value)_head_dim", 8),
)


def _axes(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


_MOE: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}

# What the rules get wrong, by model type.
ROWS_BY_TYPE: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8},
    "bailing_hybrid": _MOE,
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_head": 8},
    "bridgetower": {"text_config": {"hidden_size": 48, "num_attention_heads": 6}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "decision_transformer": {"max_ep_len": 64, "state_dim": 17, "act_dim": 4},
    "deepseek_v2": _MOE,
    "dots1": {"layer_types": ["full_attention", "sliding_attention"], "n_shared_experts": 1, "head_dim": HEAD, **_MOE},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 5, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_ssm": 96, "mamba_expand": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": 0.0,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "glm_image_text": _axes(2, 1, 1),
    "glm_ocr_text": _axes(2, 1, 1),
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 1.0,
        }
    },
    "glm4v_text": _axes(2, 1, 1),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "granite_speech5_encoder": {"context_size": 16, "num_mel_bins": 32},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_hidden_layers": 2,
        "mamba_n_heads": 12,
        "mamba_d_head": 8,
        "mamba_expand": 2,
    },
    "hunyuan_v1_dense": {"head_dim": HEAD},
    "hunyuan_v1_moe": {"head_dim": HEAD},
    "hunyuan_vl_text": {"head_dim": HEAD, **_axes(2, 1, 1)},
    "hy_v4_vl_text": _axes(2, 1, 1),
    "informer": {"prediction_length": 4, "context_length": 8},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_MOE, "num_experts": 4},
    "layoutlmv3": {"input_size": 16, "patch_size": 4, "visual_embed": False, "coordinate_size": 8, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    "mimo_v2_flash": {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": GROUPS, "swa_head_dim": HEAD},
    "ministral": {"head_dim": HEAD},
    "mistral4": {"head_dim": HEAD},
    "mobilebert": {"embedding_size": 48, "intra_bottleneck_size": 48, "true_hidden_size": 48},
    "moonshine": {
        "encoder_num_key_value_heads": HEADS,
        "decoder_num_key_value_heads": HEADS,
        "encoder_num_attention_heads": HEADS,
        "decoder_num_attention_heads": HEADS,
    },
    "nemotron": {"head_dim": HEAD, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "nemotron_h": _MOE,
    "paddleocr_vl_text": _axes(2, 1, 1),
    "qwen2_5_omni_text": _axes(2, 1, 1),
    "qwen2_5_vl_text": _axes(2, 1, 1),
    "qwen2_vl_text": _axes(2, 1, 1),
    "sam_mask_decoder": {"hidden_size": 48},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8},
    "yolos": {"image_size": [16, 16], "num_detection_tokens": 2},
}

# What a stack is called with beside the inputs that every stack of its kind takes, by class name.
INPUTS: dict[str, dict[str, Any]] = {
    "ASTModel": {"input_values": lambda c: torch.randn(2, c.max_length, c.num_mel_bins)},
    "Blip2QFormerModel": {"query_embeds": lambda c: torch.randn(2, 7, WIDTH)},
    "MimiEncoderModel": {"input_values": lambda c: torch.randn(2, 1, 1920)},
    "OmniASRAudioModel": {"input_values": lambda c: torch.randn(2, 1, 1600)},
    "PatchTSTEncoder": {"patch_input": lambda c: torch.randn(2, c.num_input_channels, 5, c.patch_length)},
    "Siglip2VisionModel": {
        "pixel_values": lambda c: torch.randn(2, 16, 3 * c.patch_size**2),
        "pixel_attention_mask": lambda c: torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": lambda c: torch.tensor([[4, 4], [4, 4]]),
    },
    "UdopStack": {"bbox": lambda c: torch.zeros(2, 7, 4)},
    "VideoLlama3VisionModel": {"merge_sizes": lambda c: torch.tensor([1])},
    "VideoMAEModel": {"pixel_values": lambda c: torch.randn(2, c.num_frames, 3, 16, 16)},
    "VivitModel": {"pixel_values": lambda c: torch.randn(2, c.num_frames, 3, 16, 16)},
    "Wav2Vec2BertModel": {"input_features": lambda c: torch.randn(2, 12, c.feature_projection_input_dim)},
}


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
    if isinstance(mlps := getattr(defaults, "mlp_layer_types", None), (list, tuple)):
        given["mlp_layer_types"] = (list(dict.fromkeys(mlps)) * len(chosen))[: len(chosen)]
    return given


def tiny_fields(cls: type[PretrainedConfig]) -> dict[str, Any]:
    """Constructor arguments of a tiny configuration."""
    defaults = cls()
    fields: dict[str, Any] = {}
    for name, value in vars(defaults).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "dtype"):
            continue
        if isinstance(value, dict) and "mrope_section" in value:
            fields[name] = {**value, "mrope_section": [2, 1, 1]}
        elif isinstance(value, PretrainedConfig):
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
