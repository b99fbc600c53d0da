"""The models that are pre-trained: a table of sizes, and a row for each family of hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from locant.compare.fields import near
from locant.training.mlm import BuiltModel, EncodingChoice, assemble, check_shape


@dataclass(frozen=True)
class Size:
    """Depth, width, heads and width of the feed-forward layer."""

    num_layers: int
    model_dim: int
    num_heads: int
    hidden_dim: int


# base and large: Devlin et al. 2019; the others: Turc et al. 2019. GPT-2's authors call base `small`, large `medium`.
SIZES = {
    "tiny": Size(2, 128, 2, 512),
    "mini": Size(4, 256, 4, 1024),
    "small": Size(4, 512, 8, 2048),
    "base": Size(12, 768, 12, 3072),
    "large": Size(24, 1024, 16, 4096),
}


@dataclass(frozen=True)
class HostChoice:
    """A family at a size; what is not 0 takes the place of the size's own value."""

    family: str = "bert"
    size: str = "tiny"
    num_layers: int = 0
    model_dim: int = 0
    num_heads: int = 0
    hidden_dim: int = 0  # width of the feed-forward layer; 0: the size's, or four times a model_dim that is given
    embedding_dim: int = 0  # width of the token embeddings (albert, electra); 0: 128 for albert, model_dim for electra
    vocab_size: int = 0  # rows of the token embeddings; 0: as many as the tokenizer has tokens
    max_positions: int = 0  # rows of a learned position table; 0: the longest trained length
    dropout: float = 0.1  # of embeddings, attention weights and layer outputs
    init_std: float = 0.02  # of the matrices; meant for width 768: narrow models learn faster with more

    def __post_init__(self) -> None:
        for name in ("num_layers", "model_dim", "num_heads", "hidden_dim", "embedding_dim", "vocab_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (that of the size) or more")
        if self.max_positions < 0:
            raise ValueError(f"max_positions = {self.max_positions}, needed 0 (the longest trained length) or more")
        if self.family not in FAMILIES:
            raise ValueError(f"family = {self.family!r} is not a host; {near(self.family, FAMILIES)}")
        if self.size not in SIZES:
            raise ValueError(f"size = {self.size!r} is not a size; {near(self.size, SIZES)}")
        if self.embedding_dim and not FAMILIES[self.family].factorized:
            raise ValueError(
                f"embedding_dim = {self.embedding_dim} has no meaning for {self.family}, whose embeddings have the "
                "width of its layers; leave it out, or take albert or electra"
            )
        size = self.sizes
        check_shape(size.model_dim, size.num_heads, self.dropout, self.init_std)

    @property
    def sizes(self) -> Size:
        """The size with what was given in place of its own values."""
        row = SIZES[self.size]
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Size) if getattr(self, f.name)}
        if "model_dim" in given:
            given.setdefault("hidden_dim", 4 * self.model_dim)
        return dataclasses.replace(row, **given)


