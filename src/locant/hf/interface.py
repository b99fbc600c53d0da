"""The attention function and the mask function that transformers calls in attached models, both called "locant"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from locant.attention import attention
from locant.encoding import Encoding, Layer
from locant.positions import Positions
from locant.terms import LogitMap, PairBias, Term, WeightScale

NAME = "locant"
WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")  # how hosts call the reach of a local layer


@dataclass(frozen=True)
class Seen:
    """One call of an attached attention module, as a watcher gets it: before its encoding acts, keys for every head.

    ``scale`` is the host's; ``mask`` as hosts give it; ``bias`` what the host adds of its own.
    """

    module: nn.Module
    index: int
    q: Tensor
    k: Tensor
    scale: float
    mask: Tensor | None
    causal: bool
    bias: Tensor | None
    route: Route


@dataclass(frozen=True)
class Route:
    """What travels from a stack's entrance to its attention modules, as the keyword ``locant``.

    ``encodings`` has one entry for each attention module, ``acts`` says whether it changes attention at all. ``x`` is
    the input of the attention module, put in by its own hook. ``keeps_bias``: a bias of the host's own is added.
    ``keeps_scale``: the logit factors of encodings are left out. ``watch`` is shown every call.
    ``tokens``: how many there are with those read before, where that is known. ``key_ids``: those of the keys as they
    came, before a transform moved them; None where they count up.
    """

    positions: Positions
    encodings: tuple[Encoding, ...]
    acts: tuple[bool, ...]
    projections: tuple[str, ...]
    backend: str
    host_kernel: str | None
    keeps_bias: bool
    weights: bool
    x: Tensor | None = None
    keeps_scale: bool = False
    tokens: int | None = None
    key_ids: Tensor | None = None
    watch: Callable[[Seen], None] | None = None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | int | None = None,
    locant: Any = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one module: with its encoding if one is attached to it, else (cross-attention) as the host would.

    ``locant``: the `Route`; modules without an encoding may be given what travels in its place, of which they read
    ``weights``. A host's softcap bounds the logits, terms included; its sinks (one logit a head) join every softmax.
    Raises: RuntimeError where an attached module was reached without passing its stack's entrance; ValueError for keys
    that the positions do not cover.
    """
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    index, route = getattr(module, "locant_index", None), vars(module).get("locant_route") if locant is None else locant
    weights = bool(kwargs.get("output_attentions")) or (route is not None and route.weights)
    if index is not None and route is None:
        raise RuntimeError(
            f"attach: {type(module).__name__} {index} got no positions; call the model (or its stack of layers), "
            "which computes them, not the layer by itself (gradient checkpointing, too, needs a host that hands "
            "keywords on)"
        )
    if index is not None and route is not None and not route.keeps_bias:
        position_bias = None  # switched off: T5 hands zeros to its layers
    plain = not weights and softcap is None and s_aux is None  # what the host's own kernel can do
    host = functools.partial(
        sdpa_attention_forward,
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=causal,
        position_bias=position_bias,
    )
    if index is None or route is None:
        if plain:
            return host()
        return _plain(query, key, value, attention_mask, scaling, dropout, causal, position_bias, softcap, s_aux)
    windowed = kwargs.get("sliding_window") is not None or _windowed(module)
    route = replace(route, positions=seen_positions(module, key, route, windowed))
    if route.watch is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        keys = _grouped(query, key)
        route.watch(Seen(module, index, query, keys, scale, attention_mask, causal, position_bias, route))
    if plain and _leaves_to_host(route, index):
        return host()
    options: dict[str, Any] = dict(scale=scaling, dropout=dropout, softcap=softcap, return_weights=weights)
    return _encoded(module, index, query, key, value, attention_mask, causal, position_bias, s_aux, route, options)


def _leaves_to_host(route: Route, index: int) -> bool:
    """Whether there is nothing to add to what the host's own kernel computes."""
    free = not route.acts[index] and route.backend == "auto" and route.positions.query_document is None
    return free and route.host_kernel == "sdpa"


