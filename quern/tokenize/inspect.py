"""Shows what is at a position of a shard: surrounding text, the document, and its source page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.data_pipeline.committed import missing_tables, named
from quern.errors import InputError
from quern.storage.parquet import open_table
from quern.tokenize.encoding import load_encoding
from quern.tokenize.shards import ShardReader

__all__ = ["Inspection", "find_verdict", "inspect"]

_PAGE_COLUMNS = (
    "url",
    "canonical_url",
    "source_file",
    "record_offset",
    "record_length",
    "record_id",
    "fetched_at",
    "language",
)


@dataclass(frozen=True)
class Inspection:
    """One token and everything known about it."""

    shard: str
    at: int
    """Position in the shard."""
    token: int
    token_text: str
    before: str
    """Text of the tokens before; it may begin in an earlier document."""
    after: str
    doc_id: str
    """Hex."""
    start: int
    """Where the document's span starts in the shard."""
    length: int
    """Tokens of the span, its EOT included."""
    position: int
    """Position in the document."""
    is_eot: bool
    purged: bool
    page: Mapping[str, Any] | None
    """URL, input file and record of the page, its time as ISO 8601; None when no verdicts are beside the tokens."""
    no_page: str | None = None
    """Why ``page`` is None, where its verdict should be there."""


def inspect(shard_path: str, at: int, context: int = 64) -> Inspection:
    """The token at position ``at`` of the shard file ``shard_path``, with ``context`` tokens on either side.

    Raises:
        InputError: the shard is a folder or not on a local file system, the corpus version does not list it, or it has
            no such position.
    """
    if not storage.is_local(shard_path):
        raise InputError(f"{shard_path}: shards are memory-mapped; expected a file on a local file system")
    if os.path.isdir(storage.split(shard_path)[1]):
        raise InputError(
            f"{shard_path}: expected a file of a shard, such as RUN/tokens/SOURCE/shard_00000.bin, got a folder"
        )
    folder, name = os.path.split(os.path.abspath(storage.split(shard_path)[1]))
    reader = ShardReader(folder)
    names = [info.bin for info in reader.shards]
    if name not in names:
        raise InputError(f"{shard_path}: the corpus version lists no such shard (it has {', '.join(names) or 'none'})")
    shard = names.index(name)
    size = reader.shards[shard].tokens
    if not 0 <= at < size:
        raise InputError(f"{shard_path}: expected a position from 0 to {size - 1}, got {at}")
    if context < 0:
        raise InputError(f"context: expected a number of tokens ≥ 0, got {context}")
    encoding = load_encoding(reader.encoding, reader.ranks_path)
    origin = int(reader.offsets[shard])
    first = max(0, at - context)
    around = reader.tokens(origin + first, origin + min(size, at + context + 1))
    here = at - first
    span = reader.locate(shard, at)
    run, source = os.path.dirname(reader.root), reader.source.removesuffix(".val")
    page = find_verdict(run, source, span.doc_id)
    return Inspection(
        shard=shard_path,
        at=at,
        token=int(around[here]),
        token_text=encoding.decode(around[here : here + 1]),
        before=encoding.decode(around[:here]),
        after=encoding.decode(around[here + 1 :]),
        doc_id=span.doc_id.hex(),
        start=span.start,
        length=span.length,
        position=at - span.start,
        is_eot=at == span.start + span.length - 1,
        purged=span.purged,
        page=page,
        no_page=_no_page(run, source) if page is None else None,
    )


def _no_page(run: str, source: str) -> str | None:
    missing = missing_tables(run, ("verdicts",), source)
    if not missing:
        return None
    return f"its verdict, which has URL, file and record, is missing: {named(missing)} is committed and not there"


def find_verdict(run_dir: str, source: str, doc_id: bytes) -> dict[str, Any] | None:
    """URL, file and record of a page from ``RUN/verdicts/<source>``, or None when it is not there.

    Reads one row group's doc_ids at a time, of those row groups whose range holds the id, and further columns only of
    the row group it is in.
    """
    for path in storage.list_files(storage.join(run_dir, "verdicts", source)):
        with open_table(path) as table:
            column = table.schema_arrow.get_field_index("doc_id")
            for group in range(table.num_row_groups):
                statistics = table.metadata.row_group(group).column(column).statistics
                known = statistics is not None and statistics.has_min_max
                if known and not statistics.min <= doc_id <= statistics.max:
                    continue
                ids = table.read_row_group(group, ["doc_id"])["doc_id"].to_pylist()
                if doc_id in ids:
                    columns = [name for name in _PAGE_COLUMNS if name in table.schema_arrow.names]
                    rows = table.read_row_group(group, columns)
                    (row,) = rows.slice(ids.index(doc_id), 1).to_pylist()
                    fetched_at = row.get("fetched_at")
                    return {**row, "fetched_at": fetched_at.isoformat() if fetched_at is not None else None}
    return None
