"""The Triton kernels. Imported only where they run: `triton` comes with torch for GPUs, not with torch for the CPU.

Every program works on tiles of queries (rows) and keys (columns) of one batch row and head. A table comes laid out by
offset, ``low`` .. ``high`` (`lower.py`); its first column serves all offsets <= low, its last all >= high. Tiles wholly
beyond one end are plain attention with a number for each row or column; only tiles of the band read single columns.

With P = exp(logits - lse), K what dropout multiplies by, and delta_i = dout_i . out_i:

    dlogits = P (K (dout v^T) - delta),    dcontent = scale_table * dlogits * s

Sums over a table column use no atomics: on counted positions a pair of query and column meets one key, so sums over
keys are stores, and sums over queries are running sums along the diagonals of a tile. With explicit ids, which may
repeat, the pairs of the band are added atomically.
"""

from typing import Any, NamedTuple

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LEFT, BAND, RIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Sizes(NamedTuple):
    """Lengths and where the band lies; ``first`` is the first (batch row * heads + head) of this launch."""

    queries: Any
    keys: Any
    heads: Any
    first: Any
    shift: Any  # query t is key shift + t
    low: Any
    high: Any


class Terms(NamedTuple):
    """What changes logits; None where there is no such term.

    bias, scales [1|H W], gate [1|H D W]: (pointer, stride of a head). query, value [G I W], key [G J W]: products with
    a table, laid out by offset. pair, mask [B|1 H|1 I|1 J|1]: (pointer, four strides). ids: (queries, keys, strides of
    a batch row).
    """

    bias: Any
    scales: Any
    gate: Any
    query: Any
    key: Any
    value: Any
    pair: Any
    mask: Any
    ids: Any


class Sums(NamedTuple):
    """Where gradients by offset go; None where they are not wanted.

    query, gate, value [G I W], key [G J W]; bias, scales [G blocks W]; ends [G blocks 2 D] (of the gate).
    """

    query: Any
    key: Any
    value: Any
    gate: Any
    ends: Any
    bias: Any
    scales: Any


# --- pieces ----------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """The hash of `backends/dropout.py`, in 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(i, j, row, drop):
    """What dropout multiplies weights by; ``drop`` is (seed, threshold, factor)."""
    head = _mix(row.to(tl.uint32) * 0x9E3779B9 + drop[0])
    queries = _mix(i.to(tl.uint32) * 0x85EBCA6B + head)
    hashed = _mix(queries[:, None] + (j.to(tl.uint32) * 0xC2B2AE35)[None, :])
    return tl.where((hashed >> 8).to(tl.int32) >= drop[1], drop[2], 0.0)


