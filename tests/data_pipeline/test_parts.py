"""Parts of an unfinished partition: what went in comes out, in one file."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.data_pipeline.execution.parts import read_head, read_tables, write_part
from quern.data_pipeline.partition import _one_table


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


def test_a_row_group_does_not_show_where_its_rows_were_set_down() -> None:
    """In texts as large as those of pages: pages of a column would end with each piece."""
    draw = random.Random(1)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(10, 60_000))) for _ in range(64)]
    table = pa.table({"text": texts, "shingles": pa.array([[draw.getrandbits(40)] * 9 for _ in texts])})

    def written(whole: pa.Table) -> bytes:
        file = io.BytesIO()
        with pq.ParquetWriter(file, whole.schema, compression="zstd") as writer:
            writer.write_table(whole)
        return file.getvalue()

    cut = [0, 3, 30, 31, 50, 64]
    parts = [{"t": pa.table(table.slice(a, b - a).to_pydict(), table.schema)} for a, b in itertools.pairwise(cut)]
    assert written(pa.concat_tables([part["t"] for part in parts])) != written(table)
    assert written(_one_table(parts, "t")) == written(table)
