"""Reading a model: sizes, position vectors, query and key weights, and the terms that positions add to attention.

Any Hugging Face model of `layouts.LAYOUTS`, with or without locant attached; models of other families on the attention
interface are read as far as `locant.hf` finds its way in them. Nothing here changes a model.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.analysis.layouts import LAYOUTS, Layout, linear, packed
from locant.analysis.plain import as_double, check_finite
from locant.encoding import Encoding
from locant.hf.attachment import Attachment
from locant.hf.families import class_names, embedding, find_sites, is_cross
from locant.hf.interface import NAME
from locant.positions import Positions

UNLIMITED = 128  # positions that are looked at where nothing limits them
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Host:
    """One stack of layers as analyses see it.

    ``model`` is what was given, ``stack`` the module below it that embeds tokens and runs layers, ``attention`` its
    distinct attention modules in order (ALBERT: fewer than layers). ``attachment``: what `locant.hf.attach` put in.
    """

    model: nn.Module
    stack: nn.Module
    layout: Layout
    attention: tuple[nn.Module, ...]
    num_layers: int
    num_heads: int
    head_dim: int
    model_dim: int
    causal: bool
    attachment: Attachment | None = None

    def module_of(self, layer: int) -> nn.Module:
        """The attention module of a layer."""
        return self.attention[layer * len(self.attention) // self.num_layers]

    def encoding_of(self, layer: int) -> Encoding | None:
        """The encoding that is attached to a layer."""
        return (
            None
            if self.attachment is None
            else self.attachment.layers()[layer * len(self.attention) // self.num_layers]
        )

    @property
    def table(self) -> nn.Embedding | None:
        """The host's own table of positions, where it has one (an attached model may have lost it)."""
        found = submodule(self.stack, self.layout.table)
        return found if isinstance(found, nn.Embedding) else None

    @property
    def spare_rows(self) -> int:
        """Rows of the table before position 0: padding_idx + 1 for RoBERTa and its kin, the offset of OPT and BART."""
        table = self.table
        if table is None:
            return 0
        padding = getattr(table, "padding_idx", None)
        return int(getattr(table, "offset", 0) if padding is None else padding + 1)

    @property
    def trained_length(self) -> int | None:
        """The number of positions that a table serves; None where no table limits it."""
        lengths = []
        if self.table is not None:
            lengths.append(self.table.weight.shape[0] - self.spare_rows)
        if self.attachment is not None and self.attachment.stack.max_length is not None:
            lengths.append(self.attachment.stack.max_length)
        return min(lengths, default=None)


def submodule(root: nn.Module, path: str | None) -> nn.Module | None:
    """The module at a path, or None where the path leads nowhere."""
    for name in (path or "").split("."):
        root = getattr(root, name, None)  # pyright: ignore[reportAssignmentType]
        if not isinstance(root, nn.Module):
            return None
    return root


def read_model(model: nn.Module) -> Host:
    """The first stack of layers of a model (the encoder where there are two) that an analysis can read.

    Raises: ValueError where there is none, with the families that are known.
    """
    for layout in LAYOUTS:
        for _, stack in model.named_modules():
            if not set(layout.stacks) & set(class_names(stack)):
                continue
            attention = tuple(
                module
                for path, module in stack.named_modules()
                if set(layout.attention) & set(class_names(module)) and not is_cross(path, module)
            )
            if attention:
                return _host(model, stack, layout, attention)
    try:
        site = find_sites(model)[0]
    except ValueError as error:
        raise ValueError(
            f"analysis: {type(model).__name__} is of no family that can be read "
            f"({', '.join(layout.name for layout in LAYOUTS)}), and on no attention interface that locant knows; "
            "give a Hugging Face model of one of them"
        ) from error
    table = next((path for kind, path in site.own if kind == "table"), None)
    names = site.family.projections
    read = linear(*names) if len(names) == 2 else packed(names[0] if names else "no known projection")
    words = next((path for path, module in site.module.named_modules() if module is embedding(site.module)), "")
    layout = Layout(site.family.name, site.family.stacks, site.family.attention, read, words, table)
    return _host(model, site.module, layout, tuple(module for _, module in site.attention))


