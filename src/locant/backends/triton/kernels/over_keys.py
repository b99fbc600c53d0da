"""Backward, what sums over keys: one program for each tile of queries."""

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
    diagonals_of,
    spread,
    store_diagonals,
    store_ends,
)
from locant.backends.triton.kernels.tiles import (
    BAND,
    LEFT,
    RIGHT,
    heads_of,
    key_range,
    load_rows,
    offsets_of,
    place_of,
    product,
    results_of,
    store_rows,
)


@triton.jit
def rows(
    x,
    dq,
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
    """Gradients that sum over keys: dq (without the query table), and by offset those of query, gate, bias, scales."""
    blocks = tl.cdiv(n.queries, B)
    block, at = tl.program_id(0) % blocks, place_of(tl.program_id(0) // blocks, n)
    q, k, v = heads_of(x, at, n, D, E)
    i = block * B + tl.arange(0, B)
    inside = i < n.queries
    tile_q = load_rows(q, i, n.queries, D, DP)
    tile_dout, tile_lse, tile_delta = results_of(x, i, at, n, E, EP)
    width = n.high - n.low + 1
    head_start, numbers = at[0] * n.queries * width, (at[0] * blocks + block) * width
    left, right = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    left_scale, right_scale = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    carry, carry_scale = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    sums = tl.zeros([B, DP], tl.float32)
    sums_left, sums_right = tl.zeros([B, DP], tl.float32), tl.zeros([B, DP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * end_of(t.gate, at[3], n, SIDE, D, DP)[None, :]
        start, stop = key_range(block * B, n, SIDE, B, B, CAUSAL, FAR)
        for first in range(start, stop, B):
            j = first + tl.arange(0, B)
            offset = offsets_of(i, j, at, t, n)
            tile_k, tile_v = load_rows(k, j, n.keys, D, DP), load_rows(v, j, n.keys, E, EP)
            content = content_of(q, k, side_q, tile_k, i, j, at, offset, t, n, SIDE, D, DOT)
            factor, weights, kept = weights_of(content, tile_lse, i, j, at, offset, t, n, SIDE, CAUSAL)
            dlogits = dlogits_of(weights, kept, tile_dout, tile_v, tile_delta, i, at, offset, t, n, SIDE, DOT)
            dcontent = dlogits * factor * t.scale
            if (s.query is not None) or (s.bias is not None):
                left, right = add_ends(dlogits, offset, left, right, n, 1, SIDE)
            if s.scales is not None:
                left_scale, right_scale = add_ends(dlogits * content, offset, left_scale, right_scale, n, 1, SIDE)
            if SIDE == BAND:
                if s.query is not None:
                    spread(s.query + head_start, i[:, None], dlogits, offset, n, t)
                if (s.bias is not None) and (t.ids is not None):
                    spread(s.bias + numbers, 0, dlogits, offset, n, t)
                if (s.scales is not None) and (t.ids is not None):
                    spread(s.scales + numbers, 0, dlogits * content, offset, n, t)
                diagonal = first - block * B - n.shift - (B - 1)
                if (s.bias is not None) and (t.ids is None):
                    low, high = diagonals_of(dlogits, B)
                    store_diagonals(s.bias + numbers, low + carry, diagonal, n, B)
                    carry = high
                if (s.scales is not None) and (t.ids is None):
                    low, high = diagonals_of(dlogits * content, B)
                    store_diagonals(s.scales + numbers, low + carry_scale, diagonal, n, B)
                    carry_scale = high
            if t.gate is None:
                sums += product(dcontent, tile_k, DOT)
            elif SIDE == LEFT:
                sums_left += product(dcontent, tile_k, DOT)
            elif SIDE == RIGHT:
                sums_right += product(dcontent, tile_k, DOT)
            else:
                sums_left += product(tl.where(offset <= n.low, dcontent, 0.0), tile_k, DOT)
                sums_right += product(tl.where(offset >= n.high, dcontent, 0.0), tile_k, DOT)
                inner = tl.where((offset > n.low) & (offset < n.high), dcontent, 0.0)
                spread(s.gate + head_start, i[:, None], inner, offset, n, t)
                for c in range(D):
                    _, key = channel_of(q, k, i, j, c, n, D)
                    channel = tl.sum(inner * gate_of(t.gate, at[3], offset, c, n, D) * key, 1)
                    sums += tl.where((tl.arange(0, DP) == c)[None, :], channel[:, None], 0.0)
        if (SIDE == BAND) and (t.ids is None):
            diagonal = start + (tl.maximum(stop - start, 0) + B - 1) // B * B - block * B - n.shift - (B - 1)
            if s.bias is not None:
                store_diagonals(s.bias + numbers, carry, diagonal, n, B)
            if s.scales is not None:
                store_diagonals(s.scales + numbers, carry_scale, diagonal, n, B)
    if s.query is not None:
        store_ends(s.query + head_start, i, left, right, n, inside)
    if s.bias is not None:
        store_ends(s.bias + numbers, 0, tl.sum(left, 0), tl.sum(right, 0), n, None)
    if s.scales is not None:
        store_ends(s.scales + numbers, 0, tl.sum(left_scale, 0), tl.sum(right_scale, 0), n, None)
    if t.gate is not None:
        d = tl.arange(0, DP)
        ends = s.ends + (at[0] * blocks + block) * 2 * D + d
        tl.store(ends, tl.sum(tile_q.to(tl.float32) * sums_left, 0), mask=d < D)
        tl.store(ends + D, tl.sum(tile_q.to(tl.float32) * sums_right, 0), mask=d < D)
        sums += sums_left * end_of(t.gate, at[3], n, LEFT, D, DP)[None, :]
        sums += sums_right * end_of(t.gate, at[3], n, RIGHT, D, DP)[None, :]
    store_rows(dq + at[0] * n.queries * D, i, n.queries, sums, D, DP)
