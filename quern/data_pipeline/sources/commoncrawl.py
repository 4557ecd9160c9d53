"""Lists the files of a crawl as Common Crawl publishes it, from its gzipped list of paths.

``<base>/crawl-data/<crawl>/warc.paths.gz`` has one path a line, relative to ``<base>``. A file's number is its line's,
from 0; its relative path, which page identities rest on, is the line itself. Nothing is read but the list.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Sequence

from quern import storage
from quern.errors import InputError

__all__ = ["BASE", "FORMATS", "crawl_files", "parse_files"]

BASE = "https://data.commoncrawl.org"
FORMATS = ("warc", "wet")

#: Of a list, packed and unpacked; the largest have a tenth of both.
_MAX_LIST_BYTES = 64 << 20
_MAX_FILES = 1_000_000
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_PATH = re.compile(r"[A-Za-z0-9._~=+-]+(?:/[A-Za-z0-9._~=+-]+)*")


def parse_files(text: str) -> list[range]:
    """``0-99,200`` as ranges, sorted and apart; both ends of a range are in it.

    Raises:
        ValueError: it is not of that form.
    """
    spans: list[range] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f'expected numbers and ranges such as "0-99,200", got {text!r}')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected ranges that go up, got {piece.strip()!r}")
        spans.append(range(first, last + 1))
    joined: list[range] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if joined and span.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined


def crawl_files(source: str, crawl: str, base: str, form: str, files: str | None) -> list[tuple[str, str]]:
    """(path, relative path) of the files of a crawl that ``files`` names (None: all), in the order of the list.

    Raises:
        InputError: there is no such crawl, a number is beyond its files, or the list is not what it should be.
        StoreError: the list cannot be read.
    """
    url = storage.join(base.rstrip("/"), "crawl-data", crawl, f"{form}.paths.gz")
    try:
        with storage.open_read(url) as file:
            data = file.read(_MAX_LIST_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            f"source {source}: crawl: {base} has no crawl {crawl!r} ({url}: no such file); "
            "names are listed at https://index.commoncrawl.org/collinfo.json"
        ) from None
    lines = _lines(url, data)
    chosen = lines if files is None else _choose(source, crawl, lines, files)
    return [(storage.join(base.rstrip("/"), line), line) for line in chosen]


def _choose(source: str, crawl: str, lines: Sequence[str], files: str) -> list[str]:
    spans = parse_files(files)
    if spans[-1].stop > len(lines):
        raise InputError(
            f"source {source}: files: expected numbers from 0 to {len(lines) - 1}, since {crawl} has {len(lines)} "
            f"files, got {spans[-1].stop - 1}"
        )
    return [lines[number] for span in spans for number in span]


def _lines(url: str, data: bytes) -> list[str]:
    """The paths; every one is checked, since they become addresses and names."""
    if len(data) > _MAX_LIST_BYTES:
        raise InputError(f"{url}: expected at most {_MAX_LIST_BYTES} bytes, has more")
    text = _inflated(url, data)
    if text.count(b"\n") > _MAX_FILES:
        raise InputError(f"{url}: expected at most {_MAX_FILES} paths, has more")
    lines = text.decode("utf-8", "replace").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise InputError(f"{url}: expected one path a line, is empty")
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not _PATH.fullmatch(line) or ".." in line.split("/") or len(line) > 1000:
            raise InputError(
                f"{url}: line {number}: expected a path such as crawl-data/…/x.warc.gz, got {line[:100]!r}"
            )
        if line in seen:
            raise InputError(f"{url}: line {number}: {line}: is listed twice")
        seen.add(line)
    return lines


def _inflated(url: str, data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            out = file.read(_MAX_LIST_BYTES + 1)
    except EOFError:
        raise InputError(f"{url}: the gzip file is cut off") from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{url}: expected a gzip file ({error})") from None
    if len(out) > _MAX_LIST_BYTES:
        raise InputError(f"{url}: expected at most {_MAX_LIST_BYTES} bytes of paths, has more")
    if not out:
        raise InputError(f"{url}: expected one path a line, is empty")
    return out
