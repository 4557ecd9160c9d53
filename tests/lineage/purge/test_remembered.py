"""When a purge need not write tombstones: the list has all of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.stages.tombstones import PURGE_SCHEMA
from quern.lineage.purge.apply.finish import is_remembered
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA

DOC, TEXT = b"d" * 15 + b"\0", b"t" * 16


@pytest.mark.parametrize(
    ("doc_id", "url", "text", "remembered"),
    [
        (DOC, "http://site.example/a", TEXT, True),  # whatever the scheme
        (DOC, None, TEXT, False),
        (DOC, "https://site.example/b", TEXT, False),
        (None, "https://site.example/a", TEXT, False),
        (DOC, "https://site.example/a", None, False),
    ],
)
def test_a_list_remembers_a_document_that_it_has_all_of(
    tmp_path: Path, doc_id: bytes | None, url: str | None, text: bytes | None, remembered: bool
) -> None:
    row = {"doc_id": doc_id, "canonical_url": url, "post_filter_hash": text}
    pq.write_table(pa.Table.from_pylist([row], PURGE_SCHEMA), tmp_path / "list.parquet")
    deletion_set = {
        "doc_id": DOC, "source": "s", "partition": "p", "canonical_url": "https://site.example/a",
        "post_filter_hash": TEXT, "why": "selected", "through": None, "stage": None, "removed_as": None,
    }  # fmt: skip
    assert is_remembered(str(tmp_path), pa.Table.from_pylist([deletion_set], DELETION_SET_SCHEMA)) == remembered


def test_no_list_remembers_nothing(tmp_path: Path) -> None:
    assert not is_remembered(str(tmp_path / "none"), DELETION_SET_SCHEMA.empty_table())
