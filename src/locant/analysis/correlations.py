"""Word and position in the first attention: Ke, He & Liu 2021 (TUPE), figure 2.

    C^uv_h[i, j] = (u_i W_q)(v_j W_k)^T / sqrt(D),     u, v in {word, position}

averaged over sentences. ``raw`` is the published expansion, which leaves the LayerNorm out. ``exact`` carries each part
through it: LN(w + p + t)_i = gain (w~ + p~ + t~)_i / sigma_i + bias, where ~ takes the vector's own mean off and
sigma_i is the true denominator of token i; type and biases go with the word. The four exact products sum to the model's
logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.analysis.diagonals import explained, optional_tensor
from locant.analysis.model import (
    Host,
    Projection,
    layer_steps,
    position_vectors,
    projection,
    submodule,
    word_vectors,
)
from locant.analysis.plain import as_double
from locant.analysis.windows import check_windows

PARTS = ("word", "position")
BLOCK = 8  # sentences that are held in float64 at once


@dataclass(frozen=True)
class Correlation:
    """One of the four maps: mean over heads and sentences [n n], its mean and standard deviation over cells, its R^2.

    ``share``: its variance as a part of the four. ``head_std`` and ``head_r2`` [H]: the same head by head.
    """

    map: Float[Tensor, "n n"]
    mean: float
    std: float
    r2: float | None
    share: float | None
    head_std: Float[Tensor, "H"]
    head_r2: Float[Tensor, "H"]


@dataclass(frozen=True)
class FourMaps:
    """Query part first: ``word_position`` is words looking at positions."""

    word_word: Correlation
    word_position: Correlation
    position_word: Correlation
    position_position: Correlation


@dataclass(frozen=True)
class Correlations:
    """Protocol (b): the published expansion, and the exact one where the way into the first attention is known."""

    sentences: int
    length: int
    raw: FourMaps
    exact: FourMaps | None


Parts = dict[str, Float[Tensor, "B n M"]]


def correlations(
    host: Host, windows: Int[Tensor, "N n"], *, progress: Callable[[int, int], None] | None = None
) -> Correlations:
    """The four maps of a model with added positions, over unpadded windows of token ids.

    A single sentence is no average, and warns. Raises: ValueError for a model without position vectors, windows that
    are padded or longer than its table.
    """
    check_windows("correlations", host, windows)
    count, n = windows.shape
    vectors = position_vectors(host, n)
    if vectors is None:
        raise ValueError(
            f"correlations: {type(host.stack).__name__} adds no position vectors to its input, so words and positions "
            "do not meet there; look at patterns or distance instead"
        )
    if count == 1:
        warnings.warn("correlations: got 1 sentence, so the maps are no averages; give 32 or more", stacklevel=2)
    weights = projection(host)
    raw, exact = _Sums(host.num_heads, n), _Sums(host.num_heads, n) if host.layout.steps else None
    for start in range(0, count, BLOCK):
        words = word_vectors(host, windows[start : start + BLOCK])
        raw.add(raw_parts(host, words, vectors.table), weights, bias=False)
        if exact is not None:
            exact.add(exact_parts(host, words, vectors.table), weights, bias=True)
        if progress is not None:
            progress(min(start + BLOCK, count), count)
    return Correlations(count, n, raw.maps(count), None if exact is None else exact.maps(count))


class _Sums:
    """Sums over sentences of the four products of each head, one head's matrices at a time."""

    def __init__(self, num_heads: int, n: int) -> None:
        self.totals = {(u, v): torch.zeros(num_heads, n, n) for u in PARTS for v in PARTS}  # float32: H n n only

    def add(self, parts: Parts, weights: Projection, bias: bool) -> None:
        for head in range(len(weights.query)):
            q = {
                u: _flat(x @ weights.query[head] + (weights.query_bias[head] if bias and u == "word" else 0.0))
                for u, x in parts.items()
            }
            k = {
                v: _flat(x @ weights.key[head] + (weights.key_bias[head] if bias and v == "word" else 0.0))
                for v, x in parts.items()
            }
            for u, v in self.totals:
                self.totals[u, v][head] += (weights.scale * q[u] @ k[v].T).float()

    def maps(self, sentences: int) -> FourMaps:
        found = {f"{u}_{v}": _correlation(total / sentences) for (u, v), total in self.totals.items()}
        variance = sum(one.std**2 for one in found.values())
        shares = {name: one.std**2 / variance if variance else None for name, one in found.items()}
        return FourMaps(**{name: Correlation(**{**vars(one), "share": shares[name]}) for name, one in found.items()})


def _flat(rows: Float[Tensor, "B n D"]) -> Float[Tensor, "n BD"]:
    """Sentences side by side: one product then sums over them."""
    return rows.transpose(0, 1).flatten(1)


def _correlation(heads: Float[Tensor, "H n n"]) -> Correlation:
    mean_map = heads.double().mean(0)
    return Correlation(
        map=mean_map,
        mean=float(mean_map.mean()),
        std=float(mean_map.std(correction=0)),
        r2=explained(mean_map)[0],
        share=None,
        head_std=heads.double().flatten(1).std(dim=1, correction=0),
        head_r2=optional_tensor([explained(head)[0] for head in heads]),
    )


def raw_parts(host: Host, words: Float[Tensor, "B n E"], positions: Float[Tensor, "n E"]) -> Parts:
    """Words and positions mapped to the width of attention by factor matrices alone."""
    parts = {"word": words, "position": positions.expand_as(words)}
    for step in layer_steps(host):
        if isinstance(step, nn.Linear):
            parts = {name: F.linear(x, as_double(step.weight)) for name, x in parts.items()}
    return parts


def exact_parts(host: Host, words: Float[Tensor, "B n E"], positions: Float[Tensor, "n E"]) -> Parts:
    """The two parts of what the first attention reads; type, gains and biases go with the word."""
    types = submodule(host.stack, host.layout.types)
    word = words + (as_double(types.weight[0]) if isinstance(types, nn.Embedding) else 0.0)
    position = positions.expand_as(words)
    for step in layer_steps(host):
        weight, bias = as_double(step.weight), getattr(step, "bias", None)  # pyright: ignore[reportArgumentType]
        offset = as_double(bias) if isinstance(bias, Tensor) else 0.0
        if isinstance(step, nn.Linear):
            word, position = F.linear(word, weight) + offset, F.linear(position, weight)
            continue
        eps = getattr(step, "eps", getattr(step, "variance_epsilon", 0.0))
        sigma = ((word + position).var(-1, correction=0, keepdim=True) + eps).sqrt()
        word = weight * (word - word.mean(-1, keepdim=True)) / sigma + offset
        position = weight * (position - position.mean(-1, keepdim=True)) / sigma
    return {"word": word, "position": position}
