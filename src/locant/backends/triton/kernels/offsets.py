"""Sums by offset: what lies beyond the ends, pairs put where they belong, sums along the diagonals of a tile.

No sum is atomic on counted positions, where a pair of query and column meets one key: sums over keys are stores, and
sums over queries are running sums along the diagonals of a tile. With explicit ids, which may repeat, the pairs of the
band are added atomically.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.tiles import LEFT, RIGHT


@triton.jit
def add_ends(values, offset, left, right, n, AXIS: tl.constexpr, SIDE: tl.constexpr):
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
def spread(pointer, rows, values, offset, n, t):
    """Puts the pairs between the ends where their row and column lie."""
    inner = (offset > n.low) & (offset < n.high) & (values != 0)
    pointers = pointer + (rows * (n.high - n.low + 1) + (offset - n.low))
    if t.ids is None:
        tl.store(pointers, values, mask=inner)
    else:
        tl.atomic_add(pointers, values, mask=inner, sem="relaxed")


@triton.jit
def store_ends(pointer, rows, left, right, n, inside):
    """Puts what lies beyond the ends into the first column and the last."""
    width = n.high - n.low + 1
    tl.store(pointer + rows * width, left, mask=inside)
    tl.store(pointer + rows * width + width - 1, right, mask=inside)


@triton.jit
def diagonals_of(values, B: tl.constexpr):
    """Sums along the 2 B - 1 diagonals of a square tile: those below (with the main one last), and those above it."""
    i, t = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    below, above = t + i - (B - 1), t + i + 1
    low = tl.gather(values, tl.maximum(below, 0), 1)
    high = tl.gather(values, tl.minimum(above, B - 1), 1)
    return tl.sum(tl.where(below >= 0, low, 0.0), 0), tl.sum(tl.where(above < B, high, 0.0), 0)


@triton.jit
def store_diagonals(pointer, sums, first_offset, n, B: tl.constexpr):
    """Puts sums along diagonals into their columns between the ends."""
    offset = first_offset + tl.arange(0, B)
    tl.store(pointer + (offset - n.low), sums, mask=(offset > n.low) & (offset < n.high))
