"""What a run did, for a person: the funnel as a table and ``stats.json``, and one self-contained HTML page."""

from quern.data_pipeline.report.page import write_report
from quern.data_pipeline.report.stats import build_stats, committed, funnel, print_funnel, write_stats
from quern.data_pipeline.report.texts import shown_documents

__all__ = [
    "build_stats",
    "committed",
    "funnel",
    "print_funnel",
    "shown_documents",
    "write_report",
    "write_stats",
]
