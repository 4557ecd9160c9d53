"""Asks the verdicts of a data run which documents of a source fulfil a condition.

A condition is an expression of SQL (DuckDB's) on the columns of a document's verdict, and

- ``tokens``: of the document, its EOT included;
- ``cluster_size``: of its cluster of duplicates before they were removed, itself included; 1 where it was in none;
- ``NAME.column``: of the table ``measures/NAME`` of the run, such as ``dsir.log_weight``; null for a document that it
  does not have.

A document is chosen where the expression is true, and not where it is null. Ids and hashes are hex text.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from quern.data_pipeline.committed import missing_tables, named
from quern.data_pipeline.dedup.schemas import CLUSTERS
from quern.errors import InputError, QuernError, first_line
from quern.storage.sql import lock, open_run, quoted
from quern.storage.sql_guard import check_condition
from quern.tokenize.selection.chosen import I64, Chosen, Identity, family_of, find_chosen, write_chosen
from quern.tokenize.selection.measures import checked_parts, part, published
from quern.tokenize.shards import ShardReader

if TYPE_CHECKING:
    import duckdb

__all__ = ["choose", "open_chosen"]

_ROWS = 1 << 16
_FOLDERS = ("verdicts", "duplicates", "measures", "tokens")
_MEASURE = re.compile(r"[a-z][a-z0-9_]*")


def choose(
    reader: ShardReader, stream: str, where: str, folder: str, known: Sequence[str] = (), ids: Iterable[str] = ()
) -> Chosen:
    """The documents of ``reader``'s source that fulfil ``where``, as they were chosen first in ``folder`` or one of the
    folders ``known``; else as the run's tables say now, written to ``folder``.

    ``stream``: the identity of the source. ``ids``: identities that a run has read from; where one of them is of this
    condition and version, it is that choice or none. Any number of processes may call it at once: they write the same
    bytes.

    Raises:
        InputError: the condition is wrong, or a table of the run is missing or damaged; or what the run has read is
            lost, and the condition chooses other documents now.
        QuernError: memory or disk did not suffice.
    """
    begins = f"{family_of(stream, where)}/{stream.rpartition('/')[2]}-"
    read = next((ident for ident in ids if ident.startswith(begins)), None)
    folders = [folder, *known]
    found = find_chosen(folders, stream, where) if read is None else open_chosen(folders, read, reader, where)
    if found is not None and os.path.exists(found.path):
        return found
    return write_chosen(folder, stream, where, _spans(reader, where))


def open_chosen(folders: Sequence[str], identity: str, reader: ShardReader, where: str | None) -> Chosen:
    """What a condition chose when a run began to read it, from the folder that has it; where none has, what it chooses
    now, if that is the same.

    Raises:
        InputError: it is not.
    """
    for folder in folders:
        if os.path.exists(os.path.join(folder, Identity(identity).file)):
            return Chosen(folder, identity)
    lost = f"{os.path.join(folders[0], Identity(identity).file)}: is missing"
    if where is None:
        raise InputError(f"{lost}, and the ledger does not tell the condition of {identity}")
    with tempfile.TemporaryDirectory(prefix="quern-chosen-") as folder:
        chosen = choose(reader, Identity(identity).stream, where, folder)
    if chosen.identity != identity:
        raise InputError(
            f"{lost}, and {where!r:.200} chooses other documents now ({chosen.identity}): put the file back from a copy"
        )
    return chosen


def _spans(reader: ShardReader, where: str) -> Iterator[tuple[I64, I64]]:
    """Starts in the stream and lengths of the documents that fulfil ``where``, in the order of the stream."""
    import duckdb

    run = os.path.dirname(reader.root)
    with open_run(run) as (connection, alias):
        try:
            table = _define(connection, reader, run, alias, where)
            check_condition(connection, where, table)
            lock(connection, [os.path.join(alias, name) for name in _FOLDERS])
            bare = "SELECT count(*) FROM spans ANTI JOIN documents ON spans.id = _id"
            ((number,),) = connection.execute(bare).fetchall()
            if number:
                raise InputError(f"{number:,} documents have no verdict in {run}/verdicts")
            hits = f"SELECT documents._id FROM {table} WHERE (\n{where}\n)"
            sql = f"SELECT place, length FROM spans SEMI JOIN ({hits}) ON spans.id = _id ORDER BY place"
            batches: pa.RecordBatchReader = connection.sql(sql).to_arrow_reader(_ROWS)
            for batch in batches:
                yield batch["place"].to_numpy(), batch["length"].to_numpy()
        except InputError as error:
            raise InputError(f"{reader.path}: where: {where!r:.200}: {error}") from None
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise QuernError(f"{reader.path}: where: {first_line(error).replace(alias, run)}") from None
        except duckdb.Error as error:
            told = first_line(error).replace(alias, run)
            if isinstance(error, duckdb.BinderException) and re.search(r'table "\w+" not found', told):
                there = ", ".join(published(run)) or "none"
                told += f'; a name with a dot is quoted ("gopher.num_words" > 100); tables of measures: {there}'
            raise InputError(f"{reader.path}: where: {where!r:.200}: {told}") from None


def _define(connection: duckdb.DuckDBPyConnection, reader: ShardReader, run: str, alias: str, where: str) -> str:
    """Make the views; returns what a condition stands behind: FROM it WHERE the condition."""
    source = reader.source.removesuffix(".val")
    if missing := missing_tables(run, {"verdicts"}, source):
        raise InputError(f"{run}: {len(missing):,} committed tables are missing: {named(missing)}")
    verdicts = sorted(glob.glob(os.path.join(glob.escape(os.path.join(alias, "verdicts", source)), "*.parquet")))
    if not verdicts:
        raise InputError(f"{run}/verdicts/{source}: has no table of verdicts; a condition is on its columns")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("CREATE TABLE shards (file VARCHAR, first BIGINT)")
    firsts = [(os.path.join(alias, "tokens", reader.source, shard.spans), int(first))
              for shard, first in zip(reader.shards, reader.offsets, strict=False)]  # fmt: skip
    connection.executemany("INSERT INTO shards VALUES (?, ?)", firsts)
    connection.execute(
        f"CREATE VIEW spans AS SELECT doc_id AS id, start + first AS place, length FROM read_parquet("
        f"[{', '.join(quoted(file) for file, _ in firsts)}], filename = true) JOIN shards ON filename = file"
    )
    sizes, joined = "1", ""
    if re.search(r"\bcluster_size\b", where, re.IGNORECASE):
        if missing := missing_tables(run, {"duplicates"}):
            raise InputError(f"{run}: {len(missing):,} committed tables are missing: {named(missing)}")
        if os.path.exists(os.path.join(run, CLUSTERS)):
            sizes, joined = "coalesce(c.size, 1)", "LEFT JOIN (SELECT doc_id, count(*) OVER (PARTITION BY cluster_id) "
            joined += f"AS size FROM read_parquet({quoted(os.path.join(alias, CLUSTERS))})) c ON c.doc_id = v.doc_id"
    listed = ", ".join(map(quoted, verdicts))
    connection.execute(
        f"""
        CREATE VIEW documents AS SELECT v.doc_id AS _id, s.length AS tokens, {sizes} AS cluster_size, v.* REPLACE (
            lower(hex(v.doc_id)) AS doc_id,
            lower(hex(pre_filter_hash)) AS pre_filter_hash,
            lower(hex(post_filter_hash)) AS post_filter_hash)
        FROM read_parquet([{listed}], union_by_name = true) v JOIN spans s ON s.id = v.doc_id {joined}
        """
    )
    table = "documents"
    for name in (name for name in published(run) if name in _MEASURE.findall(where.lower())):
        listed = ", ".join(quoted(part(alias, name, number)) for number in range(len(checked_parts(run, name))))
        columns = f"doc_id AS _of, * EXCLUDE (doc_id) FROM read_parquet([{listed}])"
        connection.execute(f'CREATE VIEW "{name}" AS SELECT {columns}')
        table += f' LEFT JOIN "{name}" ON "{name}"._of = documents._id'
    return table
