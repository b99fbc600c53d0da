"""A plain PyTorch Transformer, encoder or decoder, for study, for tests and for users without Hugging Face.

Positions are built once, at the entrance, from what the caller knows: a padding mask, explicit ids, document numbers, a
cache. Everything below reads them as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from locant.attention import attention
from locant.catalog import stack
from locant.encoding import Encoding, Layer, Stack
from locant.positions import Positions


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Transformer and the encoding it uses (see ``locant.names()``)."""

    vocab_size: int
    model_dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    feed_forward_dim: int | None = None  # default 4 model_dim
    max_length: int = 512  # rows of the tables of encodings that have one row for each position
    causal: bool = False  # decoder
    dropout: float = 0.1  # on embeddings, sublayer outputs and attention weights
    encoding: str | tuple[str, ...] = "absolute"  # one name, "a+b", or one name for each layer
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the encoding
    share_layers: bool | None = None  # None: as the encoding's paper has it
    backend: str = "auto"
    gradient_checkpointing: bool = False  # non-reentrant

    @property
    def head_dim(self) -> int:
        """Width of a head.

        Raises: ValueError where the heads do not divide the width.
        """
        if self.num_heads < 1 or self.model_dim % self.num_heads:
            raise ValueError(
                f"model: num_heads={self.num_heads} does not divide model_dim={self.model_dim}; choose another of "
                "the two"
            )
        return self.model_dim // self.num_heads


