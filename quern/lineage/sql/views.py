"""Defines the views of a run in DuckDB: its verdicts, documents, duplicates, tokens, selections and training steps.

Of a data run:

- ``verdicts``: one row a page-carrying record, as in the verdict files, and ``kept``: whether it is in the corpus's
  current version. A verdict file knows only what the chain dropped. Here a page that was removed as a duplicate, and
  not restored since, has ``stage`` = 'duplicate' and the kind (exact, url, near) as its ``reason``, and one that was
  purged ``stage`` = 'purged' and 'version 2', say; ``kept`` is true where ``stage`` is null;
- ``documents``: the verdicts that reached the quality gate, with ``text`` and ``extracted`` (null where it is the text;
  both null once a purge has taken the text). ``kept`` is that of ``verdicts``: in the document files it says only that
  the chain did not drop the page;
- ``spans``: stream, source, held_out, shard, start, length (EOT included), purged, purged_since (the corpus version
  that purged it: who read an earlier one saw it), doc_id of the current version;
- ``duplicates``: every document of a cluster, with kind, duplicate_of, similarity and band if it was removed;
- ``measures``: name, doc_id, log_weight, rank, chosen: a row for each document and complete selection (``quern mix
  select``) that weighed it;
- ``steps``: train_run, attempt (from 0), step, data_step, first_sample, global_batch, applied, surviving: a row for
  each step of the registered training runs that is complete for certain.

Of a training run: its own ``steps``. Ids and hashes are hex text.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from quern import storage
from quern.data_pipeline.committed import missing_tables, named
from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, CLUSTERS, DECISION_SCHEMA, DECISIONS
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, verdict_schema
from quern.errors import InputError
from quern.lineage.index.changes import Purges, written_by
from quern.lineage.index.decided import Redecided
from quern.lineage.sql.steps import steps_table
from quern.storage.sql import quoted
from quern.tokenize.corpus_version import fields
from quern.tokenize.selection.measures import SCHEMA, folder, published
from quern.tokenize.shard_format import SPANS_SCHEMA
from quern.train.history.consumers import read_consumers
from quern.words import counted

if TYPE_CHECKING:
    import duckdb

__all__ = ["VIEWS", "Note", "define"]

VIEWS = ("documents", "duplicates", "measures", "spans", "steps", "verdicts")

_SPANS_FILE = re.compile(r"([a-z0-9][a-z0-9_-]*(?:\.val)?)/[A-Za-z0-9_.-]+\.parquet")

Note = Callable[[str], None]


def define(
    connection: duckdb.DuckDBPyConnection, run: str, training: bool, alias: str, wanted: frozenset[str], note: Note
) -> None:
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("CREATE SCHEMA source")  # what the views are made of: SHOW TABLES leaves it out
    tokens = os.path.join(run, "tokens")
    if wanted & {"verdicts", "documents", "duplicates", "spans"}:
        version, shards = _shards(os.path.join(tokens, "VERSION.json"))
        # the documents that the current version has purged, and since when
        _fill(connection, "source.purges", Purges(tokens, version).table(), "doc_id, version")
        if wanted & {"verdicts", "documents", "duplicates"}:
            _note_missing(run, wanted, note)
            _fill(connection, "source.redecided", Redecided(tokens, version).table())
            _define_pages(connection, run, alias)
        if "spans" in wanted:
            _define_spans(connection, tokens, os.path.join(alias, "tokens"), shards)
    if "measures" in wanted:
        _define_measures(connection, run, alias)
    if "steps" in wanted:
        runs = [run] if training else dict.fromkeys(started.train_run for started in read_consumers(run))
        _fill(connection, "steps", steps_table(runs, note))


def _fill(connection: duckdb.DuckDBPyConnection, name: str, rows: pa.Table, columns: str = "*") -> None:
    connection.register("given", rows)
    connection.execute(f"CREATE TABLE {name} AS SELECT {columns} FROM given")
    connection.unregister("given")


def _note_missing(run: str, wanted: frozenset[str], note: Note) -> None:
    folders = {"verdicts", "duplicates"} | ({"documents"} & wanted)
    if missing := missing_tables(run, folders):
        note(
            f"{run}: {counted(len(missing), 'committed table')} missing, without which the views are: {named(missing)}"
        )


def _define_pages(connection: duckdb.DuckDBPyConnection, run: str, alias: str) -> None:
    for name, pattern, schema in (
        ("verdict_rows", "verdicts/*/*.parquet", verdict_schema(())),
        ("document_rows", "documents/*/*.parquet", DOCUMENT_SCHEMA),
        ("recorded_rows", DECISIONS, DECISION_SCHEMA),
        ("cluster_rows", CLUSTERS, CLUSTER_SCHEMA),
    ):
        there = next(glob.iglob(os.path.join(glob.escape(run), pattern)), None) is not None
        _define_rows(connection, f"source.{name}", [os.path.join(alias, pattern)] if there else [], schema)
    columns = ", ".join(DECISION_SCHEMA.names)
    # the decisions that hold in the current version: recorded ones, but where a later version decided anew
    connection.execute(
        f"""
        CREATE VIEW source.decision_rows AS
        SELECT {columns} FROM source.recorded_rows r
        WHERE NOT EXISTS (SELECT 1 FROM source.redecided n WHERE n.doc_id = r.doc_id)
        UNION ALL SELECT {columns} FROM source.redecided WHERE kind IS NOT NULL
        """
    )
    connection.execute(
        """
        CREATE VIEW source.pages AS
        SELECT v.doc_id AS id, v.* REPLACE (
            lower(hex(v.doc_id)) AS doc_id,
            lower(hex(pre_filter_hash)) AS pre_filter_hash,
            lower(hex(post_filter_hash)) AS post_filter_hash,
            CASE WHEN v.stage IS NOT NULL THEN v.stage WHEN d.kind IS NOT NULL THEN 'duplicate'
                WHEN p.version IS NOT NULL THEN 'purged' END AS stage,
            CASE WHEN v.stage IS NOT NULL THEN v.reason WHEN d.kind IS NOT NULL THEN d.kind
                ELSE 'version ' || p.version END AS reason),
            v.stage IS NULL AND d.kind IS NULL AND p.version IS NULL AS kept
        FROM source.verdict_rows v LEFT JOIN source.decision_rows d ON v.doc_id = d.doc_id
            LEFT JOIN source.purges p ON v.doc_id = p.doc_id
        """
    )
    connection.execute("CREATE VIEW verdicts AS SELECT * EXCLUDE (id) FROM source.pages")
    connection.execute(
        """
        CREATE VIEW documents AS
        SELECT p.* EXCLUDE (id, kept), d.text, d.extracted, p.kept
        FROM source.pages p LEFT JOIN source.document_rows d ON p.id = d.doc_id WHERE p.post_filter_hash IS NOT NULL
        """
    )
    connection.execute(
        """
        CREATE VIEW duplicates AS
        SELECT lower(hex(coalesce(c.doc_id, d.doc_id))) AS doc_id,
            lower(hex(coalesce(c.cluster_id, d.cluster_id))) AS cluster_id,
            d.kind, lower(hex(d.duplicate_of)) AS duplicate_of, d.similarity, d.band
        FROM source.cluster_rows c FULL JOIN source.decision_rows d ON c.doc_id = d.doc_id
        """
    )


def _define_spans(
    connection: duckdb.DuckDBPyConnection, tokens: str, alias: str, shards: Sequence[tuple[str, int, str]]
) -> None:
    """``alias``: of the folder ``tokens``."""
    paths = [os.path.join(alias, file) for _, _, file in shards]
    connection.execute("CREATE TABLE source.shard_files (path VARCHAR, stream VARCHAR, shard INTEGER, written INTEGER)")
    if shards:
        written = [written_by(os.path.join(tokens, file)) for _, _, file in shards]
        columns = [paths, [stream for stream, _, _ in shards], [number for _, number, _ in shards], written]
        connection.execute("INSERT INTO source.shard_files SELECT unnest(?), unnest(?), unnest(?), unnest(?)", columns)
    schema = SPANS_SCHEMA.append(pa.field("filename", pa.string()))
    _define_rows(connection, "source.span_rows", paths, schema, ", filename = true")
    connection.execute(
        """
        CREATE VIEW spans AS
        SELECT f.stream, regexp_replace(f.stream, '\\.val$', '') AS source, suffix(f.stream, '.val') AS held_out,
            f.shard, s.start, s.length, s.purged,
            CASE WHEN s.purged THEN least(coalesce(p.version, f.written), f.written) END AS purged_since,
            lower(hex(s.doc_id)) AS doc_id
        FROM source.span_rows s JOIN source.shard_files f ON s.filename = f.path
            LEFT JOIN source.purges p ON s.purged AND s.doc_id = p.doc_id
        """
    )


def _define_measures(connection: duckdb.DuckDBPyConnection, run: str, alias: str) -> None:
    _define_rows(connection, "source.no_measures", [], SCHEMA)
    rows = ["SELECT '' AS name, * FROM source.no_measures"]
    for name in published(run):
        files = quoted(os.path.join(folder(alias, name), "part-*.parquet"))
        rows.append(f"SELECT {quoted(name)} AS name, * FROM read_parquet({files}, hive_partitioning = false)")
    connection.execute(
        f"CREATE VIEW measures AS SELECT * REPLACE (lower(hex(doc_id)) AS doc_id) FROM ({' UNION ALL '.join(rows)})"
    )


def _shards(path: str) -> tuple[int, list[tuple[str, int, str]]]:
    """The version, and (stream, number of the shard, spans file below ``tokens/``) of every shard of it; 0 and none
    without one."""
    if not os.path.exists(path):
        return 0, []
    version = storage.read_json(path)
    current = version.get("version") if isinstance(version, dict) else None
    if type(current) is not int or current < 1:
        raise InputError(f"{path}: version: expected an integer ≥ 1, got {current!r:.60}")
    found = []
    for stream, listed in fields(path, version, {"sources": dict})["sources"].items():
        shards = listed.get("shards") if isinstance(listed, dict) else None
        for number, shard in enumerate(shards if isinstance(shards, list) else ()):
            file = shard.get("spans") if isinstance(shard, dict) else None
            match = _SPANS_FILE.fullmatch(str(file))
            if match is None or match[1] != stream:
                raise InputError(f"{path}: sources.{stream}.shards.{number}.spans: expected a file of it, got {file!r}")
            found.append((stream, number, match[0]))
    return current, found


def _define_rows(
    connection: duckdb.DuckDBPyConnection, name: str, files: Sequence[str], schema: pa.Schema, options: str = ""
) -> None:
    """A view of the rows of Parquet files; where there are none, a table of no rows that has the columns of all."""
    if files:
        listed = f"[{', '.join(map(quoted, files))}], hive_partitioning = false{options}"
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({listed})")
    else:
        _fill(connection, name, schema.empty_table())