@triton.jit
def _load(pointer, rows, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a contiguous matrix, zeros past its end."""
    d = tl.arange(0, PADDED)
    inside = (rows < num_rows)[:, None] & (d < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def _store(pointer, rows, num_rows, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The reverse of `_load`."""
    d = tl.arange(0, PADDED)
    inside = (rows < num_rows)[:, None] & (d < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * WIDTH + d[None, :], values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b, DOT: tl.constexpr):
    """A product of matrices in DOT, summed in float32; float32 stays float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


@triton.jit
def _place(program, blocks, n):
    """(block, row of this launch, row of all, batch row, head) of a program."""
    group = program // blocks
    row = group + n.first
    return program % blocks, group.to(tl.int64), row, row // n.heads, row % n.heads


@triton.jit
def _offsets(i, j, batch, t, n):
    """Key id minus query id."""
    if t.ids is None:
        offset = j[None, :] - i[:, None] - n.shift
    else:
        query = tl.load(t.ids[0] + batch.to(tl.int64) * t.ids[2] + i, mask=i < n.queries, other=0)
        key = tl.load(t.ids[1] + batch.to(tl.int64) * t.ids[3] + j, mask=j < n.keys, other=0)
        offset = key[None, :] - query[:, None]
    return offset


@triton.jit
def _end(gate, head, n, SIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The gate's vector beyond one end."""
    d, width = tl.arange(0, DP), n.high - n.low + 1
    pointers = gate[0] + head.to(tl.int64) * gate[1] + d * width + (width - 1 if SIDE == RIGHT else 0)
    return tl.load(pointers, mask=d < D, other=0.0)


@triton.jit
def _channel(q, k, i, j, c, n, D: tl.constexpr):
    """One channel of queries and keys."""
    query = tl.load(q + i * D + c, mask=i < n.queries, other=0.0).to(tl.float32)
    return query[:, None], tl.load(k + j * D + c, mask=j < n.keys, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gate(gate, head, offset, c, n, D: tl.constexpr):
    """One channel of the gate, for every pair."""
    column = tl.minimum(tl.maximum(offset, n.low), n.high) - n.low
    return tl.load(gate[0] + head.to(tl.int64) * gate[1] + c * (n.high - n.low + 1) + column)


@triton.jit
def _content(q, k, tile_q, tile_k, i, j, head, offset, t, n, SIDE: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr):
    """q.k of every pair, gated; beyond the band one of the two tiles comes gated already."""
    if (t.gate is not None) and (SIDE == BAND):
        content = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
        for c in range(D):
            query, key = _channel(q, k, i, j, c, n, D)
            content += query * key * _gate(t.gate, head, offset, c, n, D)
    else:
        content = _dot(tile_q, tl.trans(tile_k), DOT)
    return content


@triton.jit
def _logits(content, i, j, group, batch, head, offset, t, n, SIDE: tl.constexpr, CAUSAL: tl.constexpr):
    """(what content is multiplied by, the logits, -inf where a pair is forbidden)."""
    width = n.high - n.low + 1
    column = tl.zeros([1, 1], tl.int32)
    if SIDE == BAND:
        column = tl.minimum(tl.maximum(offset, n.low), n.high) - n.low
    elif SIDE == RIGHT:
        column += width - 1
    rows, columns = i[:, None], j[None, :]  # within a head 32 bits do: `lower.refuses` sees to it
    factor, logits = 1.0, content
    if t.scales is not None:
        factor = tl.load(t.scales[0] + head.to(tl.int64) * t.scales[1] + column)
        logits *= factor
    if t.bias is not None:
        logits += tl.load(t.bias[0] + head.to(tl.int64) * t.bias[1] + column)
    if t.query is not None:
        pointers = t.query + group * n.queries * width + (rows * width + column)
        logits += tl.load(pointers, mask=(i < n.queries)[:, None], other=0.0).to(tl.float32)
    if t.key is not None:
        pointers = t.key + group * n.keys * width + (columns * width + column)
        logits += tl.load(pointers, mask=(j < n.keys)[None, :], other=0.0).to(tl.float32)
    allowed = (i < n.queries)[:, None] & (j < n.keys)[None, :]
    if t.pair is not None:
        start = t.pair[0] + batch.to(tl.int64) * t.pair[1] + head.to(tl.int64) * t.pair[2]
        logits += tl.load(start + (rows * t.pair[3] + columns * t.pair[4]), mask=allowed, other=0.0).to(tl.float32)
    if t.mask is not None:
        start = t.mask[0] + batch.to(tl.int64) * t.mask[1] + head.to(tl.int64) * t.mask[2]
        allowed &= tl.load(start + (rows * t.mask[3] + columns * t.mask[4]), mask=allowed, other=0) != 0
    if CAUSAL:
        allowed &= j[None, :] <= i[:, None] + n.shift
    return factor, tl.where(allowed, logits, float("-inf"))


@triton.jit
def _key_range(
    start, n, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr
):
    """(first key, end) of the tiles on one side, for queries start .. start + BM."""
    end = n.keys
    if CAUSAL:
        end = tl.minimum(end, start + BM + n.shift)
    left = 0
    right = end
    if FAR:
        left = tl.minimum(tl.maximum(start + n.shift + n.low + 1, 0), end) // BN * BN
        right = (tl.maximum(start + BM - 1 + n.shift + n.high, 0) + BN - 1) // BN * BN
        right = tl.minimum(tl.maximum(right, left), end)
    if SIDE == LEFT:
        return left * 0, left
    elif SIDE == BAND:
        return left, right
    else:
        return right, end


@triton.jit
def _query_range(
    start, n, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr
):
    """(first query, end) of the tiles on one side, for keys start .. start + BN: the right side has the first ones."""
    first = 0
    if CAUSAL:
        first = tl.maximum(start - n.shift, 0) // BM * BM
    right = first
    left = n.queries
    if FAR:
        right = tl.minimum(tl.maximum(start - n.shift - n.high + 1, 0), n.queries) // BM * BM
        right = tl.maximum(right, first)
        left = (tl.maximum(start + BN - 1 - n.shift - n.low, 0) + BM - 1) // BM * BM
        left = tl.maximum(left, right)
    if SIDE == RIGHT:
        return first, right
    elif SIDE == BAND:
        return right, tl.minimum(left, n.queries)
    else:
        return left, n.queries


# --- sums by offset --------------------------------------------------------------------------------------------------


@triton.jit
def _add_ends(values, offset, left, right, n, AXIS: tl.constexpr, SIDE: tl.constexpr):
    """Adds what lies beyond the ends."""
    if SIDE == LEFT:
        left += tl.sum(values, AXIS)
    elif SIDE == RIGHT:
        right += tl.sum(values, AXIS)
    else:
        left += tl.sum(tl.where(offset <= n.low, values, 0.0), AXIS)
        right += tl.sum(tl.where(offset >= n.high, values, 0.0), AXIS)
    return left, right


@triton.jit
def _spread(pointer, rows, values, offset, n, t):
    """Puts the pairs between the ends where their row and column lie."""
    inner = (offset > n.low) & (offset < n.high) & (values != 0)
    pointers = pointer + (rows * (n.high - n.low + 1) + (offset - n.low))
    if t.ids is None:
        tl.store(pointers, values, mask=inner)
    else:
        tl.atomic_add(pointers, values, mask=inner, sem="relaxed")


@triton.jit
def _store_ends(pointer, rows, left, right, n, inside):
    width = n.high - n.low + 1
    tl.store(pointer + rows * width, left, mask=inside)
    tl.store(pointer + rows * width + width - 1, right, mask=inside)


@triton.jit
def _diagonals(values, B: tl.constexpr):
    """Sums along the 2 B - 1 diagonals of a square tile: those below (with the main one last), and those above it."""
    i, t = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    below, above = t + i - (B - 1), t + i + 1
    low = tl.gather(values, tl.maximum(below, 0), 1)
    high = tl.gather(values, tl.minimum(above, B - 1), 1)
    return tl.sum(tl.where(below >= 0, low, 0.0), 0), tl.sum(tl.where(above < B, high, 0.0), 0)


@triton.jit
def _store_diagonals(pointer, sums, first_offset, n, B: tl.constexpr):
    offset = first_offset + tl.arange(0, B)
    tl.store(pointer + (offset - n.low), sums, mask=(offset > n.low) & (offset < n.high))


# --- forward ---------------------------------------------------------------------------------------------------------


@triton.jit
def forward(
    q,
    k,
    v,
    out,
    lse,
    t,
    n,
    scale,
    drop,
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
    block, group, row, batch, head = _place(tl.program_id(0), tl.cdiv(n.queries, BM), n)
    q += group * n.queries * D
    k += group * n.keys * D
    v += group * n.keys * E
    i = block * BM + tl.arange(0, BM)
    tile_q = _load(q, i, n.queries, D, DP)
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, EP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * _end(t.gate, head, n, SIDE, D, DP)[None, :]
        start, stop = _key_range(block * BM, n, SIDE, BM, BN, CAUSAL, FAR)
        for first in range(start, stop, BN):
            j = first + tl.arange(0, BN)
            offset = _offsets(i, j, batch, t, n)
            tile_k = _load(k, j, n.keys, D, DP)
            content = scale * _content(q, k, side_q, tile_k, i, j, head, offset, t, n, SIDE, D, DOT)
            _, logits = _logits(content, i, j, group, batch, head, offset, t, n, SIDE, CAUSAL)
            above = tl.maximum(most, tl.max(logits, 1))
            finite = tl.where(above == float("-inf"), 0.0, above)
            shrink = tl.exp(most - finite)
            weights = tl.exp(logits - finite[:, None])
            total = total * shrink + tl.sum(weights, 1)
            if drop is not None:
                weights *= _kept(i, j, row, drop)
            sums = sums * shrink[:, None] + _dot(weights, _load(v, j, n.keys, E, EP), DOT)
            most = above
    blind = total == 0
    _store(out + group * n.queries * E, i, n.queries, sums / tl.where(blind, 1.0, total)[:, None], E, EP)
    logarithm = tl.where(blind, float("inf"), most + tl.log(tl.where(blind, 1.0, total)))
    tl.store(lse + group * n.queries + i, logarithm, mask=i < n.queries)


# --- backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _weights(
    content, tile_lse, i, j, row, group, batch, head, offset, t, n, drop, SIDE: tl.constexpr, CAUSAL: tl.constexpr
):
    """(factor of content, weights after softmax, what dropout multiplies them by)."""
    factor, logits = _logits(content, i, j, group, batch, head, offset, t, n, SIDE, CAUSAL)
    kept = 1.0
    if drop is not None:
        kept = _kept(i, j, row, drop)
    return factor, tl.exp(logits - tile_lse[:, None]), kept


@triton.jit
def _dlogits(
    weights, kept, tile_dout, tile_v, tile_delta, i, group, offset, t, n, SIDE: tl.constexpr, DOT: tl.constexpr
):
    """The gradient of the logits."""
    dweights = _dot(tile_dout, tl.trans(tile_v), DOT)
    if t.value is not None:
        width = n.high - n.low + 1
        column = tl.zeros([1, 1], tl.int32)
        if SIDE == BAND:
            column = tl.minimum(tl.maximum(offset, n.low), n.high) - n.low
        elif SIDE == RIGHT:
            column += width - 1
        pointers = t.value + group * n.queries * width + (i[:, None] * width + column)
        dweights += tl.load(pointers, mask=(i < n.queries)[:, None], other=0.0).to(tl.float32)
    return weights * (dweights * kept - tile_delta[:, None])


@triton.jit
def masses(
    q,
    k,
    lse,
    t,
    n,
    s,
    scale,
    drop,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DOT: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAR: tl.constexpr,
):
    """The weights of each query summed by offset [G I W]: what the value table is multiplied by."""
    block, group, row, batch, head = _place(tl.program_id(0), tl.cdiv(n.queries, BM), n)
    q += group * n.queries * D
    k += group * n.keys * D
    i = block * BM + tl.arange(0, BM)
    inside = i < n.queries
    tile_q = _load(q, i, n.queries, D, DP)
    tile_lse = tl.load(lse + group * n.queries + i, mask=inside, other=float("inf"))
    left, right = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    mass = s.value + group * n.queries * (n.high - n.low + 1)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * _end(t.gate, head, n, SIDE, D, DP)[None, :]
        start, stop = _key_range(block * BM, n, SIDE, BM, BN, CAUSAL, FAR)
        for first in range(start, stop, BN):
            j = first + tl.arange(0, BN)
            offset = _offsets(i, j, batch, t, n)
            tile_k = _load(k, j, n.keys, D, DP)
            content = scale * _content(q, k, side_q, tile_k, i, j, head, offset, t, n, SIDE, D, DOT)
            _, weights, kept = _weights(
                content, tile_lse, i, j, row, group, batch, head, offset, t, n, drop, SIDE, CAUSAL
            )
            weights *= kept
            left, right = _add_ends(weights, offset, left, right, n, 1, SIDE)
            if SIDE == BAND:
                _spread(mass, i[:, None], weights, offset, n, t)
    _store_ends(mass, i, left, right, n, inside)


@triton.jit
def rows(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dq,
    t,
    n,
    s,
    scale,
    drop,
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
    block, group, row, batch, head = _place(tl.program_id(0), blocks, n)
    q += group * n.queries * D
    k += group * n.keys * D
    v += group * n.keys * E
    i = block * B + tl.arange(0, B)
    inside = i < n.queries
    tile_q, tile_dout = _load(q, i, n.queries, D, DP), _load(dout + group * n.queries * E, i, n.queries, E, EP)
    tile_lse = tl.load(lse + group * n.queries + i, mask=inside, other=float("inf"))
    tile_delta = tl.load(delta + group * n.queries + i, mask=inside, other=0.0)
    width = n.high - n.low + 1
    head_start, numbers = group * n.queries * width, (group * blocks + block) * width
    left, right = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    left_scale, right_scale = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    carry, carry_scale = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    sums = tl.zeros([B, DP], tl.float32)
    sums_left, sums_right = tl.zeros([B, DP], tl.float32), tl.zeros([B, DP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_q = tile_q
        if (t.gate is not None) and (SIDE != BAND):
            side_q = tile_q * _end(t.gate, head, n, SIDE, D, DP)[None, :]
        start, stop = _key_range(block * B, n, SIDE, B, B, CAUSAL, FAR)
        for first in range(start, stop, B):
            j = first + tl.arange(0, B)
            offset = _offsets(i, j, batch, t, n)
            tile_k, tile_v = _load(k, j, n.keys, D, DP), _load(v, j, n.keys, E, EP)
            content = scale * _content(q, k, side_q, tile_k, i, j, head, offset, t, n, SIDE, D, DOT)
            factor, weights, kept = _weights(
                content, tile_lse, i, j, row, group, batch, head, offset, t, n, drop, SIDE, CAUSAL
            )
            dlogits = _dlogits(weights, kept, tile_dout, tile_v, tile_delta, i, group, offset, t, n, SIDE, DOT)
            dcontent = dlogits * factor * scale
            if (s.query is not None) or (s.bias is not None):
                left, right = _add_ends(dlogits, offset, left, right, n, 1, SIDE)
            if s.scales is not None:
                left_scale, right_scale = _add_ends(dlogits * content, offset, left_scale, right_scale, n, 1, SIDE)
            if SIDE == BAND:
                if s.query is not None:
                    _spread(s.query + head_start, i[:, None], dlogits, offset, n, t)
                if (s.bias is not None) and (t.ids is not None):
                    _spread(s.bias + numbers, 0, dlogits, offset, n, t)
                if (s.scales is not None) and (t.ids is not None):
                    _spread(s.scales + numbers, 0, dlogits * content, offset, n, t)
                diagonal = first - block * B - n.shift - (B - 1)
                if (s.bias is not None) and (t.ids is None):
                    low, high = _diagonals(dlogits, B)
                    _store_diagonals(s.bias + numbers, low + carry, diagonal, n, B)
                    carry = high
                if (s.scales is not None) and (t.ids is None):
                    low, high = _diagonals(dlogits * content, B)
                    _store_diagonals(s.scales + numbers, low + carry_scale, diagonal, n, B)
                    carry_scale = high
            if t.gate is None:
                sums += _dot(dcontent, tile_k, DOT)
            elif SIDE == LEFT:
                sums_left += _dot(dcontent, tile_k, DOT)
            elif SIDE == RIGHT:
                sums_right += _dot(dcontent, tile_k, DOT)
            else:
                sums_left += _dot(tl.where(offset <= n.low, dcontent, 0.0), tile_k, DOT)
                sums_right += _dot(tl.where(offset >= n.high, dcontent, 0.0), tile_k, DOT)
                inner = tl.where((offset > n.low) & (offset < n.high), dcontent, 0.0)
                _spread(s.gate + head_start, i[:, None], inner, offset, n, t)
                for c in range(D):
                    _, key = _channel(q, k, i, j, c, n, D)
                    channel = tl.sum(inner * _gate(t.gate, head, offset, c, n, D) * key, 1)
                    sums += tl.where((tl.arange(0, DP) == c)[None, :], channel[:, None], 0.0)
        if (SIDE == BAND) and (t.ids is None):
            diagonal = start + (tl.maximum(stop - start, 0) + B - 1) // B * B - block * B - n.shift - (B - 1)
            if s.bias is not None:
                _store_diagonals(s.bias + numbers, carry, diagonal, n, B)
            if s.scales is not None:
                _store_diagonals(s.scales + numbers, carry_scale, diagonal, n, B)
    if s.query is not None:
        _store_ends(s.query + head_start, i, left, right, n, inside)
    if s.bias is not None:
        _store_ends(s.bias + numbers, 0, tl.sum(left, 0), tl.sum(right, 0), n, None)
    if s.scales is not None:
        _store_ends(s.scales + numbers, 0, tl.sum(left_scale, 0), tl.sum(right_scale, 0), n, None)
    if t.gate is not None:
        d = tl.arange(0, DP)
        ends = s.ends + (group * blocks + block) * 2 * D + d
        tl.store(ends, tl.sum(tile_q.to(tl.float32) * sums_left, 0), mask=d < D)
        tl.store(ends + D, tl.sum(tile_q.to(tl.float32) * sums_right, 0), mask=d < D)
        sums += sums_left * _end(t.gate, head, n, LEFT, D, DP)[None, :]
        sums += sums_right * _end(t.gate, head, n, RIGHT, D, DP)[None, :]
    _store(dq + group * n.queries * D, i, n.queries, sums, D, DP)


@triton.jit
def columns(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    t,
    n,
    s,
    scale,
    drop,
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
    block, group, row, batch, head = _place(tl.program_id(0), tl.cdiv(n.keys, B), n)
    q += group * n.queries * D
    k += group * n.keys * D
    dout += group * n.queries * E
    j = block * B + tl.arange(0, B)
    tile_k, tile_v = _load(k, j, n.keys, D, DP), _load(v + group * n.keys * E, j, n.keys, E, EP)
    head_start = group * n.keys * (n.high - n.low + 1)
    left, right = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    sums, sums_v = tl.zeros([B, DP], tl.float32), tl.zeros([B, EP], tl.float32)
    sums_left, sums_right = tl.zeros([B, DP], tl.float32), tl.zeros([B, DP], tl.float32)
    for SIDE in tl.static_range(0 if FAR else 1, 3 if FAR else 2):
        side_k = tile_k
        if (t.gate is not None) and (SIDE != BAND):
            side_k = tile_k * _end(t.gate, head, n, SIDE, D, DP)[None, :]
        start, stop = _query_range(block * B, n, SIDE, B, B, CAUSAL, FAR)
        for first in range(start, stop, B):
            i = first + tl.arange(0, B)
            inside = i < n.queries
            offset = _offsets(i, j, batch, t, n)
            tile_q, tile_dout = _load(q, i, n.queries, D, DP), _load(dout, i, n.queries, E, EP)
            tile_lse = tl.load(lse + group * n.queries + i, mask=inside, other=float("inf"))
            tile_delta = tl.load(delta + group * n.queries + i, mask=inside, other=0.0)
            content = scale * _content(q, k, tile_q, side_k, i, j, head, offset, t, n, SIDE, D, DOT)
            factor, weights, kept = _weights(
                content, tile_lse, i, j, row, group, batch, head, offset, t, n, drop, SIDE, CAUSAL
            )
            dlogits = _dlogits(weights, kept, tile_dout, tile_v, tile_delta, i, group, offset, t, n, SIDE, DOT)
            dcontent = dlogits * factor * scale
            sums_v += _dot(tl.trans(weights * kept), tile_dout, DOT)
            if s.key is not None:
                left, right = _add_ends(dlogits, offset, left, right, n, 0, SIDE)
                if SIDE == BAND:
                    _spread(s.key + head_start, j[None, :], dlogits, offset, n, t)
            if t.gate is None:
                sums += _dot(tl.trans(dcontent), tile_q, DOT)
            elif SIDE == LEFT:
                sums_left += _dot(tl.trans(dcontent), tile_q, DOT)
            elif SIDE == RIGHT:
                sums_right += _dot(tl.trans(dcontent), tile_q, DOT)
            else:
                sums_left += _dot(tl.trans(tl.where(offset <= n.low, dcontent, 0.0)), tile_q, DOT)
                sums_right += _dot(tl.trans(tl.where(offset >= n.high, dcontent, 0.0)), tile_q, DOT)
                inner = tl.where((offset > n.low) & (offset < n.high), dcontent, 0.0)
                for c in range(D):
                    query, _ = _channel(q, k, i, j, c, n, D)
                    channel = tl.sum(inner * _gate(t.gate, head, offset, c, n, D) * query, 0)
                    sums += tl.where((tl.arange(0, DP) == c)[None, :], channel[:, None], 0.0)
    if s.key is not None:
        _store_ends(s.key + head_start, j, left, right, n, j < n.keys)
    if t.gate is not None:
        sums += sums_left * _end(t.gate, head, n, LEFT, D, DP)[None, :]
        sums += sums_right * _end(t.gate, head, n, RIGHT, D, DP)[None, :]
    _store(dk + group * n.keys * D, j, n.keys, sums, D, DP)
    _store(dv + group * n.keys * E, j, n.keys, sums_v, E, EP)


@triton.jit
def gates(q, k, dcontent, dgate, n, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):
    """The gradient of the gate's table between the ends: one program for each offset of each batch row and head."""
    width = n.high - n.low + 1
    column, group, _, _, _ = _place(tl.program_id(0), width, n)
    offset = column + n.low
    d = tl.arange(0, DP)
    sums = tl.zeros([DP], tl.float32)
    first = tl.maximum(-offset - n.shift, 0)
    last = tl.minimum(n.keys - offset - n.shift, n.queries)
    for start in range(first, last, BM):
        i = start + tl.arange(0, BM)
        key = i + n.shift + offset
        inside = (i < last) & (column > 0) & (column < width - 1)
        pointers = dcontent + group * n.queries * width + (i * width + column)
        numbers = tl.load(pointers, mask=inside, other=0.0)
        query = _load(q + group * n.queries * D, i, last, D, DP).to(tl.float32)
        keys = _load(k + group * n.keys * D, key, n.keys, D, DP).to(tl.float32)
        sums += tl.sum(numbers[:, None] * query * keys, 0)
    tl.store(dgate + (group * width + column) * D + d, sums, mask=d < D)


@triton.jit
def pairs(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dpair,
    t,
    n,
    scale,
    drop,
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
        row = index + n.first
        batch, head = row // n.heads, row % n.heads
        mine = (batch if num_batches > 1 else 0) * num_heads + (head if num_heads > 1 else 0) == target
        if mine:
            group = tl.full([], 0, tl.int64) + index
            offset = _offsets(i, j, batch, t, n)
            here_q, here_k = q + group * n.queries * D, k + group * n.keys * D
            tile_q, tile_k = _load(here_q, i, n.queries, D, DP), _load(here_k, j, n.keys, D, DP)
            tile_dout = _load(dout + group * n.queries * E, i, n.queries, E, EP)
            tile_v = _load(v + group * n.keys * E, j, n.keys, E, EP)
            tile_lse = tl.load(lse + group * n.queries + i, mask=inside, other=float("inf"))
            tile_delta = tl.load(delta + group * n.queries + i, mask=inside, other=0.0)
            content = scale * _content(here_q, here_k, tile_q, tile_k, i, j, head, offset, t, n, BAND, D, DOT)
            _, weights, kept = _weights(
                content, tile_lse, i, j, row, group, batch, head, offset, t, n, drop, BAND, CAUSAL
            )
            sums += _dlogits(weights, kept, tile_dout, tile_v, tile_delta, i, group, offset, t, n, BAND, DOT)
    pointers = dpair + target.to(tl.int64) * n.queries * n.keys + (i[:, None] * n.keys + j[None, :])
    both = inside[:, None] & (j < n.keys)[None, :]
    tl.store(pointers, tl.load(pointers, mask=both, other=0.0) + sums, mask=both)
