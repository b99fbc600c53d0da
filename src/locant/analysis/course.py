"""Translation invariance over a training run and against performance: Wennberg & Henter 2021, section 3.

Beside the table and the heads' position-only logits, which not every encoding has, each checkpoint is asked for its
attention on one repeated word, which every model has, and for the patterns of its heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor, nn

from locant.analysis.diagonals import shuffled
from locant.analysis.locality import identical_words, some_words
from locant.analysis.model import UNLIMITED, Host, check_weights, position_vectors, read_model
from locant.analysis.patterns import LayerPatterns, attention_patterns, head_patterns
from locant.analysis.phase_shift import average_ranks
from locant.analysis.translation_invariance import head_invariance, position_logits, table_invariance

WORDS = 8  # words that are repeated
MEASURES = {  # of `Checkpoint`: what is held against the loss
    "r2": "table, raw",
    "r2_off_diagonal": "table, raw, without the diagonal",
    "r2_layernorm": "table, after LayerNorm",
    "heads_r2": "position-only logits, mean over heads",
    "words_r2": "attention on one repeated word",
}


@dataclass(frozen=True)
class Checkpoint:
    """One step of a run; R^2 is what the offset explains, None where a model has no such thing.

    ``r2``, ``r2_off_diagonal``: of P P^T; ``r2_layernorm``: of the table as attention sees it. ``heads_r2``: mean over
    heads of position-only logits, ``heads_null`` the same with positions shuffled. ``words_r2``, ``words_null``: of
    attention on one repeated word. ``patterns``: heads by position-only logits, ``attention``: by measured attention,
    each a count by name. ``loss`` if told.
    """

    step: int
    r2: float | None = None
    r2_off_diagonal: float | None = None
    r2_layernorm: float | None = None
    heads_r2: float | None = None
    heads_null: float | None = None
    words_r2: float | None = None
    words_null: float | None = None
    locality: float | None = None
    patterns: dict[str, int] = field(default_factory=dict)
    attention: dict[str, int] = field(default_factory=dict)
    loss: float | None = None


@dataclass(frozen=True)
class Correlation:
    """Pearson and Spearman correlation over ``n`` pairs; None for fewer than 3, or where one side does not vary."""

    pearson: float | None
    spearman: float | None
    n: int


@dataclass(frozen=True)
class Course:
    """The checkpoints in order, and how each of ``MEASURES`` that there is goes with the loss.

    Checkpoints of one run are no independent samples: whatever rises in training correlates with a loss that falls.
    """

    length: int
    checkpoints: tuple[Checkpoint, ...]
    with_loss: dict[str, Correlation]


def over_checkpoints(
    models: Iterable[tuple[int, nn.Module, float | None]],
    *,
    length: int | None = None,
    windows: Int[Tensor, "N n"] | None = None,
    seed: int = 0,
) -> Course:
    """(step, model, loss or None) of a run -> its invariance over training; models may be made one at a time.

    ``length``: positions that are looked at (default: those of the table, or 128). ``windows`` of token ids: for the
    patterns of measured attention. Raises: ValueError for no checkpoints, or weights that are not finite.
    """
    found: list[Checkpoint] = []
    n = length or 0
    for step, model, loss in models:
        host = read_model(model)
        n = n or host.trained_length or UNLIMITED
        found.append(_checkpoint(step, host, loss, min(n, host.trained_length or n), windows, seed))
    if not found:
        raise ValueError("checkpoints: got 0 of them; give (step, model, loss)")
    told = {name: [(getattr(point, name), point.loss) for point in found] for name in MEASURES}
    with_loss = {
        name: _correlate_known(pairs) for name, pairs in told.items() if any(value is not None for value, _ in pairs)
    }
    return Course(n, tuple(found), with_loss)


def _checkpoint(
    step: int, host: Host, loss: float | None, length: int, windows: Tensor | None, seed: int
) -> Checkpoint:
    check_weights(host)
    vectors = position_vectors(host)
    table = None if vectors is None else table_invariance(vectors.table, seed=seed)
    seen = None if vectors is None or vectors.layernorm is None else table_invariance(vectors.layernorm, seed=seed)
    heads = [
        head_invariance(logits, host.num_heads, layer, name, seed=seed)
        for layer, name, logits in position_logits(host, length, every_treatment=False)
    ]
    words = identical_words(host, some_words(host, WORDS, seed), length)
    measured = None if windows is None else attention_patterns(host, windows)
    return Checkpoint(
        step,
        r2=None if table is None else table.r2,
        r2_off_diagonal=None if table is None else table.r2_off_diagonal,
        r2_layernorm=None if seen is None else seen.r2,
        heads_r2=_mean([value for one in heads for value in one.r2.tolist()]),
        heads_null=_mean([value for one in heads for value in one.null_shuffled.tolist()]),
        words_r2=words.r2,
        words_null=shuffled(words.map, seed)[0],
        locality=words.locality,
        patterns=_counted(head_patterns(host, length)) if heads else {},
        attention=_counted(measured or ()),
        loss=loss,
    )


def _counted(layers: Sequence[LayerPatterns]) -> dict[str, int]:
    return dict(Counter(head.label for layer in layers for head in layer.heads if head.label is not None))


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None


def _correlate_known(pairs: list[tuple[float | None, float | None]]) -> Correlation:
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    return correlate([x for x, _ in known], [y for _, y in known])


def correlate(x: Sequence[float], y: Sequence[float]) -> Correlation:
    """Pearson and Spearman correlation of two lists, for example R^2 and score of several models.

    Raises: ValueError for lists of unequal length.
    """
    if len(x) != len(y):
        raise ValueError(f"correlate: got {len(x)} and {len(y)} values; give equally many")
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (x, y))
    ranks = [average_ranks(values[:, None])[:, 0] for values in (a, b)] if len(x) else [a, b]
    return Correlation(_pearson(a, b), _pearson(*ranks), len(x))


def _pearson(a: Tensor, b: Tensor) -> float | None:
    if len(a) < 3:
        return None
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return None if norm <= 1e-300 else max(-1.0, min(1.0, float(a @ b) / norm))