def _host(model: nn.Module, stack: nn.Module, layout: Layout, attention: tuple[nn.Module, ...]) -> Host:
    config = getattr(stack, "config", None) or getattr(attention[0], "config", None)
    heads = _number(HEADS, attention[0], config)
    query, _, _, _ = layout.read(attention[0])
    own = getattr(stack, NAME, None)
    shared = _number(LAYERS, config) if len(attention) < (_number(LAYERS, config) or 0) else None
    if heads is None or query.shape[0] % heads:
        raise ValueError(
            f"analysis: {type(stack).__name__} tells num_heads={heads} for queries of width {query.shape[0]}; "
            f"looked for {', '.join(HEADS)} in its attention and its config"
        )
    return Host(
        model=model,
        stack=stack,
        layout=layout,
        attention=attention,
        num_layers=shared if shared and getattr(config, "num_hidden_groups", None) else len(attention),
        num_heads=heads,
        head_dim=query.shape[0] // heads,
        model_dim=query.shape[1],
        causal=bool(getattr(attention[0], "is_causal", False)),
        attachment=own if isinstance(own, Attachment) else None,
    )


def _number(names: tuple[str, ...], *places: Any) -> int | None:
    found = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def check_weights(host: Host) -> None:
    """Raise a ValueError that names the first parameter or buffer that is not finite."""
    for kind in (host.model.named_parameters(), host.model.named_buffers()):
        for name, tensor in kind:
            if tensor.is_meta:
                raise ValueError(f"analysis: {name} is on the meta device and holds no numbers; load the weights first")
            check_finite("analysis", name, tensor)


# --- position vectors ---


@dataclass(frozen=True)
class PositionVectors:
    """What a model adds to its input for each position, in float64.

    ``table`` [n E]: the rows as they are stored. ``raw`` [n M]: the rows mapped to the width of attention by factor
    matrices alone (the same as ``table`` in most families). ``layernorm`` [n M]: the row with the first token type, as
    the first attention reads it; ``layernorm_meanword``: with the mean word embedding, too. The last two are None
    where the family's way into the first attention is not known.
    """

    table: Float[Tensor, "n E"]
    raw: Float[Tensor, "n M"]
    layernorm: Float[Tensor, "n M"] | None
    layernorm_meanword: Float[Tensor, "n M"] | None

    def treatments(self) -> dict[str, Float[Tensor, "n M"]]:
        """Those that are known, by name."""
        named = {"raw": self.raw, "layernorm": self.layernorm, "layernorm_meanword": self.layernorm_meanword}
        return {name: vectors for name, vectors in named.items() if vectors is not None}


@torch.no_grad()
def position_vectors(host: Host, length: int | None = None) -> PositionVectors | None:
    """The vectors of positions 0 .. length - 1 (default: all rows, or 128 where nothing limits them); None without any.

    Raises: ValueError for a length past the table.
    """
    limit = host.trained_length
    n = length or limit or UNLIMITED
    if limit is not None and n > limit:
        raise ValueError(f"analysis: length={n} but the model has {limit} positions; give length <= {limit}")
    table = _table_rows(host, n)
    if table is None:
        return None
    types = submodule(host.stack, host.layout.types)
    first_type = as_double(types.weight[0]) if isinstance(types, nn.Embedding) else 0.0
    with_word = None
    if host.layout.steps:
        with_word = enter_attention(host, table + first_type + mean_word(host))
    return PositionVectors(
        table=table,
        raw=_factors(host, table),
        layernorm=enter_attention(host, table + first_type) if host.layout.steps else None,
        layernorm_meanword=with_word,
    )


def _table_rows(host: Host, n: int) -> Float[Tensor, "n E"] | None:
    """Rows of the host's table, and what attached encodings add to the input."""
    rows = None
    if host.table is not None:
        rows = as_double(host.table.weight)[host.spare_rows : host.spare_rows + n]
    if host.attachment is not None and host.attachment.embeds:
        words = submodule(host.stack, host.layout.words)
        width = words.weight.shape[1] if isinstance(words, nn.Embedding) else host.model_dim
        stack = host.attachment.stack
        device = next((p.device for p in host.attachment.parameters()), torch.device("cpu"))
        positions = stack.prepare(Positions.arange(n, device=device))
        added = as_double(stack.embed(torch.zeros(1, n, width, device=device), positions)[0])
        rows = added if rows is None else rows + added
    return rows


