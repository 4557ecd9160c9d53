"""Reads the pages of a partition of any kind."""

from __future__ import annotations

from collections.abc import Iterator

from quern import storage
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.sources.containers.ranges import FileRange
from quern.data_pipeline.sources.jsonl import read_jsonl
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.parquet import read_parquet
from quern.data_pipeline.sources.plan import InputFile, Partition, SourceConfig
from quern.data_pipeline.sources.tree import read_file
from quern.data_pipeline.sources.warc import read_warc
from quern.errors import InputError

__all__ = ["read"]


def read(source: SourceConfig, partition: Partition, log: ReadLog) -> Iterator[Page]:
    """Every page of ``partition``, one for each page-carrying record, in the order of the files.

    A record without usable text is a page with a ``fault``: ``read.damaged``, ``read.http_status``, ``read.too_large``,
    ``read.empty``, ``read.not_text``, ``read.undecodable``, or one of those that :func:`read_jsonl` names. Damaged
    files never raise: what is readable is read, and each damage is noted in ``log``.

    Raises:
        InputError: a file is missing or cannot be opened or read; a Parquet file lacks a column.
    """
    for file in partition.files:
        try:
            yield from _pages(source, file, log, partition.range)
        except FileNotFoundError:
            raise InputError(f"source {source.name}: {file.path}: no such file (it was there when planned)") from None
        except storage.ChangedError:
            raise InputError(
                f"source {source.name}: {file.path}: changed since the run was planned; start it again"
            ) from None
        except OSError as error:
            raise InputError(
                f"source {source.name}: {file.path}: cannot be read ({error.strerror or error})"
            ) from error


def _pages(source: SourceConfig, file: InputFile, log: ReadLog, part: FileRange | None) -> Iterator[Page]:
    path, relative, fingerprint = file.path, file.relative_path, file.fingerprint
    if source.kind in ("warc", "wet", "commoncrawl"):
        return read_warc(path, relative, source.name, source.max_bytes, log, part, fingerprint)
    if source.kind == "jsonl":
        return read_jsonl(path, relative, source, log, fingerprint)
    if source.kind == "parquet":
        return read_parquet(path, relative, source, log, fingerprint)
    return read_file(path, relative, source.name, source.max_bytes, fingerprint)
