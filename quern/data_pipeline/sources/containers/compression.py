"""Decompresses files piece by piece, damaged ones too.

Nothing here raises for damage: it is noted, with its offset in the file. Behind damage a gzip file goes on at its next
member (see ``gzip_members.py``); of any other compression the rest is lost.
"""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Iterator
from typing import IO

import pyarrow as pa
import zstandard

from quern.data_pipeline.sources.containers.gzip_members import GzipMembers, Note

__all__ = ["compression_of", "pieces"]

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
)
_READ_BYTES = 1 << 17
_PIECE_BYTES = 1 << 20


def compression_of(head: bytes) -> str | None:
    """The compression a file's first six bytes tell: gzip, zstd, bz2, xz, lz4 or None."""
    return next((name for magic, name in _MAGIC if head.startswith(magic)), None)


def pieces(file: IO[bytes], note: Note) -> Iterator[bytes]:
    """The decompressed content (of a plain file: the content), in pieces of at most about a megabyte."""
    kind = compression_of(file.read(6))
    file.seek(0)
    if kind == "gzip":
        members = GzipMembers(file, note)
        while members.advance():
            while piece := members.piece():
                yield piece
        return
    try:
        yield from _decompressed(file, kind)
    except (zstandard.ZstdError, lzma.LZMAError, pa.ArrowException, EOFError, OSError) as error:
        # bz2 and lz4 report damage as OSError; one that has an errno is the store's and not the content's.
        if getattr(error, "errno", None) is not None or isinstance(error, MemoryError):
            raise
        # Arrow closes what it reads.
        note(0 if file.closed else file.tell(), f"{kind} stream is damaged, the rest cannot be read: {error}")


def _decompressed(file: IO[bytes], kind: str | None) -> Iterator[bytes]:
    if kind == "zstd":
        yield from _zstd_frames(file)
    elif kind == "bz2":
        yield from _streams(file, bz2.BZ2Decompressor)
    elif kind == "xz":
        yield from _streams(file, lzma.LZMADecompressor)
    elif kind == "lz4":
        with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "lz4") as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
    else:
        while piece := file.read(_READ_BYTES):
            yield piece


def _streams(file: IO[bytes], make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> Iterator[bytes]:
    """As the standard library's file classes, but what comes before damage is given, not lost with the error."""
    decompressor = None
    while step := file.read(_READ_BYTES):
        while True:
            if decompressor is None:
                step = step.lstrip(b"\0")  # padding between and behind streams
                if not step:
                    break
                decompressor = make()
            piece = decompressor.decompress(step, _PIECE_BYTES)
            step = b""
            if piece:
                yield piece
            if decompressor.eof:
                step, decompressor = decompressor.unused_data, None
            elif decompressor.needs_input:
                break
    if decompressor is not None:
        raise EOFError("the file ends inside a stream")


def _zstd_frames(file: IO[bytes]) -> Iterator[bytes]:
    """zstandard's own stream reader takes a file that is cut off for a whole one; this one raises EOFError."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    # Small steps bound the memory of a step's output: a zstd block of four bytes can stand for 128 KiB.
    while step := file.read(1 << 11):
        while step:
            frame = frame or decompressor.decompressobj()
            piece = frame.decompress(step)
            step = b""
            if frame.eof:
                step, frame = frame.unused_data, None
            if piece:
                yield piece
    if frame is not None:
        raise EOFError("the file ends inside a frame")
