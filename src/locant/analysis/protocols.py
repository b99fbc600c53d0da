"""All protocols on one model: `analyze(model, tokenizer, texts)` -> `Analysis`."""

from __future__ import annotations

import difflib
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from locant.analysis.correlations import Correlations, correlations
from locant.analysis.course import Course
from locant.analysis.distance import AttentionByDistance, attention_by_distance
from locant.analysis.locality import Locality, head_locality, identical_words, some_words
from locant.analysis.model import Host, check_weights, position_vectors, read_model
from locant.analysis.patterns import Patterns, attention_patterns, head_patterns
from locant.analysis.phase_shift import MinimalPair, PhaseShift, phase_shift
from locant.analysis.plain import plain
from locant.analysis.probe import Probe, position_probe
from locant.analysis.scoring import make_scorer
from locant.analysis.table import Table, table
from locant.analysis.translation_invariance import TranslationInvariance, no_positions, translation_invariance
from locant.analysis.windows import text_windows

WINDOWS = 32  # windows of text that averages are taken over
SHIFTED = 4  # windows that are read at every shift
PROBED = 48  # windows that probes are trained on; a third as many test them
LEAST = 8  # windows below which no probe is trained
WORDS = 8  # words that are repeated
OF_ALL_ROWS = {"translation_invariance", "table"}  # protocols that compare every row of a table with every other

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelFacts:
    """What was analyzed. ``positions`` says how the model knows them; ``trained_length``: rows of its tables."""

    name: str
    family: str
    num_layers: int
    num_heads: int
    head_dim: int
    model_dim: int
    causal: bool
    positions: str
    trained_length: int | None
    parameters: int


