"""Exact attention tile by tile in plain PyTorch, on any device, with a backward that recomputes each tile.

A tile is a block of queries, a few heads of one batch row and all keys. Nothing of size [B H I J] exists, and memory
beyond inputs, outputs and gradients grows linearly with the length. `parts` says what each term does to a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from locant.backends import dropout, operator
from locant.backends.blocked import gate
from locant.backends.blocked.parts import Part, Setting, keys, numbers, pairs, queries
from locant.backends.blocked.tile import Group, Scratch, Tile
from locant.backends.call import Backend, Call
from locant.backends.operator import Kernel, tensors_of
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
    Term,
    WeightScale,
)

BLOCK = 128  # queries of a tile
TILE_ELEMENTS = 1 << 18  # pairs of a tile (1 MB in float32: two of them stay in a core's cache)

# For each term: the part built on diagonals, and the part that gathers.
PARTS: dict[type[Term], tuple[type[Part], type[Part]]] = {
    RelativeScale: (numbers.ScaleToeplitz, numbers.ScaleNumbers),
    RelativeGate: (gate.GateDiagonals, gate.GateRows),
    RelativeBias: (numbers.Toeplitz, numbers.Numbers),
    PairBias: (pairs.Pairs, pairs.Pairs),
    LowRankBias: (pairs.LowRank, pairs.LowRank),
    RelativeQuery: (queries.QueryDiagonals, queries.QueryRows),
    RelativeKey: (keys.KeyDiagonals, keys.KeyRows),
    WeightScale: (pairs.PairWeights, pairs.PairWeights),
    RelativeValue: (queries.ValueDiagonals, queries.ValueRows),
}


def refuses(call: Call) -> str | None:
    """Why a call cannot be served."""
    if any(isinstance(term, LogitMap) for term in call.terms):
        return "LogitMap is a function that may mix heads and hold parameters, which a tile's own backward cannot see"
    for term in call.terms:
        if type(term) not in PARTS:
            return f"{type(term).__name__} has no form by tiles"
    if sum(isinstance(term, RelativeGate) for term in call.terms) > 1:
        return "one product can be gated once, and there are several vector gates"
    if call.return_weights:
        return "it does not return weights"
    scale = call.operands.scale
    if isinstance(scale, Tensor) and scale.requires_grad:
        return "it gives no gradient to a scale"
    return operator.refuses()


@dataclass(frozen=True)
class Plan:
    """A call without its tensors that want gradients, and how it is cut into tiles."""

    call: Call
    block: int
    group: int
    dtype: torch.dtype
    seed: int

    @classmethod
    def of(cls, call: Call, seed: int) -> Plan:
        """Tiles of about `TILE_ELEMENTS`; half precision is computed in float32."""
        num_heads, num_queries, num_keys = call.operands.q.shape[1], call.operands.q.shape[2], call.operands.k.shape[2]
        dtype = torch.promote_types(call.operands.q.dtype, torch.float32)
        most = max(16, TILE_ELEMENTS // max(num_keys, 1) // 16 * 16)  # chunks of keys divide it evenly
        block = max(1, min(BLOCK, num_queries, most))
        group = max(1, min(num_heads, TILE_ELEMENTS // max(block * num_keys, 1)))
        return cls(call, block, group, dtype, seed)

    def parts(self, tensors: list[Tensor], grads: list[Tensor | None]) -> list[Part]:
        """One part for each term, in the order of the call."""
        operands = self.call.operands
        scale = 1.0 if isinstance(operands.scale, Tensor) else operands.scale
        setting = Setting(operands.positions, self.block, scale, tensors[0])
        built, at = [], 3
        for term in self.call.terms:
            by_offset = operands.positions.contiguous and getattr(getattr(term, "rule", None), "offset_only", False)
            count = 2 if isinstance(term, LowRankBias) else 1
            part = PARTS[type(term)][0 if by_offset else 1]
            built.append(part(term, tensors[at : at + count], grads[at : at + count], setting))
            at += count
        return built


class Loop:
    """The tiles of a call in order; parts are told when a group of heads, and a batch row of it, begins and ends."""

    def __init__(self, plan: Plan, tensors: list[Tensor], grads: list[Tensor | None]) -> None:
        self.plan, self.call = plan, plan.call
        self.q, self.k, self.v = tensors[:3]
        self.dq, self.dk, self.dv = grads[:3]
        self.parts = plan.parts(tensors, grads)
        self.scratch = Scratch(self.q)
        self.backward = grads[0] is not None

    def stage(self, name: str) -> list[Part]:
        """The parts of one stage."""
        return [part for part in self.parts if part.stage == name]

    def tiles(self) -> Iterator[Tile]:
        """All tiles; parts are opened and closed on the way."""
        batch, num_heads, num_queries = self.q.shape[:3]
        for first in range(0, num_heads, self.plan.group):
            heads = slice(first, min(first + self.plan.group, num_heads))
            self._tell(lambda part, heads=heads: part.open_heads(heads, self.scratch))
            for b in range(batch):
                dk = None if self.dk is None else self.dk[b, heads]
                group = Group(b, heads, self.k[b, heads], self.v[b, heads], dk, self.scratch)
                self._tell(lambda part, group=group: part.open(group))
                for start in range(0, num_queries, self.plan.block):
                    yield self._tile(group, slice(start, min(start + self.plan.block, num_queries)))
                if self.backward:
                    self._tell(lambda part, group=group: part.close(group))
            if self.backward:
                self._tell(lambda part, heads=heads: part.close_heads(heads))

    def _tell(self, what: Callable[[Part], None]) -> None:
        for part in self.parts:
            what(part)

    def _tile(self, group: Group, queries: slice) -> Tile:
        operands = self.call.operands
        q = self.q[group.batch, group.heads, queries]
        row_scale = None
        if isinstance(operands.scale, Tensor):
            scale = operands.scale.reshape(-1, operands.scale.shape[-1])
            row_scale = scale[group.batch if len(scale) > 1 else 0, queries, None].to(q.dtype)
        scaled = q * (operands.scale if row_scale is None else row_scale)
        num_keys = queries.stop if self.call.plain_causal else self.k.shape[2]
        grads = (torch.zeros_like(q), torch.zeros_like(q)) if self.backward else (None, None)
        return Tile(group, queries, num_keys, q, scaled, row_scale, operands.positions, *grads)

    def weights(self, tile: Tile) -> tuple[Tensor, list[Tensor]]:
        """Weights after softmax [G I J], and the content before each relative scale (backward only)."""
        shape = (len(tile.q), tile.num_queries, tile.num_keys)
        logits, before = self.scratch("logits", *shape), []
        gates = self.stage("gate")
        for part in gates:
            part.forward(tile, logits)
        if not gates:
            torch.bmm(tile.scaled, tile.group.k[:, : tile.num_keys].transpose(-1, -2), out=logits)
        for part in self.stage("scale"):
            if self.backward:
                before.append(logits.clone())
            part.forward(tile, logits)
        for part in self.stage("logits"):
            part.forward(tile, logits)
        if self.call.allowed is None:
            return torch.softmax(logits, -1, out=self.scratch("weights", *shape)), before
        allowed = tile.pick(self.call.allowed.expand(-1, -1, self.q.shape[2], self.k.shape[2]))
        logits.masked_fill_(~allowed, float("-inf"))
        blind = ~allowed.any(-1, keepdim=True)
        logits.masked_fill_(blind, 0.0)  # a query that sees nothing: finite here, zero below
        weights = torch.softmax(logits, -1, out=self.scratch("weights", *shape))
        return weights.masked_fill_(blind, 0.0), before

    def kept(self, tile: Tile) -> Tensor | None:
        """What dropout multiplies the weights by, the same in forward and backward."""
        probability = self.call.dropout
        if not probability:
            return None
        group, device = tile.group, self.q.device
        heads = torch.arange(group.heads.start, group.heads.stop, device=device) + group.batch * self.q.shape[1]
        queries = torch.arange(tile.queries.start, tile.queries.stop, device=device)
        return dropout.kept(self.plan.seed, probability, heads, queries, tile.num_keys, self.q.dtype)

    def run_forward(self, out: Tensor) -> None:
        """Fill ``out`` [B H I E]."""
        for tile in self.tiles():
            weights, _ = self.weights(tile)
            for part in self.stage("weights"):
                part.forward(tile, weights)
            kept = self.kept(tile)
            if kept is not None:
                weights *= kept
            part_out = weights @ tile.group.v[:, : tile.num_keys]
            for part in self.stage("value"):
                part.forward(tile, weights, part_out)
            out[tile.group.batch, tile.group.heads, tile.queries] = part_out

    def run_backward(self, dout: Tensor) -> None:
        """Sum all gradients."""
        for tile in self.tiles():
            group = tile.group
            weights, contents = self.weights(tile)
            part_dout = dout[group.batch, group.heads, tile.queries].to(weights.dtype)
            dweights = self._values_backward(tile, weights, part_dout)
            dlogits = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
            for part in self.stage("logits"):
                part.backward(tile, dlogits)
            for part, content in zip(reversed(self.stage("scale")), reversed(contents), strict=True):
                part.backward(tile, dlogits, content)
            gates = self.stage("gate")
            for part in gates:
                part.backward(tile, dlogits)
            assert tile.dq is not None and tile.dscaled is not None and group.dk is not None and self.dq is not None
            if not gates:
                tile.dscaled.baddbmm_(dlogits, group.k[:, : tile.num_keys])
                group.dk[:, : tile.num_keys].baddbmm_(dlogits.transpose(-1, -2), tile.scaled)
            scale = self.call.operands.scale if tile.row_scale is None else tile.row_scale
            self.dq[group.batch, group.heads, tile.queries] = tile.dq + tile.dscaled * scale

    def _values_backward(self, tile: Tile, weights: Tensor, dout: Tensor) -> Tensor:
        """The gradient of the weights after softmax; sums those of v and of what stands between."""
        stages, before, factored = self.stage("weights"), [], weights
        for part in stages:
            before.append(factored)
            factored = factored.clone()
            part.forward(tile, factored)
        kept = self.kept(tile)
        dropped = factored if kept is None else factored * kept
        v = tile.group.v[:, : tile.num_keys]
        assert self.dv is not None
        self.dv[tile.group.batch, tile.group.heads, : tile.num_keys].baddbmm_(dropped.transpose(-1, -2), dout)
        grad = torch.bmm(dout, v.transpose(-1, -2), out=self.scratch("grad", *weights.shape))
        for part in self.stage("value"):
            part.backward(tile, grad, dropped, dout)
        if kept is not None:
            grad *= kept
        for part, seen in zip(reversed(stages), reversed(before), strict=True):
            part.backward(tile, grad, seen)
        return grad


class Blocked(Kernel):
    """The kernel: keeps nothing but its inputs."""

    keeps = False

    def forward(self, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        """Output [B H I E], and nothing."""
        plan, tensors = Plan.of(call, seed), _tensors(call)
        q, v = tensors[0], tensors[2]
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        Loop(plan, [t.to(plan.dtype) for t in tensors], [None] * len(tensors)).run_forward(out)
        return out, q.new_empty(0, dtype=torch.float32)

    def backward(
        self, call: Call, seed: int, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q, k, v and of every tensor of every term that wants one."""
        plan, tensors = Plan.of(call, seed), _tensors(call)
        dtype = plan.dtype
        grads = [t.new_zeros(t.shape, dtype=dtype) if i < 3 or wanted[i] else None for i, t in enumerate(tensors)]
        Loop(plan, [t.to(dtype) for t in tensors], grads).run_backward(dout)
        return grads


def _tensors(call: Call) -> list[Tensor]:
    operands = call.operands
    terms = (tensor for term in call.terms for tensor in tensors_of(term, operands.positions))
    return [operands.q, operands.k, operands.v, *terms]


run = operator.register("blocked", Blocked())
BACKEND = Backend(refuses=refuses, run=run)
