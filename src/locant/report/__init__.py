"""Results in, one self-contained HTML page out."""

from locant.report.analysis_page import render_analysis, write_analysis_page
from locant.report.page import render, write_report
from locant.report.run_page import RunPage, render_run, write_run_page

__all__ = [
    "RunPage",
    "render",
    "render_analysis",
    "render_run",
    "write_analysis_page",
    "write_report",
    "write_run_page",
]
