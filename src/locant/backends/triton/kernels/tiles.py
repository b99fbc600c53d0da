"""Tiles of rows: where a program works, what it loads and stores, and which tiles lie on which side of the band."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LEFT, BAND, RIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_rows(pointer, rows, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a contiguous matrix, zeros past its end."""
    d = tl.arange(0, PADDED)
    inside = (rows < num_rows)[:, None] & (d < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, rows, num_rows, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The reverse of `load_rows`."""
    d = tl.arange(0, PADDED)
    inside = (rows < num_rows)[:, None] & (d < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * WIDTH + d[None, :], values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def product(a, b, DOT: tl.constexpr):
    """A product of matrices in DOT, summed in float32; float32 stays float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


@triton.jit
def place_of(group, n):
    """Where a program is: (row of this launch, row of all, batch row, head), a row being one head of a batch row."""
    row = group + n.first
    return group.to(tl.int64), row, row // n.heads, row % n.heads


@triton.jit
def heads_of(x, at, n, D: tl.constexpr, E: tl.constexpr):
    """q, k and v of one row of this launch."""
    return x.q + at[0] * n.queries * D, x.k + at[0] * n.keys * D, x.v + at[0] * n.keys * E


@triton.jit
def results_of(x, i, at, n, E: tl.constexpr, EP: tl.constexpr):
    """dout, lse and delta of a tile of queries."""
    inside = i < n.queries
    dout = load_rows(x.dout + at[0] * n.queries * E, i, n.queries, E, EP)
    lse = tl.load(x.lse + at[0] * n.queries + i, mask=inside, other=float("inf"))
    return dout, lse, tl.load(x.delta + at[0] * n.queries + i, mask=inside, other=0.0)


@triton.jit
def offsets_of(i, j, at, t, n):
    """Key id minus query id."""
    if t.ids is None:
        offset = j[None, :] - i[:, None] - n.shift
    else:
        query = tl.load(t.ids[0] + at[2].to(tl.int64) * t.ids[2] + i, mask=i < n.queries, other=0)
        key = tl.load(t.ids[1] + at[2].to(tl.int64) * t.ids[3] + j, mask=j < n.keys, other=0)
        offset = key[None, :] - query[:, None]
    return offset


@triton.jit
def key_range(
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
def query_range(
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
