"""Backward, what neither tiles of queries nor tiles of keys sum: a gate's table, a bias of pairs."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.logits import (
    content_of,
    dlogits_of,
    weights_of,
)
from locant.backends.triton.kernels.tiles import (
    BAND,
    heads_of,
    load_rows,
    offsets_of,
    place_of,
    results_of,
)


@triton.jit
def gates(x, dcontent, dgate, n, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """The gradient of the gate's table between the ends: one program for each offset of each batch row and head."""
    width = n.high - n.low + 1
    column, at = tl.program_id(0) % width, place_of(tl.program_id(0) // width, n)
    here = heads_of(x, at, n, D, D)
    q, k = here[0], here[1]
    offset = column + n.low
    d = tl.arange(0, DP)
    sums = tl.zeros([DP], tl.float32)
    first = tl.maximum(-offset - n.shift, 0)
    last = tl.minimum(n.keys - offset - n.shift, n.queries)
    for start in range(first, last, BM):
        i = start + tl.arange(0, BM)
        key = i + n.shift + offset
        inside = (i < last) & (column > 0) & (column < width - 1)
        pointers = dcontent + at[0] * n.queries * width + (i * width + column)
        numbers = tl.load(pointers, mask=inside, other=0.0)
        query = load_rows(q, i, last, D, DP).to(tl.float32)
        keys = load_rows(k, key, n.keys, D, DP).to(tl.float32)
        sums += tl.sum(numbers[:, None] * query * keys, 0)
    tl.store(dgate + (at[0] * width + column) * D + d, sums, mask=d < D)


@triton.jit
def pairs(
    x,
    dpair,
    t,
    n,
    num_batches,
    num_heads,
    rows_here,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Adds to the gradient of a bias of pairs [num_batches num_heads I J], summed over what it is shared by."""
    blocks_i, blocks_j = tl.cdiv(n.queries, BM), tl.cdiv(n.keys, BN)
    program = tl.program_id(0)
    block_j, block_i = program % blocks_j, program // blocks_j % blocks_i
    target = program // blocks_j // blocks_i
    i, j = block_i * BM + tl.arange(0, BM), block_j * BN + tl.arange(0, BN)
    inside = i < n.queries
    sums = tl.zeros([BM, BN], tl.float32)
    for index in range(rows_here):
        at = place_of(tl.full([], 0, tl.int32) + index, n)
        mine = (at[2] if num_batches > 1 else 0) * num_heads + (at[3] if num_heads > 1 else 0) == target
        if mine:
            offset = offsets_of(i, j, at, t, n)
            q, k, v = heads_of(x, at, n, D, E)
            tile_q, tile_k = load_rows(q, i, n.queries, D, DP), load_rows(k, j, n.keys, D, DP)
            tile_v = load_rows(v, j, n.keys, E, EP)
            tile_dout, tile_lse, tile_delta = results_of(x, i, at, n, E, EP)
            content = content_of(q, k, tile_q, tile_k, i, j, at, offset, t, n, BAND, D, DOT)
            _, weights, kept = weights_of(content, tile_lse, i, j, at, offset, t, n, BAND, CAUSAL)
            sums += dlogits_of(weights, kept, tile_dout, tile_v, tile_delta, i, at, offset, t, n, BAND, DOT)
    pointers = dpair + target.to(tl.int64) * n.queries * n.keys + (i[:, None] * n.keys + j[None, :])
    both = inside[:, None] & (j < n.keys)[None, :]
    tl.store(pointers, tl.load(pointers, mask=both, other=0.0) + sums, mask=both)
