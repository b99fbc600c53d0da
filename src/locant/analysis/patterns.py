"""What kind of head it is: Ke, He & Liu 2021 (TUPE), figure 6. The five names are the paper's, the thresholds ours.

A = softmax of position-only logits, or measured attention. w = min(16, n // 4), rows w .. n - w - 1 count.

    a(k)  mean of A[i, i + k]       near  mass on |k| <= min(5, w)       wide  mass on |k| <= n // 4
    E     mean row entropy / logarithm of the keys seen                  wide_uniform  the same for equal weights

First match: previous (a(-1) >= 0.3, >= 2 a(1), > a(0)), next (mirrored), whole (E >= 0.95), local (near >= 0.5), broad
(wide >= 1.25 wide_uniform), other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.model import Host
from locant.analysis.passes import run
from locant.analysis.plain import check_finite
from locant.analysis.translation_invariance import no_positions, position_logits
from locant.analysis.windows import check_windows

NAMES = ("previous", "next", "self", "entropy", "near", "wide", "wide_uniform")
LEAST = 8  # positions below which no pattern is told


@dataclass(frozen=True)
class HeadPattern:
    """The label of a head and the seven numbers it rests on; all None below 8 positions.

    ``previous``, ``next``, ``self``: a(-1), a(1), a(0). ``entropy``: E.
    """

    label: str | None
    previous: float | None
    next: float | None
    self: float | None
    entropy: float | None
    near: float | None
    wide: float | None
    wide_uniform: float | None


TOO_SHORT = HeadPattern(*[None] * 8)  # below 8 positions


@dataclass(frozen=True)
class LayerPatterns:
    """The heads of one layer; ``source`` says what A was made of."""

    layer: int
    source: str
    heads: tuple[HeadPattern, ...]


@dataclass(frozen=True)
class Patterns:
    """Protocol (b), figure 6: heads by their position-only logits, and by measured attention where text was given."""

    length: int
    layers: tuple[LayerPatterns, ...]
    attention: tuple[LayerPatterns, ...] | None


def pattern_numbers(weights: Float[Tensor, "... n n"], *, causal: bool = False) -> Float[Tensor, "... 7"]:
    """The seven numbers of attention weights (rows sum to 1), in the order of ``NAMES``.

    Raises: ValueError for fewer than 8 positions, or numbers that are not finite.
    """
    n = weights.shape[-1]
    if n < LEAST:
        raise ValueError(f"patterns: got {n} positions; a pattern needs {LEAST} or more")
    check_finite("patterns", "the attention", weights)
    a = weights.double()
    w = min(16, n // 4)
    index = torch.arange(n, device=a.device)
    away = (index[None, :] - index[:, None]).abs()
    seen = (index[None, :] <= index[:, None] if causal else torch.ones(n, n, dtype=torch.bool)).to(a.device)
    uniform = seen / seen.sum(-1, keepdim=True)
    rows = slice(w, n - w)

    def at(k: int) -> Tensor:
        return a.diagonal(k, -2, -1)[..., w + min(k, 0) : n - w + min(k, 0)].mean(-1)

    def within(x: Tensor, radius: int) -> Tensor:
        return (x * (away <= radius))[..., rows, :].sum(-1).mean(-1)

    counts = seen.sum(-1).double()
    several = counts > 1
    entropy = -torch.special.xlogy(a, a).sum(-1)[..., several] / counts[several].log()
    wide_uniform = within(uniform.double(), n // 4).expand(a.shape[:-2])
    numbers = (at(-1), at(1), at(0), entropy.mean(-1), within(a, min(5, w)), within(a, n // 4), wide_uniform)
    return torch.stack(numbers, -1)


def classify(numbers: Float[Tensor, "7"]) -> HeadPattern:
    """The label that the seven numbers give."""
    previous, after, own, entropy, near, wide, wide_uniform = numbers.tolist()
    rules = (
        ("previous", previous >= 0.3 and previous >= 2 * after and previous > own),
        ("next", after >= 0.3 and after >= 2 * previous and after > own),
        ("whole", entropy >= 0.95),
        ("local", near >= 0.5),
        ("broad", wide >= 1.25 * wide_uniform),
    )
    label = next((name for name, holds in rules if holds), "other")
    return HeadPattern(label, previous, after, own, entropy, near, wide, wide_uniform)


def softmax_logits(logits: Float[Tensor, "... n n"], *, causal: bool = False) -> Float[Tensor, "... n n"]:
    """Attention of position-only logits in float64; a causal model sees keys up to the query."""
    n = logits.shape[-1]
    if causal:
        logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
    return logits.double().softmax(-1)


def head_pattern(logits: Float[Tensor, "n n"], *, causal: bool = False) -> HeadPattern:
    """The pattern of one head's position-only logits; label None below 8 positions.

    Raises: ValueError for logits that are not finite.
    """
    check_finite("patterns", "the logits", logits)
    if logits.shape[-1] < LEAST:
        return TOO_SHORT
    return classify(pattern_numbers(softmax_logits(logits, causal=causal), causal=causal))


def head_patterns(host: Host, length: int = 128) -> tuple[LayerPatterns, ...]:
    """The heads of a model by what positions alone add to their logits; an untied [CLS] is left out.

    Raises: ValueError for a model without positions that act on their own.
    """
    found = []
    for layer, source, logits in position_logits(host, length, every_treatment=False):
        heads = (head_pattern(logits(h), causal=host.causal) for h in range(host.num_heads))
        found.append(LayerPatterns(layer, source, tuple(heads)))
    if not found:
        raise ValueError(no_positions(host))
    return tuple(found)


def attention_patterns(
    host: Host, windows: Int[Tensor, "N n"], *, progress: Callable[[int, int], None] | None = None
) -> tuple[LayerPatterns, ...]:
    """The heads of a model by measured attention: the seven numbers of each window, averaged, then the label.

    Labels are None below 8 tokens. Raises: ValueError for windows that are padded, or too long for the model.
    """
    check_windows("patterns", host, windows)
    if windows.shape[1] < LEAST:
        unknown = (TOO_SHORT,) * host.num_heads
        return tuple(LayerPatterns(layer, "attention", unknown) for layer in range(host.num_layers))
    sums: dict[int, Tensor] = {}

    def visit(layer: int, weights: Tensor) -> None:
        sums[layer] = sums.get(layer, 0.0) + pattern_numbers(weights, causal=host.causal).sum(0)

    for done in range(len(windows)):
        run(host, windows[done : done + 1], visit=visit)
        if progress is not None:
            progress(done + 1, len(windows))
    return tuple(
        LayerPatterns(layer, "attention", tuple(classify(head) for head in total / len(windows)))
        for layer, total in sorted(sums.items())
    )
