"""Backward, what sums over queries: one program for each tile of keys."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.logits import (
    channel_of,
    content_of,
    dlogits_of,
    end_of,
    gate_of,
    weights_of,
)
from locant.backends.triton.kernels.offsets import (
    add_ends,
    spread,
    store_ends,
)
from locant.backends.triton.kernels.tiles import (
    BAND,
    LEFT,
    RIGHT,
    heads_of,
    load_rows,
    offsets_of,
    place_of,
    product,
    query_range,
    results_of,
    store_rows,
)


@triton.jit
def columns(
    x,
    dk,
    dv,
    t,
    n,
    s,
    D: tl.constexpr,
    E: tl.constexpr,
    DP: tl.constexpr,
    EP: tl.constexpr,
    B: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
):
    """Gradients that sum over queries: dk (without the key table), dv, and by offset that of the key products."""
    blocks = tl.cdiv(n.keys, B)
    block, at = tl.program_id(0) % blocks, place_of(tl.program_id(0) // blocks, n)
    q, k, v = heads_of(x, at, n, D, E)
    j = block * B + tl.arange(0, B)
    tile_k, tile_v = load_rows(k, j, n.keys, D, DP), load_rows(v, j, n.keys, E, EP)
    head_start = at[0] * n.keys * (n.high - n.low + 1)
    left, right = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    sums, sums_v = tl.zeros([B, DP], tl.float32), tl.zeros([B, EP], tl.float32)
    sums_left, sums_right = tl.zeros([B, DP], tl.float32), tl.zeros([B, DP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_k = tile_k
        if (t.gate is not None) and (SIDE != BAND):
            side_k = tile_k * end_of(t.gate, at[3], n, SIDE, D, DP)[None, :]
        start, stop = query_range(block * B, n, SIDE, B, B, CAUSAL, FAR)
        for first in range(start, stop, B):
            i = first + tl.arange(0, B)
            offset = offsets_of(i, j, at, t, n)
            tile_q = load_rows(q, i, n.queries, D, DP)
            tile_dout, tile_lse, tile_delta = results_of(x, i, at, n, E, EP)
            content = content_of(q, k, tile_q, side_k, i, j, at, offset, t, n, SIDE, D, DOT)
            factor, weights, kept = weights_of(content, tile_lse, i, j, at, offset, t, n, SIDE, CAUSAL)
            dlogits = dlogits_of(weights, kept, tile_dout, tile_v, tile_delta, i, at, offset, t, n, SIDE, DOT)
            dcontent = dlogits * factor * t.scale
            sums_v += product(tl.trans(weights * kept), tile_dout, DOT)
            if s.key is not None:
                left, right = add_ends(dlogits, offset, left, right, n, 0, SIDE)
                if SIDE == BAND:
                    spread(s.key + head_start, j[None, :], dlogits, offset, n, t)
            if t.gate is None:
                sums += product(tl.trans(dcontent), tile_q, DOT)
            elif SIDE == LEFT:
                sums_left += product(tl.trans(dcontent), tile_q, DOT)
            elif SIDE == RIGHT:
                sums_right += product(tl.trans(dcontent), tile_q, DOT)
            else:
                sums_left += product(tl.trans(tl.where(offset <= n.low, dcontent, 0.0)), tile_q, DOT)
                sums_right += product(tl.trans(tl.where(offset >= n.high, dcontent, 0.0)), tile_q, DOT)
                inner = tl.where((offset > n.low) & (offset < n.high), dcontent, 0.0)
                for c in range(D):
                    query, _ = channel_of(q, k, i, j, c, n, D)
                    channel = tl.sum(inner * gate_of(t.gate, at[3], offset, c, n, D) * query, 0)
                    sums += tl.where((tl.arange(0, DP) == c)[None, :], channel[:, None], 0.0)
    if s.key is not None:
        store_ends(s.key + head_start, j, left, right, n, j < n.keys)
    if t.gate is not None:
        sums += sums_left * end_of(t.gate, at[3], n, LEFT, D, DP)[None, :]
        sums += sums_right * end_of(t.gate, at[3], n, RIGHT, D, DP)[None, :]
    store_rows(dk + at[0] * n.keys * D, j, n.keys, sums, D, DP)
    store_rows(dv + at[0] * n.keys * E, j, n.keys, sums_v, E, EP)
