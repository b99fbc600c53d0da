"""What a result table allows to conclude, and what it does not, in plain sentences.

Which difference may be called clear is decided by the rule of `locant.compare.summary`. The only threshold set here is
that for shifted ids: a loss that moves by at most `SAME_LOSS` nats counts as unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from locant.compare.objective import words_of
from locant.compare.pace import pace
from locant.compare.results import ResultTable
from locant.compare.scored import majority_text
from locant.compare.summary import CLEAR, LEANING, LEVEL, UNKNOWN, Difference, Row, compare, summarise
from locant.compare.words import Words

SAME_LOSS = 5e-4  # nats; half of the last digit shown

_AHEAD = "ahead"  # of the one with the lowest mean, on the seeds in common: runs failed, and the means are over others

RULE = (
    "A difference is called clear when it is larger than the spread of the seeds (the larger of the two encodings' "
    "standard deviations) and the 95% t interval of the differences, paired by seed, excludes zero."
)


@dataclass(frozen=True)
class Finding:
    """One sentence and its subject: "answer", "pace", "length", "shift", "cost", "gap" (not measured) or "limit"."""

    subject: str
    text: str


def conclusions(table: ResultTable) -> tuple[str, ...]:
    """Plain sentences: which encoding, how far beyond the trained length, at what cost, and what stays open."""
    return tuple(finding.text for finding in findings(table))


def findings(table: ResultTable) -> tuple[Finding, ...]:
    """The sentences of `conclusions`, each with its subject, in reading order."""
    rows = summarise(table)
    subjects: tuple[tuple[str, Callable[[ResultTable, Sequence[Row]], Iterable[str]]], ...] = (
        ("answer", _best),
        ("answer", _against_baseline),
        ("pace", _by_pace),
        ("length", _by_length),
        ("shift", _by_shift),
        ("cost", _cost),
        ("gap", _gaps),
        ("limit", _limits),
    )
    return tuple(Finding(subject, text) for subject, sentences in subjects for text in sentences(table, rows))


# --- answer ----------------------------------------------------------------------------------------------------------


def _best(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    ranked = [row for row in rows if row.rank is not None]
    if not ranked:
        measure = words_of(table).measure
        yield f"No run finished with a {measure} at the trained length, so nothing can be concluded about quality."
        return
    best, others = ranked[0], ranked[1:]
    words = words_of(table)
    where = f"at the trained length of {table.trained_length} {words.trained}"
    yield f"{best.encoding} has the lowest {words.measure} {where}: {_loss(best, words)}."
    if majority := majority_text(table):
        yield majority
    by_verdict: dict[str, list[str]] = {}
    for row in others:
        gap = compare(table, row.encoding, best.encoding)
        verdict = _AHEAD if gap.mean is not None and gap.mean < 0 else gap.verdict
        by_verdict.setdefault(verdict, []).append(f"{row.encoding} ({_behind(gap)})")
    if _AHEAD in by_verdict:
        yield (
            f"That mean is over other seeds than theirs; on the seeds in common these are ahead of {best.encoding}: "
            f"{_join(by_verdict[_AHEAD])}."
        )
    if LEVEL in by_verdict:
        yield f"Cannot be told apart from {best.encoding} with {_seeds(table)}: {_join(by_verdict[LEVEL])}."
    if LEANING in by_verdict:
        yield (
            f"Behind {best.encoding} by more than the spread of the seeds, but with {_seeds(table)} the 95% interval "
            f"still reaches zero: {_join(by_verdict[LEANING])}."
        )
    if UNKNOWN in by_verdict:
        yield (
            f"Fewer than two seeds in common with {best.encoding}, so whether the gap is chance is unknown: "
            f"{_join(by_verdict[UNKNOWN])}."
        )
    if others and len(by_verdict.get(CLEAR, ())) == len(others):
        yield f"{best.encoding} is clearly ahead of every other encoding."
    elif CLEAR in by_verdict:
        yield f"Clearly behind {best.encoding}: {_join(_some(by_verdict[CLEAR]))}."


def _against_baseline(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    base = table.baseline
    losses = {row.encoding: row.loss for row in rows if row.loss is not None}
    if losses and base not in losses:
        yield f"Nothing can be compared with the baseline {base}, which has no loss at the trained length."
    groups: dict[tuple[str, bool], list[tuple[Row, Difference]]] = {}
    for row in rows:
        gap = row.trained.difference if row.trained else None
        if gap is not None and gap.mean is not None:
            groups.setdefault((gap.verdict, gap.mean < 0), []).append((row, gap))
    for better, word in ((True, "beat"), (False, "lose to")):
        if clear := groups.get((CLEAR, better)):
            yield _clear_sentence(clear, base, word, words_of(table).short)
        if leaning := groups.get((LEANING, better)):
            side = "better" if better else "worse"
            yield (
                f"On average {side} than {base} by more than the spread of the seeds, but with {_seeds(table)} the "
                f"95% interval still reaches zero: {_join(_named(leaning))}."
            )
    if level := groups.get((LEVEL, True), []) + groups.get((LEVEL, False), []):
        yield f"Cannot be told apart from {base} with {_seeds(table)}: {_join(row.encoding for row, _ in level)}."
    if unknown := groups.get((UNKNOWN, True), []) + groups.get((UNKNOWN, False), []):
        names = _join(f"{row.encoding} ({gap.mean:+.3f})" for row, gap in unknown)
        yield f"Against {base} with one seed, so without any measure of chance: {names} {words_of(table).short}."
    judged = [verdict for verdict, _ in groups if verdict != UNKNOWN]
    if judged and (CLEAR, True) not in groups:
        yield f"No encoding is clearly better than {base}."


def _clear_sentence(clear: Sequence[tuple[Row, Difference]], base: str, word: str, unit: str) -> str:
    if len(clear) == 1:
        row, gap = clear[0]
        verb = {"beat": "beats", "lose to": "loses to"}[word]
        return (
            f"{row.encoding} {verb} {base} by {_nats(gap.mean)} {unit}, more than the spread of the seeds "
            f"({_nats(gap.seed_spread)}); 95% interval {_interval(gap)}."
        )
    widest = max((gap.seed_spread or 0.0) for _, gap in clear)
    spread = f"the spread of the seeds is at most {_nats(widest)}"
    return f"Clearly {word} {base}, in {unit}: {_join(_some(_named(clear)))}; {spread}."


def _by_pace(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    found = {row.encoding: one for row in rows if not row.is_baseline and (one := pace(table, row.encoding))}
    there = sorted((one.share.mean, name, one) for name, one in found.items() if one.share.mean is not None)
    if there:
        named = [
            f"{name} after {share:.0%} of them"
            + ("" if one.reached == one.seeds else f" ({one.reached} of {_count(one.seeds, 'seed')})")
            for share, name, one in there
        ]
        every = max(one.interval for one in found.values())
        yield (
            f"The validation loss with which {table.baseline} ends all its steps is reached by {_join(named)}; it was "
            f"looked at every {every:,} steps."
        )
    if never := [name for name, one in found.items() if not one.reached]:
        yield f"Never as low as the end of {table.baseline}: {_join(never)}."


# --- lengths and shifts ----------------------------------------------------------------------------------------------


def _by_length(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    for length in sorted({one.length for row in rows for one in row.lengths} - {table.trained_length}):
        scored = [
            (one.loss.mean, one.loss.mean - row.loss, row.encoding)
            for row in rows
            for one in row.lengths
            if one.length == length and one.loss.mean is not None and row.loss is not None
        ]
        if not scored:
            continue
        loss, change, name = min(scored)
        gaps = {other: compare(table, other, name, length) for *_, other in scored if other != name}
        level = [other for other, gap in gaps.items() if gap.verdict != CLEAR or (gap.mean or 0.0) < 0]
        ties = f", not clearly ahead of {_join(_some(level))}" if level else ""
        sentence = (
            f"At {_at(table, length)} {name} has the lowest loss, {loss:.3f} ({change:+.3f} against its loss at "
            f"{table.trained_length} tokens){ties}."
        )
        _, worst, loser = max(scored, key=lambda item: item[1])
        if worst > SAME_LOSS and loser != name:
            sentence += f" The largest rise is that of {loser}, {worst:+.3f}."
        yield sentence
    absent = [(row.encoding, one.reason, one.length) for row in rows for one in row.lengths if not one.loss.n]
    for names, lengths, reason in _grouped(absent):
        places = _join(_at(table, length) for length in lengths)
        yield f"{_join(names)} cannot be evaluated at {places}: {reason}."


def _grouped(absent: Iterable[tuple[str, str | None, int]]) -> list[tuple[list[str], tuple[int, ...], str]]:
    """Encodings that fail at the same places for the same reason, told in one sentence."""
    places: dict[tuple[str, str], list[int]] = {}
    for name, reason, place in absent:
        places.setdefault((name, (reason or "no reason was recorded").rstrip(".")), []).append(place)
    groups: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for (name, reason), where in places.items():
        groups.setdefault((tuple(where), reason), []).append(name)
    return [(names, where, reason) for (where, reason), names in groups.items()]


def _by_shift(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    measured = [(row.encoding, row.max_shift_change) for row in rows if row.max_shift_change is not None]
    same = [(name, change) for name, change in measured if change <= SAME_LOSS]
    moved = sorted(((change, name) for name, change in measured if change > SAME_LOSS), reverse=True)
    if same:
        largest = max(change for _, change in same)
        verb = "does" if len(same) == 1 else "do"
        names = _join(name for name, _ in same)
        yield f"{names} {verb} not change under shifted ids (largest change {largest:.4f} nats)."
    if moved:
        verb = "changes" if len(moved) == 1 else "change"
        yield f"{_join(f'{name} (up to {_nats(change)} nats)' for change, name in moved)} {verb} under shifted ids."
    absent = [(row.encoding, one.reason, one.shift) for row in rows for one in row.shifts if not one.loss.n]
    for names, shifts, reason in _grouped(absent):
        yield f"{_join(names)} cannot be evaluated with ids shifted by {_join(map(str, shifts))}: {reason}."


# --- cost and gaps ---------------------------------------------------------------------------------------------------


def _cost(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    base = next((row for row in rows if row.is_baseline), None)
    for kind, what in (("train", "Training"), ("inference", "Inference")):
        field = f"{kind}_tokens_per_second"
        found = ((value, row) for row in rows if (value := getattr(row.speed, field, None)))
        speeds = sorted(found, key=lambda pair: (pair[0], pair[1].encoding))
        if len(speeds) < 2:
            continue
        (slow, slowest), (fast, fastest) = speeds[0], speeds[-1]
        own = getattr(base.speed, field, None) if base else None
        share = f", {slow / own:.0%} of {table.baseline}" if own and not slowest.is_baseline else ""
        ends = f"{fastest.encoding} is fastest ({fast:,.0f} tokens/s), {slowest.encoding} slowest ({slow:,.0f}{share})"
        apart = _rounds_apart(slowest, fastest, kind)
        if apart is None:
            yield f"{what}: {ends}. Measured in one round, so without any measure of chance."
        elif apart:
            yield f"{what}: {ends}."
        else:
            yield (
                f"{what}: no order can be told, since even the rounds of {slowest.encoding} ({slow:,.0f} tokens/s) and "
                f"{fastest.encoding} ({fast:,.0f}), the ends by median, overlap."
            )
    best = next((row for row in rows if row.rank == 1), None)
    if best and base and best is not base and best.speed and base.speed:
        own, other = best.speed.train_tokens_per_second, base.speed.train_tokens_per_second
        if own and other:
            added = f" and adds {best.extra_parameters:,} parameters" if best.extra_parameters is not None else ""
            told = " (their rounds overlap)" if _rounds_apart(best, base, "train") is False else ""
            share = f"{own / other:.0%} of the speed of {base.encoding}{told}"
            yield f"{best.encoding}, lowest in mean loss, trains at {share}{added}."
    added = sorted((row.extra_parameters, row.encoding) for row in rows if row.extra_parameters is not None)
    if added and added[-1][0]:
        yield f"Most parameters are added by {added[-1][1]}: {added[-1][0]:,}."


def _rounds_apart(one: Row, other: Row, kind: str) -> bool | None:
    """Whether every round of one was faster than every round of the other; None where there are less than two."""
    first, second = (getattr(row.speed, f"{kind}_rounds", ()) for row in (one, other))
    if min(len(first), len(second)) < 2:
        return None
    return min(first) > max(second) or min(second) > max(first)


def _gaps(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        if row.failed:
            kept = "no number at all" if not row.done else f"its numbers come from {_count(row.done, 'seed')} only"
            runs = f"{len(row.failed)} of {_count(row.planned, 'run')}"
            yield f"{row.encoding}: {runs} did not finish ({'; '.join(row.failed)}); {kept}."
        for one in row.lengths:
            if 0 < one.loss.n < row.done:
                yield (
                    f"{row.encoding} at {_at(table, one.length)}: {row.done - one.loss.n} of "
                    f"{_count(row.done, 'finished run')} has no loss ({one.reason}) and is left out of the mean."
                )
        if row.done and row.speed is not None and row.speed.reason:
            yield f"{row.encoding}: speed or memory lacks numbers ({row.speed.reason})."
    if silent := [row.encoding for row in rows if row.done and row.speed is None]:
        yield f"Speed and memory were not measured for {_join(silent)}."


def _limits(table: ResultTable, rows: Sequence[Row]) -> Iterable[str]:
    yield RULE
    points = [run.curve[-1] for run in table.runs if run.status == "done" and run.curve]
    budget = [f"{max(point.step for point in points):,} training steps"] if points else []
    sizes = sorted(row.total_parameters for row in rows if row.total_parameters is not None)
    if sizes:
        span = f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[0]:,} to {sizes[-1]:,}"
        budget.insert(0, f"one model size ({span} parameters)")
    yield (
        f"This is {_join(['one corpus', *budget, _seeds(table)])}; it does not show what more training, larger models, "
        "other text or tasks built on the model would give."
    )
    if len(table.seeds) == 2:
        yield "With two seeds an interval rests on one degree of freedom and is wide; more seeds narrow it."
    judged = sum(1 for row in rows if row.trained and row.trained.difference and row.trained.difference.n > 1)
    if judged >= 3:
        yield (
            f"{judged} encodings are compared with {table.baseline}, and all with the best, at the 95% level without "
            "correction for their number, so a narrow clear difference may be chance."
        )
    if any(row.speed for row in rows):
        yield "Speed and memory hold for this machine and these sizes; the order can be another elsewhere."


# --- words -----------------------------------------------------------------------------------------------------------


def _loss(row: Row, words: Words) -> str:
    loss = row.trained.loss if row.trained else None
    if loss is None or loss.mean is None:
        return "no number"
    deviation = "" if loss.std is None else f" ± {loss.std:.3f}"
    return f"{loss.mean:.3f}{deviation} {words.unit} ({_count(loss.n, 'seed')})"


def _behind(gap: Difference) -> str:
    return "no common seed" if gap.mean is None else f"{gap.mean:+.3f}"


def _nats(value: float | None) -> str:
    return "?" if value is None else f"{abs(value):.2f}" if abs(value) >= 0.1 else f"{abs(value):.3f}"


def _interval(gap: Difference) -> str:
    return "unknown" if gap.low is None or gap.high is None else f"{gap.low:+.3f} to {gap.high:+.3f}"


def _named(group: Iterable[tuple[Row, Difference]]) -> list[str]:
    return [f"{row.encoding} by {_nats(gap.mean)}" for row, gap in group]


def _at(table: ResultTable, length: int) -> str:
    return f"{length} {words_of(table).trained} ({length / table.trained_length:g}x)"


def _seeds(table: ResultTable) -> str:
    return _count(len(table.seeds), "seed")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _some(names: Sequence[str], limit: int = 6) -> list[str]:
    return list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} more"]


def _join(parts: Iterable[str]) -> str:
    items = list(parts)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
