"""Figures as SVG that can stand inside an HTML page: unique ids, no namespaces or addresses, colors by style sheet."""

from __future__ import annotations

import html
import re

from locant.plots.style import DARK, Figure, to_svg


def inline_svg(figure: Figure, prefix: str, description: str) -> str:
    """One `<svg>` element with `description` as its text for screen readers.

    Every id starts with `prefix`; what belongs to encoding number k carries `data-series="k"`; each color of the house
    style becomes a CSS variable (`color_rules`) with the printed color as its fallback.
    """
    svg = to_svg(figure)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(?::\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href=", "href=")
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r'\bhref="#([^"]*)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(rf'(id="{prefix}-series-(\d+)-\d+")', r'\1 data-series="\2"', svg)
    svg = re.sub(r"style=\"[^\"]*\"", lambda match: _colors_to_variables(match.group()), svg)
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib always writes a viewBox"
    return f'<svg {box.group()} role="img" aria-label="{html.escape(description)}">{rest}'


def color_rules(*, dark: bool) -> str:
    """The CSS variables for `inline_svg`, on a light or a dark ground."""
    return " ".join(f"{_variable(light)}: {dim if dark else light};" for light, dim in DARK.items())


def color_reference(color: str) -> str:
    """How a style sheet names one of the house colors."""
    return f"var({_variable(color)}, {color})"


def _variable(color: str) -> str:
    return f"--c-{color.lstrip('#')}"


def _colors_to_variables(style: str) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: color_reference(match[0]) if match[0] in DARK else match[0], style)
