"""Positions at a stack's entrance: what a host was given (ids, mask, cache, documents) as one `Positions`.

Explicit ``positions`` win, then explicit ``position_ids`` (2-D, one row for each sequence), then the ids counted over a
2-D ``attention_mask``, then 0, 1, 2, ... With a cache, the ids of past keys are kept with it and follow its rows.
"""

from __future__ import annotations

import functools
import operator
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from locant.positions import Positions


@dataclass(frozen=True)
class Arrival:
    """What arrives at a stack: batch, number of new tokens, past tokens, number of keys, and where they live.

    ``keys`` is larger than past + new in a cache of fixed size; the rest of it is masked.
    """

    batch: int
    new: int
    past: Any  # an int, or a tensor while a fixed-size cache is being traced
    keys: int
    device: torch.device
    cache: Any = None

    @property
    def fresh(self) -> bool:
        """Whether nothing was read before."""
        return isinstance(self.past, int) and self.past == 0

    @property
    def tokens(self) -> int | None:
        """Tokens in all, with those read before; None where that is traced."""
        return self.past + self.new if isinstance(self.past, int) else None


def arrival(arguments: dict[str, Any]) -> Arrival:
    """Sizes of what a stack was called with.

    Raises: ValueError where it was given no tokens, embeddings or hidden states.
    """
    for name, axes in (("input_ids", 1), ("inputs_embeds", 2), ("hidden_states", 2)):
        given = arguments.get(name)
        if given is not None:
            shape = given.shape[: given.dim() - axes + 1]
            # a product, not int(numel): sizes stay symbols while torch.export traces
            return _with_cache(arguments, functools.reduce(operator.mul, shape[:-1], 1), shape[-1], given.device)
    given = ", ".join(name for name, value in arguments.items() if value is not None)
    raise ValueError(
        f"attach: the model was called with {given or 'nothing'}; input_ids, inputs_embeds or hidden_states are needed "
        "to know how many positions there are"
    )


def _with_cache(arguments: dict[str, Any], batch: int, new: int, device: torch.device) -> Arrival:
    cache = arguments.get("cache")
    cache = arguments.get("past_key_values") if cache is None else cache
    if cache is None or not hasattr(cache, "get_mask_sizes"):
        return Arrival(batch, new, 0, new, device)
    past = cache.get_seq_length()
    if isinstance(past, Tensor) and not torch.compiler.is_compiling():
        past = int(past)
    return Arrival(batch, new, past, _extent(cache, new), device, cache)


def _extent(cache: Any, new: int) -> int:
    """Number of keys, unwritten ones of a fixed-size cache too: of the longest layer, for windows keep fewer."""
    layers = getattr(cache, "layers", None) or getattr(getattr(cache, "self_attention_cache", None), "layers", ())
    counted = [i for i, layer in enumerate(layers) if hasattr(layer, "get_mask_sizes")] or [0]
    return max(sum(map(int, cache.get_mask_sizes(new, index))) for index in counted)


def positions_of(arguments: dict[str, Any], at: Arrival, trained: int) -> Positions:
    """The positions of a call. Takes ``positions`` and ``document_ids`` out of the arguments.

    ``trained`` bounds explicit ids while compiling, when their values cannot be read.
    Raises: ValueError for shapes that do not fit.
    """
    given, documents = arguments.pop("positions", None), arguments.pop("document_ids", None)
    ids, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    _check_mask(mask, at)
    if given is not None:
        return _given(given, documents)
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    _check("position_ids", ids, at)
    _check("document_ids", documents, at)
    positions = _placed(ids, documents, mask, arguments, at, trained)
    return positions if mask is None else _masked(positions, mask)


def _masked(positions: Positions, mask: Tensor) -> Positions:
    """Positions that know which keys are real; those not written yet are none."""
    unwritten = positions.num_keys - mask.shape[-1]
    return replace(positions, key_real=F.pad(mask.bool(), (0, unwritten)) if unwritten else mask.bool())


def _placed(
    ids: Tensor | None,
    documents: Tensor | None,
    mask: Tensor | None,
    arguments: dict[str, Any],
    at: Arrival,
    trained: int,
) -> Positions:
    if documents is not None:
        return _packed(ids, documents, at, trained)
    if ids is not None:
        alone = arguments.get("attention_mask") is None  # a mask, of whatever form, decides who sees whom
        return _explicit(ids, mask, at, trained, packed=alone)
    if mask is not None and not _plain_mask(mask, at):
        return _counted(mask, at)
    return _in_order(at) if _stored(at) is None else _explicit(_next(at), mask, at, trained)


def _check(name: str, ids: Tensor | None, at: Arrival) -> None:
    if ids is None:
        return
    if ids.dim() not in (1, 2) or ids.shape[-1] != at.new or (ids.dim() == 2 and ids.shape[0] not in (1, at.batch)):
        raise ValueError(
            f"attach: {name} have shape {tuple(ids.shape)} but {at.batch} sequences of {at.new} tokens came in; "
            f"give [{at.batch}, {at.new}]"
        )


