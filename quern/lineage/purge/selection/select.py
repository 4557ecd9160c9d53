"""Resolves the selection of a purge: URLs, hosts, documents, benchmark matches, or an SQL query."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from quern import storage
from quern.data_pipeline.page.url import MAX_CHARS, canonicalize
from quern.errors import InputError
from quern.lineage.store import parse_hash, parse_host

__all__ = ["KINDS", "Wanted", "select"]

#: The kinds of selection, as their options are called.
KINDS = ("url", "domain", "doc", "urls-file", "match", "sql")
#: Of these only a run on this machine can be asked.
_LOCAL_KINDS = ("match", "sql")
#: Bad lines of a file that an error names, and characters of one that it shows.
_SHOWN_LINES, _SHOWN_CHARS = 5, 60

Note = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """The selection before the run is searched."""

    doc_ids: frozenset[bytes] = frozenset()
    urls: tuple[str, ...] = ()
    """Canonical; as they were spelled where they have no canonical form."""
    domains: tuple[str, ...] = ()
    """Canonical hosts, each for itself and all hosts below it."""
    strict: bool = True
    """Whether each of them must be in the run; else what is not is told."""


def select(run: str, given: Mapping[str, Sequence[str]], *, note: Note = lambda line: None) -> Wanted:
    """Resolve options of one kind in a run. ``given``: the values of each of :data:`KINDS`.

    Whether the run has what is named shows in :func:`quern.lineage.purge.selection.deletion_set.find_deletion_set`.
    ``note`` takes lines for the person.

    Raises:
        InputError: not exactly one kind is given, a value is no URL, host, doc_id or file of its kind, a benchmark or
            query finds nothing, or the run is on a store and would have to be indexed.
    """
    kinds = [kind for kind in KINDS if given.get(kind)]
    if len(kinds) != 1:
        names = ", ".join(f"--{kind}" for kind in KINDS[:-1])
        got = " and ".join(f"--{kind}" for kind in kinds) or "none"
        raise InputError(f"expected one of {names} and --{KINDS[-1]}, got {got}")
    (kind,) = kinds
    values = list(dict.fromkeys(given[kind]))
    if kind in _LOCAL_KINDS and not storage.is_local(run):
        raise InputError(
            f"{run}: --{kind} reads the run's index, which only a run on this machine has; copy the run, find the "
            "documents there, and give them with --doc or --urls-file"
        )
    if kind == "url":
        return Wanted(urls=tuple(dict.fromkeys(canonicalize(url) or url for url in values)))
    if kind == "domain":
        return Wanted(domains=tuple(dict.fromkeys(parse_host(value, "--domain") for value in values)))
    if kind == "doc":
        return Wanted(doc_ids=frozenset(parse_hash(value, "--doc") for value in values))
    if kind == "urls-file":
        urls = dict.fromkeys(url for path in values for url in _read_urls(path))
        return Wanted(urls=tuple(urls), strict=False)
    find = _matched if kind == "match" else _queried
    found = frozenset(doc_id for value in values for doc_id in find(run, value, note))
    if not found:
        what = "no document holds text of it" if kind == "match" else "it gives no document"
        raise InputError(f"--{kind}: {' '.join(values[0].split())[:_SHOWN_CHARS]}: {what}")
    return Wanted(doc_ids=found)


# ---- a file of URLs


def _read_urls(path: str) -> list[str]:
    """The canonical URLs of a file, one a line; empty lines are passed over."""
    name = "standard input" if path == "-" else path
    urls, bad = [], []
    for number, line in _lines(path):
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
        if not text:
            continue
        if (url := _canonical(text)) is None:
            bad.append(f"line {number}: {text[:_SHOWN_CHARS].decode('utf-8', 'backslashreplace')!r}")
        else:
            urls.append(url)
    if bad:
        more = f"; and {len(bad) - _SHOWN_LINES:,} more lines" if len(bad) > _SHOWN_LINES else ""
        raise InputError(f"{name}: expected an http(s) URL a line, got {'; '.join(bad[:_SHOWN_LINES])}{more}")
    if not urls:
        raise InputError(f"{name}: expected an http(s) URL a line, found none")
    return urls


def _canonical(text: bytes) -> str | None:
    try:
        return canonicalize(text.decode())
    except UnicodeDecodeError:
        return None


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Numbered from 1; of a line longer than any URL only the first part is given."""
    most = 4 * MAX_CHARS + 2
    number = 0
    with storage.reading(path), nullcontext(sys.stdin.buffer) if path == "-" else storage.open_read(path) as file:
        while line := file.readline(most):
            number += 1
            yield number, line
            while len(line) == most and not line.endswith(b"\n"):  # the rest of it
                line = file.readline(most)


# ---- what a benchmark matches, what a query finds


def _matched(run: str, path: str, note: Note) -> list[bytes]:
    from quern.lineage.match import Matches, match, read_index
    from quern.lineage.store import IndexedRun

    if Matches.is_saved(path):
        lineage = IndexedRun(run)
        numbers, *_ = Matches.load(path).in_run(lineage)
        return lineage.documents(numbers).doc_ids
    read_index(path)  # a wrong one is an error before an index is built
    found = match(IndexedRun(run), path, workers=os.cpu_count() or 1)
    if found.not_looked_for:
        note(f"{path}: {len(found.not_looked_for):,} items have too few words to be looked for")
    return found.doc_ids


def _queried(run: str, sql: str, note: Note) -> list[bytes]:
    from quern.lineage.sql.query import query

    result = query(run, sql, note=note)
    if "doc_id" not in result.columns:
        raise InputError(f"--sql: expected a query with a column doc_id, got {', '.join(result.columns)}")
    place = result.columns.index("doc_id")
    return [_doc_id(row[place], number) for number, row in enumerate(result.rows)]


def _doc_id(value: object, row: int) -> bytes:
    if isinstance(value, bytes | str):
        return parse_hash(value, f"--sql: row {row}: doc_id")
    raise InputError(f"--sql: row {row}: doc_id: expected 32 hex digits, got {value!r:.60}")
