"""Who sits where: the position ids of queries and keys, as explicit data.

Ids are never rebuilt from tensor shapes: left padding, packed documents, key-value caches and gaps all break that.
The one sign convention is ``offset = key id - query id``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Position ids of I queries and J keys, and what else is known about who sits where.

    Shapes: ``query`` [I] or [B I], ``key`` [J] or [B J] (integers, or float32 for continuous positions);
    ``query_special``, ``query_document`` like ``query``; ``key_special``, ``key_document`` like ``key``;
    every tensor in ``pair`` is [I J], [B I J] or [B H I J].

    ``contiguous`` is static knowledge (never read from a device): in every row the key ids step by one and query t
    is key J - I + t, so that an offset is constant along a diagonal. ``span`` bounds every |offset|, ``length`` every
    id (ids lie in 0 .. length - 1). ``shared`` holds what encodings computed once for all layers. ``key_real``: which
    keys are no padding, where that is known (attention is masked by its own mask; lengths are counted over this one).
    """

    query: Shaped[Tensor, "... I"]
    key: Shaped[Tensor, "... J"]
    span: int
    length: int
    contiguous: bool = False
    query_special: Bool[Tensor, "... I"] | None = None
    key_special: Bool[Tensor, "... J"] | None = None
    query_document: Int[Tensor, "... I"] | None = None
    key_document: Int[Tensor, "... J"] | None = None
    key_real: Bool[Tensor, "... J"] | None = None
    pair: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[Hashable, Any] = field(default_factory=dict)

    @property
    def num_queries(self) -> int:
        """I, the number of queries."""
        return self.query.shape[-1]

    @property
    def num_keys(self) -> int:
        """J, the number of keys."""
        return self.key.shape[-1]

    @property
    def continuous(self) -> bool:
        """Whether the ids are real numbers (table rules refuse those)."""
        return self.query.is_floating_point() or self.key.is_floating_point()

    @classmethod
    def arange(
        cls, num_queries: int, num_keys: int | None = None, device: torch.device | str | None = None
    ) -> Positions:
        """Keys 0 .. J-1; the queries are the last I of them (J > I with a key-value cache).

        Raises: ValueError if there are more queries than keys.
        """
        num_keys = num_queries if num_keys is None else num_keys
        if num_queries > num_keys:
            raise ValueError(
                f"positions: got {num_queries} queries but only {num_keys} keys; the queries are the last keys, "
                f"so pass num_keys >= {num_queries}, or explicit ids with Positions.from_ids"
            )
        key = torch.arange(num_keys, device=device)
        return cls(key[num_keys - num_queries :], key, span=max(num_keys - 1, 0), length=num_keys, contiguous=True)

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "B J"], num_queries: int | None = None) -> Positions:
        """Count over the real tokens of a padding mask (True = real): padding on either side, or holes, shift nothing.

        Masked tokens get the id of the last real token before them, or 0. The queries are the last ``num_queries``
        keys. Raises: TypeError if the mask is not boolean, ValueError if there are more queries than keys.
        """
        if mask.dtype != torch.bool:
            raise TypeError(
                f"positions: the mask has dtype {mask.dtype}, True/False is needed (True = real token); use mask.bool()"
            )
        num_keys = mask.shape[-1]
        num_queries = num_keys if num_queries is None else num_queries
        if num_queries > num_keys:
            raise ValueError(
                f"positions: got {num_queries} queries but a mask of {num_keys} keys; pass the mask of all keys, "
                "cached ones too"
            )
        key = (mask.long().cumsum(-1) - 1).clamp(min=0)
        query = key[:, num_keys - num_queries :]
        return cls(query, key, span=max(num_keys - 1, 0), length=num_keys, key_real=mask)

    @classmethod
    def from_ids(
        cls,
        query: Shaped[Tensor, "... I"],
        key: Shaped[Tensor, "... J"] | None = None,
        *,
        strict: bool = False,
        length: int | None = None,
    ) -> Positions:
        """Explicit ids: gaps, shifts, restarts. ``key`` defaults to ``query``.

        ``length`` bounds the ids from above (max id + 1); left out, it is read from the ids once, here. Given, it is
        checked where looking at the ids costs nothing (on the CPU, not while compiling).
        Raises: ValueError for negative ids or ids above the bound; ids that are all equal at a length above one (a
        frequent mistake: token types passed as positions) warn, or raise when ``strict``.
        """
        key = query if key is None else key
        for name, ids in (("query", query), ("key", key)):
            if ids.dtype == torch.bool or ids.is_complex():
                raise TypeError(
                    f"positions: {name} ids have dtype {ids.dtype}; pass integers (or float32 for real-valued ids)"
                )
            if ids.dim() not in (1, 2):
                raise ValueError(
                    f"positions: {name} ids have shape {tuple(ids.shape)}; pass [n] or [batch, n], one id for each "
                    "token"
                )
        if length is None:
            length, span = cls._bounds(query, key, strict)
            return cls(query, key, span=span, length=length)
        readable = query.device.type == key.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and (reach := cls._bounds(query, key, strict)[0]) > length:
            raise ValueError(f"positions: ids reach {reach} but length={length} was given as their bound; raise it")
        return cls(query, key, span=max(length - 1, 0), length=length)

    @staticmethod
    def _bounds(query: Tensor, key: Tensor, strict: bool) -> tuple[int, int]:
        if not query.numel() or not key.numel():
            return 0, 0
        low = min(query.min().item(), key.min().item())
        high = max(query.max().item(), key.max().item())
        if not math.isfinite(high - low):
            raise ValueError(f"positions: ids reach from {low} to {high}; every id must be a finite number")
        if low < 0 and not query.is_floating_point():
            raise ValueError(f"positions: the smallest id is {low}; ids count from 0, so shift them up")
        if key.shape[-1] > 1 and bool((key == key[..., :1]).all()):
            message = (
                f"positions: all {key.shape[-1]} ids are equal to {key.flatten()[0].item()}, so no token can tell "
                "its place; "
                "were token types passed as position ids?"
            )
            if strict:
                raise ValueError(message)
            warnings.warn(message, stacklevel=4)
        return int(-(-high // 1)) + 1, int(-(-(high - low) // 1))

    @classmethod
    def packed(cls, documents: Int[Tensor, "... J"]) -> Positions:
        """Several documents in one row: ids restart with each, and no token sees another document.

        ``documents`` numbers the document of each token; equal neighbors belong together.
        """
        index = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
        ids = index - torch.where(starts, index, torch.zeros_like(index)).cummax(-1).values
        length = documents.shape[-1]
        return cls(ids, ids, span=max(length - 1, 0), length=length, query_document=documents, key_document=documents)

    def shift(self, by: int | Tensor) -> Positions:
        """Move every id by ``by`` (an int, or one number for each batch row, [B 1]); offsets do not change."""
        most = by if isinstance(by, int) else int(by.max().item())
        return replace(self, query=self.query + by, key=self.key + by, length=self.length + most, shared={})

    def batched(self, batch: int) -> Positions:
        """The same positions with a row for each of ``batch`` sequences.

        Raises: ValueError where they have rows already, of another number.
        """
        given = {n: t for n, t in vars(self).items() if n.startswith(("query", "key")) and t is not None}
        rows = {len(t) for t in given.values() if t.dim() == 2}
        if not rows <= {1, batch}:
            raise ValueError(f"positions: ids of {max(rows)} sequences came for a batch of {batch}; give {batch} rows")
        return replace(self, **{n: t.expand(batch, t.shape[-1]) for n, t in given.items()})

    def last(self) -> Shaped[Tensor, "... I 1"]:
        """The largest id of a real key in each query's document; 0 where there are no keys."""
        if not self.num_keys:
            return self.key.new_zeros(*self.key.shape[:-1], 1, 1)
        key, real, same = self.key[..., None, :], self.key_real, self.same_document()
        lowest = torch.finfo(key.dtype).min if key.is_floating_point() else torch.iinfo(key.dtype).min
        for known in (None if real is None else real[..., None, :], same):
            if known is not None:
                key = torch.where(known, key, lowest)
        return key.amax(-1, keepdim=True)

    def special(self) -> tuple[Bool[Tensor, "... I"], Bool[Tensor, "... J"]]:
        """Which queries and keys are special ([CLS]): as given, or else those whose id is 0."""
        query = self.query == 0 if self.query_special is None else self.query_special
        key = self.key == 0 if self.key_special is None else self.key_special
        return query, key

    def offsets(self) -> Shaped[Tensor, "... I J"]:
        """Key id minus query id, for every pair."""
        return self.key[..., None, :] - self.query[..., :, None]

    def same_document(self) -> Bool[Tensor, "... I J"] | None:
        """Which pairs belong to one document; None where no documents are known."""
        if self.query_document is None or self.key_document is None:
            return None
        return self.query_document[..., :, None] == self.key_document[..., None, :]

    def share(self, owner: Hashable, value: Any) -> Positions:
        """These positions with ``value`` on board, computed once by ``owner`` for all layers."""
        return replace(self, shared={**self.shared, owner: value})

    def recall(self, owner: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``owner`` shared at the entrance, or ``compute()`` where the entrance was not passed.

        Raises: RuntimeError under reentrant gradient checkpointing, which would lose the gradient of a shared value.
        """
        if owner not in self.shared:
            return compute()
        value = self.shared[owner]
        tensors = value if isinstance(value, tuple) else (value,)
        if not torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{getattr(owner, 'name', owner)}: what all layers share was computed with gradients, but this layer "
                "runs "
                "without: reentrant gradient checkpointing would lose them; use use_reentrant=False "
                "(gradient_checkpointing_kwargs={'use_reentrant': False})"
            )
        return value