def _encoded(
    module: nn.Module,
    index: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    bias: Tensor | None,
    sinks: Tensor | None,
    route: Route,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention of one module with its encoding; ``bias`` is the host's own."""
    encoding = route.encodings[index]
    if sinks is not None:
        key, value, mask, seen = with_sink(query, key, value, mask, causal, route.positions)
        route = replace(route, positions=seen)
    key, value = _grouped(query, key), _grouped(query, value)
    query, key = encoding.query_key(query, key, route.positions)
    layer = Layer(query, key, route.x, *projections(module, route.projections, query.shape[1], key.shape[-1]))
    terms = encoding.terms(route.positions, layer)
    if bias is not None:
        terms += (PairBias(bias),)
    factor = 1.0 if route.keeps_scale else encoding.logit_factor
    options = {**options, "sinks": sinks, "logit_factor": factor, "backend": route.backend}
    out = attention_with_mask(query, key, value, terms, route.positions, mask, causal, **options)
    out, kept = out if isinstance(out, tuple) else (out, None)
    return out.transpose(1, 2).contiguous(), kept


def attention_with_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: tuple[Term, ...],
    positions: Positions | None,
    mask: Tensor | None,
    causal: bool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`locant.attention` for a mask as hosts give it: boolean, additive, or None where causality says all there is.

    ``softcap`` c bounds the logits as c tanh(l / c); ``sinks`` [H] are the logits of the last key (see `with_sink`).
    """
    causal = causal and mask is None and query.shape[2] > 1
    if mask is not None and mask.is_floating_point():
        allowed = mask > torch.finfo(mask.dtype).min / 2
        bias, mask = mask.masked_fill(~allowed, 0.0), allowed
        if torch.compiler.is_compiling() or bool(bias.any()):
            terms += (PairBias(bias.expand(*bias.shape[:2], query.shape[2], key.shape[2])),)
    if softcap is not None:
        terms += (LogitMap(functools.partial(_capped, softcap)),)
    if sinks is not None:
        terms += (LogitMap(functools.partial(_sunk, sinks), reach="row"), WeightScale(_without_sink))
    out = attention(query, key, value, terms, positions, mask=mask, causal=causal, **options)
    return (out[0], out[1][..., :-1]) if isinstance(out, tuple) and sinks is not None else out


def _capped(cap: float, content: Tensor, bias: Tensor, positions: Positions, allowed: Tensor | None) -> Tensor:
    return torch.tanh((content + bias) / cap) * cap


def _sunk(sinks: Tensor, content: Tensor, bias: Tensor, positions: Positions, allowed: Tensor | None) -> Tensor:
    """The last key's logit is the sink's."""
    logits = content + bias
    sink = sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat((logits[..., :-1], sink), -1)


def _without_sink(positions: Positions) -> Tensor:
    """The sink takes its share of the softmax and gives nothing, to values of the encoding neither."""
    keep = torch.ones(1, 1, positions.num_keys, device=positions.key.device)
    keep[..., -1] = 0
    return keep.expand(1, positions.num_queries, -1)


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, positions: Positions
) -> tuple[Tensor, Tensor, Tensor, Positions]:
    """Keys, values, mask and positions with one key more, without content, which every query sees."""
    count, keys = query.shape[2], key.shape[2]
    allowed = torch.ones(1, 1, count, keys, dtype=torch.bool, device=query.device) if mask is None else mask
    if causal and mask is None:
        allowed = allowed.tril(keys - count)
    same = positions.same_document()
    if same is not None:
        same = same[None, None] if same.dim() == 2 else same[:, None]
        allowed = allowed & same if allowed.dtype == torch.bool else allowed.masked_fill(~same, float("-inf"))
    more = replace(
        positions,
        key=torch.cat((positions.key, positions.key[..., -1:]), -1),
        key_special=None if positions.key_special is None else F.pad(positions.key_special, (0, 1)),
        key_real=None if positions.key_real is None else F.pad(positions.key_real, (0, 1)),
        contiguous=False,
        query_document=None,
        key_document=None,
        shared={},
    )
    key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
    return key, value, F.pad(allowed, (0, 1), value=allowed.dtype == torch.bool), more


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    bias: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention without an encoding, with its weights; queries and keys may belong to different sequences."""
    terms = () if bias is None else (PairBias(bias),)
    queries, keys = (torch.arange(n, device=query.device) for n in (query.shape[2], key.shape[2]))
    positions = Positions(queries, keys, span=max(len(queries), len(keys)) - 1, length=max(len(queries), len(keys)))
    if sinks is not None:
        key, value, mask, positions = with_sink(query, key, value, mask, causal, positions)
    options: dict[str, Any] = dict(scale=scaling, dropout=dropout, softcap=softcap, sinks=sinks)
    out, weights = attention_with_mask(
        query, key, value, terms, positions, mask, causal, return_weights=True, **options
    )
    return out.transpose(1, 2).contiguous(), weights


def _grouped(query: Tensor, grouped: Tensor) -> Tensor:
    """Keys or values of grouped heads, repeated for each query head."""
    groups = query.shape[1] // grouped.shape[1]
    return grouped if groups == 1 else grouped.repeat_interleave(groups, dim=1)


def _windowed(module: nn.Module) -> bool:
    """Whether a module sees the nearest keys only, so that its cache may drop the others."""
    holders = module, getattr(module, "config", None)
    return any(getattr(holder, name, None) is not None for holder in holders for name in WINDOWS)


def seen_positions(module: nn.Module, key: Tensor, route: Route, windowed: bool) -> Positions:
    """The positions of the keys that a module sees: all of them, or those that a sliding window has kept.

    Raises: ValueError where they cannot be told apart.
    """
    positions, count = route.positions, key.shape[2]
    if count == positions.num_keys:
        return positions
    if not windowed or route.tokens is None or not positions.num_queries <= count < positions.num_keys:
        raise ValueError(
            f"attach: {type(module).__name__} sees {count} keys but the positions cover {positions.num_keys}; it "
            "attends to other tokens than its stack was given, or its cache dropped some, so use a dynamic cache of "
            "full length"
        )
    first = max(route.tokens - count, 0)  # the last ones, or all and room that is not written yet
    ids = {name: getattr(positions, name) for name in ("key", "key_special", "key_document", "key_real")}
    kept = {n: t if t is None else t[..., first : first + count] for n, t in ids.items()}
    return replace(positions, **kept, contiguous=positions.contiguous and route.tokens == positions.num_keys, shared={})


def projections(
    module: nn.Module, names: tuple[str, ...], num_heads: int, head_dim: int
) -> tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]:
    """The host's own query and key projection, both to num_heads * head_dim (grouped keys repeated)."""
    if len(names) == 2:
        project_key = functools.partial(_project_key, getattr(module, names[1]), num_heads, head_dim)
        return getattr(module, names[0]), project_key
    if len(names) == 1:
        fused, width = getattr(module, names[0]), num_heads * head_dim
        return functools.partial(_slice, fused, 0, width), functools.partial(_slice, fused, width, width)
    return None, None


def _project_key(project: nn.Module, num_heads: int, head_dim: int, rows: Tensor) -> Tensor:
    keys = project(rows)
    groups = num_heads * head_dim // keys.shape[-1]
    return keys if groups == 1 else keys.unflatten(-1, (-1, head_dim)).repeat_interleave(groups, dim=-2).flatten(-2)


def _slice(fused: Any, start: int, width: int, rows: Tensor) -> Tensor:
    """A slice of a fused projection, as the module computes it (an adapter may be part of it)."""
    return fused(rows)[..., start : start + width]


def mask_function(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """The host's mask as booleans [B 1 I J], True = may attend; None where nothing but causality forbids a pair."""
    if q_length not in (1, kv_length):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)


def register() -> None:
    """Make both functions known to transformers; with the attention alone, padding would be lost silently."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_function)
