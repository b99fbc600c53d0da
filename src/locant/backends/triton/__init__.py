"""Attention with position terms in Triton, for GPUs: forward and backward in tiles, without a matrix of pairs.

On the CPU the kernels run only in Triton's interpreter, for tests: set TRITON_INTERPRET=1 before `triton` is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locant.backends import dropout, operator
from locant.backends.call import Backend, Call, constant
from locant.backends.operator import Kernel
from locant.backends.triton import lower

SCRATCH = 1 << 30  # bytes at most, for products with tables and their gradients: beyond, heads are taken in groups
_SIGNED = 1 << 31


@dataclass(frozen=True)
class Tiles:
    """Queries and keys of a tile in forward, both in backward (square), and how many warps and stages serve it."""

    queries: int
    keys: int
    backward: int
    warps: int
    stages: int


def tiles(dtype: torch.dtype, width: int, gated: bool) -> Tiles:
    """What fits into the registers and the memory of a multiprocessor, for heads of a padded width.

    Compiled for sm_90 without a GPU: at most 100 kB of shared memory, and hardly a register spilled in half precision.
    """
    if dtype == torch.float32:
        return Tiles(32, 32, 16, 4, 1) if width > 64 else Tiles(32, 32, 32, 8, 1)
    return Tiles(64, 64, 32, 8, 2) if width > 64 else Tiles(64, 64, 32 if gated else 64, 4, 2)


def product_dtype(q: Tensor) -> torch.dtype:
    """What products of matrices read: the interpreter has none in bfloat16."""
    return torch.float32 if q.device.type == "cpu" else q.dtype


@dataclass(frozen=True)
class Group:
    """Whole batch rows, or some heads of one: what is computed at a time."""

    batch: slice
    heads: slice
    first: int  # batch row * heads + head
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """This group's part of a contiguous tensor [B H ..]."""
        return tensor.flatten(0, 1)[self.first : self.first + self.size]

    def rows(self, tensor: Tensor) -> Tensor:
        """This group's part of a tensor [1|H ..]."""
        return tensor if len(tensor) == 1 else tensor[self.heads]

    def split(self, tensor: Tensor) -> Tensor:
        """A tensor [G ..] as [batch heads ..]."""
        return tensor.unflatten(0, (self.batch.stop - self.batch.start, -1))

    def add(self, total: Tensor, grad: Tensor) -> None:
        """Adds the gradient [G ..] of a table [1|H ..], in one order."""
        grad = self.split(grad).sum(0, dtype=torch.float32)
        self.rows(total).add_(grad.sum(0, keepdim=True) if len(total) == 1 else grad)


