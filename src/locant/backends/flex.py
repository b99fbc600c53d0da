"""Terms as one score function of PyTorch's FlexAttention, which is compiled to a kernel for the GPU.

FlexAttention hands the score function s (q.k) of a pair; with c the column of its offset it becomes

    score * scale_table[h, c] + bias_table[h, c]
        + sum over terms of query_products[b, h, i, row(c)], key_products[b, h, j, row(c)], pairs[b, h, i, j]

What the function reads are tensors: ids, rows by offset, tables and products with tables. No length is written into it,
so one compiled kernel serves every length of one `Family` (lengths within one tile of the mask, 128, make another).
Sizes that happen to be equal at the first call, as batch and heads, torch takes to stay equal: that may cost a second.
Gradients of tables come from FlexAttention's own backward, which adds them atomically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from locant.backends.call import Backend, Call
from locant.terms import (
    LogitMap,
    LowRankBias,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    Rule,
    WeightScale,
    within_reach,
)

TILE = 128  # queries and keys of a tile of the mask
NARROWEST = 16  # heads that FlexAttention compiles
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVED = (RelativeBias, RelativeScale, RelativeQuery, RelativeKey, PairBias)
REASONS: dict[type, str] = {
    RelativeGate: "a score function sees the product q.k, not its channels",
    RelativeValue: "a score function changes logits, not what the weights are multiplied with",
    WeightScale: "a score function changes logits, not the weights after softmax",
    LogitMap: "a score function sees one pair of one head at a time",
    LowRankBias: "its factors are read by pair and channel",
}
ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# --- what the score function reads ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picked:
    """A tensor and along which of its axes pairs differ; on the others it has one entry."""

    tensor: Tensor
    varies: tuple[bool, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Picked:
        """Of a tensor whose axes of one entry are shared by all."""
        return cls(tensor, tuple(extent > 1 for extent in tensor.shape))

    def at(self, *indices: Tensor) -> Tensor:
        """The entry at these places."""
        return self.tensor[
            tuple([index if own else index * 0 for index, own in zip(indices, self.varies, strict=True)])
        ]


@dataclass(frozen=True)
class Products:
    """Products of queries or keys with a table [B H N R], and the row of each offset [W]."""

    numbers: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Inputs:
    """All that a score function reads; columns of offsets are key id - (query id - span)."""

    query_ids: Picked
    key_ids: Picked
    scales: tuple[Picked, ...]
    biases: tuple[Picked, ...]
    by_query: tuple[Products, ...]
    by_key: tuple[Products, ...]
    pairs: tuple[Picked, ...]

    def structure(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on, beside shapes."""
        picked = (self.query_ids, self.key_ids, *self.scales, *self.biases, *self.pairs)
        counts = tuple(len(part) for part in (self.scales, self.biases, self.by_query, self.by_key, self.pairs))
        return (*(one.varies for one in picked), *counts)


def inputs_of(call: Call) -> Inputs:
    """Tables by offset, products with tables and pairs; sums and products of numbers of one kind are taken here."""
    operands, positions = call.operands, call.operands.positions
    offsets = torch.arange(-positions.span, positions.span + 1, device=operands.q.device)
    scales, biases, pairs = [], [], []
    products: dict[type, list[Products]] = {RelativeQuery: [], RelativeKey: []}
    for term in call.terms:
        number = float(operands.scale) if getattr(term, "scaled", False) else 1.0  # pyright: ignore[reportArgumentType]
        if isinstance(term, PairBias):
            pairs.append(Picked.of(term.tensor(positions) * number))
        elif isinstance(term, RelativeBias | RelativeScale):
            by_offset = term.table.index_select(1, term.rule.row(offsets)).float() * number
            (scales if isinstance(term, RelativeScale) else biases).append(by_offset)
        else:
            assert isinstance(term, RelativeQuery | RelativeKey)
            rows = operands.q if isinstance(term, RelativeQuery) else operands.k
            products[type(term)].append(_products(term.table, term.rule, rows, offsets, number, call))
    return Inputs(
        Picked.of(_two(positions.query - positions.span)),
        Picked.of(_two(positions.key)),
        tuple(Picked.of(table) for table in _folded(scales, torch.mul)),
        tuple(Picked.of(table) for table in _folded(biases, torch.add)),
        tuple(products[RelativeQuery]),
        tuple(products[RelativeKey]),
        tuple(pairs),
    )


def _products(table: Tensor, rule: Rule, rows: Tensor, offsets: Tensor, number: float, call: Call) -> Products:
    table, rule = within_reach(table, rule, call.operands.positions)
    numbers = (rows @ table.to(rows.dtype).transpose(-1, -2)).float() * number
    return Products(numbers, rule.row(offsets))