def _check_mask(mask: Any, at: Arrival) -> None:
    """Refuse a mask that is not [B J] or [B 1 I J]: hosts drop one that forbids nothing before they see its shape."""
    if not isinstance(mask, Tensor):
        return
    if mask.dim() not in (2, 4) or (mask.shape[0] != at.batch and (mask.dim() == 2 or mask.shape[0] != 1)):
        raise ValueError(
            f"attach: attention_mask has shape {tuple(mask.shape)} but {at.batch} sequences of {at.new} tokens came "
            f"in; give [{at.batch}, tokens], or [{at.batch}, 1, queries, keys]"
        )
    lengths = (at.keys, at.past + at.new) if isinstance(at.past, int) else ()
    if mask.dim() == 2 and lengths and mask.shape[-1] not in lengths:
        raise ValueError(
            f"attach: the attention mask covers {mask.shape[-1]} tokens but {at.past} cached and {at.new} new ones are "
            f"attended to; give [{at.batch}, {at.past + at.new}]"
        )


def _given(positions: Any, documents: Tensor | None) -> Positions:
    """``positions=`` as it came."""
    if not isinstance(positions, Positions):
        raise TypeError(
            f"attach: positions is a {type(positions).__name__}; give a locant.Positions, or ids as position_ids="
        )
    if documents is not None:
        raise ValueError(
            "attach: positions and document_ids came together; put the documents into positions (Positions.packed)"
        )
    return positions


