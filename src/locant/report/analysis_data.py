"""An analysis as small as a page needs it: maps as bytes, numbers with five digits."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locant.analysis import Analysis
from locant.analysis.course import MEASURES
from locant.analysis.distance import uniform_distance
from locant.analysis.locality import uniform_locality
from locant.analysis.patterns import LayerPatterns
from locant.analysis.plain import reduced
from locant.analysis.translation_invariance import HeadInvariance

DIGITS = 5
SIDE = 96  # largest side of a map that stands alone
ROOT = 0.5  # attention is stored, and drawn, by its square root: one bright cell would darken all others
SOURCES = {
    "layernorm_bias": "position logits: table after LayerNorm, with biases (what attention sees)",
    "terms": "position logits: what the encoding adds",
    "layernorm_meanword_bias": "position logits: table and mean word after LayerNorm, with biases",
    "layernorm": "position logits: table after LayerNorm",
    "layernorm_meanword": "position logits: table and mean word after LayerNorm",
    "raw_bias": "position logits: raw table, with biases",
    "raw": "position logits: raw table (what papers report)",
}
TREATMENTS = {"raw": "raw", "layernorm": "after LayerNorm", "layernorm_meanword": "with mean word, after LayerNorm"}


def page_data(analysis: Analysis) -> dict[str, Any]:
    """Everything that the page draws of one model, as JSON."""
    parts = {
        "views": _views(analysis),
        "table": _position_table(analysis),
        "correlations": _correlations(analysis),
        "shift": _shift(analysis),
        "locality": _locality(analysis),
        "probe": _probe(analysis),
        "rows": _rows(analysis),
        "companions": _companions(analysis),
        "course": _course(analysis),
    }
    n, causal = analysis.length, analysis.model.causal
    even = {"distance": uniform_distance(n, causal=causal), "locality": uniform_locality(n, causal=causal)}
    even["weight"] = 2 / (n + 1) if causal else 1 / n
    facts = {**vars(analysis.model), "length": n, "skipped": analysis.skipped, "even": rounded(even)}
    return {**facts, **parts}


def pack(maps: Float[Tensor, "H m m"], power: float = 1.0) -> dict[str, Any]:
    """Maps as one byte for each cell: v = low + (high - low) (byte / 255)^(1 / power), each map by itself."""
    x = maps.double()
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    spread = torch.where(high > low, high - low, torch.ones_like(high))
    cells = (((x - low) / spread) ** power * 255).round().to(torch.uint8)
    return {
        "side": x.shape[-1],
        "power": power,
        "low": rounded(low.flatten()),
        "high": rounded(high.flatten()),
        "mean": rounded(x.mean((1, 2))),
        "bytes": base64.b64encode(cells.numpy().tobytes()).decode("ascii"),
    }


def rounded(value: Any) -> Any:
    """Tensors and numbers with five digits, None where undefined."""
    if isinstance(value, Tensor):
        return rounded(value.detach().cpu().tolist())
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def _views(analysis: Analysis) -> list[dict[str, Any]]:
    """What can be shown of a head: measured attention, and each kind of position-only logits."""
    found = [_attention(analysis)]
    invariance = analysis.translation_invariance
    heads = () if invariance is None else invariance.heads
    found += [_logits(analysis, source, [one for one in heads if one.source == source]) for source in SOURCES]
    return [view for view in found if view is not None and view["layers"]]


def _attention(analysis: Analysis) -> dict[str, Any]:
    distance, patterns = analysis.distance, analysis.patterns
    layers: dict[str, dict[str, Any]] = {}
    if distance is not None:
        for layer, maps in enumerate(distance.maps):
            layers[str(layer)] = {
                "maps": pack(maps, ROOT),
                "curve": rounded(distance.mean[layer]),
                "far": rounded(distance.mean_distance[layer]),
            }
    for one in (patterns.attention or ()) if patterns is not None else ():
        layers.setdefault(str(one.layer), {})["patterns"] = _pattern_rows(one)
    return {
        "id": "attention",
        "title": "measured attention",
        "n": analysis.length,
        "offsets": None if distance is None else rounded(distance.offsets),
        "layers": layers,
    }


def _logits(analysis: Analysis, source: str, heads: list[HeadInvariance]) -> dict[str, Any] | None:
    if not heads:
        return None
    patterns = {} if analysis.patterns is None else {(p.layer, p.source): p for p in analysis.patterns.layers}
    kernels = {(k.layer, k.source): k for k in analysis.translation_invariance.kernels}  # pyright: ignore[reportOptionalMemberAccess]
    layers = {}
    for one in heads:
        layer = {
            "maps": pack(one.maps),
            "curve": rounded(one.profile),
            "r2": rounded(one.r2),
            "null": rounded(one.null_shuffled),
            "spread": rounded(one.spread),
        }
        fitted = kernels.get((one.layer, source))
        if fitted is not None:
            layer |= {
                "fit": rounded(fitted.scores(one.offsets)),
                "explained": rounded(fitted.r2),
                "needed": fitted.needed,
            }
        if (one.layer, source) in patterns:
            layer["patterns"] = _pattern_rows(patterns[one.layer, source])
        layers[str(one.layer)] = layer
    return {
        "id": source,
        "title": SOURCES[source],
        "n": heads[0].n,
        "offsets": rounded(heads[0].offsets),
        "layers": layers,
    }


def _pattern_rows(one: LayerPatterns) -> list[dict[str, Any]]:
    return [rounded(vars(head)) for head in one.heads]


def _position_table(analysis: Analysis) -> list[dict[str, Any]] | None:
    found = analysis.translation_invariance
    if found is None or found.position_table is None:
        return None
    treatments = []
    for name, title in TREATMENTS.items():
        one = getattr(found.position_table, name)
        if one is None:
            continue
        keys = ("n", "width", "r2", "r2_off_diagonal", "null", "null_off_diagonal", "null_shuffled")
        treatments.append(
            {
                "id": name,
                "title": title,
                **{key: rounded(getattr(one, key)) for key in keys},
                "centered": rounded(one.centered.r2),
                "cosine": rounded(one.cosine.r2),
                "first": None if one.first is None else rounded(one.first.r2),
                "offsets": rounded(one.offsets),
                "curve": rounded(one.profile),
                "map": pack(reduced(one.map, SIDE)[None]),
            }
        )
    return treatments


def _correlations(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.correlations
    if found is None:
        return None
    kinds = {}
    for kind in ("exact", "raw"):
        four = getattr(found, kind)
        if four is not None:
            kinds[kind] = {
                name: {
                    "map": pack(reduced(one.map, SIDE)[None]),
                    **{key: rounded(getattr(one, key)) for key in ("mean", "std", "r2", "share")},
                }
                for name, one in vars(four).items()
            }
    return {"sentences": found.sentences, "length": found.length, "kinds": kinds}


def _shift(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.phase_shift
    if found is None:
        return None
    scores = {}
    if found.perplexity is not None:
        scores["perplexity"] = {
            "title": f"{found.perplexity.kind} perplexity",
            "y": rounded(found.perplexity.mean),
            "rank": rounded(found.perplexity.mean_rank),
        }
    if found.acceptability is not None:
        scores["acceptability"] = {"title": "acceptability, share right", "y": rounded(found.acceptability.accuracy)}
    return {
        "shifts": found.shifts,
        "how": found.how,
        "relative": found.relative,
        "control": found.control,
        "cosine": rounded(found.drift.cosine),
        "l2": rounded(found.drift.l2),
        "scores": scores,
    }


def _locality(analysis: Analysis) -> dict[str, Any] | None:
    if analysis.locality is None:
        return None
    words = analysis.locality.identical_words
    keys = ("words", "length", "locality", "symmetry", "symmetry_raw", "monotonicity", "r2")
    return {
        **{key: rounded(getattr(words, key)) for key in keys},
        "map": pack(reduced(words.map, SIDE)[None], ROOT),
        "layers": [rounded(vars(one)) for one in words.per_layer],
        "logits": [
            {"layer": one.layer, "source": one.source, **rounded(vars(one.mean))}
            for one in analysis.locality.logits or ()
        ],
    }


def _probe(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.probe
    if found is None:
        return None
    keys = (
        "length",
        "chance",
        "distance",
        "accuracy",
        "linear_distance",
        "linear_accuracy",
        "mean_prediction",
        "spread",
    )
    return {key: rounded(getattr(found, key)) for key in keys}


def _rows(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.table
    if found is None:
        return None
    return {
        "n": found.n,
        "width": found.width,
        "regression": rounded(vars(found.regression)),
        "order": rounded(vars(found.order)),
        "monotonicity": rounded(found.monotonicity),
        "values": rounded(found.spectrum.values),
        "rank": found.spectrum.rank,
        "rank_99": found.spectrum.rank_99,
        "axes": rounded(found.pca.T),
        "map": pack(reduced(found.cosine_map, SIDE)[None]),
    }


def _course(analysis: Analysis) -> dict[str, Any] | None:
    found = analysis.over_training
    if found is None:
        return None
    points = found.checkpoints
    by_attention = any(point.attention for point in points)
    counts = [point.attention if by_attention else point.patterns for point in points]
    return {
        "steps": [point.step for point in points],
        "loss": None if all(point.loss is None for point in points) else rounded([point.loss for point in points]),
        "measures": [
            {
                "title": title,
                "y": rounded([getattr(point, name) for point in points]),
                "spearman": rounded(found.with_loss[name].spearman),
                "n": found.with_loss[name].n,
            }
            for name, title in MEASURES.items()
            if name in found.with_loss
        ],
        "nulls": {name: rounded([getattr(point, name) for point in points]) for name in ("heads_null", "words_null")},
        "by": "measured attention" if by_attention else "position-only logits",
        "heads": analysis.model.num_layers * analysis.model.num_heads,
        "patterns": {name: [count.get(name, 0) for count in counts] for name in sorted({n for c in counts for n in c})},
    }


def _companions(analysis: Analysis) -> list[dict[str, Any]] | None:
    found = () if analysis.distance is None else analysis.distance.companions
    keys = ("layer", "name", "kind", "offsets", "values")
    return [{key: rounded(getattr(one, key)) for key in keys} for one in found] or None
