"""Reads JSON lines: each line is one object and one page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from quern import storage
from quern.data_pipeline.page.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.sources.containers.compression import pieces
from quern.data_pipeline.sources.fields import fill
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import SourceConfig

__all__ = ["read_jsonl"]

#: Commas and opening brackets a line may have, those of its text too: every value of it has one. Two million take
#: some 200 MB as Python's objects.
_MAX_VALUES = 2_000_000


def read_jsonl(
    path: str, relative_path: str, source: SourceConfig, log: ReadLog, fingerprint: str | None = None
) -> Iterator[Page]:
    """A page for every line that is not blank; ``position`` is the line's number from 0, blank ones counted.

    A line without a text carries a fault that says why: ``read.undecodable`` (not UTF-8), ``read.bad_json``,
    ``read.too_deep``, ``read.not_an_object``, ``read.no_field``, ``read.null_text``, ``read.wrong_type``.
    """
    with storage.open_read(path, fingerprint) as file:
        stream = pieces(file, partial(log.damaged, path))
        for number, (offset, length, parts) in enumerate(_lines(stream, source.max_bytes)):
            if parts is not None and all(not part or part.isspace() for part in parts):
                continue
            page = Page(source.name, path, relative_path, number, offset, length, media="text")
            if parts is None:
                page.fault = "read.too_large"
            else:
                try:
                    line = b"".join(parts)
                    _fill(page, source, log, line[3:] if offset == 0 and line.startswith(b"\xef\xbb\xbf") else line)
                except MemoryError:
                    page.fault = OUT_OF_MEMORY
            yield page


def _fill(page: Page, source: SourceConfig, log: ReadLog, line: bytes) -> None:
    if _has_too_many_values(line):
        page.fault = "read.too_large"
        return
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        page.fault = "read.undecodable"
    except ValueError:
        page.fault = "read.bad_json"
    except RecursionError:
        page.fault = "read.too_deep"
    else:
        if isinstance(row, dict):
            fill(page, source, row, log)
        else:
            page.fault = "read.not_an_object"


def _has_too_many_values(line: bytes) -> bool:
    """Whether a line may hold so many values that Python would need gigabytes for them: ``[[],[],[],…``."""
    if len(line) <= _MAX_VALUES:
        return False
    return sum(map(line.count, (b",", b"[", b"{"))) > _MAX_VALUES


def _lines(stream: Iterator[bytes], max_bytes: int) -> Iterator[tuple[int, int, list[bytes] | None]]:
    """(offset, length without the newline, parts) of each line; None for a line that is longer than ``max_bytes``."""
    offset, length = 0, 0
    parts: list[bytes] = []
    for piece in stream:
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            length += end - start
            if length <= max_bytes:
                parts.append(piece[start:end])
                yield offset, length, parts
            else:
                yield offset, length, None
            offset += length + 1
            length, start, parts = 0, end + 1, []
        length += len(piece) - start
        if length <= max_bytes:
            parts.append(piece[start:])
        else:
            parts = []
    if length:
        yield offset, length, parts if length <= max_bytes else None