def groups(batch: int, heads: int, bytes_of_head: int) -> Iterator[Group]:
    """The groups of a call, each within `SCRATCH`."""
    at_once = max(1, SCRATCH // max(bytes_of_head, 1))
    if at_once >= heads:
        step = at_once // heads
        for start in range(0, batch, step):
            stop = min(start + step, batch)
            yield Group(slice(start, stop), slice(0, heads), start * heads, (stop - start) * heads)
        return
    for b in range(batch):
        for start in range(0, heads, at_once):
            stop = min(start + at_once, heads)
            yield Group(slice(b, b + 1), slice(start, stop), b * heads + start, stop - start)


class Plan:
    """A call lowered, and the arguments that its kernels share."""

    def __init__(self, call: Call, seed: int) -> None:
        from locant.backends.triton import kernels

        self.call, self.kernels, self.tables = call, kernels, lower.lower(call)
        operands = call.operands
        self.q, self.k, self.v = (t.contiguous() for t in (operands.q, operands.k, operands.v))
        self.batch, self.heads, self.queries, depth = self.q.shape
        self.keys, width = self.v.shape[2:]
        padded = tuple(max(16, 1 << (extent - 1).bit_length()) for extent in (depth, width))
        tables = self.tables.whole
        self.tiles = tiles(self.q.dtype, max(padded), "gate" in tables)
        self.by_offset = bool(set(tables) - {"pair"})
        self.counted = operands.positions.contiguous or not self.by_offset
        self.constants = {
            "D": depth,
            "E": width,
            "DP": padded[0],
            "EP": padded[1],
            "DOT": getattr(kernels.tl, str(product_dtype(self.q)).removeprefix("torch.")),
        }
        self.flags = {"CAUSAL": call.plain_causal, "FAR": self.by_offset and self.counted}
        self.launch = {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}
        signed = seed - 2 * _SIGNED if seed >= _SIGNED else seed
        self.drop = (signed, dropout.threshold(call.dropout), dropout.factor(call.dropout)) if call.dropout else None
        self.gate = tables["gate"].transpose(1, 2).contiguous() if "gate" in tables else None
        self.ids = None if self.counted else self._ids()

    def _ids(self) -> tuple[Any, ...]:
        positions = self.call.operands.positions
        ids = [(ids if ids.dim() == 2 else ids[None]).int().contiguous() for ids in (positions.query, positions.key)]
        return (*ids, *(0 if len(t) == 1 else t.shape[1] for t in ids))

    def groups(self, backward: bool) -> Iterator[Group]:
        """The groups within which scratch memory is kept."""
        return groups(self.batch, self.heads, scratch(self.call, self.tables.width, backward))

    def sizes(self, group: Group) -> Any:
        """The lengths, for a launch on a group."""
        shift = self.keys - self.queries
        first, ends = group.first, (self.tables.low, self.tables.high)
        return self.kernels.Sizes(self.queries, self.keys, self.heads, first, shift, *ends)

    def terms(self, group: Group, dout: Tensor | None = None) -> Any:
        """What changes logits, with products for this group."""
        tables = self.tables.whole
        products = {"query": self.q, "key": self.k, "value": dout}
        made = {
            name: group.split(group.of(rows)) @ group.rows(tables[name]).to(rows.dtype).transpose(-1, -2)
            for name, rows in products.items()
            if name in tables and rows is not None
        }
        allowed = None if self.call.plain_causal or self.call.allowed is None else self.call.allowed.view(torch.uint8)
        return self.kernels.Terms(
            bias=_by_head(tables.get("bias")),
            scales=_by_head(tables.get("scales")),
            gate=_by_head(self.gate),
            query=made.get("query"),
            key=made.get("key"),
            value=made.get("value"),
            pair=_by_pair(tables.get("pair")),
            mask=_by_pair(allowed),
            ids=self.ids,
            scale=float(self.call.operands.scale),  # pyright: ignore[reportArgumentType]
            drop=self.drop,
        )

    def inputs(self, group: Group, *results: Tensor) -> Any:
        """What is read of this group: q, k, v and, where they are there, dout, lse and delta."""
        given = [group.of(tensor) for tensor in (self.q, self.k, self.v, *results)]
        return self.kernels.Inputs(*given, *[None] * (6 - len(given)))


def _by_head(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor, 0 if len(tensor) == 1 else tensor.stride(0)


def _by_pair(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return tensor, *(0 if extent == 1 else s for extent, s in zip(tensor.shape, tensor.stride(), strict=True))


def scratch(call: Call, width: int, backward: bool) -> int:
    """Bytes of scratch memory for each batch row and head, for so many columns: linear where tables are clipped."""
    operands, size = call.operands, call.operands.q.element_size()
    lengths = {"query": operands.q.shape[2], "key": operands.k.shape[2], "value": operands.q.shape[2]}
    lengths |= {"gate": operands.q.shape[2]} if backward else {}
    names = {lower.NAMES[type(term)] for term in call.terms}
    rows = sum(length for name, length in lengths.items() if name in names)
    return rows * width * (size + 4 if backward or "value" in names else size)


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def start(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel."""
    kernel[(programs,)](*arguments, **constants)


class Triton(Kernel):
    """The kernels: they keep the output and the logarithm of each row's sum."""

    keeps = True

    def forward(self, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        """Output [B H I E] and logarithms [B H I]."""
        plan = Plan(call, seed)
        q, tables = plan.q, plan.tables.whole
        out = q.new_empty(*q.shape[:3], plan.v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        m, n = plan.tiles.queries, plan.tiles.keys
        blocks = {"BM": m, "BN": n, **plan.flags, **plan.launch}
        for group in plan.groups(False):
            terms, sizes = plan.terms(group), plan.sizes(group)
            part_out = group.of(out)
            made = part_out.new_empty(part_out.shape, dtype=torch.float32) if "value" in tables else part_out
            given = (plan.inputs(group), made, group.of(lse), terms, sizes)
            start(plan.kernels.forward, group.size * cdiv(plan.queries, m), *given, **plan.constants, **blocks)
            if "value" in tables:
                mass = _masses(plan, group, terms, lse)
                part_out.copy_(made + (group.split(mass) @ group.rows(tables["value"])).flatten(0, 1))
        return out, lse

    def backward(
        self, call: Call, seed: int, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q, k, v and of every table."""
        return Backward(Plan(call, seed), out, lse, dout, wanted).run()


def _masses(plan: Plan, group: Group, terms: Any, lse: Tensor) -> Tensor:
    """Weights by offset [G I W]."""
    mass = torch.zeros(group.size, plan.queries, plan.tables.width, dtype=torch.float32, device=lse.device)
    x = plan.inputs(group)._replace(lse=group.of(lse))
    sums = plan.kernels.Sums(None, None, mass, None, None, None, None)
    constants = {name: value for name, value in plan.constants.items() if name != "EP"}
    m = plan.tiles.backward
    start(
        plan.kernels.masses, group.size * cdiv(plan.queries, m), x, terms, plan.sizes(group), sums,
        BM=m, BN=m, **constants, **plan.flags, **plan.launch,
    )  # fmt: skip
    return mass


class Backward:
    """One backward pass, group by group; sums over groups and batch rows are taken in one order."""

    def __init__(self, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]) -> None:
        self.plan, self.lse = plan, lse
        self.dout = dout.to(plan.q.dtype).contiguous()
        self.delta = (out.float() * self.dout.float()).sum(-1)
        self.names = {p.name for p, want in zip(plan.tables.shares, wanted[3:], strict=True) if want}
        tables = plan.tables.whole
        self.grads = {name: self.delta.new_zeros(tables[name].shape) for name in sorted(self.names)}
        self.dq, self.dk, self.dv = (torch.empty_like(t, dtype=torch.float32) for t in (plan.q, plan.k, plan.v))

    def run(self) -> list[Tensor | None]:
        """All groups."""
        for group in self.plan.groups(True):
            self._group(group, self.plan.terms(group, self.dout))
        return [self.dq, self.dk, self.dv, *self.plan.tables.raised(self.grads)]

    def _group(self, group: Group, terms: Any) -> None:
        plan, tables = self.plan, self.plan.tables.whole
        queries, keys, width, block = plan.queries, plan.keys, plan.tables.width, plan.tiles.backward
        blocks = cdiv(queries, block)
        shapes = {
            "query": (queries, width),
            "key": (keys, width),
            "gate": (queries, width),
            "bias": (blocks, width),
            "scales": (blocks, width),
        }
        # Tables whose vectors enter dq and dk are summed by offset in any case; numbers only where they are wanted.
        held = {name for name in shapes if name in tables and (name in self.names or name in ("query", "key", "gate"))}
        sums = {name: self.delta.new_zeros(group.size, *shapes[name]) for name in held}
        ends = self.delta.new_empty(group.size, blocks, 2, plan.q.shape[3]) if "gate" in held else None
        given = plan.kernels.Sums(
            sums.get("query"), sums.get("key"), None, sums.get("gate"), ends, sums.get("bias"), sums.get("scales")
        )
        x = plan.inputs(group, self.dout, self.lse, self.delta)
        dq, dk, dv = (group.of(t) for t in (self.dq, self.dk, self.dv))
        sizes = plan.sizes(group)
        constants = {"B": block, **plan.constants, **plan.flags, **plan.launch}
        start(plan.kernels.rows, group.size * blocks, x, dq, terms, sizes, given, **constants)
        start(plan.kernels.columns, group.size * cdiv(keys, block), x, dk, dv, terms, sizes, given, **constants)
        if "pair" in self.names:
            self._pairs(group, x, terms, sizes)
        for name, rows, grad in (("query", plan.q, dq), ("key", plan.k, dk)):
            if name in sums:
                self._products(group, name, sums[name], rows, grad)
        for name in ("bias", "scales"):
            if name in sums:
                group.add(self.grads[name], sums[name].sum(1))
        if "gate" in self.names:
            assert ends is not None
            self._gate(group, x, sums["gate"], ends, sizes)
        if "value" in self.names:
            mass = group.split(_masses(plan, group, terms, self.lse)).to(plan.q.dtype)
            group.add(self.grads["value"], (mass.transpose(-1, -2) @ group.split(x.dout)).flatten(0, 1))

    def _products(self, group: Group, name: str, sums: Tensor, rows: Tensor, grad: Tensor) -> None:
        """What a table of vectors adds to dq or dk, and its own gradient."""
        by_offset = group.split(sums).to(rows.dtype)
        table = group.rows(self.plan.tables.whole[name]).to(rows.dtype)
        grad += (by_offset @ table).flatten(0, 1)
        if name in self.names:
            group.add(self.grads[name], (by_offset.transpose(-1, -2) @ group.split(group.of(rows))).flatten(0, 1))

    def _gate(self, group: Group, x: Any, dcontent: Tensor, ends: Tensor, sizes: Any) -> None:
        plan = self.plan
        width, depth = plan.tables.width, plan.q.shape[3]
        found = dcontent.new_empty(group.size, width, depth)
        start(
            plan.kernels.gates, group.size * width, x, dcontent, found, sizes,
            D=depth, DP=plan.constants["DP"], BM=plan.tiles.backward, num_warps=4,
        )  # fmt: skip
        found[:, 0], found[:, -1] = ends[:, :, 0].sum(1), ends[:, :, 1].sum(1)
        group.add(self.grads["gate"], found)

    def _pairs(self, group: Group, x: Any, terms: Any, sizes: Any) -> None:
        plan, grad = self.plan, self.grads["pair"]
        block = plan.tiles.backward
        programs = grad.shape[0] * grad.shape[1] * cdiv(plan.queries, block) * cdiv(plan.keys, block)
        constants = {**plan.constants, **plan.launch, "CAUSAL": plan.flags["CAUSAL"]}
        given = (x, grad, terms, sizes, *grad.shape[:2], group.size)
        start(plan.kernels.pairs, programs, *given, BM=block, BN=block, **constants)


def refuses(call: Call) -> str | None:
    """Why a call cannot be served."""
    why = operator.refuses() or _missing(call.operands.q.device.type) or lower.refuses(call)
    if why is not None:
        return why
    needed = scratch(call, lower.widest(call), True)
    return f"tables not clipped need {needed >> 20} MB of scratch memory for each head" if needed > SCRATCH else None


@constant
def _missing(device: str) -> str | None:
    """Why the kernels cannot run on a kind of device."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda" or (device == "cpu" and interpreted):
        return None
    return f"it runs on a GPU, and the tensors are on {device} (TRITON_INTERPRET=1 interprets it on the CPU, for tests)"


run = operator.register("triton", Triton())
BACKEND = Backend(refuses=refuses, run=run)
