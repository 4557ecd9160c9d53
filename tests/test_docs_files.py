"""docs/files.md against the schemas with which the files are written."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, SIGNATURE_SCHEMA, verdict_schema
from quern.lineage.index.changes import CHANGES_SCHEMA
from quern.tokenize.selection.measures import SCHEMA
from quern.tokenize.shard_format import SPANS_SCHEMA

TEXT = (Path(__file__).parents[1] / "docs" / "files.md").read_text()
TABLES = {
    "documents": DOCUMENT_SCHEMA,
    "signatures": SIGNATURE_SCHEMA,
    "decisions": DECISION_SCHEMA,
    "clusters": CLUSTER_SCHEMA,
    "spans": SPANS_SCHEMA,
    "changes": CHANGES_SCHEMA,
    "measures": SCHEMA,
}


def types(schema: pa.Schema) -> dict[str, str]:
    named = {pa.binary(16): "16 bytes", pa.string(): "text", pa.bool_(): "true or false", pa.float64(): "number"}
    lists = {pa.list_(pa.string()): "list of text", pa.timestamp("us", tz="UTC"): "timestamp, UTC"}
    lists |= {pa.list_(kind): "integers" for kind in (pa.uint32(), pa.uint64())}
    return {field.name: (named | lists).get(field.type, "integer") for field in schema}


def columns(rows: list[str], of: str | None = None) -> dict[str, str]:
    """The columns and types that a table of the page gives; one type for several names is that of each."""
    found = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) < 3 or (of and cells.pop(0) != of) or "`" not in cells[0]:
            continue
        names = re.findall("`([^`]+)`", cells[0])
        kinds = [cells[1]] if cells[1].endswith("UTC") else cells[1].split(", ")
        found |= dict(zip(names, kinds * len(names) if len(kinds) == 1 else kinds, strict=True))
    return found


def test_the_columns_of_verdicts_are_those_of_its_schema() -> None:
    part = TEXT.split("Columns of `verdicts`:")[1].split("Columns of the other tables:")[0]
    assert columns(part.splitlines()) == types(verdict_schema(()))


def test_the_columns_of_the_other_tables_are_those_of_their_schemas() -> None:
    rows = TEXT.split("Columns of the other tables:")[1].split("## A training run")[0].splitlines()
    for name, schema in TABLES.items():
        assert columns(rows, name) == types(schema), name
