"""Translation invariance over a training run and against performance: Wennberg & Henter 2021, section 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locant.analysis.model import check_weights, position_vectors, read_model
from locant.analysis.phase_shift import average_ranks
from locant.analysis.translation_invariance import head_invariance, position_logits, table_invariance


@dataclass(frozen=True)
class Checkpoint:
    """One step of a run: R^2 of the table (raw, and as attention sees it), mean R^2 of the heads, loss if told."""

    step: int
    r2: float | None
    r2_layernorm: float | None
    heads_r2: float | None
    loss: float | None


@dataclass(frozen=True)
class Correlation:
    """Pearson and Spearman correlation over ``n`` pairs; None for fewer than 3, or where one side does not vary."""

    pearson: float | None
    spearman: float | None
    n: int


@dataclass(frozen=True)
class Course:
    """The checkpoints in order, and how each measure goes with the loss."""

    checkpoints: tuple[Checkpoint, ...]
    r2_with_loss: Correlation
    heads_r2_with_loss: Correlation


def over_checkpoints(models: Iterable[tuple[int, nn.Module, float | None]]) -> Course:
    """(step, model, loss or None) of a run -> its invariance over training; models may be made one at a time.

    Raises: ValueError for no checkpoints, or weights that are not finite.
    """
    found = [_checkpoint(step, model, loss) for step, model, loss in models]
    if not found:
        raise ValueError("checkpoints: got 0 of them; give (step, model, loss)")
    table = [(point.r2, point.loss) for point in found]
    heads = [(point.heads_r2, point.loss) for point in found]
    return Course(tuple(found), _correlate_known(table), _correlate_known(heads))


def _checkpoint(step: int, model: nn.Module, loss: float | None) -> Checkpoint:
    host = read_model(model)
    check_weights(host)
    vectors = position_vectors(host)
    raw = normed = None
    if vectors is not None:
        raw = table_invariance(vectors.table).r2
        normed = None if vectors.layernorm is None else table_invariance(vectors.layernorm).r2
    sources = list(position_logits(host, every_treatment=False)) if vectors is not None else position_logits(host)
    means = [head_invariance(logits, host.num_heads, layer, name).mean for layer, name, logits in sources]
    known = [mean for mean in means if mean is not None]
    return Checkpoint(step, raw, normed, sum(known) / len(known) if known else None, loss)


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
