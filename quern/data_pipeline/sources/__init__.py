"""Readers of pages: WARC, ARC and WET files, JSON lines, Parquet, folders of text or code.

:func:`plan` lists a source's files and cuts them into partitions; :func:`read` gives a partition's pages;
:func:`misread` says which ranges of a large file did not meet their neighbours.
"""

from quern.data_pipeline.sources.containers.ranges import Edges, FileRange, misread
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import InputFile, Partition, SourceConfig, plan
from quern.data_pipeline.sources.reading import read

__all__ = ["Edges", "FileRange", "InputFile", "Partition", "ReadLog", "SourceConfig", "misread", "plan", "read"]
