"""Phase shift: Sinha et al. 2022 ("The Curious Case of Absolute Position Embeddings"), arXiv:2210.12574.

The same sentence is read at positions k, k + 1, ..., k + n - 1. A model that knows relative positions does not notice;
`PhaseShift.relative` says where that must hold exactly, and ``control`` whether it did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locant.analysis.model import Host
from locant.analysis.passes import how_to_shift, run
from locant.analysis.scoring import Scorer
from locant.analysis.windows import check_windows

STEP, FARTHEST = 50, 400  # default shifts: every 50 as far as the table goes, or to 400 where there is none
LEAST = 4  # default shifts beside 0 in short tables: a smaller step
EXACT = 1e-5  # float32: what a relative encoding may differ by, and as much again every 50 positions (see `exact`)

Model = TypeVar("Model")


@dataclass(frozen=True)
class Drift:
    """Hidden states at shift k against shift 0, layer 0 = embeddings: mean cosine and relative L2 change, [k L+1]."""

    cosine: Float[Tensor, "k L1"]
    l2: Float[Tensor, "k L1"]


@dataclass(frozen=True)
class Perplexity:
    """exp(-mean log p of a token) by shift: ``mean`` [k] over all tokens, ``per_text`` [k N].

    ``mean_rank`` [k]: a text ranks the shifts from its lowest perplexity (1) on; a model that is indifferent to
    position has (K + 1) / 2 everywhere. ``delta`` [k]: against shift 0; ``worst``: the largest of them.
    """

    kind: str
    mean: Float[Tensor, "k"]
    per_text: Float[Tensor, "k N"]
    mean_rank: Float[Tensor, "k"]
    delta: Float[Tensor, "k"]
    worst: float


@dataclass(frozen=True)
class Accuracy:
    """Share of right choices by shift, ties counting one half: ``accuracy`` [k], by group, against shift 0.

    ``per_paradigm``: accuracy of each group (BLiMP's paradigms), [k] each. ``worst``: the largest loss.
    """

    accuracy: Float[Tensor, "k"]
    per_paradigm: dict[str, Float[Tensor, "k"]]
    pairs: int
    delta: Float[Tensor, "k"]
    worst: float


@dataclass(frozen=True)
class PhaseShift:
    """Protocol (d). ``dropped``: shifts that some example cannot take. ``relative``: whether nothing may change.

    ``control``: for relative encodings, whether hidden states stayed the same (see `exact`); else None.
    """

    length: int
    shifts: tuple[int, ...]
    dropped: tuple[int, ...]
    shift_specials: bool
    how: str
    relative: bool
    control: bool | None
    drift: Drift
    perplexity: Perplexity | None
    acceptability: Accuracy | None


@dataclass(frozen=True)
class MinimalPair:
    """Two token sequences of which the first is acceptable; ``group`` names the paradigm."""

    good: tuple[int, ...]
    bad: tuple[int, ...]
    group: str = ""


@dataclass(frozen=True)
class Choice:
    """A prompt and its possible continuations as token ids, of which ``answer`` is right."""

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    answer: int


def fitting_shifts(
    host: Host, longest: int, shifts: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shifts that every example can take, shifts that some example cannot), 0 among the first.

    Raises: ValueError for negative shifts, or examples longer than the model.
    """
    limit = host.trained_length
    if limit is not None and longest > limit:
        raise ValueError(f"phase shift: an example has {longest} tokens but the model has {limit} positions; cut it")
    room = FARTHEST if limit is None else limit - longest
    wanted = list(range(0, room + 1, min(STEP, max(1, room // LEAST)))) if shifts is None else sorted({0, *shifts})
    if wanted[0] < 0:
        raise ValueError(f"phase shift: got the shift {wanted[0]}; shifts count from 0")
    kept = tuple(k for k in wanted if limit is None or k <= room)
    return kept, tuple(k for k in wanted if k not in kept)


def is_relative(host: Host) -> bool:
    """Whether moving all positions may change nothing: no table, and encodings that claim shift invariance."""
    parts = () if host.attachment is None else host.attachment.stack.parts()
    return host.table is None and all(part.properties.shift_invariant for part in parts)


def exact(found: Drift, shifts: Sequence[int]) -> bool:
    """Whether hidden states stayed the same to 1e-5 (1 + k / 50): angles of far positions are rounded more coarsely."""
    allowed = EXACT * (1 + torch.tensor(list(shifts), dtype=torch.float64) / STEP)
    return bool((found.l2.amax(1) <= allowed).all())


def drift(
    host: Host,
    windows: Int[Tensor, "N n"],
    shifts: Sequence[int],
    *,
    shift_specials: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Drift:
    """How hidden states change when all positions move by each shift.

    Raises: ValueError for windows that are padded, or shifts past the table.
    """
    check_windows("phase shift", host, windows)
    cosine: list[Tensor] = []
    l2: list[Tensor] = []
    for row, window in enumerate(windows):
        still = run(host, window[None], hidden=True).hidden
        for column, shift in enumerate(shifts):
            moved = run(host, window[None], hidden=True, shift=shift, shift_specials=shift_specials).hidden
            near, far = _compare(still, moved)
            if row == 0:
                cosine.append(near / len(windows))
                l2.append(far / len(windows))
            else:
                cosine[column] += near / len(windows)
                l2[column] += far / len(windows)
        if progress is not None:
            progress(row + 1, len(windows))
    return Drift(torch.stack(cosine), torch.stack(l2))


def _compare(still: Sequence[Tensor], moved: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    cosines, changes = [], []
    for a, b in zip(still, moved, strict=True):
        a, b = a.double().cpu(), b.double().cpu()
        cosines.append(torch.cosine_similarity(a, b, dim=-1).mean())
        changes.append(((a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-30)).mean())
    return torch.stack(cosines), torch.stack(changes)


def perplexity(scorer: Scorer, texts: Sequence[Sequence[int]], shifts: Sequence[int]) -> Perplexity:
    """Perplexity (masked models: pseudo-perplexity) of token sequences by shift.

    Raises: ValueError for no texts, a text without a token to score, or shifts past the table.
    """
    if not texts:
        raise ValueError("phase shift: got 0 texts; give token sequences to score")
    losses = torch.zeros(len(shifts), len(texts), dtype=torch.float64)
    counts = torch.zeros(len(texts), dtype=torch.float64)
    for column, text in enumerate(texts):
        for row, shift in enumerate(shifts):
            scores = scorer.token_scores(text, shift)
            losses[row, column], counts[column] = -scores.sum(), len(scores)
    mean = (losses.sum(1) / counts.sum()).exp()
    per_text = (losses / counts).exp()
    delta = mean - mean[0]
    return Perplexity(scorer.kind, mean, per_text, average_ranks(per_text).mean(1), delta, float(delta.max()))


def average_ranks(columns: Float[Tensor, "k N"]) -> Float[Tensor, "k N"]:
    """The rank of each value in its column, from 1 for the lowest; equal values share the mean of their ranks."""
    below = (columns[None] < columns[:, None]).sum(1).double()
    equal = (columns[None] == columns[:, None]).sum(1).double()
    return below + (equal + 1) / 2


def acceptability(
    scorer: Scorer,
    pairs: Sequence[MinimalPair],
    shifts: Sequence[int],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Accuracy:
    """Zero-shot acceptability: how often the good sentence of a minimal pair has the higher log-likelihood, by shift.

    Raises: ValueError for no pairs, or shifts past the table.
    """
    if not pairs:
        raise ValueError("phase shift: got 0 minimal pairs; give rows of BLiMP, for example")
    found = torch.zeros(len(shifts), len(pairs), dtype=torch.float64)
    for column, pair in enumerate(pairs):
        for row, shift in enumerate(shifts):
            good, bad = (float(scorer.token_scores(ids, shift).sum()) for ids in (pair.good, pair.bad))
            found[row, column] = 1.0 if good > bad else 0.5 if good == bad else 0.0
        if progress is not None:
            progress(column + 1, len(pairs))
    return _accuracy(found, [pair.group for pair in pairs])


def few_shot(scorer: Scorer, items: Sequence[Choice], shifts: Sequence[int]) -> Accuracy:
    """Accuracy of choosing the continuation with the highest log-likelihood, the whole prompt moved by each shift.

    Raises: ValueError for no items, an item without options, or a model that is not causal.
    """
    if not items or any(not 0 <= item.answer < len(item.options) for item in items):
        raise ValueError(
            f"phase shift: got {len(items)} few-shot items; each needs options and the place of the answer"
        )
    if scorer.kind != "causal":
        raise ValueError(f"phase shift: few-shot prompts need a causal model, this one is {scorer.kind!r}")
    found = torch.zeros(len(shifts), len(items), dtype=torch.float64)
    for column, item in enumerate(items):
        for row, shift in enumerate(shifts):
            scores = [
                float(scorer.token_scores((*item.prompt, *option), shift)[-len(option) :].sum())
                for option in item.options
            ]
            best = [i for i, score in enumerate(scores) if score == max(scores)]
            found[row, column] = (item.answer in best) / len(best)
    return _accuracy(found, [""] * len(items))


def _accuracy(right: Tensor, groups: Sequence[str]) -> Accuracy:
    names = sorted({group for group in groups if group})
    by_group = {name: right[:, [i for i, group in enumerate(groups) if group == name]].mean(1) for name in names}
    accuracy = torch.stack(list(by_group.values())).mean(0) if by_group else right.mean(1)
    delta = accuracy - accuracy[0]
    return Accuracy(accuracy, by_group, right.shape[1], delta, float(0.0 - delta.min()))


def phase_shift(
    host: Host,
    windows: Int[Tensor, "N n"],
    *,
    shifts: Sequence[int] | None = None,
    shift_specials: bool = True,
    scorer: Scorer | None = None,
    pairs: Sequence[MinimalPair] = (),
    progress: Callable[[int, int], None] | None = None,
) -> PhaseShift:
    """Protocol (d) on a model: drift of hidden states; with a scorer, perplexity of the windows, and minimal pairs.

    Raises: ValueError for windows that are padded or too long, and where no example fits.
    """
    check_windows("phase shift", host, windows)
    longest = max(windows.shape[1], *(len(ids) for pair in pairs for ids in (pair.good, pair.bad)), 0)
    kept, dropped = fitting_shifts(host, longest, shifts)
    scored = len(pairs) if scorer is not None else 0
    report = progress or (lambda done, total: None)
    found = drift(
        host,
        windows,
        kept,
        shift_specials=shift_specials,
        progress=lambda done, total: report(done, total + scored),
    )
    relative = is_relative(host)
    return PhaseShift(
        length=windows.shape[1],
        shifts=kept,
        dropped=dropped,
        shift_specials=shift_specials,
        how=how_to_shift(host),
        relative=relative,
        control=exact(found, kept) if relative else None,
        drift=found,
        perplexity=None if scorer is None else perplexity(scorer, windows.tolist(), kept),
        acceptability=None
        if scorer is None or not pairs
        else acceptability(
            scorer, pairs, kept, progress=lambda done, total: report(len(windows) + done, len(windows) + total)
        ),
    )


# --- fine-tuned at one shift, tested at another ---


@dataclass(frozen=True)
class ShiftMatrix:
    """Scores [k_train k_test], mean over seeds and their standard deviation (nan for one seed)."""

    shifts: tuple[int, ...]
    seeds: tuple[int, ...]
    mean: Float[Tensor, "k k"]
    std: Float[Tensor, "k k"]
    undefined: int


def shift_matrix(
    train: Callable[[int, int], Model],
    evaluate: Callable[[Model, int], float | None],
    shifts: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
) -> ShiftMatrix:
    """Train with positions moved by each shift, test at every shift.

    ``train(shift, seed)`` gives a model, ``evaluate(model, shift)`` its score; None (as of `matthews` where a label is
    constant) counts 0 and is counted in ``undefined``. Raises: ValueError for no shifts or seeds.
    """
    if not shifts or not seeds:
        raise ValueError(f"phase shift: got {len(shifts)} shifts and {len(seeds)} seeds; give at least one of each")
    scores, undefined = torch.zeros(len(seeds), len(shifts), len(shifts), dtype=torch.float64), 0
    for s, seed in enumerate(seeds):
        for row, trained in enumerate(shifts):
            model = train(trained, seed)
            for column, tested in enumerate(shifts):
                score = evaluate(model, tested)
                undefined += score is None
                scores[s, row, column] = 0.0 if score is None else score
    std = scores.std(0) if len(seeds) > 1 else torch.full_like(scores[0], float("nan"))
    return ShiftMatrix(tuple(shifts), tuple(seeds), scores.mean(0), std, undefined)


def matthews(predicted: Sequence[int], true: Sequence[int]) -> float | None:
    """Matthews correlation of two-valued labels; None where either side is constant (by convention it counts 0).

    Raises: ValueError for no labels, or unequal numbers of them.
    """
    if not true or len(predicted) != len(true):
        raise ValueError(
            f"matthews: got {len(predicted)} predictions for {len(true)} labels; give equally many, at least 1"
        )
    if len(set(predicted)) < 2 or len(set(true)) < 2:
        return None
    return statistics.correlation([float(p) for p in predicted], [float(t) for t in true])


def blimp_pairs(rows: Sequence[Mapping[str, Any]], encode: Callable[[str], Sequence[int]]) -> tuple[MinimalPair, ...]:
    """Rows of BLiMP (sentence_good, sentence_bad, UID) as token sequences.

    Raises: ValueError for a row without one of the three.
    """
    for row in rows:
        if missing := [key for key in ("sentence_good", "sentence_bad", "UID") if key not in row]:
            raise ValueError(
                f"blimp: a row has {', '.join(map(str, row))} but no {missing[0]!r}; give rows as released"
            )
    return tuple(
        MinimalPair(tuple(encode(row["sentence_good"])), tuple(encode(row["sentence_bad"])), row["UID"]) for row in rows
    )
