"""The closed set of terms that an encoding may put into attention, each with one plain-PyTorch meaning.

With s the scale of the host (1/sqrt(D)) times the encoding's logit factor, attention computes, in this order:

    content = s (q . k)              changed by RelativeGate (per channel) and RelativeScale (per logit)
    logits  = content + s (scaled terms) + (unscaled terms)        then LogitMap, then the mask
    weights = softmax(logits)        changed by WeightScale
    out     = weights v              plus RelativeValue

A term holds tables and a *rule* (which table row serves a pair), never an [I J D] tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from locant.positions import Positions

GATE_BLOCK_ELEMENTS = 1 << 23  # at most this many products [B H block J D] at once (32 MB in float32)

# --- rules: (query id, key id, which are special) -> table row, elementwise ---


@dataclass(frozen=True)
class Rule:
    """Which table row serves a pair. A rule that reads only the offset sets ``offset_only`` and defines ``row``."""

    offset_only: ClassVar[bool] = True

    @property
    def num_rows(self) -> int:
        """Number of table rows the rule can ask for."""
        raise NotImplementedError

    def row(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Table row for an offset (key id - query id)."""
        raise NotImplementedError

    def rows(self, positions: Positions) -> Int[Tensor, "... I J"]:
        """Table row of every pair.

        Raises: ValueError for real-valued ids, which have no row.
        """
        if positions.continuous:
            raise ValueError(
                f"{type(self).__name__.lower()} rule: ids are {positions.query.dtype}, but a table needs integer ids; "
                "use an encoding that is defined for real positions (sinusoidal, rope, alibi, kerple, fire, sandwich)"
            )
        return self.row(positions.offsets())


