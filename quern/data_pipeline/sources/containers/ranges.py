"""Byte ranges of a large WARC or ARC file, read separately and then checked against their neighbours.

A range is the records that *begin* in [start, end). It finds its first one by its own search, which may be misled: by a
crawl inside a page, by damage that hides a beginning. So each range says where its first record began and where the
first one behind its end does, and neighbours must agree. The place where the range before stopped is where a reader of
the whole file would have come by, so a range that began elsewhere is read again from there. What only a reader of the
whole file can know (addresses in a decompressed stream, that there is no record at all) makes one range of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quern.data_pipeline.sources.containers.gzip_members import REREAD_BYTES
from quern.data_pipeline.sources.containers.record_signs import Kind

__all__ = ["Edges", "FileRange", "cut", "misread"]


@dataclass(frozen=True)
class FileRange:
    """Records that begin in [``start``, ``end``) of a file of ``size`` bytes as stored."""

    start: int
    end: int
    size: int
    first: int | None = None
    """Where the first record is, if that is known; else it is searched for."""
    kind: Kind = None
    """What the records before ``first`` were."""

    @property
    def name(self) -> str:
        """Distinguishes the partition of this range from others of its file, for any way of cutting."""
        return f"{self.start:015d}-{self.end:015d}"


@dataclass(frozen=True)
class Edges:
    """Where a range's reader started and stopped, and what it found there."""

    end: int
    """Of the range as it was read."""
    first: int | None
    """Where it began to read; None if it found no beginning."""
    stop: int
    """The first beginning at or behind ``end``; the file's size where there is none."""
    kind: Kind
    """What its first record was taken to follow on."""
    kind_mattered: bool
    """Whether it had to search for records before it had read one."""
    stop_kind: Kind
    records: int
    by_stream: bool
    """Whether a record's address is a place in the decompressed stream."""
    reread: int
    """Bytes decoded more than once."""


def cut(size: int, split_bytes: int) -> list[FileRange]:
    """The ranges of a file of ``size`` bytes, each of ``split_bytes`` but the last."""
    return [FileRange(start, min(start + split_bytes, size), size) for start in range(0, size, split_bytes)]


def misread(ranges: Sequence[FileRange], edges: Sequence[Edges]) -> dict[int, FileRange]:
    """The ranges of a file (all are given) that must be read again, and how; empty if together they are the file.

    Behind a range that was misread the others are judged by where it stopped all the same: it will stop there again if
    it found its way. If not, the next call says so; the first range that is wrong is right after it is read again.
    """
    size = ranges[0].size
    if edges[0].end >= size and not any(one.records for one in edges[1:]):
        return _without_others(ranges, edges)
    place, kind = edges[0].stop, edges[0].stop_kind
    again: dict[int, FileRange] = {}
    used = [edges[0]] if edges[0].records else []
    for index in range(1, len(ranges)):
        part, seen = ranges[index], edges[index]
        beyond = place >= part.end
        if not (
            (seen.first == place and (beyond or not seen.kind_mattered or seen.kind == kind))
            or (beyond and seen.first is None)
        ):
            again[index] = replace(part, first=place, kind=kind)
        elif seen.records and not again:
            used.append(seen)
        if not beyond:
            if seen.first is None:
                break
            place, kind = seen.stop, seen.stop_kind or kind  # a range without records still knows the one before
    more = len(used) > 1 or not edges[0].records or any((part.first or 0) < part.end for part in again.values())
    by_stream = more and any(one.by_stream for one in used)
    if by_stream or sum(one.reread for one in used) > REREAD_BYTES or not (used or again):
        return {0: replace(ranges[0], end=size, first=0)} | _without_others(ranges, edges)
    return again


def _without_others(ranges: Sequence[FileRange], edges: Sequence[Edges]) -> dict[int, FileRange]:
    """Every range but the first, to be read as nothing where it is something."""
    return {
        index: replace(ranges[index], first=ranges[index].size)
        for index in range(1, len(ranges))
        if edges[index].records or edges[index].first not in (None, ranges[index].size)
    }