@dataclass(frozen=True)
class Shape(Size):
    """All that a config is made of."""

    embedding_dim: int
    vocab_size: int
    max_positions: int
    dropout: float
    init_std: float
    pad_id: int

    def fraction(self, share: float) -> Shape:
        """About that share of the width, in whole heads: ELECTRA's generator. Depth and embeddings stay."""
        heads = max(1, round(share * self.num_heads))
        width = heads * (self.model_dim // self.num_heads)
        hidden = max(1, round(self.hidden_dim * heads / self.num_heads))
        return dataclasses.replace(self, num_heads=heads, model_dim=width, hidden_dim=hidden)


@dataclass(frozen=True)
class Family:
    """One kind of host. ``predict`` turns hidden states [N M] into logits [N V]; ``table`` names its position table."""

    objective: str
    make: Callable[[Shape], Any]
    predict: Callable[[Any, Any], Any]
    table: str
    factorized: bool = False  # token embeddings may have a width of their own
    transform: bool = True  # a dense layer stands between hidden states and vocabulary


def shape_of(choice: HostChoice, tokens: int, length: int, pad_id: int) -> Shape:
    """The shape of a host for a tokenizer of so many tokens, trained at up to ``length``.

    Raises: ValueError for fewer embeddings than tokens, and fewer positions than the trained length.
    """
    if choice.vocab_size and choice.vocab_size < tokens:
        raise ValueError(
            f"pretrain: host.vocab_size = {choice.vocab_size}, but the tokenizer has {tokens} tokens; write "
            f"host.vocab_size = {tokens} or more, or 0 for automatic"
        )
    if choice.max_positions and choice.max_positions < length:
        raise ValueError(
            f"pretrain: host.max_positions = {choice.max_positions}, but windows have up to {length} tokens; write "
            f"host.max_positions = {length} or more, or 0 for automatic"
        )
    size = choice.sizes
    width = (choice.embedding_dim or (128 if choice.family == "albert" else 0)) or size.model_dim
    return Shape(
        **dataclasses.asdict(size),
        embedding_dim=width,
        vocab_size=choice.vocab_size or tokens,
        max_positions=choice.max_positions or length,
        dropout=choice.dropout,
        init_std=choice.init_std,
        pad_id=pad_id,
    )


def build_host(family: Family, shape: Shape, encoding: EncodingChoice, seed: int) -> BuiltModel:
    """A host drawn from the seed alone, with the encoding attached in place of its own position table."""
    return assemble(lambda: family.make(shape), (family.table,), encoding, seed)


def _encoder(shape: Shape, config: Any, **more: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.model_dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.hidden_dim,
        "max_position_embeddings": shape.max_positions,
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.dropout,
        "initializer_range": shape.init_std,
        "pad_token_id": shape.pad_id,
    }
    return config(**{**sizes, **more})


def _bert(shape: Shape) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(_encoder(shape, BertConfig))


def _roberta(shape: Shape) -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    rows = shape.max_positions + shape.pad_id + 1  # RoBERTa's table begins behind the padding id
    more = {"max_position_embeddings": rows, "type_vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    return RobertaForMaskedLM(_encoder(shape, RobertaConfig, **more))


def _albert(shape: Shape) -> Any:
    from transformers import AlbertConfig, AlbertForMaskedLM

    more = {"embedding_size": shape.embedding_dim, "bos_token_id": None, "eos_token_id": None}
    return AlbertForMaskedLM(_encoder(shape, AlbertConfig, **more))


def electra_generator(shape: Shape) -> Any:
    """ELECTRA's generator: a masked language model."""
    from transformers import ElectraConfig, ElectraForMaskedLM

    return ElectraForMaskedLM(_encoder(shape, ElectraConfig, embedding_size=shape.embedding_dim))


def _electra(shape: Shape) -> Any:
    from transformers import ElectraConfig, ElectraForPreTraining

    return ElectraForPreTraining(_encoder(shape, ElectraConfig, embedding_size=shape.embedding_dim))


def _gpt2(shape: Shape) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_embd=shape.model_dim,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_inner=shape.hidden_dim,
        n_positions=shape.max_positions,
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        initializer_range=shape.init_std,
        pad_token_id=shape.pad_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def generated_logits(host: Any, hidden: Any) -> Any:
    """Logits [N V] of ELECTRA's generator from its hidden states [N M]."""
    return host.generator_lm_head(host.generator_predictions(hidden))


_TABLE = "embeddings.position_embeddings.weight"
FAMILIES = {
    "bert": Family("mlm", _bert, lambda host, hidden: host.cls(hidden), f"bert.{_TABLE}"),
    "roberta": Family("mlm", _roberta, lambda host, hidden: host.lm_head(hidden), f"roberta.{_TABLE}"),
    "albert": Family("mlm", _albert, lambda host, hidden: host.predictions(hidden), f"albert.{_TABLE}", True),
    "electra": Family("electra", _electra, generated_logits, f"electra.{_TABLE}", True),
    "gpt2": Family(
        "causal", _gpt2, lambda host, hidden: host.lm_head(hidden), "transformer.wpe.weight", transform=False
    ),
}
GENERATOR = dataclasses.replace(FAMILIES["electra"], make=electra_generator)
