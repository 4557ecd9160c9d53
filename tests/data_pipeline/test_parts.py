"""Parts of an unfinished partition: what went in comes out, in one file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from quern import storage
from quern.data_pipeline.execution.parts import read_head, read_tables, write_part


@pytest.mark.parametrize("base", ["", "memory:///parts"])
def test_tables_and_head_come_back(tmp_path: Path, base: str) -> None:
    path = storage.join(base or str(tmp_path), "part-00000")
    head = {"inputs": {"é.gz": "1:2"}, "progress": {"pages": 7, "by_reason": {"a:b\nc": 1}}}
    tables = {
        "verdicts": pa.table({"x": [1, None, 3], "names": [["a"], [], None]}),
        "documents": pa.table({"text": ["œuvre", "b" * 1000]}),
        "signatures": pa.table({"doc_id": pa.array([], pa.binary(16))}),
    }
    write_part(path, head, tables)
    assert storage.list_files(base or str(tmp_path)) == [path]
    assert read_head(path) == head
    assert read_tables(path) == tables
    assert read_head(path + "1") is None
