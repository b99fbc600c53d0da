"""Results in, one self-contained HTML page out."""

from locant.report.page import render, write_report

__all__ = ["render", "write_report"]