def layer_steps(host: Host) -> list[nn.Module]:
    """The modules between the sum of embeddings and the first attention, in order."""
    config = getattr(host.stack, "config", None)
    if host.layout.step_flag is not None and not getattr(config, host.layout.step_flag, True):
        return []
    found = (submodule(host.stack, path) for path in host.layout.steps)
    return [module for module in found if module is not None]


def enter_attention(host: Host, summed: Float[Tensor, "... E"]) -> Float[Tensor, "... M"]:
    """What the first attention reads for sums of embeddings: norms and maps on the way, in float64."""
    for step in layer_steps(host):
        summed = copy.deepcopy(step).to("cpu", torch.float64)(summed)
    return summed


def _factors(host: Host, table: Float[Tensor, "n E"]) -> Float[Tensor, "n M"]:
    for step in layer_steps(host):
        if isinstance(step, nn.Linear):
            table = F.linear(table, as_double(step.weight))
    return table


def word_vectors(host: Host, ids: Tensor) -> Float[Tensor, "... E"]:
    """Embeddings of words as they are added to those of positions, in float64."""
    words = submodule(host.stack, host.layout.words)
    assert words is not None
    scale = submodule(host.stack, host.layout.scale_words)
    device = next(words.parameters()).device
    vectors = words(ids.to(device))
    return as_double(vectors if scale is None else scale(vectors))


@torch.no_grad()
def mean_word(host: Host, block: int = 4096) -> Float[Tensor, "E"]:
    """The mean embedding over the vocabulary."""
    words: Any = submodule(host.stack, host.layout.words)
    sums = [
        word_vectors(host, torch.arange(start, min(start + block, words.weight.shape[0]))).sum(0)
        for start in range(0, words.weight.shape[0], block)
    ]
    return torch.stack(sums).sum(0) / words.weight.shape[0]


# --- projections ---


@dataclass(frozen=True)
class Projection:
    """Query and key weights of one layer by head, in float64, and what multiplies the product."""

    query: Float[Tensor, "H M D"]
    query_bias: Float[Tensor, "H D"]
    key: Float[Tensor, "H M D"]
    key_bias: Float[Tensor, "H D"]
    scale: float

    def logits(self, x: Float[Tensor, "I M"], y: Float[Tensor, "J M"], head: int, bias: bool) -> Float[Tensor, "I J"]:
        """(x W_q [+ b_q])(y W_k [+ b_k]) times the scale, for one head."""
        q, k = x @ self.query[head], y @ self.key[head]
        if bias:
            q, k = q + self.query_bias[head], k + self.key_bias[head]
        return self.scale * q @ k.T


@torch.no_grad()
def projection(host: Host, layer: int = 0) -> Projection:
    """W_q, b_q, W_k, b_k of a layer; key heads that several query heads share are repeated."""
    module: Any = host.module_of(layer)
    query, query_bias, key, key_bias = host.layout.read(module)
    groups = query.shape[0] // key.shape[0]

    def split(weight: Tensor, repeat: int) -> Tensor:
        by_head = as_double(weight).unflatten(0, (-1, host.head_dim)).transpose(1, 2)  # [H M D]
        return by_head.repeat_interleave(repeat, dim=0)

    def split_bias(bias: Tensor | None, repeat: int) -> Tensor:
        zeros = torch.zeros(host.num_heads // repeat, host.head_dim, dtype=torch.float64)
        by_head = zeros if bias is None else as_double(bias).unflatten(0, (-1, host.head_dim))
        return by_head.repeat_interleave(repeat, dim=0)

    return Projection(
        split(query, 1),
        split_bias(query_bias, 1),
        split(key, groups),
        split_bias(key_bias, groups),
        scale_of(host, layer),
    )


def scale_of(host: Host, layer: int) -> float:
    """What multiplies q.k in a layer: the host's scale, the number of its terms (DeBERTa), an encoding's factor."""
    module: Any = host.module_of(layer)
    scale = getattr(module, "scaling", None)
    scale = 1 / math.sqrt(host.head_dim) if not isinstance(scale, float) else scale
    scale /= math.sqrt(1 + len(getattr(module, "pos_att_type", None) or ()))
    encoding = host.encoding_of(layer)
    return scale if encoding is None else scale * encoding.logit_factor
