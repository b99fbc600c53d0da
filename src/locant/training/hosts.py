"""The models that are trained from random weights: a row for each family of hosts.

`locant compare` and `locant pretrain` both build from these rows; each has its own way to say how large a host is, and
both come down to a `Shape`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.data.mlm import IGNORED
from locant.training.mlm import BuiltModel, EncodingChoice, assemble

if TYPE_CHECKING:
    from torch import Tensor

    from locant.encoding import Stack


def check_shape(model_dim: int, num_heads: int, dropout: float, init_std: float) -> None:
    """What holds of every host. Raises: ValueError."""
    if model_dim % num_heads:
        raise ValueError(
            f"num_heads = {num_heads} does not divide model_dim = {model_dim}; "
            f"choose one of {[n for n in range(1, 33) if model_dim % n == 0]}"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout = {dropout}, needed 0 <= dropout < 1")
    if not 0 < init_std <= 1:
        raise ValueError(f"init_std = {init_std}, needed a number above 0 and up to 1")


def check_embedding(family: str, embedding_dim: int, where: str = "") -> None:
    """A width of the embeddings must mean something to the family; ``where``: of the key. Raises: ValueError."""
    if embedding_dim and FAMILIES[family].embedding_dim is None:
        raise ValueError(
            f"{where}embedding_dim = {embedding_dim} has no meaning for {family}, whose embeddings have the "
            "width of its layers; leave it out, or take albert or electra"
        )


@dataclass(frozen=True)
class ModelSize:
    """Size of the model that all encodings of a comparison share, and its family."""

    family: str = ""  # "": the first that the task can train (bert, gpt2, electra)
    num_layers: int = 4
    model_dim: int = 256
    num_heads: int = 4
    hidden_dim: int = 0  # width of the feed-forward layer; 0: four times model_dim
    embedding_dim: int = 0  # width of the token embeddings (albert, electra); 0: 128 for albert, model_dim for electra
    max_positions: int = 0  # rows of a learned position table; 0: the trained length
    dropout: float = 0.1  # of embeddings, attention weights and layer outputs
    init_std: float = (
        0.02  # of the host's matrices; BERT's own, meant for width 768: narrow models learn faster with more
    )

    def __post_init__(self) -> None:
        for name in ("num_layers", "model_dim", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, needed at least 1")
        check_shape(self.model_dim, self.num_heads, self.dropout, self.init_std)
        for name in ("hidden_dim", "embedding_dim", "max_positions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (automatic) or more")

    def shape(self, family: str, vocab_size: int, length: int, pad_id: int) -> Shape:
        """The shape of a host for so many tokens; ``length``: rows of a position table, where none are named."""
        return Shape(
            num_layers=self.num_layers,
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            hidden_dim=self.hidden_dim or 4 * self.model_dim,
            embedding_dim=self.embedding_dim or FAMILIES[family].embedding_dim or self.model_dim,
            vocab_size=vocab_size,
            max_positions=self.max_positions or length,
            dropout=self.dropout,
            init_std=self.init_std,
            pad_id=pad_id,
        )


@dataclass(frozen=True)
class Shape:
    """All that a config is made of."""

    num_layers: int
    model_dim: int
    num_heads: int
    hidden_dim: int
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
    embedding_dim: int | None = None  # of the token embeddings, where it may differ from model_dim; 0: usually the same
    transform: bool = True  # a dense layer stands between hidden states and vocabulary


def build_host(family: Family, shape: Shape, encoding: EncodingChoice, seed: int) -> BuiltModel:
    """A host drawn from the seed alone, with the encoding attached in place of its own position table."""
    return assemble(lambda: family.make(shape), (family.table,), encoding, seed)


def build_encoding(encoding: EncodingChoice, size: ModelSize, length: int, *, causal: bool = False) -> Stack:
    """The encoding objects that a host of this size would get, without one: for checks and descriptions."""
    import locant

    sizes = {
        "num_heads": size.num_heads,
        "head_dim": size.model_dim // size.num_heads,
        "model_dim": size.model_dim,
        "max_length": size.max_positions or length,
        "causal": causal,
    }
    return locant.stack(encoding.name, size.num_layers, **{**sizes, **encoding.options})


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted_logits(host: Any, input_ids: Tensor, labels: Tensor, **positions: Any) -> tuple[Tensor, Tensor]:
    """Logits [N V] and targets [N] of the tokens that carry a label; ``positions`` say where tokens stand."""
    hidden = hidden_states(host, input_ids, positions)
    predicted = labels != IGNORED
    return _logits(host, hidden[predicted]), labels[predicted]


def next_token_logits(host: Any, input_ids: Tensor, labels: Tensor, **positions: Any) -> tuple[Tensor, Tensor]:
    """The same of a decoder; a token is predicted from the one before it."""
    hidden = hidden_states(host, input_ids, {**positions, "use_cache": False})
    predicted = labels[:, 1:] != IGNORED
    return _logits(host, hidden[:, :-1][predicted]), labels[:, 1:][predicted]


def hidden_states(host: Any, input_ids: Tensor, keywords: dict[str, Any]) -> Tensor:
    """What the layers give, [B I M]."""
    given = {name: value for name, value in keywords.items() if value is not None}
    return host.base_model(input_ids=input_ids, **given).last_hidden_state


def _logits(host: Any, hidden: Tensor) -> Tensor:
    return FAMILIES[host.config.model_type].predict(host, hidden)


# --- rows -------------------------------------------------------------------------------------------------------------


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


_TABLE = "embeddings.position_embeddings.weight"
FAMILIES = {
    "bert": Family("mlm", _bert, lambda host, hidden: host.cls(hidden), f"bert.{_TABLE}"),
    "roberta": Family("mlm", _roberta, lambda host, hidden: host.lm_head(hidden), f"roberta.{_TABLE}"),
    "albert": Family("mlm", _albert, lambda host, hidden: host.predictions(hidden), f"albert.{_TABLE}", 128),
    "electra": Family(
        "electra",
        _electra,
        lambda host, hidden: host.generator_lm_head(host.generator_predictions(hidden)),  # of the generator
        f"electra.{_TABLE}",
        0,
    ),
    "gpt2": Family(
        "causal", _gpt2, lambda host, hidden: host.lm_head(hidden), "transformer.wpe.weight", transform=False
    ),
}
GENERATOR = dataclasses.replace(FAMILIES["electra"], make=electra_generator)
