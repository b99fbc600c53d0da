"""Tiny models of every family that analyses read, and heads built to do a known thing."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

import locant.hf
from tests.hf_models import BERT_SIZES, HEADS, HOSTS, LAYERS, ROWS, T5_SIZES, VOCABULARY, WIDTH, attached, host, stir

_DISENTANGLED: dict[str, Any] = dict(**BERT_SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"])


def _bart() -> Any:
    sizes: dict[str, Any] = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDES.items()}
    return T.BartForConditionalGeneration(
        T.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=ROWS, scale_embedding=True, **sizes)
    )


SIDES = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 37}


def _opt(before: bool = True) -> Any:
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=37)
    return T.OPTForCausalLM(
        T.OPTConfig(
            **sizes,
            num_attention_heads=HEADS,
            max_position_embeddings=ROWS,
            word_embed_proj_dim=18,
            do_layer_norm_before=before,
        )
    )


EXTRA = {
    "bart": _bart,
    "opt": _opt,
    "opt-post": lambda: _opt(before=False),
    "mpnet": lambda: T.MPNetModel(T.MPNetConfig(**{**BERT_SIZES, "max_position_embeddings": ROWS + 2})),
    "deberta": lambda: T.DebertaModel(T.DebertaConfig(**_DISENTANGLED)),
    "deberta-v2": lambda: T.DebertaV2Model(
        T.DebertaV2Config(**_DISENTANGLED, share_att_key=True, position_buckets=6, norm_rel_ebd="layer_norm")
    ),
    "t5-full": lambda: T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)),
    "bert-mlm": lambda: T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)),
    "mistral": lambda: T.MistralModel(
        T.MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=LAYERS,
            intermediate_size=37,
            max_position_embeddings=ROWS,
        )
    ),
}
FAMILIES = (*HOSTS, *EXTRA)


def family(name: str) -> Any:
    """A tiny model of a family, its weights uneven."""
    if name in HOSTS:
        return host(name)
    torch.manual_seed(0)
    return stir(EXTRA[name](), seed=1).eval()


def looking_at_neighbors() -> Any:
    """BERT whose heads look at the previous token, the next one, and everywhere; words and weights do not matter."""
    model = host("bert")
    locant.hf.attach(model, "t5")
    with torch.no_grad():
        for module in model.modules():
            for name in ("query", "key"):
                if hasattr(module, name):
                    getattr(module, name).weight.zero_()
                    getattr(module, name).bias.zero_()
        table = attached(model).encodings[0].table
        table.zero_()
        table[0, 1], table[1, 17] = 20.0, 20.0  # bucket 1: offset -1; bucket 17: offset +1
    return model
