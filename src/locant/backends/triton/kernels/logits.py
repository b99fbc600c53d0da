"""Content, logits, weights and their gradient for one tile of pairs."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.tiles import BAND, RIGHT, product


@triton.jit
def mix(x):
    """The hash of `backends/dropout.py`, in 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_of(i, j, at, t):
    """What dropout multiplies weights by."""
    head = mix(at[1].to(tl.uint32) * 0x9E3779B9 + t.drop[0])
    queries = mix(i.to(tl.uint32) * 0x85EBCA6B + head)
    hashed = mix(queries[:, None] + (j.to(tl.uint32) * 0xC2B2AE35)[None, :])
    return tl.where((hashed >> 8).to(tl.int32) >= t.drop[1], t.drop[2], 0.0)


@triton.jit
def end_of(gate, head, n, SIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The gate's vector beyond one end."""
    d, width = tl.arange(0, DP), n.high - n.low + 1
    pointers = gate[0] + head.to(tl.int64) * gate[1] + d * width + (width - 1 if SIDE == RIGHT else 0)
    return tl.load(pointers, mask=d < D, other=0.0)


@triton.jit
def channel_of(q, k, i, j, c, n, D: tl.constexpr):
    """One channel of queries and keys."""
    query = tl.load(q + i * D + c, mask=i < n.queries, other=0.0).to(tl.float32)
    return query[:, None], tl.load(k + j * D + c, mask=j < n.keys, other=0.0).to(tl.float32)[None, :]


@triton.jit
def gate_of(gate, head, offset, c, n, D: tl.constexpr):
    """One channel of the gate, for every pair."""
    column = tl.minimum(tl.maximum(offset, n.low), n.high) - n.low
    return tl.load(gate[0] + head.to(tl.int64) * gate[1] + c * (n.high - n.low + 1) + column)


@triton.jit
def content_of(q, k, tile_q, tile_k, i, j, at, offset, t, n, SIDE: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr):
    """s (q.k) of every pair, gated; beyond the band one of the two tiles comes gated already."""
    if (t.gate is not None) and (SIDE == BAND):
        content = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
        for c in range(D):
            query, key = channel_of(q, k, i, j, c, n, D)
            content += query * key * gate_of(t.gate, at[3], offset, c, n, D)
    else:
        content = product(tile_q, tl.trans(tile_k), DOT)
    return t.scale * content


@triton.jit
def logits_of(content, i, j, at, offset, t, n, SIDE: tl.constexpr, CAUSAL: tl.constexpr):
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
        factor = tl.load(t.scales[0] + at[3].to(tl.int64) * t.scales[1] + column)
        logits *= factor
    if t.bias is not None:
        logits += tl.load(t.bias[0] + at[3].to(tl.int64) * t.bias[1] + column)
    if t.query is not None:
        pointers = t.query + at[0] * n.queries * width + (rows * width + column)
        logits += tl.load(pointers, mask=(i < n.queries)[:, None], other=0.0).to(tl.float32)
    if t.key is not None:
        pointers = t.key + at[0] * n.keys * width + (columns * width + column)
        logits += tl.load(pointers, mask=(j < n.keys)[None, :], other=0.0).to(tl.float32)
    allowed = (i < n.queries)[:, None] & (j < n.keys)[None, :]
    if t.pair is not None:
        start = t.pair[0] + at[2].to(tl.int64) * t.pair[1] + at[3].to(tl.int64) * t.pair[2]
        logits += tl.load(start + (rows * t.pair[3] + columns * t.pair[4]), mask=allowed, other=0.0).to(tl.float32)
    if t.mask is not None:
        start = t.mask[0] + at[2].to(tl.int64) * t.mask[1] + at[3].to(tl.int64) * t.mask[2]
        allowed &= tl.load(start + (rows * t.mask[3] + columns * t.mask[4]), mask=allowed, other=0) != 0
    if CAUSAL:
        allowed &= j[None, :] <= i[:, None] + n.shift
    return factor, tl.where(allowed, logits, float("-inf"))


@triton.jit
def weights_of(content, tile_lse, i, j, at, offset, t, n, SIDE: tl.constexpr, CAUSAL: tl.constexpr):
    """(factor of content, weights after softmax, what dropout multiplies them by)."""
    factor, logits = logits_of(content, i, j, at, offset, t, n, SIDE, CAUSAL)
    kept = 1.0
    if t.drop is not None:
        kept = kept_of(i, j, at, t)
    return factor, tl.exp(logits - tile_lse[:, None]), kept


@triton.jit
def dlogits_of(
    weights, kept, tile_dout, tile_v, tile_delta, i, at, offset, t, n, SIDE: tl.constexpr, DOT: tl.constexpr
):
    """The gradient of the logits."""
    dweights = product(tile_dout, tl.trans(tile_v), DOT)
    if t.value is not None:
        width = n.high - n.low + 1
        column = tl.zeros([1, 1], tl.int32)
        if SIDE == BAND:
            column = tl.minimum(tl.maximum(offset, n.low), n.high) - n.low
        elif SIDE == RIGHT:
            column += width - 1
        pointers = t.value + at[0] * n.queries * width + (i[:, None] * width + column)
        dweights += tl.load(pointers, mask=(i < n.queries)[:, None], other=0.0).to(tl.float32)
    return weights * (dweights * kept - tile_delta[:, None])