@dataclass
class Cache:
    """Keys, values and what is known about the tokens behind them, for decoding in steps.

    Key ids are stored when written: they are never rebuilt from lengths, so rows of unequal length decode right.
    """

    keys: list[Tensor] = field(default_factory=list)  # for each layer [B H J D]
    values: list[Tensor] = field(default_factory=list)
    mask: Bool[Tensor, "B J"] | None = None
    ids: Shaped[Tensor, "B J"] | None = None

    def __len__(self) -> int:
        """Number of cached tokens."""
        return self.keys[0].shape[2] if self.keys else 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones included."""
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat((self.keys[layer], k), 2)
            self.values[layer] = torch.cat((self.values[layer], v), 2)
        return self.keys[layer], self.values[layer]


class Attention(nn.Module):
    """Multi-head self-attention with an encoding's terms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.config = config
        self.query, self.key, self.value = (nn.Linear(config.model_dim, width) for _ in range(3))
        self.out = nn.Linear(width, config.model_dim)

    def heads(self, x: Float[Tensor, "B N M"]) -> Float[Tensor, "B H N D"]:
        """Split the last axis into heads."""
        return x.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)

    def forward(
        self,
        x: Float[Tensor, "B I M"],
        encoding: Encoding,
        positions: Positions,
        mask: Bool[Tensor, "B 1 1 J"] | None,
        cache: Cache | None,
        index: int,
    ) -> Float[Tensor, "B I M"]:
        """Attend from the tokens of x to them and to the cached ones."""
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        if cache is not None:
            k, v = cache.extend(index, k, v)
        q, k = encoding.query_key(q, k, positions)
        terms = encoding.terms(positions, Layer(q, k, x, self.query, self.key))
        dropout = self.config.dropout if self.training else 0.0
        out = attention(
            q,
            k,
            v,
            terms,
            positions,
            mask=mask,
            causal=self.config.causal,
            logit_factor=encoding.logit_factor,
            dropout=dropout,
            backend=self.config.backend,
        )
        assert isinstance(out, Tensor)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each after a LayerNorm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        wide = config.feed_forward_dim or 4 * config.model_dim
        self.attention = Attention(config)
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(config.model_dim), nn.LayerNorm(config.model_dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.model_dim, wide), nn.GELU(), nn.Linear(wide, config.model_dim)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B I M"],
        encoding: Encoding,
        positions: Positions,
        mask: Bool[Tensor, "B 1 1 J"] | None,
        cache: Cache | None,
        index: int,
    ) -> Float[Tensor, "B I M"]:
        """One layer."""
        x = x + self.dropout(self.attention(self.attention_norm(x), encoding, positions, mask, cache, index))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Token ids in, hidden states out; ``logits`` maps them to the vocabulary with the tied embedding.

    >>> model = Transformer(ModelConfig(vocab_size=100, encoding="huang_m4", options={"clip": 16}))
    >>> model(torch.randint(100, (2, 7))).shape
    torch.Size([2, 7, 256])
    """

    def __init__(self, config: ModelConfig, encoding: Stack | None = None) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.model_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.model_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.apply(_initialize)
        self.encoding = encoding or _encoding(config)
        if len(self.encoding) != config.num_layers:
            raise ValueError(
                f"model: the stack serves {len(self.encoding)} layers but num_layers={config.num_layers}; build one "
                "of that length"
            )

    def forward(
        self,
        ids: Int[Tensor, "B I"],
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B I M"]:
        """Hidden states of the tokens.

        ``mask``, ``position_ids`` and ``documents`` are [B I] like ``ids``. ``mask``: True = a real token.
        ``position_ids`` win over counting; ``documents`` number packed texts, restart the count and keep them apart.
        With a ``cache`` (decoder only) the ids are the next tokens. Raises: ValueError for combinations that have no
        meaning, TypeError for a mask that is not boolean.
        """
        positions, seen = self._positions(ids, mask, position_ids, documents, cache)
        positions = self.encoding.prepare(positions, ids.shape[0])
        x = self.dropout(self.encoding.embed(self.tokens(ids), positions))
        allowed = None if seen is None else seen[:, None, None, :]
        for index, block in enumerate(self.blocks):
            arguments = (x, self.encoding[index], positions, allowed, cache, index)
            if self.config.gradient_checkpointing and self.training:
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(*arguments)
        return self.norm(x)

    def logits(self, hidden: Float[Tensor, "B I M"]) -> Float[Tensor, "B I V"]:
        """Scores over the vocabulary."""
        return F.linear(hidden, self.tokens.weight)

    def _positions(
        self,
        ids: Tensor,
        mask: Tensor | None,
        position_ids: Tensor | None,
        documents: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Positions, Tensor | None]:
        """Positions of these tokens (and the cached ones), and the mask over all keys."""
        if ids.dim() != 2:
            raise ValueError(f"model: ids have shape {tuple(ids.shape)}; give [batch, tokens]")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"model: mask has dtype {mask.dtype} but True/False is needed (True = a real token)")
        for name, given in (("mask", mask), ("position_ids", position_ids), ("documents", documents)):
            if given is not None and given.shape != ids.shape:
                raise ValueError(
                    f"model: {name} has shape {tuple(given.shape)} but ids have {tuple(ids.shape)}; they must agree"
                )
        if documents is not None:
            if cache is not None or position_ids is not None:
                raise ValueError("model: documents come with their own ids and without a cache; give one or the other")
            return Positions.packed(documents), mask
        seen, known = (mask, position_ids) if cache is None else self._remember(ids, mask, position_ids, cache)
        if known is not None:
            return Positions.from_ids(known[:, known.shape[1] - ids.shape[1] :], known), seen
        if seen is not None:
            return Positions.from_mask(seen, ids.shape[1]), seen
        past = 0 if cache is None else len(cache)
        return Positions.arange(ids.shape[1], past + ids.shape[1], device=ids.device), None

    def _remember(
        self, ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Cache
    ) -> tuple[Tensor | None, Tensor | None]:
        """Store what is known of the new tokens in the cache; returns it for all tokens."""
        if not self.config.causal:
            raise ValueError(
                "model: a cache needs a decoder, but causal=False: earlier tokens would have to be recomputed"
            )
        past = len(cache)
        if past and (position_ids is None) != (cache.ids is None):
            raise ValueError(
                f"model: position_ids must be given for all steps or for none; the {past} cached tokens disagree"
            )
        if mask is not None or cache.mask is not None:
            before = cache.mask if cache.mask is not None else ids.new_ones(ids.shape[0], past, dtype=torch.bool)
            now = mask if mask is not None else torch.ones_like(ids, dtype=torch.bool)
            cache.mask = torch.cat((before, now), 1)
        if position_ids is not None:
            cache.ids = position_ids if cache.ids is None else torch.cat((cache.ids, position_ids), 1)
        return cache.mask, cache.ids


def _encoding(config: ModelConfig) -> Stack:
    name = config.encoding if isinstance(config.encoding, str) else list(config.encoding)
    return stack(
        name,
        config.num_layers,
        share_layers=config.share_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        model_dim=config.model_dim,
        max_length=config.max_length,
        causal=config.causal,
        **config.options,
    )


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
