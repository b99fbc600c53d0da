"""One or two analyses as one HTML page to explore, which works from a file: data, style and script inside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from locant.analysis import Analysis
from locant.report.analysis_data import page_data
from locant.report.analysis_findings import Finding, findings
from locant.report.figures import color_rules
from locant.training.folder import write_atomically

HERE = Path(__file__).parent
STYLES = ("page.css", "analysis.css")
SCRIPTS = ("analysis_charts.js", "analysis.js")
SECTIONS: dict[str, tuple[str, set[str]]] = {  # id: its name in the navigation, and data of which it needs some
    "numbers": ("Numbers", set()),
    "heads": ("Heads", {"views"}),
    "positions": ("Position table", {"table", "rows"}),
    "words": ("Words and positions", {"correlations"}),
    "moved": ("Shift", {"shift"}),
    "repeated": ("Repeated word", {"locality"}),
    "probes": ("Probe", {"probe"}),
    "training": ("Over training", {"course"}),
    "run": ("What was run", set()),
    "limits": ("Limits", set()),
}
LIMITS = (
    "One model is one sample: a difference between two models says nothing about why they differ.",
    "Averages are taken over the windows of one text; another text gives other attention, though not other tables.",
    "Attention weights tell where a head looks, not what its values do with it.",
    "The five names of patterns are those of the TUPE paper; the thresholds that assign them are this library's.",
    "Maps on this page are block means in 256 steps; analysis.json and the CSV files beside it hold full numbers.",
)


def write_analysis_page(
    analyses: Sequence[Analysis], path: str | Path, *, environment: Mapping[str, Any] | None = None
) -> Path:
    """Writes the page, whole or not at all, and returns its path.

    Raises: ValueError for another number of analyses than 1 or 2; OSError when the folder cannot be written.
    """
    return write_atomically(path, render_analysis(analyses, environment=environment))


def render_analysis(analyses: Sequence[Analysis], *, environment: Mapping[str, Any] | None = None) -> str:
    """The page of one model, or of two side by side, as HTML text.

    Raises: ValueError for another number of analyses.
    """
    if len(analyses) not in (1, 2):
        raise ValueError(f"analysis page: got {len(analyses)} analyses, needed 1, or 2 to stand side by side")
    names = _names(analyses)
    data = [{**page_data(one), "name": name} for one, name in zip(analyses, names, strict=True)]
    held = {key for one in data for key, value in one.items() if value}
    held |= {"scores" for one in data if one["shift"] and one["shift"]["scores"]}
    sections = {id: title for id, (title, needs) in SECTIONS.items() if not needs or needs & held}
    jinja = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return jinja.get_template("analysis.html.jinja").render(
        style=Markup("\n".join((HERE / name).read_text(encoding="utf-8") for name in STYLES)),
        script=Markup("\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)),
        light=Markup(color_rules(dark=False)),
        dark=Markup(color_rules(dark=True)),
        data=Markup(_inert(json.dumps(data, allow_nan=False, separators=(",", ":")))),
        models=names,
        date=str((environment or {}).get("date") or "")[:10],
        overview=[_overview(one, name if len(names) > 1 else "") for one, name in zip(analyses, names, strict=True)],
        sections=sections,
        held=held,
        numbers=_side_by_side([findings(one) for one in analyses]),
        facts=[(name, _facts(one)) for one, name in zip(analyses, names, strict=True)]
        + ([("Where and with what", _flat(environment))] if environment else []),
        limits=LIMITS,
    )


def _inert(text: str) -> str:
    """JSON in which nothing can end the element it stands in."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _names(analyses: Sequence[Analysis]) -> list[str]:
    names = [one.model.name for one in analyses]
    return names if len(set(names)) == len(names) else [f"{name} ({at})" for at, name in enumerate(names, 1)]


def _overview(analysis: Analysis, name: str) -> str:
    model = analysis.model
    way = "causal" if model.causal else "bidirectional"
    told = (
        f"{model.family}, {way}, {model.num_layers} layers of {model.num_heads} heads, {model.parameters / 1e6:.1f} M "
        f"parameters; positions: {model.positions}; windows of {analysis.length} tokens"
    )
    return f"{name}: {told}" if name else told


def _side_by_side(columns: list[list[Finding]]) -> list[tuple[str, list[Finding | None]]]:
    """Each measure with what each model has of it, None where it has nothing."""
    found = [{finding.measure: finding for finding in column} for column in columns]
    measures = dict.fromkeys(finding.measure for column in columns for finding in column)
    return [(measure, [column.get(measure) for column in found]) for measure in measures]


def _facts(analysis: Analysis) -> list[tuple[str, str]]:
    model = analysis.model
    lines = [
        ("family", model.family),
        ("layers, heads, head width", f"{model.num_layers}, {model.num_heads}, {model.head_dim}"),
        ("width", str(model.model_dim)),
        ("parameters", f"{model.parameters:,}"),
        ("positions", model.positions),
        ("window, seed", f"{analysis.length} tokens, {analysis.seed}"),
    ]
    lines += [(name, f"{seconds:.1f} s") for name, seconds in analysis.seconds.items() if name not in analysis.skipped]
    return lines + [(name, f"not run: {reason}") for name, reason in analysis.skipped.items()]


def _flat(value: Mapping[str, Any], name: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, item in value.items():
        dotted = f"{name}.{key}" if name else str(key)
        lines += _flat(item, dotted) if isinstance(item, Mapping) else [(dotted, "none" if item is None else str(item))]
    return lines
