"""What every kernel is given: tuples of pointers and numbers."""

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """What a launch reads: q, k, v, and in backward dout, lse and delta; contiguous, from the launch's first row on."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any


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
    """What changes logits, and the weights after them; None where there is no such term.

    bias, scales [1|H W], gate [1|H D W]: (pointer, stride of a head). query, value [G I W], key [G J W]: products with
    a table, laid out by offset. pair, mask [B|1 H|1 I|1 J|1]: (pointer, four strides). ids: (queries, keys, strides of
    a batch row). scale: s. drop: (seed, threshold, factor) of dropout.
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
    scale: Any
    drop: Any


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