@dataclass(frozen=True)
class Analysis:
    """Results of the protocols that ran; one that cannot run on this model is None, its reason in ``skipped``.

    ``over_training``: of a run with checkpoints, see `locant.analysis.load.analyze_saved`.
    """

    model: ModelFacts
    length: int
    seed: int
    translation_invariance: TranslationInvariance | None = None
    correlations: Correlations | None = None
    patterns: Patterns | None = None
    distance: AttentionByDistance | None = None
    phase_shift: PhaseShift | None = None
    locality: Locality | None = None
    probe: Probe | None = None
    table: Table | None = None
    over_training: Course | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: numbers, lists, dictionaries; None where undefined."""
        return plain(self)


@dataclass(frozen=True)
class Task:
    """What a protocol may read: the model, windows of text, and how to report progress."""

    host: Host
    length: int
    seed: int
    windows: Int[Tensor, "N n"] | None
    bare_windows: Int[Tensor, "P n"] | None
    tokenizer: Any
    pairs: tuple[MinimalPair, ...]
    progress: Callable[[int, int], None]

    @property
    def text(self) -> Int[Tensor, "N n"]:
        """The windows.

        Raises: Impossible where no text was given.
        """
        if self.windows is None:
            raise Impossible("needs text: give tokenizer and texts, or windows of token ids")
        return self.windows


class Impossible(Exception):
    """A protocol that this model or input does not allow; the message is the reason."""


def _translation_invariance(task: Task) -> TranslationInvariance:
    return translation_invariance(task.host, seed=task.seed, progress=task.progress)


def _correlations(task: Task) -> Correlations:
    if position_vectors(task.host, 1) is None:
        raise Impossible("the model adds no position vectors to its input")
    return correlations(task.host, task.text, progress=task.progress)


def _patterns(task: Task) -> Patterns:
    windows = task.windows
    measured = None if windows is None else attention_patterns(task.host, windows, progress=task.progress)
    layers = _by_logits(head_patterns, task)
    if layers is None and measured is None:
        raise Impossible(f"{no_positions(task.host)} (or give text, for patterns of measured attention)")
    return Patterns(task.length, layers or (), measured)


def _by_logits(function: Callable[[Host, int], Any], task: Task) -> Any:
    """A function of position-only logits, or None where the model has none."""
    try:
        return function(task.host, task.length)
    except ValueError as error:
        if str(error) != no_positions(task.host):
            raise
        return None


def _distance(task: Task) -> AttentionByDistance:
    return attention_by_distance(task.host, task.text, progress=task.progress)


def _phase_shift(task: Task) -> PhaseShift:
    scorer = None
    try:
        scorer = make_scorer(task.host, task.tokenizer)
    except ValueError:
        pass  # no head, or no mask token: hidden states alone
    return phase_shift(task.host, task.text[:SHIFTED], scorer=scorer, pairs=task.pairs, progress=task.progress)


def _locality(task: Task) -> Locality:
    words = some_words(task.host, WORDS, task.seed)
    return Locality(
        _by_logits(head_locality, task), identical_words(task.host, words, task.length, progress=task.progress)
    )


def _probe(task: Task) -> Probe:
    windows = task.text if task.bare_windows is None else task.bare_windows
    if len(windows) < LEAST:
        raise Impossible(f"needs {LEAST} windows of text or more, got {len(windows)}")
    train = len(windows) * 3 // 4
    return position_probe(task.host, windows[:train], windows[train:], seed=task.seed, progress=task.progress)


def _table(task: Task) -> Table:
    return table(task.host, seed=task.seed)


PROTOCOLS: dict[str, Callable[[Task], Any]] = {
    "translation_invariance": _translation_invariance,
    "correlations": _correlations,
    "patterns": _patterns,
    "distance": _distance,
    "phase_shift": _phase_shift,
    "locality": _locality,
    "probe": _probe,
    "table": _table,
}


def analyze(
    model: nn.Module,
    tokenizer: Any = None,
    texts: Sequence[str] | None = None,
    *,
    windows: Int[Tensor, "N n"] | None = None,
    only: Iterable[str] | None = None,
    length: int = 128,
    pairs: Sequence[MinimalPair] = (),
    seed: int = 0,
    name: str = "",
    progress: Progress | None = None,
) -> Analysis:
    """Run protocols on a model.

    ``texts`` are cut by the ``tokenizer`` into windows of ``length`` tokens (``windows`` [N n] of token ids take their
    place); protocols that read text are left out without. ``only``: names from ``PROTOCOLS``. ``pairs``: minimal pairs
    for the phase shift of a model with a language-model head. ``progress(protocol, done, total)`` is called on the way.
    What cannot run on this model is None, with the reason in ``skipped``; where nothing can, that is an error.
    Raises: ValueError for unknown names, unknown models, weights that are not finite (named), text shorter than a
    window, lengths below 3 or past the table, and more memory than there is (with what to lower).
    """
    chosen = chosen_protocols(only)
    host = read_model(model)
    check_weights(host)
    given = windows
    length = length if given is None else given.shape[-1]
    _check_length(host, length)
    check_memory(host, length, chosen)
    bare = None
    if given is None and texts is not None:
        if tokenizer is None:
            raise ValueError(f"analysis: got {len(texts)} texts but tokenizer=None; give the model's tokenizer")
        windows = text_windows(tokenizer, texts, length, limit=WINDOWS)
        if "probe" in chosen:
            bare = text_windows(tokenizer, texts, length, limit=PROBED + PROBED // 3, special=False)
    report = progress or (lambda name, done, total: None)
    found: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for protocol in chosen:
        started = time.perf_counter()
        counted = _Counted(protocol, report)
        task = Task(host, length, seed, windows, bare, tokenizer, tuple(pairs), counted)
        try:
            found[protocol] = PROTOCOLS[protocol](task)
        except (Impossible, ValueError) as reason:
            if isinstance(reason, ValueError) and str(reason) != no_positions(host):
                raise
            skipped[protocol] = str(reason)
        seconds[protocol] = time.perf_counter() - started
        counted.finish()
    if not found:
        named: dict[str, list[str]] = {}
        for protocol, reason in skipped.items():
            named.setdefault(reason.removeprefix("analysis: "), []).append(protocol)
        reasons = "; ".join(f"{', '.join(protocols)}: {reason}" for reason, protocols in named.items())
        raise ValueError(f"analysis: none of {', '.join(chosen)} can run on {type(model).__name__}. {reasons}")
    return Analysis(_facts(host, name), length, seed, skipped=skipped, seconds=seconds, **found)


class _Counted:
    """Progress of one protocol; at its end done equals total."""

    def __init__(self, protocol: str, report: Progress) -> None:
        self.protocol, self.report, self.total = protocol, report, 1
        report(protocol, 0, 1)

    def __call__(self, done: int, total: int) -> None:
        self.total = total
        self.report(self.protocol, done, total)

    def finish(self) -> None:
        self.report(self.protocol, self.total, self.total)


def chosen_protocols(only: Iterable[str] | None) -> list[str]:
    """Names of protocols in their order; all for None. Raises: ValueError for none, or unknown ones."""
    names = list(PROTOCOLS) if only is None else list(dict.fromkeys([only] if isinstance(only, str) else only))
    for name in names:
        if name not in PROTOCOLS:
            near = difflib.get_close_matches(name, PROTOCOLS, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {', '.join(PROTOCOLS)}"
            raise ValueError(f"analysis: unknown protocol {name!r}; {hint}")
    if not names:
        raise ValueError(f"analysis: only={only!r} leaves nothing to do; choose from {', '.join(PROTOCOLS)}")
    return [name for name in PROTOCOLS if name in names]


def _check_length(host: Host, length: int) -> None:
    limit = host.trained_length
    if length < 3:
        raise ValueError(f"analysis: length={length} has no offsets to compare; give 8 or more")
    if limit is not None and length > limit:
        raise ValueError(f"analysis: length={length} but the model has {limit} positions; give length={limit} or less")


def check_memory(host: Host, length: int, chosen: Iterable[str]) -> None:
    """Raise a ValueError where the largest arrays of the chosen protocols would not fit into the free memory."""
    chosen, free = set(chosen), free_memory()
    n = max(length, host.trained_length or 0)
    maps = 3 * 8 * host.num_heads * length * length  # one layer
    states = 4 * (PROBED + PROBED // 3) * length * host.model_dim * (host.num_layers + 1) if "probe" in chosen else 0
    tables = 8 * 8 * n * n if chosen & OF_ALL_ROWS else 0  # a few matrices of all rows
    need = maps + states + tables
    if free is None or need <= free:
        return
    smaller = max(8, int(length * math.sqrt(free / need) / 2))
    advice = f"leave {' and '.join(sorted(OF_ALL_ROWS))} out with only=, they compare all rows"
    if tables < maps + states:
        advice = f"lower length to about {smaller}, or leave protocols out with only="
    raise ValueError(
        f"analysis: {host.num_heads} heads at length={length} (table of {n}) need {need / 1e9:.1f} GB but "
        f"{free / 1e9:.1f} GB are free; {advice}"
    )


def free_memory() -> int | None:
    """Bytes of memory that are free, or of all memory where the system does not say; None where it says neither."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemAvailable"]
    except (OSError, KeyError):
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        return os.sysconf(names[0]) * os.sysconf(names[1]) if set(names) <= set(os.sysconf_names) else None


def _facts(host: Host, name: str) -> ModelFacts:
    parts = []
    if host.table is not None:
        rows = host.table.weight.shape[0] - host.spare_rows  # pyright: ignore[reportIndexIssue]
        parts.append(f"a learned table of {rows} rows")
    if host.attachment is not None:
        parts.append(f"{host.attachment.stack.name} (attached)")
    elif host.layout.bias is not None:
        parts.append("a bucketed bias")
    elif getattr(host.attention[0], "relative_attention", False):
        parts.append("vectors of relative positions")
    elif any("rotary" in path for path, _ in host.stack.named_modules()):
        parts.append("rotations of queries and keys")
    return ModelFacts(
        name=name or type(host.model).__name__,
        family=host.layout.name,
        num_layers=host.num_layers,
        num_heads=host.num_heads,
        head_dim=host.head_dim,
        model_dim=host.model_dim,
        causal=host.causal,
        positions=" and ".join(parts) or "none",
        trained_length=host.trained_length,
        parameters=sum(p.numel() for p in host.model.parameters()),
    )
