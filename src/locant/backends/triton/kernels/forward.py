"""Forward: the output, and the weights of each query summed by offset."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.logits import (
    content_of,
    end_of,
    kept_of,
    logits_of,
    weights_of,
)
from locant.backends.triton.kernels.offsets import (
    add_ends,
    spread,
    store_ends,
)
from locant.backends.triton.kernels.tiles import (
    BAND,
    heads_of,
    key_range,
    load_rows,
    offsets_of,
    place_of,
    product,
    store_rows,
)


@triton.jit
def forward(
    x,
    out,
    lse,
    t,
    n,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
):
    """Output without the value table, and lse (+inf for a query that sees nothing, whose output is 0)."""
    blocks = tl.cdiv(n.queries, BM)
    block, at = tl.program_id(0) % blocks, place_of(tl.program_id(0) // blocks, n)
    q, k, v = heads_of(x, at, n, D, E)
    i = block * BM + tl.arange(0, BM)
    tile_q = load_rows(q, i, n.queries, D, DP)
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, EP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * end_of(t.gate, at[3], n, SIDE, D, DP)[None, :]
        start, stop = key_range(block * BM, n, SIDE, BM, BN, CAUSAL, FAR)
        for first in range(start, stop, BN):
            j = first + tl.arange(0, BN)
            offset = offsets_of(i, j, at, t, n)
            tile_k = load_rows(k, j, n.keys, D, DP)
            content = content_of(q, k, side_q, tile_k, i, j, at, offset, t, n, SIDE, D, DOT)
            _, logits = logits_of(content, i, j, at, offset, t, n, SIDE, CAUSAL)
            above = tl.maximum(most, tl.max(logits, 1))
            finite = tl.where(above == float("-inf"), 0.0, above)
            shrink = tl.exp(most - finite)
            weights = tl.exp(logits - finite[:, None])
            total = total * shrink + tl.sum(weights, 1)
            if t.drop is not None:
                weights *= kept_of(i, j, at, t)
            sums = sums * shrink[:, None] + product(weights, load_rows(v, j, n.keys, E, EP), DOT)
            most = above
    blind = total == 0
    store_rows(out + at[0] * n.queries * E, i, n.queries, sums / tl.where(blind, 1.0, total)[:, None], E, EP)
    logarithm = tl.where(blind, float("inf"), most + tl.log(tl.where(blind, 1.0, total)))
    tl.store(lse + at[0] * n.queries + i, logarithm, mask=i < n.queries)


@triton.jit
def masses(
    x,
    t,
    n,
    s,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
):
    """The weights of each query summed by offset [G I W]: what the value table is multiplied by."""
    blocks = tl.cdiv(n.queries, BM)
    block, at = tl.program_id(0) % blocks, place_of(tl.program_id(0) // blocks, n)
    pointers = heads_of(x, at, n, D, E)
    q, k = pointers[0], pointers[1]
    i = block * BM + tl.arange(0, BM)
    inside = i < n.queries
    tile_q = load_rows(q, i, n.queries, D, DP)
    tile_lse = tl.load(x.lse + at[0] * n.queries + i, mask=inside, other=float("inf"))
    left, right = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    mass = s.value + at[0] * n.queries * (n.high - n.low + 1)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * end_of(t.gate, at[3], n, SIDE, D, DP)[None, :]
        start, stop = key_range(block * BM, n, SIDE, BM, BN, CAUSAL, FAR)
        for first in range(start, stop, BN):
            j = first + tl.arange(0, BN)
            offset = offsets_of(i, j, at, t, n)
            tile_k = load_rows(k, j, n.keys, D, DP)
            content = content_of(q, k, side_q, tile_k, i, j, at, offset, t, n, SIDE, D, DOT)
            _, weights, kept = weights_of(content, tile_lse, i, j, at, offset, t, n, SIDE, CAUSAL)
            weights *= kept
            left, right = add_ends(weights, offset, left, right, n, 1, SIDE)
            if SIDE == BAND:
                spread(mass, i[:, None], weights, offset, n, t)
    store_ends(mass, i, left, right, n, inside)