def _folded(tables: list[Tensor], fold: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """All tables [1|H W] in one."""
    for table in tables[1:]:
        tables = [fold(tables[0], table)]
    return tables


def _two(ids: Tensor) -> Tensor:
    return ids if ids.dim() == 2 else ids[None]


def score_function(given: Inputs) -> ScoreFunction | None:
    """The score of a pair from s (q.k); None where no term changes it. FlexAttention wants each tensor read once."""
    if not (given.scales or given.biases or given.by_query or given.by_key or given.pairs):
        return None

    def score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        column = given.key_ids.at(b, j) - given.query_ids.at(b, i)
        for table in given.scales:
            score = score * table.at(h, column)
        for table in given.biases:
            score = score + table.at(h, column)
        for products in given.by_query:
            score = score + products.numbers[b, h, i, products.rows[column]]
        for products in given.by_key:
            score = score + products.numbers[b, h, j, products.rows[column]]
        for pair in given.pairs:
            score = score + pair.at(b, h, i, j)
        return score

    return score


# --- the mask ---------------------------------------------------------------------------------------------------------


def block_mask(call: Call) -> Any:
    """Which tiles are seen in full, in part or not at all; None where everything is."""
    if call.allowed is None:
        return None
    from torch.nn.attention.flex_attention import BlockMask

    allowed = Picked.of(call.allowed)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if call.plain_causal else allowed.at(b, h, i, j)

    queries, keys = call.operands.q.shape[2], call.operands.k.shape[2]
    pairs = call.allowed.expand(*call.allowed.shape[:2], queries, keys)
    pairs = F.pad(pairs, (0, -keys % TILE, 0, -queries % TILE))
    number = pairs.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).sum((3, 5))  # of pairs seen, for each tile
    full = number == TILE * TILE
    some = (number > 0) & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(some), *_ordered(full), BLOCK_SIZE=TILE, mask_mod=seen, seq_lengths=(queries, keys)
    )


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row there are, and the columns with those first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.int()


# --- compiling and running --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Calls that one compiled kernel serves, at every length."""

    structure: tuple[Any, ...]
    mask: tuple[Any, ...] | None
    dtype: torch.dtype
    shape: tuple[int, ...]  # heads, widths, and whether there is more than one batch row
    lengths: tuple[bool, ...]  # one query, fewer than a tile's, one tile of queries, one tile of keys
    scale: float
    training: bool


def attend(q: Tensor, k: Tensor, v: Tensor, score: ScoreFunction | None, mask: Any, scale: float) -> Tensor:
    """FlexAttention, as it is."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=score, block_mask=mask, scale=scale)  # pyright: ignore[reportReturnType]


@lru_cache(maxsize=256)
def compiled(family: Family, backend: str = "inductor") -> Callable[..., Tensor]:
    """`attend` compiled for a family. A function of its own for each: torch limits recompilations by code object."""
    own = FunctionType(attend.__code__.replace(co_name=f"attend_{abs(hash(family))}"), attend.__globals__)
    return torch.compile(own, fullgraph=True, dynamic=True, backend=backend)


def prepare(call: Call) -> tuple[tuple[Any, ...], Family]:
    """The arguments of `attend`, and the family that they belong to."""
    operands, given, mask = call.operands, inputs_of(call), block_mask(call)
    q, k, v = operands.q, operands.k, operands.v
    seen = None if call.allowed is None else (call.plain_causal, *(extent > 1 for extent in call.allowed.shape))
    shape = (q.shape[1], q.shape[3], v.shape[3], q.shape[0] > 1)
    queries, keys = q.shape[2], k.shape[2]
    lengths = (queries == 1, queries < TILE, queries <= TILE, keys <= TILE)
    scale = float(operands.scale)  # pyright: ignore[reportArgumentType]
    family = Family(given.structure(), seen, q.dtype, shape, lengths, scale, torch.is_grad_enabled())
    return (q, k, v, score_function(given), mask, scale), family


def run(call: Call) -> Tensor:
    """Output [B H I E]."""
    arguments, family = prepare(call)
    return compiled(family)(*arguments)


def refuses(call: Call) -> str | None:
    """Why a call cannot be served."""
    device = call.operands.q.device.type
    if device != "cuda":
        return f"it runs on a GPU, and the tensors are on {device} (where FlexAttention has no backward)"
    if torch.compiler.is_compiling():
        return "its kernels are compiled by themselves, not as a part of another graph"
    return terms_refused(call)


def terms_refused(call: Call) -> str | None:
    """Why terms, dtype or shapes cannot be served, wherever it runs."""
    operands, positions = call.operands, call.operands.positions
    for term in call.terms:
        if not isinstance(term, SERVED):
            return f"{type(term).__name__}: {REASONS.get(type(term), 'its score function does not know this term')}"
        if isinstance(term, PairBias):
            continue
        if positions.continuous or not term.rule.offset_only:
            needed = "integer ids" if positions.continuous else "a rule that reads only the offset"
            return f"{type(term).__name__} needs {needed}"
    dtypes = {operands.q.dtype, operands.k.dtype, operands.v.dtype}
    if len(dtypes) > 1 or operands.q.dtype not in DTYPES:
        return f"it computes in float32, bfloat16 or float16, not in {', '.join(sorted(map(str, dtypes)))}"
    if min(operands.q.shape[3], operands.v.shape[3]) < NARROWEST:
        return f"heads are {operands.q.shape[3]} and {operands.v.shape[3]} wide, and it takes {NARROWEST} at least"
    if operands.q.numel() * operands.v.numel() == 0:
        return "there is nothing to compute"
    if isinstance(operands.scale, Tensor):
        return "the scale must be one number"
    if call.terms and torch.are_deterministic_algorithms_enabled():
        return "table gradients are added atomically, in any order, and deterministic ones are asked for"
    if call.dropout:
        return "a score function changes logits, and dropout falls on the weights after softmax"
    return "it does not return weights" if call.return_weights else None


BACKEND = Backend(refuses=refuses, run=run)
