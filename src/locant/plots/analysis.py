"""Figures of an analysis for papers, one function for each result: a dataclass and a width in inches in, Figure out.

Maps share two scales of color (one from light to dark, by the square root of attention, and one from orange over light
to blue), layers are drawn from dark
to light, and what a number must be held against is drawn dotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from locant.analysis import Analysis, Course
from locant.analysis.correlations import Correlations
from locant.analysis.course import MEASURES
from locant.analysis.distance import AttentionByDistance, uniform_distance
from locant.analysis.locality import Locality, uniform_locality
from locant.analysis.patterns import Patterns
from locant.analysis.phase_shift import PhaseShift, ShiftMatrix
from locant.analysis.probe import Probe
from locant.analysis.table import Table
from locant.analysis.translation_invariance import TranslationInvariance
from locant.plots.style import COLORS, INK, MUTED, NONE_COLOR, ONE_COLUMN, PAPER, TWO_COLUMN, styled

AMOUNT = LinearSegmentedColormap.from_list("locant amount", [PAPER, "#5b9bd5", "#07223f"])
SIGNED = LinearSegmentedColormap.from_list("locant signed", ["#a8510a", "#f6f7f8", "#1d5fa8"])
LABELS: dict[str, str] = dict(
    zip(("previous", "next", "whole", "local", "broad", "other"), (*COLORS[:2], NONE_COLOR, *COLORS[2:5]), strict=True)
)
CONTROL: dict[str, Any] = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (1, 2))}
MOST = 12  # heads that are drawn one by one


def analysis_figures(analysis: Analysis, width: float = TWO_COLUMN) -> dict[str, Figure]:
    """Every figure that an analysis allows, by name."""
    found: dict[str, Figure] = {}
    invariance = analysis.translation_invariance
    if invariance is not None and invariance.position_table is not None:
        found["similarity_of_positions"] = similarity_of_positions(invariance, width)
    if invariance is not None:
        found["scoring_functions"] = scoring_functions(invariance, width)
    drawings: dict[str, Callable[[Any, float], Figure]] = {
        "correlations": word_position_maps,
        "patterns": patterns_of_heads,
        "distance": attention_by_offset,
        "phase_shift": drift_by_shift,
        "locality": locality_by_layer,
        "probe": probe_by_layer,
        "table": spectrum_of_table,
        "over_training": invariance_over_training,
    }
    for protocol, draw in drawings.items():
        result = getattr(analysis, protocol)
        if result is not None:
            found[draw.__name__] = draw(result, width)
    return found


def similarity_of_positions(result: TranslationInvariance, width: float = TWO_COLUMN) -> Figure:
    """Products of position vectors and their mean by offset, one row for each treatment, R^2 beside its null.

    Raises: ValueError for a model without a table of positions.
    """
    table = result.position_table
    if table is None:
        raise ValueError("plot: this model has position_table=None; draw scoring_functions instead")
    kinds = {"raw": "raw", "layernorm": "after LayerNorm"}
    shown = [(title, one) for name, title in kinds.items() if (one := getattr(table, name)) is not None]
    with styled():
        figure, axes = _sheet(width, 0.36 * width * len(shown), len(shown), 2)
        for (title, one), (left, right) in zip(shown, axes, strict=True):
            _map(figure, left, one.map, one.n, signed=True)
            left.set_title(f"{title}: R² = {_text(one.r2)} (random rows {_text(one.null)})")
            right.plot(one.offsets.numpy(), one.profile.numpy(), color=COLORS[0], linewidth=1.0)
            right.set(
                xlabel="offset k", ylabel="mean product", title=f"off the diagonal: R² = {_text(one.r2_off_diagonal)}"
            )
    return figure


def scoring_functions(result: TranslationInvariance, width: float = TWO_COLUMN) -> Figure:
    """f(k) of each head as attention sees it (of the first layer that has one), with the fit of Gaussian kernels."""
    fitted = {(one.layer, one.source): one for one in result.kernels}
    one = next((head for head in result.heads if (head.layer, head.source) in fitted), result.heads[-1])
    fit = fitted.get((one.layer, one.source))
    curves = None if fit is None else fit.scores(one.offsets)
    count = min(len(one.r2), MOST)
    columns = min(count, 4)
    with styled():
        figure, axes = _sheet(width, 0.95 + 1.15 * math.ceil(count / columns), math.ceil(count / columns), columns)
        for head, here in enumerate(axes.flat):
            if head >= count:
                here.set_axis_off()
                continue
            here.plot(one.offsets.numpy(), one.profile[head].numpy(), color=COLORS[0], linewidth=1.1, label="f(k)")
            if curves is not None:
                dashed = {
                    "linewidth": 0.9,
                    "linestyle": (0, (4, 2)),
                    "label": "5 Gaussian kernels, fitted to all offsets",
                }
                here.plot(one.offsets.numpy(), curves[head].numpy(), color=COLORS[1], **dashed)
            here.set_title(f"head {head}: R² = {_text(float(one.r2[head]))}", fontsize=7.5)
            here.tick_params(labelsize=7)
        figure.supxlabel(f"offset k (layer {one.layer}, {one.source})", fontsize=8.5)
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    return figure


def word_position_maps(result: Correlations, width: float = TWO_COLUMN) -> Figure:
    """The four maps of words and positions, exact where they are known, on one scale."""
    maps, kind = (result.raw, "raw") if result.exact is None else (result.exact, "exact")
    four = {name.replace("_", " → "): one for name, one in vars(maps).items()}
    center = float(np.mean([one.mean for one in four.values()]))
    reach = max(float((one.map - center).abs().max()) for one in four.values()) or 1.0
    with styled():
        figure, axes = _sheet(width, 0.3 * width + 0.2, 1, 4)
        for (name, one), here in zip(four.items(), axes[0], strict=True):
            image = _image(here, one.map, result.length, SIGNED, TwoSlopeNorm(center, center - reach, center + reach))
            here.set_title(f"{name}\nshare {_text(one.share)}", fontsize=8)
        axes[0, 0].set_ylabel("query")
        figure.colorbar(image, ax=list(axes[0]), shrink=0.62, label=f"logit, {kind}", pad=0.01).outline.set_visible(
            False
        )  # pyright: ignore[reportCallIssue, reportPossiblyUnboundVariable]
    return figure


def patterns_of_heads(result: Patterns, width: float = TWO_COLUMN) -> Figure:
    """One square for each head with the name of its pattern: by position-only logits, and by measured attention."""
    shown = [
        (title, one) for title, one in (("position logits", result.layers), ("attention", result.attention)) if one
    ]
    heads = max(len(layer.heads) for _, layers in shown for layer in layers)
    side = min(0.34, (width - 0.9) / (heads * len(shown)))
    tall = max(len(layers) for _, layers in shown)
    with styled():
        figure, axes = _sheet(width, 1.25 + side * tall, 1, len(shown))
        for (title, layers), here in zip(shown, axes[0], strict=True):
            for row, layer in enumerate(layers):
                for column, head in enumerate(layer.heads):
                    _square(here, column, row, head.label)
            here.set(xlim=(-0.5, heads - 0.5), ylim=(tall - 0.5, -0.5), aspect="equal", title=title, xlabel="head")
            here.set_yticks(range(len(layers)), [str(layer.layer) for layer in layers])
            here.grid(False)
        axes[0, 0].set_ylabel("layer")
        patches = [Patch(color=color, label=f"{name[0].upper()} {name}") for name, color in LABELS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(LABELS), frameon=False)
    return figure


def _square(axes: Axes, column: int, row: int, label: str | None) -> None:
    color = MUTED if label is None else LABELS[label]
    axes.fill(
        [column - 0.46, column + 0.46, column + 0.46, column - 0.46],
        [row - 0.46, row - 0.46, row + 0.46, row + 0.46],
        color=color,
    )
    axes.text(column, row, (label or "?")[0].upper(), color=PAPER, fontsize=6, ha="center", va="center")


def attention_by_offset(result: AttentionByDistance, width: float = TWO_COLUMN) -> Figure:
    """Attention per pair by offset, mean over the heads of each layer, and how far each head reaches."""
    n, layers = result.length, result.mean.shape[0]
    causal = bool((result.counts[result.offsets > 0] == 0).all())
    even = uniform_distance(n, causal=causal)
    with styled():
        figure, axes = _sheet(width, 2.5, 1, 2)
        left, right = axes[0]
        _by_layer(left, result.offsets.tolist(), result.mean.mean(1))
        left.set(xlabel="offset k = key − query", ylabel="attention per pair", yscale="log")
        if not causal:
            left.axhline(1 / n, **CONTROL)
        for layer in range(layers):
            reach = result.mean_distance[layer].tolist()
            right.scatter([layer] * len(reach), reach, s=9, color=_layer_color(layer, layers), alpha=0.85, linewidths=0)
        right.axhline(even, **CONTROL)
        right.annotate(
            "equal weights", (0.99, even), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7
        )
        right.set(xlabel="layer", ylabel="mean distance of a head (tokens)", ylim=(0, None))
        _whole_numbers(right)
    return figure


def drift_by_shift(result: PhaseShift, width: float = TWO_COLUMN) -> Figure:
    """Cosine of hidden states with those at shift 0, a line for each layer, and the scores by shift where there are."""
    scores = [
        (f"{result.perplexity.kind} perplexity", result.perplexity.mean) if result.perplexity is not None else None,
        ("acceptability", result.acceptability.accuracy) if result.acceptability is not None else None,
    ]
    shown = [score for score in scores if score is not None]
    with styled():
        figure, axes = _sheet(width, 2.5, 1, 1 + len(shown))
        here = axes[0, 0]
        _by_layer(here, result.shifts, result.drift.cosine.T, name="layer (0: embeddings)")
        here.axhline(1.0, **CONTROL)
        here.set(xlabel="shift of all positions", ylabel="cosine with shift 0")
        _at_least(here, 0.01)
        for (name, values), other in zip(shown, axes[0, 1:], strict=True):
            other.plot(result.shifts, values.numpy(), color=COLORS[0], marker="o")
            other.axhline(float(values[0]), **CONTROL)
            other.set(xlabel="shift of all positions", ylabel=name)
            _at_least(other, 0.02 * abs(float(values[0])))
    return figure


def tuned_and_tested(result: ShiftMatrix, width: float = ONE_COLUMN) -> Figure:
    """Scores of models fine-tuned with positions moved by one shift (rows) and tested at another (columns)."""
    count = len(result.shifts)
    mean, std = result.mean.numpy(), result.std.numpy()
    with styled():
        figure, axes = _sheet(width, 0.85 * width, 1, 1)
        here = axes[0, 0]
        image = here.imshow(mean, cmap=AMOUNT, vmin=min(0.0, float(mean.min())), vmax=float(mean.max()) or 1.0)
        for row in range(count):
            for column in range(count):
                spread = "" if math.isnan(std[row, column]) else f"\n±{std[row, column]:.3f}"
                ink = PAPER if mean[row, column] > 0.6 * float(mean.max()) else INK
                here.text(
                    column, row, f"{mean[row, column]:.3f}{spread}", color=ink, fontsize=6.5, ha="center", va="center"
                )
        here.grid(False)
        here.set_xticks(range(count), [str(shift) for shift in result.shifts])
        here.set_yticks(range(count), [str(shift) for shift in result.shifts])
        here.set(xlabel="tested at shift", ylabel="trained at shift", title=f"mean of {len(result.seeds)} seeds")
        figure.colorbar(image, ax=here, shrink=0.8, pad=0.02).outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def locality_by_layer(result: Locality, width: float = TWO_COLUMN) -> Figure:
    """Attention on one repeated word, and its locality and symmetry by layer (dotted: locality of equal weights)."""
    words = result.identical_words
    names = {"locality": "locality", "symmetry": "symmetry, published", "symmetry_raw": "symmetry, stable"}
    with styled():
        figure, axes = _sheet(width, 0.4 * width, 1, 2)
        left, right = axes[0]
        _map(figure, left, words.map, words.length, signed=False)
        left.set_title(f"R² = {_text(words.r2)}, monotonicity {_text(words.monotonicity)}")
        for at, (key, name) in enumerate(names.items()):
            y = [math.nan if (value := getattr(one, key)) is None else value for one in words.per_layer]
            right.plot(range(len(y)), y, color=COLORS[at], marker="os^"[at], label=name)
        causal = not bool(words.map.triu(1).any())
        right.axhline(uniform_locality(words.length, causal=causal), **CONTROL)
        right.set(xlabel="layer", ylim=(0, 1.03))
        _whole_numbers(right)
        right.legend(frameon=False, fontsize=7)
    return figure


def probe_by_layer(result: Probe, width: float = TWO_COLUMN) -> Figure:
    """Distance of the probe's answer from the true position by layer, beside chance, and its answers on some layers."""
    layers = len(result.layers)
    with styled():
        figure, axes = _sheet(width, 2.5, 1, 2)
        left, right = axes[0]
        left.plot(result.layers, result.distance.numpy(), color=COLORS[0], marker="o", label="probe")
        left.plot(result.layers, result.linear_distance.numpy(), color=COLORS[1], marker="s", label="linear probe")
        left.axhline(result.chance, label="chance", **CONTROL)
        left.set(xlabel="layer (0: embeddings)", ylabel="distance (tokens)", ylim=(0, None))
        _whole_numbers(left)
        left.legend(frameon=False, fontsize=7)
        right.plot([0, result.length - 1], [0, result.length - 1], **CONTROL)
        for layer in sorted({0, layers // 2, layers - 1}):
            color = _layer_color(layer, layers)
            mean, spread = result.mean_prediction[layer].numpy(), result.spread[layer].numpy()
            right.plot(range(result.length), mean, color=color, linewidth=1.1, label=f"layer {result.layers[layer]}")
            right.fill_between(range(result.length), mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
        right.set(xlabel="true position", ylabel="mean answer ± 1 std")
        right.legend(frameon=False, fontsize=7)
    return figure


def spectrum_of_table(result: Table, width: float = TWO_COLUMN) -> Figure:
    """Singular values of the centered table, and its rows on the first three principal axes."""
    with styled():
        figure, axes = _sheet(width, 2.4, 1, 2)
        left, right = axes[0]
        values = result.spectrum.values.numpy()
        left.plot(range(1, len(values) + 1), values, color=COLORS[0])
        left.axvline(result.spectrum.rank_99, **CONTROL)
        left.set(
            xlabel="direction", ylabel="singular value", title=f"{result.spectrum.rank_99} hold 99 % of the energy"
        )
        for axis in range(result.pca.shape[1]):
            dash = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)))[axis]
            right.plot(
                result.pca[:, axis].numpy(), color=COLORS[axis], linestyle=dash, linewidth=1.1, label=f"axis {axis + 1}"
            )
        right.set(xlabel="position", ylabel="coordinate")
        right.legend(frameon=False, fontsize=7)
    return figure


