"""Results in, one self-contained HTML page out."""

from locant.report.analysis_page import render_analysis, write_analysis_page
from locant.report.page import render, write_report

__all__ = ["render", "render_analysis", "write_analysis_page", "write_report"]