def readable(tensor: Tensor) -> bool:
    """Whether looking at values costs nothing: eager, on the CPU."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _in_order(at: Arrival) -> Positions:
    if isinstance(at.past, int) and at.keys == at.past + at.new:
        return Positions.arange(at.new, at.keys, device=at.device)
    query = torch.arange(at.new, device=at.device) + at.past
    key = torch.arange(at.keys, device=at.device)
    length = at.past + at.new if isinstance(at.past, int) else at.keys
    return Positions(query, key.clamp(max=length - 1), span=max(length - 1, 0), length=length)


def _plain_mask(mask: Tensor, at: Arrival) -> bool:
    """Whether counting over the mask gives 0, 1, 2, ... for the real tokens: no padding, or only on the right."""
    return _stored(at) is None and readable(mask) and bool((mask[:, 1:] <= mask[:, :-1]).all())


def _count(mask: Tensor) -> Tensor:
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _counted(mask: Tensor, at: Arrival) -> Positions:
    """Ids counted over the mask of all keys, cached ones too; keys not yet written are masked anyway."""
    seen = mask.shape[-1]
    ids = _count(mask)
    query = ids[:, at.past : at.past + at.new] if isinstance(at.past, int) else ids[:, -at.new :]
    if at.keys > seen:
        ids = torch.cat((ids, ids[:, -1:].expand(-1, at.keys - seen)), dim=-1)
    if isinstance(at.past, int):
        _store(at, ids[:, : at.past + at.new])
    return Positions(query, ids, span=max(at.keys - 1, 0), length=min(at.keys, seen))


def _packed(ids: Tensor | None, documents: Tensor, at: Arrival, trained: int) -> Positions:
    if not at.fresh:
        raise ValueError(
            f"attach: document_ids came with a cache of {at.past} tokens; packed documents are read in one go, so pass "
            "no cache"
        )
    documents = documents if documents.dim() == 2 else documents[None]
    packed = Positions.packed(documents.to(at.device))
    if ids is not None:
        placed = Positions.from_ids(ids, length=None if readable(ids) else max(at.keys, trained))
        packed = replace(placed, query_document=packed.query_document, key_document=packed.key_document)
    return _unwritten(packed, at)


def _unwritten(positions: Positions, at: Arrival) -> Positions:
    """Keys of a fixed-size cache that are not written yet: some id, they are masked."""
    spare = at.keys - positions.num_keys
    if spare <= 0:
        return positions
    grow = {"key": positions.key, "key_document": positions.key_document}
    return replace(
        positions,
        contiguous=False,
        **{
            n: t if t is None else torch.cat((t, t[..., -1:].expand(*t.shape[:-1], spare)), -1) for n, t in grow.items()
        },
    )


def _explicit(ids: Tensor, mask: Tensor | None, at: Arrival, trained: int, packed: bool = False) -> Positions:
    """Explicit ids; those of the past come with the cache, or are counted over the mask.

    ``packed``: ids that restart are documents.
    """
    ids = ids if ids.dim() == 2 else ids[None]
    if at.fresh and mask is not None:
        _warn_of_restarts(ids, mask)
    past = _stored(at)
    if past is None and readable(ids) and isinstance(at.past, int) and (mask is None or _plain_mask(mask, at)):
        in_order = torch.arange(at.past, at.past + at.new, device=ids.device)
        if bool((ids == in_order).all()):
            return _in_order(at)
    if at.fresh:
        key = ids
    elif past is not None:
        key = torch.cat((past.expand(at.batch, -1) if past.shape[0] == 1 else past, ids.expand(at.batch, -1)), dim=-1)
    elif isinstance(at.past, int):
        before = _count(mask)[:, : at.past] if mask is not None else torch.arange(at.past, device=ids.device)[None]
        key = torch.cat((before.expand(at.batch, -1), ids.expand(at.batch, -1)), dim=-1)
    else:
        key = (
            torch.arange(at.keys, device=ids.device)[None]
            - (torch.arange(at.new, device=ids.device) + at.past - ids)[:, :1]
        )
        key = key.clamp(min=0)
    if key.shape[-1] <= at.keys and isinstance(at.past, int):
        _store(at, key)
    length = None if readable(ids) else max(at.keys, trained)
    positions = Positions.from_ids(ids, key, length=length)
    if at.fresh and packed:
        positions = _restarts(positions)
    return _unwritten(positions, at)


def _warn_of_restarts(ids: Tensor, mask: Tensor) -> None:
    """Beside a mask [B J], ids that restart among real tokens look like packed documents, which it does not part."""
    if not (readable(ids) and readable(mask)) or ids.shape[-1] < 2:
        return
    real = mask[:, : ids.shape[-1]].bool()
    restart = (ids[:, 1:] == 0) & (ids[:, :-1] != 0) & real[:, 1:] & real[:, :-1]
    if bool(restart.any()):
        first = int(restart.any(0).nonzero()[0, 0]) + 1
        warnings.warn(
            f"attach: position_ids restart at token {first} beside an attention_mask, so it and the tokens before it "
            "see each other (as in transformers); for packed documents leave out the mask, or pass document_ids",
            stacklevel=2,
        )


def _restarts(positions: Positions) -> Positions:
    """Ids that count up and restart at 0 are packed documents: no token sees another document."""
    ids = positions.query
    if positions.continuous or ids.shape[-1] < 2:
        return positions
    step = (ids[:, 1:] == ids[:, :-1] + 1) | (ids[:, 1:] == 0)
    packed = step.all(-1, keepdim=True) & (ids[:, 1:] != 0).any(-1, keepdim=True)
    documents = torch.where(packed, (ids == 0).cumsum(-1), torch.zeros_like(ids))
    if readable(ids) and bool((documents == documents[:, :1]).all()):
        return positions
    return replace(positions, query_document=documents, key_document=documents)


# --- ids of cached keys -----------------------------------------------------------------------------------------------


def _stored(at: Arrival) -> Tensor | None:
    """Ids of the past keys, as kept with the cache; None where they are 0, 1, 2, ... or the cache was never met."""
    kept = getattr(at.cache, "locant_ids", None)
    if kept is None or not isinstance(at.past, int) or at.past == 0:
        return None
    if kept.shape[-1] < at.past:  # tokens were added without passing here: they count on
        more = torch.arange(1, at.past - kept.shape[-1] + 1, device=kept.device)
        kept = torch.cat((kept, kept[:, -1:] + more), dim=-1)
    return kept[:, : at.past]


def _next(at: Arrival) -> Tensor:
    """The ids that follow the stored ones."""
    stored = _stored(at)
    assert stored is not None
    return stored[:, -1:] + torch.arange(1, at.new + 1, device=stored.device)


def _store(at: Arrival, ids: Tensor) -> None:
    if at.cache is not None:
        keep(at.cache, ids)


def keep(cache: Any, ids: Tensor) -> None:
    """Keep the ids of a cache's keys with it; they follow when its rows are reordered, selected, repeated or reset."""
    cache.locant_ids = ids
    if "reorder_cache" in vars(cache):
        return
    for name, follow in (
        ("reorder_cache", _reorder),
        ("batch_select_indices", _select),
        ("batch_repeat_interleave", _repeat),
        ("reset", _reset),
    ):
        if hasattr(type(cache), name):
            setattr(cache, name, functools.partial(follow, cache))


def _rows(cache: Any, rows: Tensor) -> None:
    if cache.locant_ids is not None and cache.locant_ids.shape[0] > 1:
        cache.locant_ids = cache.locant_ids.index_select(0, rows.to(cache.locant_ids.device))


def _reorder(self: Any, beam_idx: Tensor) -> None:
    type(self).reorder_cache(self, beam_idx)
    _rows(self, beam_idx)


def _select(self: Any, indices: Tensor) -> None:
    type(self).batch_select_indices(self, indices)
    _rows(self, indices)


def _repeat(self: Any, repeats: int) -> None:
    type(self).batch_repeat_interleave(self, repeats)
    if self.locant_ids is not None and self.locant_ids.shape[0] > 1:
        self.locant_ids = self.locant_ids.repeat_interleave(repeats, dim=0)


def _reset(self: Any) -> None:
    type(self).reset(self)
    self.locant_ids = None