@dataclass(frozen=True)
class Clip(Rule):
    """Row clip(offset, -clip, clip) + clip; ``outside='zero'`` sends farther offsets to one extra row instead."""

    clip: int
    outside: Literal["clip", "zero"] = "clip"

    @property
    def num_rows(self) -> int:
        """2 clip + 1, and one more with ``outside='zero'``."""
        return 2 * self.clip + 1 + (self.outside == "zero")

    def row(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Table row for an offset."""
        rows = offset.clamp(-self.clip, self.clip) + self.clip
        if self.outside == "zero":
            rows = torch.where(offset.abs() > self.clip, 2 * self.clip + 1, rows)
        return rows


@dataclass(frozen=True)
class Distance(Rule):
    """Row min(abs(offset), clip): left and right alike."""

    clip: int

    @property
    def num_rows(self) -> int:
        """Clip + 1."""
        return self.clip + 1

    def row(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Table row for an offset."""
        return offset.abs().clamp(max=self.clip)


@dataclass(frozen=True)
class LogBucket(Rule):
    """Raffel et al. 2020: exact near, logarithmic far, saturating at ``max_distance``; the right half is offset > 0.

    With ``causal`` all buckets serve offsets <= 0 and offsets > 0 share bucket 0.
    At the ends of buckets float32 arithmetic decides, as in the public code (float64 decides otherwise).
    """

    num_buckets: int = 32
    max_distance: int = 128
    causal: bool = False

    def __post_init__(self) -> None:
        """Check that the buckets leave an exact and a logarithmic part."""
        exact = self.num_buckets // 2 if self.causal else self.num_buckets // 4
        if self.num_buckets % 2 or exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"bucket rule: num_buckets={self.num_buckets} and max_distance={self.max_distance} leave no "
                "logarithmic part; "
                f"use an even num_buckets >= {2 if self.causal else 4} and max_distance > {max(exact, 1)}"
            )

    @property
    def num_rows(self) -> int:
        """Number of buckets."""
        return self.num_buckets

    def row(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Table row for an offset."""
        half = self.num_buckets if self.causal else self.num_buckets // 2
        base = torch.zeros_like(offset) if self.causal else half * (offset > 0).to(offset.dtype)
        distance = (-offset).clamp(min=0) if self.causal else offset.abs()
        exact = half // 2
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (log * (half - exact)).to(offset.dtype)).clamp(max=half - 1)
        return base + torch.where(distance < exact, distance, far)


@dataclass(frozen=True)
class SignedLogBucket(Rule):
    """He et al. 2021: row clamp(delta + size, 0, 2 size - 1), delta the query - key distance, logarithmic when far.

    ``max_distance=None`` leaves delta linear (first version). ``flip`` reads delta(j, i) instead of delta(i, j).
    At the ends of buckets float32 arithmetic decides, as in the public code.
    """

    size: int
    max_distance: int | None = None
    flip: bool = False

    @property
    def num_rows(self) -> int:
        """Twice ``size``."""
        return 2 * self.size

    def row(self, offset: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Table row for an offset."""
        delta = offset if self.flip else -offset
        if self.max_distance is not None:
            delta = self.bucket(delta)
        return (delta + self.size).clamp(0, 2 * self.size - 1)

    def bucket(self, delta: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Signed logarithmic bucket of a distance: linear up to size / 2, then ceil of a logarithm."""
        assert self.max_distance is not None
        middle = self.size // 2
        near = delta.abs() <= middle
        farthest = torch.tensor((self.max_distance - 1) / middle, dtype=torch.float32, device="cpu").log()
        log = torch.log(delta.abs().clamp(min=1).float() / middle) / farthest
        far = middle + torch.ceil(log * (middle - 1)).to(delta.dtype)
        return torch.where(near, delta, delta.sign() * far)


@dataclass(frozen=True)
class Untied(Rule):
    """Special tokens ([CLS]) get rows of their own: ``from_row`` where the query is special, ``to_row`` where the key.

    The query decides first: a special token looking at a special token uses ``from_row``.
    """

    rule: Rule
    from_row: int
    to_row: int
    offset_only: ClassVar[bool] = False

    @property
    def num_rows(self) -> int:
        """Rows of the inner rule, and those added."""
        return max(self.rule.num_rows, self.from_row + 1, self.to_row + 1)

    def rows(self, positions: Positions) -> Int[Tensor, "... I J"]:
        """Table row of every pair."""
        query, key = positions.special()
        rows = torch.where(key[..., None, :], self.to_row, self.rule.rows(positions))
        return torch.where(query[..., :, None], self.from_row, rows)


# --- terms ---


@dataclass(frozen=True)
class Operands:
    """What a term may read: q [B H I D], k [B H J D], v [B H J E], positions, and the full scale s.

    ``scale`` is a number, or a tensor [I] or [B 1 I] with one number for each query row.
    """

    q: Float[Tensor, "B H I D"]
    k: Float[Tensor, "B H J D"]
    v: Float[Tensor, "B H J E"]
    positions: Positions
    scale: float | Tensor

    @property
    def row_scale(self) -> float | Tensor:
        """The scale, shaped to multiply [B H I J]."""
        return self.scale[..., None].to(self.q.dtype) if isinstance(self.scale, Tensor) else self.scale

    def scaled(self, tensor: Tensor, scaled: bool) -> Tensor:
        """``tensor`` [.. I J] (or q) times the scale where a term is inside it."""
        return tensor * self.row_scale if scaled else tensor


class Term:
    """Base of all terms; ``stage`` says where in the order of arithmetic a term acts."""

    stage: ClassVar[Literal["content", "logits", "map", "weights", "value"]]

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the term does not fit the operands."""


def _check_table(who: str, table: Tensor, rule: Rule, operands: Operands, width: int | None) -> None:
    heads = operands.q.shape[1]
    if table.shape[0] not in (1, heads):
        raise ValueError(
            f"{who}: the table serves {table.shape[0]} heads but q has {heads}; build it for 1 or {heads} heads"
        )
    if table.shape[1] != rule.num_rows:
        raise ValueError(f"{who}: the table has {table.shape[1]} rows but its rule asks for {rule.num_rows}")
    if width is not None and table.shape[2] != width:
        raise ValueError(
            f"{who}: the table was built for head_dim={table.shape[2]} but q, k have head_dim={width}; "
            f"build the encoding with head_dim={width}"
        )


def _batched(rows: Tensor) -> Tensor:
    """Rows [I J] or [B I J] as [B|1 1 I J]."""
    return rows[None, None] if rows.dim() == 2 else rows[:, None]


def within_reach(table: Tensor, rule: Rule, positions: Positions) -> tuple[Tensor, Rule]:
    """The rows [H R D] that offsets of these positions can ask for, and their rule: on short input, few.

    Tables whose rule does more than clip, and whatever is being compiled (lengths vary there), stay whole.
    """
    if not isinstance(rule, Clip) or rule.outside != "clip":
        return table, rule
    if torch.compiler.is_compiling() or positions.span >= rule.clip:
        return table, rule
    near = max(positions.span, 1)
    return table[:, rule.clip - near : rule.clip + near + 1], Clip(near)


def _gated(q: Tensor, k: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """sum_c q_c k_c a[row]_c for a block of queries; backward recomputes the block instead of keeping it."""

    def product(q: Tensor, k: Tensor, table: Tensor) -> Tensor:
        heads = table.shape[0]
        gates = F.embedding(rows[:, 0], table.transpose(0, 1).flatten(1).to(q.dtype))  # [B I J (H D)]
        gates = gates.unflatten(-1, (heads, -1)).permute(0, 3, 1, 2, 4)  # [B H I J D]
        return ((gates * k[:, :, None]) @ q[..., None]).squeeze(-1)

    if not torch.is_grad_enabled():
        return product(q, k, table)
    return checkpoint(product, q, k, table, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class RelativeScale(Term):
    """content * a[row]: one number for each head and row, multiplying the dot product. Neutral at 1."""

    table: Float[Tensor, "H R"]
    rule: Rule
    stage = "content"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative scale", self.table, self.rule, operands, None)

    def apply(self, operands: Operands, content: Float[Tensor, "B H I J"]) -> Float[Tensor, "B H I J"]:
        """Content times the row's number."""
        return content * RelativeBias(self.table, self.rule).apply(operands)


@dataclass(frozen=True)
class RelativeGate(Term):
    """sum_c q_c k_c a[row]_c: one vector for each row, multiplying channel by channel. Neutral at 1."""

    table: Float[Tensor, "H R D"]
    rule: Rule
    stage = "content"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative gate", self.table, self.rule, operands, operands.q.shape[-1])

    def apply(self, operands: Operands, content: Float[Tensor, "B H I J"]) -> Float[Tensor, "B H I J"]:
        """The gated product in place of ``content``, a block of queries at a time, recomputed in backward."""
        rows = _batched(self.rule.rows(operands.positions)).expand(content.shape[0], 1, *content.shape[2:])
        q = operands.scaled(operands.q, True)
        pairs = content.shape[0] * content.shape[1] * content.shape[3] * q.shape[-1]
        if torch.compiler.is_exporting():  # one block: their number would become a constant of the program
            return _gated(q, operands.k, self.table, rows)
        block = max(1, GATE_BLOCK_ELEMENTS // max(pairs, 1))
        parts = []
        for start in range(0, content.shape[2], block):
            part = slice(start, start + block)
            parts.append(_gated(q[:, :, part], operands.k, self.table, rows[:, :, part]))
        return torch.cat(parts, dim=2) if parts else content


@dataclass(frozen=True)
class RelativeBias(Term):
    """b[row]: one number for each head and row, added; unscaled by default. Neutral at 0."""

    table: Float[Tensor, "H R"]
    rule: Rule
    scaled: bool = False
    stage = "logits"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative bias", self.table, self.rule, operands, None)

    def pairs(self, positions: Positions) -> Float[Tensor, "B2 H I J"]:
        """The row's number for every pair, unscaled."""
        bias = F.embedding(self.rule.rows(positions), self.table.T).movedim(-1, -3)
        return bias if bias.dim() == 4 else bias[None]

    def apply(self, operands: Operands) -> Float[Tensor, "B2 H I J"]:
        """The row's number for every pair."""
        return operands.scaled(self.pairs(operands.positions).to(operands.q.dtype), self.scaled)


@dataclass(frozen=True)
class PairBias(Term):
    """A bias given for each pair: a tensor [H I J] or [B H I J], or a function of Positions that returns one."""

    bias: Tensor | Callable[[Positions], Tensor]
    scaled: bool = False
    stage = "logits"

    def tensor(self, positions: Positions) -> Tensor:
        """The bias [B|1 H|1 I J]."""
        bias = self.bias if isinstance(self.bias, Tensor) else self.bias(positions)
        return bias if bias.dim() == 4 else bias[None]

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the given tensor cannot be broadcast to the logits."""
        if not isinstance(self.bias, Tensor):
            return
        want = (operands.q.shape[0], operands.q.shape[1], operands.q.shape[2], operands.k.shape[2])
        have = (1,) * (4 - self.bias.dim()) + tuple(self.bias.shape)
        if any(h not in (1, w) for h, w in zip(have[:2], want[:2], strict=True)) or have[2:] != want[2:]:
            raise ValueError(
                f"pair bias: the bias has shape {tuple(self.bias.shape)} but the logits are {want}; "
                "give [H I J] or [B H I J]"
            )

    def apply(self, operands: Operands) -> Float[Tensor, "B2 H2 I J"]:
        """The bias of every pair."""
        return operands.scaled(self.tensor(operands.positions).to(operands.q.dtype), self.scaled)


def offset_bias(
    score: Callable[[Shaped[Tensor, "..."]], Float[Tensor, "H ..."]], positions: Positions, scaled: bool = False
) -> RelativeBias | PairBias:
    """A bias that is a function of the offset: ``score`` takes offsets of any shape and puts the heads in front.

    It is evaluated once for each offset that integer ids can have, or for every pair where ids are real numbers.
    """
    if positions.continuous:
        bias = score(positions.offsets())
        return PairBias(bias if bias.dim() == 3 else bias.transpose(0, 1), scaled)
    span = max(positions.span, 1)
    offset = torch.arange(-span, span + 1, device=positions.key.device)
    return RelativeBias(score(offset), Clip(span), scaled)


@dataclass(frozen=True)
class LowRankBias(Term):
    """f_i . g_j: a bias that factors into [B|1 H|1 I E] and [B|1 H|1 J E]; scaled by default."""

    query: Float[Tensor, "B2 H2 I E"]
    key: Float[Tensor, "B3 H3 J E"]
    scaled: bool = True
    stage = "logits"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the factors do not fit the operands."""
        have, want = (self.query.shape[2], self.key.shape[2]), (operands.q.shape[2], operands.k.shape[2])
        if have != want:
            raise ValueError(f"low-rank bias: the factors serve {have} (queries, keys) but q and k have {want}")

    def apply(self, operands: Operands) -> Float[Tensor, "B2 H2 I J"]:
        """The product of every pair."""
        product = self.query @ self.key.transpose(-1, -2)
        return operands.scaled(product.to(operands.q.dtype), self.scaled)


@dataclass(frozen=True)
class RelativeQuery(Term):
    """q_i . a[row] (Shaw's key form): added, scaled by default. Neutral at 0."""

    table: Float[Tensor, "H R D"]
    rule: Rule
    scaled: bool = True
    stage = "logits"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative query", self.table, self.rule, operands, operands.q.shape[-1])

    def apply(self, operands: Operands) -> Float[Tensor, "B H I J"]:
        """Products with every table row, then the row of each pair is picked: [B H I R], never [I J D]."""
        table, rule = within_reach(self.table, self.rule, operands.positions)
        rows = _batched(rule.rows(operands.positions))
        products = operands.scaled(operands.q, self.scaled) @ table.to(operands.q.dtype).transpose(-1, -2)
        return products.gather(-1, rows.expand(*products.shape[:2], *rows.shape[-2:]))


@dataclass(frozen=True)
class RelativeKey(Term):
    """k_j . a[row]: added, scaled by default. Neutral at 0."""

    table: Float[Tensor, "H R D"]
    rule: Rule
    scaled: bool = True
    stage = "logits"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative key", self.table, self.rule, operands, operands.k.shape[-1])

    def apply(self, operands: Operands) -> Float[Tensor, "B H I J"]:
        """Products with every table row, then the row of each pair is picked: [B H J R], never [I J D]."""
        table, rule = within_reach(self.table, self.rule, operands.positions)
        rows = _batched(rule.rows(operands.positions)).transpose(-1, -2)
        products = operands.k @ table.to(operands.k.dtype).transpose(-1, -2)
        picked = products.gather(-1, rows.expand(*products.shape[:2], *rows.shape[-2:])).transpose(-1, -2)
        return operands.scaled(picked, self.scaled)


@dataclass(frozen=True)
class LogitMap(Term):
    """A function of the logits: ``fn(content, bias, positions, allowed)``, content the scaled part, bias the unscaled.

    ``allowed`` [B|1 H|1 I J] says what the mask will leave (None: everything); what the mask takes is still in the
    logits. ``reach='pair'``: each pair on its own (heads may mix); ``'row'``: a whole row of keys at once (keys cannot
    be tiled).
    """

    fn: Callable[[Tensor, Tensor, Positions, Tensor | None], Tensor]
    reach: Literal["pair", "row"] = "pair"
    stage = "map"

    def apply(
        self,
        operands: Operands,
        content: Float[Tensor, "B H I J"],
        bias: Float[Tensor, "..."],
        allowed: Bool[Tensor, "B2 H2 I2 J2"] | None = None,
    ) -> Float[Tensor, "B H I J"]:
        """The new logits."""
        return self.fn(content, bias, operands.positions, allowed)


@dataclass(frozen=True)
class WeightScale(Term):
    """weights * w, after the softmax: w [H I J] or [B H I J], or a function of Positions."""

    scale: Tensor | Callable[[Positions], Tensor]
    stage = "weights"

    def apply(self, operands: Operands, weights: Float[Tensor, "B H I J"]) -> Float[Tensor, "B H I J"]:
        """The weights times the factor of each pair."""
        return weights * PairBias(self.scale).tensor(operands.positions).to(weights.dtype)


@dataclass(frozen=True)
class RelativeValue(Term):
    """sum_j weights_ij a[row] (Shaw's value form): added to the output. Neutral at 0."""

    table: Float[Tensor, "H R E"]
    rule: Rule
    stage = "value"

    def check(self, operands: Operands) -> None:
        """Raise a ValueError where the table does not fit the operands."""
        _check_table("relative value", self.table, self.rule, operands, operands.v.shape[-1])

    def apply(self, operands: Operands, weights: Float[Tensor, "B H I J"]) -> Float[Tensor, "B H I E"]:
        """Weights of equal row summed first, [B H I R], then one product with the table."""
        table, rule = within_reach(self.table, self.rule, operands.positions)
        rows = _batched(rule.rows(operands.positions)).expand(weights.shape)
        mass = weights.new_zeros(*weights.shape[:-1], rule.num_rows).scatter_add(-1, rows, weights)
        return mass @ table.to(weights.dtype)
