"""Reports of a run for people: the funnel as a table, ``stats.json``, and one self-contained HTML page."""

from quern.data_pipeline.report.counters import TokenLengths
from quern.data_pipeline.report.funnel import funnel, print_funnel
from quern.data_pipeline.report.losses import check_sources, find_losses
from quern.data_pipeline.report.page import survey_run, write_report
from quern.data_pipeline.report.stats import FileCounts, build_stats, committed, write_stats
from quern.data_pipeline.report.survey import Budget, Survey
from quern.data_pipeline.report.texts import shown_documents

__all__ = [
    "Budget",
    "FileCounts",
    "Survey",
    "TokenLengths",
    "build_stats",
    "check_sources",
    "committed",
    "find_losses",
    "funnel",
    "print_funnel",
    "shown_documents",
    "survey_run",
    "write_report",
    "write_stats",
]
