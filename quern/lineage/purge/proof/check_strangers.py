"""Checks files that quern did not write, such as copies of tables, for purged documents."""

from __future__ import annotations

import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import IO, Any

import numpy as np
import pyarrow as pa
import zstandard

from quern import storage
from quern.data_pipeline.page.keys import KEY, contains
from quern.errors import InputError, one_line
from quern.lineage.purge.proof.check_audit import Purged
from quern.lineage.purge.proof.findings import Check
from quern.lineage.purge.proof.placed import Kind, strangers
from quern.storage.parquet import Table
from quern.words import counted

__all__ = ["check_strangers"]

#: Bytes of a text that are held, and compared whole, at most.
_WHOLE = 16 << 20
#: Bytes of a compressed Parquet file that are set down on disk to be read, at most.
_SPOOLED = 1 << 30
_ROWS = 256
_KEYS = 4096
#: Of what could not be read, so many are told by name; all are counted.
_NAMED = 20
_HEX = re.compile(rb"(?<![0-9A-Fa-f])[0-9A-Fa-f]{32}(?![0-9A-Fa-f])")
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_UNREADABLE = (EOFError, ValueError, RecursionError, zlib.error, zstandard.ZstdError, pa.ArrowException, InputError)
_WHY: dict[Kind, str] = {
    "link": "is a symbolic link, which is not followed",
    "special": "is no regular file",
    "closed": "is a folder that cannot be listed",
}


class _UnreadError(Exception):
    """Why a file, or a part of it, was not looked through."""


def check_strangers(run: str, version: Mapping[str, Any] | None, purged: Purged, *, deep: bool) -> Check:
    """Look through every file that quern did not place: Parquet, JSON, JSON lines and other UTF-8 text, each also
    compressed by gzip or zstd. ``deep``: hash its texts, too. Without a purge there is nothing to look for."""
    check = Check("other files", "no file that quern did not place has a purged doc_id, nor with --deep a purged text")
    read: list[str] = []
    unread: list[str] = []
    training: list[str] = []
    for name, kind in strangers(run, version):
        if kind == "training run":
            training.append(name)
            continue
        check.counts["files"] += 1
        why = None
        if purged.entries:
            why = _WHY[kind] if kind in _WHY else _look_through(check, run, name, purged, deep)
        (read if why is None else unread).append(name)
        if why is not None and len(unread) <= _NAMED:
            check.unknown.append(f"{name}: {why}")
    if len(unread) > _NAMED:
        check.unknown.append(f"{len(unread) - _NAMED:,} more files that quern did not place could not be read")
    others = "that quern did not place"
    for noun, which, names, told in (
        ("file", others, read, "looked through" if purged.entries else "found in the run"),
        ("file", others, unread, "not read, or not to the end"),
        ("training run", "in the run's folder", training, "not looked through"),
    ):
        if names:
            check.notes.append(_told(noun, which, names, told))
    return check


def _told(noun: str, which: str, names: Sequence[str], told: str) -> str:
    """A clause of the verdict, with the first of some names."""
    were = ("was", "") if len(names) == 1 else ("were", "first ")
    return f"{counted(len(names), noun)} {which} {were[0]} {told}: {were[1]}{names[0]}"


def _look_through(check: Check, run: str, name: str, purged: Purged, deep: bool) -> str | None:
    """Note what a file has of purged documents; why it could not be read to its end, if it could not."""
    try:
        with storage.open_read(storage.join(run, name)) as file:
            _compare(check, name, _values(file), purged, deep)
    except FileNotFoundError:
        return "is gone since the folder was listed"
    except _UnreadError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error.strerror or one_line(error, 120)})"
    except _UNREADABLE as error:
        return f"cannot be read ({one_line(error, 120)})"
    return None


def _compare(check: Check, name: str, values: Iterable[tuple[int | None, bytes]], purged: Purged, deep: bool) -> None:
    """Values with their rows against doc_ids, as 16 bytes or 32 hex digits anywhere in them, and against texts."""
    ids: list[bytes] = []
    texts: list[bytes] = []
    rows: tuple[list[int | None], list[int | None]] = ([], [])

    def flush() -> None:
        for keys, own, known, what in (
            (ids, rows[0], purged.ids, "has the doc_id of a purged document"),
            (texts, rows[1], purged.texts, "is the very text of a purged document"),
        ):
            for at in np.flatnonzero(contains(known, np.array(keys, KEY))).tolist():
                check.found(name, what, own[at], keys[at] if keys is ids else None)
            keys.clear()
            own.clear()

    try:
        for row, value in values:
            if not value:
                continue
            found = [value] if len(value) == 16 else []
            found += [bytes.fromhex(hexed.decode()) for hexed in _HEX.findall(value)]
            ids += found
            rows[0].extend([row] * len(found))
            if deep:
                check.counts["texts compared"] += 1
                texts.append(blake2b(value, digest_size=16).digest())  # of document.content_hash
                rows[1].append(row)
            if len(ids) + len(texts) >= _KEYS:
                flush()
    finally:  # what was found before the file could not be read any further stands
        flush()


