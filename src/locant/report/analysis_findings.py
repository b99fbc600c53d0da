"""What an analysis says, number by number, each beside its control: for the page, the terminal and a paper's text."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from locant.analysis import Analysis
from locant.analysis.course import MEASURES
from locant.analysis.distance import uniform_distance
from locant.analysis.locality import uniform_locality
from locant.analysis.patterns import LayerPatterns
from locant.analysis.phase_shift import PhaseShift


@dataclass(frozen=True)
class Finding:
    """One number: what was measured, its value, what it must be held against, and a sentence with all of it."""

    protocol: str
    measure: str
    value: str
    control: str
    sentence: str


def number(value: float | None, digits: int = 3) -> str:
    """A number as text: fixed digits, or powers of ten where it is tiny or huge; "undefined" for None and nan."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value != 0 and not 10**-digits <= abs(value) < 1e6:
        return f"{value:.2e}".replace("-", "\N{MINUS SIGN}")
    return f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")


def findings(analysis: Analysis) -> list[Finding]:
    """The numbers to cite, in the order of the protocols."""
    return [finding for about in ABOUT for finding in about(analysis)]


def _table(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.translation_invariance
    table = None if found is None else found.position_table
    if table is None:
        return
    for treatment, title in (("raw", "raw"), ("layernorm", "after LayerNorm")):
        one = getattr(table, treatment)
        if one is None:
            continue
        control = f"random rows {number(one.null)}, positions shuffled {number(one.null_shuffled)}"
        yield Finding(
            "translation_invariance",
            f"R² of the position table, {title}",
            number(one.r2),
            control,
            f"The offset alone explains R² = {number(one.r2)} of the products of its {one.n} position vectors "
            f"({title}; {control}).",
        )


def _heads(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.translation_invariance
    if found is None:
        return
    seen = [one for one in found.heads if one.source in ("terms", "layernorm_bias")] or found.heads[-1:]
    means = [one.mean for one in seen if one.mean is not None]
    if means:
        value, control = number(statistics.fmean(means)), number(_mean([one.null_shuffled for one in seen]))
        yield Finding(
            "translation_invariance",
            "R² of the heads' position logits, mean",
            value,
            f"positions shuffled {control}",
            f"What positions alone add to the logits depends on the offset with R² = {value} in the mean over "
            f"{sum(len(one.r2) for one in seen)} heads (positions shuffled: {control}).",
        )
    needed = [count for one in found.kernels for count in one.needed]
    if needed:
        few = sum(count is not None and count <= 2 for count in needed)
        enough = sum(count is not None for count in needed)
        yield Finding(
            "translation_invariance",
            "heads whose f(k) 5 Gaussian kernels explain to 95 %",
            f"{enough} of {len(needed)}",
            f"2 kernels: {few}",
            f"Five Gaussian kernels explain 95 % of the scoring function in {enough} of {len(needed)} heads, two of "
            f"them in {few}.",
        )


def _correlations(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.correlations
    if found is None:
        return
    for title, maps in (("raw", found.raw), ("exact", found.exact)):
        if maps is None:
            continue
        crossed = [maps.word_position.share, maps.position_word.share]
        cross = None if None in crossed else sum(share for share in crossed if share is not None)
        control = f"words {number(maps.word_word.share)}, positions {number(maps.position_position.share)}"
        yield Finding(
            "correlations",
            f"share of the word-position maps in the variance of mean logits, {title}",
            number(cross),
            control,
            f"Words looking at positions and positions at words hold {number(cross)} of the variance of the mean maps "
            f"({title}; {control}; {found.sentences} sentences).",
        )


def _patterns(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.patterns
    if found is None:
        return
    for title, layers in (("position logits", found.layers), ("measured attention", found.attention)):
        if layers:
            told = count_patterns(layers)
            yield Finding(
                "patterns",
                f"patterns of heads, {title}",
                told,
                "equal weights: whole",
                f"Heads by {title}: {told}; a head with equal weights would be called whole.",
            )


def count_patterns(layers: tuple[LayerPatterns, ...]) -> str:
    """For example "12 local, 3 previous", most frequent first."""
    counts = Counter(head.label or "too short to tell" for layer in layers for head in layer.heads)
    return ", ".join(f"{count} {label}" for label, count in counts.most_common())


def _distance(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.distance
    if found is None:
        return
    n, flat = found.length, found.mean_distance.flatten()
    even = uniform_distance(n, causal=analysis.model.causal)
    value = f"{number(float(flat.mean()), 1)} ({number(float(flat.min()), 1)} to {number(float(flat.max()), 1)})"
    control = f"equal weights {number(even, 1)}"
    yield Finding(
        "distance",
        "mean distance of attention, in tokens",
        value,
        control,
        f"Attention reaches {value} tokens far, mean and range over heads ({control}; {found.windows} windows of {n}).",
    )


def _shift(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.phase_shift
    if found is None:
        return
    if len(found.shifts) > 1:
        yield from _moved(found)
    if found.acceptability is not None:
        worst, here = found.acceptability.worst, float(found.acceptability.accuracy[0])
        yield Finding(
            "phase_shift",
            "largest loss of acceptability under a shift",
            number(worst),
            f"shift 0: {number(here)}; chance 0.500",
            f"Of {found.acceptability.pairs} pairs, the share told right falls by at most {number(worst)} from "
            f"{number(here)} at shift 0 (chance 0.5).",
        )


def _moved(found: PhaseShift) -> Iterator[Finding]:
    last = found.drift.cosine[-1, -1]
    control = "must not change, and did not" if found.control else "must not change, but did"
    control = control if found.relative else "shift 0: 1.000"
    yield Finding(
        "phase_shift",
        f"cosine of the last hidden states at shift {found.shifts[-1]}",
        number(float(last), 4),
        control,
        f"Moved by {found.shifts[-1]} positions ({found.how}), the last hidden states keep a cosine of "
        f"{number(float(last), 4)} with themselves ({control}).",
    )
    if found.perplexity is not None:
        worst, here = found.perplexity.worst, float(found.perplexity.mean[0])
        yield Finding(
            "phase_shift",
            "largest rise of perplexity under a shift",
            number(worst),
            f"shift 0: {number(here)}",
            f"The {found.perplexity.kind} perplexity rises by at most {number(worst)} from {number(here)} at shift 0.",
        )


def _locality(analysis: Analysis) -> Iterator[Finding]:
    if analysis.locality is None:
        return
    words = analysis.locality.identical_words
    even = uniform_locality(words.length, causal=analysis.model.causal)
    yield Finding(
        "locality",
        "locality on one repeated word",
        number(words.locality),
        f"equal weights {number(even)}",
        f"On a repeated word, where content cannot differ, attention has locality {number(words.locality)} (equal "
        f"weights: {number(even)}; 1 would be itself alone).",
    )
    stable = number(words.symmetry_raw)
    yield Finding(
        "locality",
        "symmetry on one repeated word",
        number(words.symmetry),
        f"equal weights 1.000; stable variant {stable}",
        f"Its symmetry is {number(words.symmetry)} by the published formula and {stable} by the stable variant (1: "
        "left and right alike).",
    )


def _probe(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.probe
    if found is None:
        return
    first, last = float(found.distance[0]), float(found.distance[-1])
    best, least = int(found.distance.argmin()), float(found.distance.min())
    yield Finding(
        "probe",
        "distance of the probe from the true position, last layer",
        number(last, 2),
        f"chance {number(found.chance, 2)}",
        f"A probe misses the true position by {number(first, 2)} tokens on the embeddings, {number(last, 2)} on the "
        f"last layer, least on layer {best} ({number(least, 2)}); chance: {number(found.chance, 2)}.",
    )


def _rows(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.table
    if found is None:
        return
    regression, order = found.regression, found.order
    yield Finding(
        "table",
        "error of a linear map from row to position",
        number(regression.error, 2),
        f"always the mean {number(regression.training_mean_error, 2)}",
        f"A linear map reads the position off an unseen row to within {number(regression.error, 2)} (always the mean: "
        f"{number(regression.training_mean_error, 2)}; {found.n} rows).",
    )
    yield Finding(
        "table",
        "error rate of telling the later of two rows",
        number(order.error),
        f"always the same answer {number(order.majority)}",
        f"Which of two rows is later is told wrong at a rate of {number(order.error)} (always the same answer: "
        f"{number(order.majority)}).",
    )


def _over_training(analysis: Analysis) -> Iterator[Finding]:
    found = analysis.over_training
    if found is None:
        return
    first, last = found.checkpoints[0], found.checkpoints[-1]
    for name, goes in found.with_loss.items():
        value, start = getattr(last, name), getattr(first, name)
        control = f"step {first.step}: {number(start)}; Spearman with the loss {number(goes.spearman)}, n = {goes.n}"
        yield Finding(
            "over_training",
            f"R² at step {last.step}, {MEASURES[name]}",
            number(value),
            control,
            f"Over the run, R² of the offset ({MEASURES[name]}) goes from {number(start)} at step {first.step} to "
            f"{number(value)} at step {last.step}; with the loss it has a Spearman correlation of "
            f"{number(goes.spearman)} over {goes.n} checkpoints, which are no independent samples.",
        )


ABOUT: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    _table,
    _heads,
    _correlations,
    _patterns,
    _distance,
    _shift,
    _locality,
    _probe,
    _rows,
    _over_training,
)


def _mean(parts: list[Tensor]) -> float | None:
    values = [value for part in parts for value in part.tolist() if math.isfinite(value)]
    return statistics.fmean(values) if values else None