def invariance_over_training(result: Course, width: float = TWO_COLUMN) -> Figure:
    """R^2 over the checkpoints of a run, the loss, and the heads' patterns, each where it is known."""
    points = result.checkpoints
    steps = [point.step for point in points]
    losses = [math.nan if point.loss is None else point.loss for point in points]
    told, named = not all(map(math.isnan, losses)), any(point.attention or point.patterns for point in points)
    with styled():
        figure, axes = _sheet(width, 2.6, 1, 1 + told + named)
        for at, (key, name) in enumerate(MEASURES.items()):
            y = [math.nan if (value := getattr(point, key)) is None else value for point in points]
            if not all(map(math.isnan, y)):
                axes[0, 0].plot(steps, y, color=COLORS[at], marker="os^Dv"[at], markersize=3, label=name)
        axes[0, 0].set(xlabel="step", ylabel="R² of the offset", ylim=(-0.03, 1.03))
        axes[0, 0].legend(frameon=False, fontsize=6)
        if told:
            axes[0, 1].plot(steps, losses, color=INK, marker="o", markersize=3)
            ranks = ", ".join(_text(one.spearman) for one in result.with_loss.values())
            axes[0, 1].set(xlabel="step", ylabel="loss", title=f"Spearman with R²: {ranks}")
            axes[0, 1].title.set_fontsize(7)
        if named:
            _counts(axes[0, -1], steps, [point.attention or point.patterns for point in points])
    return figure


