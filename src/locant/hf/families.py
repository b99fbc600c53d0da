"""Model families as data: where a host keeps its layers, its projections and the positions it brings of its own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from locant.hf.search import ROTARY_NAMES, TABLE_NAMES, generic_sites
from locant.hf.site import Family, Site, calls_interface, class_names, embedding, is_cross, paths_above, size

__all__ = [
    "FAMILIES",
    "ROTARY_NAMES",
    "TABLE_NAMES",
    "Family",
    "Site",
    "calls_interface",
    "class_names",
    "embedding",
    "find_sites",
    "is_cross",
    "paths_above",
    "size",
]

_BERT_TABLE = "embeddings.position_embeddings"

FAMILIES: tuple[Family, ...] = (
    Family("bert", ("BertModel",), ("BertSelfAttention",), ("query", "key"), ("BertEncoder",), table=_BERT_TABLE),
    Family(
        "roberta",
        ("RobertaModel",),
        ("RobertaSelfAttention",),
        ("query", "key"),
        ("RobertaEncoder",),
        table=_BERT_TABLE,
        padded_rows=True,
    ),
    Family(
        "electra",
        ("ElectraModel",),
        ("ElectraSelfAttention",),
        ("query", "key"),
        ("ElectraEncoder",),
        table=_BERT_TABLE,
    ),
    Family(
        "albert", ("AlbertModel",), ("AlbertAttention",), ("query", "key"), ("AlbertTransformer",), table=_BERT_TABLE
    ),
    Family(
        "distilbert",
        ("DistilBertModel",),
        ("DistilBertSelfAttention",),
        ("q_lin", "k_lin"),
        ("Transformer",),
        table=_BERT_TABLE,
    ),
    Family("gpt2", ("GPT2Model",), ("GPT2Attention",), ("c_attn",), table="wpe"),
    Family("llama", ("LlamaModel",), ("LlamaAttention",), ("q_proj", "k_proj"), rotary="rotary_emb"),
    Family("t5", ("T5Stack",), ("T5Attention",), ("q", "k"), bias="relative_attention_bias"),
)


def find_sites(model: nn.Module) -> list[Site]:
    """The stacks of a model that an encoding can be attached to.

    Raises: ValueError where there is none, with what was looked for.
    """
    sites = list(_known_sites(model)) or list(generic_sites(model))
    if not sites:
        raise ValueError(_nothing_found(model))
    return sites


def _known_sites(model: nn.Module) -> Iterator[Site]:
    found: list[str] = []
    for level in ("stacks", "encoders"):
        for path, module in model.named_modules():
            if any(path == f or path.startswith(f"{f}." if f else "") for f in found):
                continue
            for family in FAMILIES:
                if not set(getattr(family, level)) & set(class_names(module)):
                    continue
                attention = _self_attention(module, family.attention)
                if attention:
                    found.append(path)
                    yield Site(
                        path, module, family, attention, level == "stacks", _own(module, family, attention, level)
                    )
                    break


def _self_attention(stack: nn.Module, classes: tuple[str, ...]) -> tuple[tuple[str, nn.Module], ...]:
    return tuple(
        (path, module)
        for path, module in stack.named_modules()
        if set(classes) & set(class_names(module)) and not is_cross(path, module)
    )


def _own(
    stack: nn.Module, family: Family, attention: tuple[tuple[str, nn.Module], ...], level: str
) -> tuple[tuple[str, str], ...]:
    paths = dict(stack.named_modules())
    known = (("table", family.table), ("rotary", family.rotary)) if level == "stacks" else ()
    own = [(kind, path) for kind, path in known if path in paths]
    if family.bias:
        own += [("bias", f"{path}.{family.bias}") for path, module in attention if hasattr(module, family.bias)]
    return tuple(own)


def _nothing_found(model: nn.Module) -> str:
    attention = sorted({type(m).__name__ for _, m in model.named_modules() if "Attention" in type(m).__name__})
    without = f" It has {', '.join(attention[:4])}, which compute attention on their own." if attention else ""
    names = ", ".join(name for family in FAMILIES for name in family.stacks + family.encoders)
    return (
        f"attach: {type(model).__name__} has no self-attention that locant can serve; looked for the families "
        f"{', '.join(f.name for f in FAMILIES)} ({names}) and for a module with get_input_embeddings that takes "
        "input_ids, above modules whose forward calls ALL_ATTENTION_FUNCTIONS of transformers v5."
        f"{without} Give a model of a known family, or one on the attention interface"
    )
