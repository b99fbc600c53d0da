"""How large the models of `locant pretrain` are: named sizes, and what may take the place of their values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from locant.compare.fields import near
from locant.training.hosts import FAMILIES, Shape, check_embedding, check_shape


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
        check_embedding(self.family, self.embedding_dim)
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
    width = choice.embedding_dim or FAMILIES[choice.family].embedding_dim or size.model_dim
    return Shape(
        **dataclasses.asdict(size),
        embedding_dim=width,
        vocab_size=choice.vocab_size or tokens,
        max_positions=choice.max_positions or length,
        dropout=choice.dropout,
        init_std=choice.init_std,
        pad_id=pad_id,
    )