def _counts(axes: Axes, steps: list[int], counts: list[dict[str, int]]) -> None:
    """Heads by pattern over the steps, those that appear at all."""
    for name, color in LABELS.items():
        if any(name in count for count in counts):
            axes.plot(
                steps, [count.get(name, 0) for count in counts], color=color, marker="o", markersize=3, label=name
            )
    axes.set(xlabel="step", ylabel="heads", ylim=(0, None))
    axes.legend(frameon=False, fontsize=6)


# --- parts -----------------------------------------------------------------------------------------------------------


def _sheet(width: float, height: float, rows: int, columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for here in axes.flat:
        here.title.set_fontsize(8.5)
    return figure, axes


def _map(figure: Figure, axes: Axes, values: Tensor, n: int, *, signed: bool) -> None:
    x = values.double()
    center = float(x.mean())
    reach = float((x - center).abs().max()) or 1.0
    norm = TwoSlopeNorm(center, center - reach, center + reach) if signed else PowerNorm(0.5, 0, float(x.max()) or 1.0)
    image = _image(axes, x, n, SIGNED if signed else AMOUNT, norm)
    axes.set_ylabel("query")
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02).outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _image(axes: Axes, values: Tensor, n: int, colors: LinearSegmentedColormap, norm: Normalize) -> Any:
    edges = (-0.5, n - 0.5, n - 0.5, -0.5)
    image = axes.imshow(values.double().numpy(), cmap=colors, norm=norm, extent=edges, interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("key")
    axes.tick_params(labelsize=7)
    return image


def _whole_numbers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _at_least(axes: Axes, spread: float) -> None:
    """Widens the axis of values that hardly differ: rounding is no change."""
    low, high = axes.get_ylim()
    if high - low < spread:
        axes.set_ylim((low + high - spread) / 2, (low + high + spread) / 2)


def _layer_color(layer: int, layers: int) -> Any:
    return colormaps["cividis"](0.05 + 0.8 * layer / max(1, layers - 1))


def _by_layer(axes: Axes, x: Sequence[int], lines: Tensor, name: str = "layer") -> None:
    """One line for each layer, the first and the last named."""
    for layer, line in enumerate(lines):
        label = f"{name} {layer}" if layer == 0 else str(layer) if layer == len(lines) - 1 else None
        axes.plot(x, line.numpy(), color=_layer_color(layer, len(lines)), linewidth=1.1, label=label)
    axes.legend(frameon=False, fontsize=7)


def _text(value: float | None) -> str:
    return "undefined" if value is None or math.isnan(value) else f"{value:.3f}"