def _values(file: IO[bytes]) -> Iterator[tuple[int | None, bytes]]:
    """Every value of a file that may be a doc_id or a text, with its row or line from 0."""
    start = file.read(4)
    file.seek(0)
    if start == _PARQUET:
        yield from _of_parquet(file)
    elif start.startswith(_GZIP) or start == _ZSTD:
        opened: Any = gzip.GzipFile(fileobj=file)
        if start == _ZSTD:
            opened = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        stream = io.BufferedReader(opened)
        inner = stream.peek(4)[:4]
        if inner == _PARQUET:
            yield from _of_compressed_parquet(stream)
        else:
            yield from _of_text(stream)
    else:
        yield from _of_text(file)


def _of_compressed_parquet(stream: IO[bytes]) -> Iterator[tuple[int | None, bytes]]:
    with tempfile.TemporaryFile() as whole:
        while chunk := stream.read(1 << 20):
            if whole.tell() + len(chunk) > _SPOOLED:
                raise _UnreadError("is compressed Parquet of more than 1 GiB")
            whole.write(chunk)
        yield from _of_parquet(whole)


def _of_parquet(file: IO[bytes]) -> Iterator[tuple[int | None, bytes]]:
    first = 0
    for batch in Table(file, pre_buffer=False).iter_batches(_ROWS):
        for column in batch.columns:
            for leaf, flat in _leaves(column):
                for at, value in enumerate(leaf.to_pylist()):
                    if value is not None:
                        yield first + at if flat else None, value
        first += len(batch)


def _leaves(array: pa.Array, flat: bool = True) -> Iterator[tuple[pa.Array, bool]]:
    """The arrays of bytes in a column, however deep; ``flat``: whether each value stands in the row of its place."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _leaves(array.storage, flat)
    elif pa.types.is_dictionary(kind):
        yield from _leaves(array.dictionary_decode(), flat)
    elif pa.types.is_struct(kind):
        for part in array.flatten():
            yield from _leaves(part, flat)
    elif pa.types.is_map(kind):
        yield from _leaves(array.keys, False)
        yield from _leaves(array.items, False)
    elif pa.types.is_nested(kind):
        yield from _leaves(array.flatten(), False)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        yield array.cast(pa.large_string()).cast(pa.large_binary()), flat
    elif pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        yield array, flat
    elif pa.types.is_binary_view(kind):
        yield array.cast(pa.large_binary()), flat


def _of_text(file: IO[bytes]) -> Iterator[tuple[int | None, bytes]]:
    """The whole text, its lines, and where it or a line is JSON the strings in it."""
    head = file.read(_WHOLE + 1)
    if len(head) <= _WHOLE:
        data = _checked(head)
        yield None, data
        yield None, data.rstrip(b"\r\n")
        strings = _strings(data)
        if strings is not None:
            yield from ((None, value) for value in strings)
            return
    json_lines = True
    for number, line in enumerate(_lines(head, file)):
        yield number, _checked(line).rstrip(b"\r")
        strings = _strings(line) if line.strip() else []
        json_lines &= strings is not None
        yield from ((number, value) for value in strings or ())
    if len(head) > _WHOLE and not json_lines:
        raise _UnreadError(f"is a text of more than {_WHOLE >> 20} MiB: only its lines were compared")


def _lines(head: bytes, file: IO[bytes]) -> Iterator[bytes]:
    while head:
        more = file.read(_WHOLE)
        end = head.rfind(b"\n") + 1 if more else len(head)
        if not end:
            raise _UnreadError(f"has a line of more than {_WHOLE >> 20} MiB")
        yield from (line.rstrip(b"\n") for line in io.BytesIO(head[:end]))
        head = head[end:] + more


def _checked(data: bytes) -> bytes:
    """UTF-8 without a NUL and without its mark."""
    try:
        data.decode()
    except UnicodeDecodeError:
        raise _UnreadError("is neither Parquet nor UTF-8 text") from None
    if b"\0" in data:
        raise _UnreadError("is neither Parquet nor UTF-8 text")
    return data.removeprefix(b"\xef\xbb\xbf")


def _strings(data: bytes) -> list[bytes] | None:
    """Every string in a JSON value, keys too; None where ``data`` is no JSON."""
    if data.lstrip()[:1] not in (b"{", b"[", b'"'):
        return None
    try:
        waiting = [json.loads(data)]
    except ValueError:
        return None
    found = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return found
