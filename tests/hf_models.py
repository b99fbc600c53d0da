"""Tiny Hugging Face models with odd sizes, and what the tests of locant.hf have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn

import locant.hf
from locant.hf.attachment import attachments
from locant.hf.record import fingerprint

VOCABULARY, HEADS, LAYERS, WIDTH, ROWS = 43, 3, 2, 24, 29

BERT_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    num_hidden_layers=LAYERS,
    intermediate_size=37,
    max_position_embeddings=ROWS,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LLAMA_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_hidden_layers=LAYERS,
    intermediate_size=37,
    max_position_embeddings=ROWS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
T5_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=WIDTH,
    d_kv=10,
    num_heads=HEADS,
    num_layers=LAYERS,
    d_ff=37,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)


def _bert(**sizes: Any) -> nn.Module:
    return T.BertModel(T.BertConfig(**{**BERT_SIZES, **sizes}))


def _roberta() -> nn.Module:
    return T.RobertaModel(T.RobertaConfig(**{**BERT_SIZES, "max_position_embeddings": ROWS + 2, "pad_token_id": 1}))


def _electra() -> nn.Module:
    return T.ElectraModel(T.ElectraConfig(**BERT_SIZES, embedding_size=14))


def _albert() -> nn.Module:
    return T.AlbertModel(T.AlbertConfig(**{**BERT_SIZES, "num_hidden_layers": 3}, embedding_size=14))


def _distilbert() -> nn.Module:
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, dim=WIDTH, n_heads=HEADS, n_layers=LAYERS, hidden_dim=37)
    return T.DistilBertModel(
        T.DistilBertConfig(**sizes, max_position_embeddings=ROWS, dropout=0.0, attention_dropout=0.0)
    )


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = dict(vocab_size=VOCABULARY, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=ROWS)
    tokens: dict[str, Any] = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return T.GPT2LMHeadModel(T.GPT2Config(**sizes, **tokens, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _llama() -> nn.Module:
    return T.LlamaForCausalLM(T.LlamaConfig(**LLAMA_SIZES))


def _t5_encoder() -> nn.Module:
    return T.T5EncoderModel(T.T5Config(**T5_SIZES))


HOSTS: dict[str, Callable[..., Any]] = {
    "bert": _bert,
    "roberta": _roberta,
    "electra": _electra,
    "albert": _albert,
    "distilbert": _distilbert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5_encoder,
}


def stir(model: Any, seed: int = 0, std: float = 0.25) -> Any:
    """Add noise to every parameter, so that nothing is neutral and positions matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def host(name: str, **sizes: Any) -> Any:
    """A tiny model of a family, with weights that make attention uneven."""
    torch.manual_seed(0)
    return stir(HOSTS[name](**sizes), seed=1).eval()


def noisy(model: Any, name: Any, seed: int = 3, **options: Any) -> Any:
    """Attach, and move every added parameter away from neutral."""
    torch.manual_seed(seed)
    locant.hf.attach(model, name, **options)
    for _, _, attachment in attachments(model):
        stir(attachment, seed)
    return model


def remark(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a folder's weights (other ones, if given) as those of the record that is there, whatever it is."""
    whole = (folder / "config.json").is_file()
    file = folder / ("model.safetensors" if whole else "locant.safetensors")
    record = json.loads((folder / ("config.json" if whole else "locant.json")).read_text())
    mark = fingerprint(record.get("locant") if whole else record)
    tensors = load_file(file) if tensors is None else tensors
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt", "locant": mark})


def attached(model: Any) -> Any:
    """The first attachment of a model."""
    return attachments(model)[0][2]


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids above all special ones."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def first(output: Any) -> torch.Tensor:
    """The main tensor of a model's output."""
    return output[0]
