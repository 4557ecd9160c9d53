"""Shows a training run as one self-contained HTML page, from the files in its folder. Imports no torch."""

from quern.train.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
