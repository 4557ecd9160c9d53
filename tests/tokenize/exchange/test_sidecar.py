"""Exported files that come back: the same bytes, ids and records; tables that do not fit are refused."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.tokenize.exchange import sidecar
from quern.tokenize.exchange.export import export
from quern.tokenize.exchange.ingest import ingest
from support.damage import flip
from support.exchange import plain_formats as plain
from support.exchange.import_case import FORMATS, options, refused, verdicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("merge", "eot", "format"),
    [
        pytest.param(merge, eot, form, marks=() if merge == (eot == (form == "megatron")) else pytest.mark.long)
        for merge in (True, False)
        for eot in (True, False)
        for form in FORMATS
        if eot or form != "bin"  # raw ids keep their EOT
    ],
)
def test_what_comes_back_goes_out_as_the_same_bytes(
    run_dir: Path, tmp_path: Path, format: Any, eot: bool, merge: bool
) -> None:
    first = export(str(run_dir), format, str(tmp_path / "out"), sources=["web"], eot=eot, merge=merge)
    files = [str(tmp_path / "out" / own.file) for own in first.files]
    ranks = str(run_dir / "tokens" / "encoding.tiktoken")
    for sidecars in (True, False):
        run, again = tmp_path / f"run-{sidecars}", tmp_path / f"again-{sidecars}"
        report = ingest(files, str(run), options(ranks, format, source="web", sidecars=sidecars))
        assert all(own.sidecar is sidecars for own in report.files)
        export(str(run), format, str(again), eot=eot)
        names = sorted(path.name for path in again.iterdir())
        whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        if merge:  # one file is shard 0
            whole = {name.replace("web.", "web_00000.", 1): data for name, data in whole.items()}
        if not eot and not sidecars:
            # documents without a token are no documents where nothing else tells of them
            assert all(again.joinpath(n).read_bytes() == whole[n] for n in names if n.endswith((".bin", ".ds")))
            continue
        assert names == sorted(whole)
        for name in names:
            tables = name.endswith(".documents.parquet") and (merge or not sidecars)
            if name != "export.json" and not tables:
                assert (again / name).read_bytes() == whole[name], name


@pytest.mark.slow
def test_documents_get_their_ids_and_records_back(run_dir: Path, listing: Any, tmp_path: Path) -> None:
    export(str(run_dir), "megatron", str(tmp_path / "out"), sources=["web"], eot=False)
    ranks = str(run_dir / "tokens" / "encoding.tiktoken")
    files = sorted(map(str, (tmp_path / "out").glob("*.idx")))
    ingest(files, str(tmp_path / "run"), options(ranks, "megatron", source="back"))
    live = [row for row in listing.spans["web"] if not row["purged"]]
    assert [doc_id for doc_id, _ in plain.read_run(tmp_path / "run", "back")] == [row["doc_id"] for row in live]
    before = {row["doc_id"]: row for row in listing.rows}
    for doc_id, row in verdicts(tmp_path / "run", "back").items():
        for name in row.keys() - {"source"}:
            assert row[name] == before[doc_id][name], name


Change = Callable[[Path, Path], Any]


def _rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def _set(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    values = table[name].to_pylist()
    values[row] = value
    return table.set_column(
        table.column_names.index(name), table.schema.field(name), pa.array(values, table.schema.field(name).type)
    )


def _flip_a_url(data: Path, side: Path) -> None:
    """A bit of a page of data; the table is whole otherwise."""
    place = pq.read_metadata(side).row_group(0).column(3)
    assert place.path_in_schema == "url"
    flip(side, place.data_page_offset + place.total_compressed_size // 2, 4)


def _share_a_long_url(side: Path) -> None:
    """One text of 100 MB in a small file, which every row has."""
    table = pq.read_table(side)
    assert len(table) > 10
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * len(table), pa.int32()), ["x" * (100 << 20)])
    at, told = table.column_names.index("url"), table.schema.metadata
    table = table.set_column(at, "url", shared).replace_schema_metadata()
    with pq.ParquetWriter(
        side, table.schema, dictionary_pagesize_limit=1 << 30, compression="zstd", store_schema=False
    ) as out:
        out.write_table(table)
        out.add_key_value_metadata(told)
    assert side.stat().st_size < 1 << 20


BROKEN: dict[str, tuple[Change, str]] = {
    "other bytes": (lambda data, side: data.write_bytes(b"A\0" + data.read_bytes()[2:]), "is of other bytes than"),
    "another file's": (lambda data, side: shutil.copy(side.with_name("web_00001.documents.parquet"), side),
                       "is of a file 'web_00001.bin'"),
    "not a table": (lambda data, side: side.write_bytes(b"PAR1"), "cannot be read"),
    "another table": (lambda data, side: pq.write_table(pa.table({"doc_id": [1]}), side), "no table of documents"),
    "without metadata": (lambda data, side: pq.write_table(pq.read_table(side).replace_schema_metadata(), side),
                         "no table of documents"),
    "a text of all": (lambda data, side: _share_a_long_url(side), "expected at most 1 GiB of text in 16384 rows"),
    "a bit": (_flip_a_url, "cannot be read"),
    "a row more": (lambda data, side: _rewrite(side, lambda t: pa.concat_tables([t, t.slice(0, 1)])), "documents"),
    "a row less": (lambda data, side: _rewrite(side, lambda t: t.slice(0, len(t) - 1)), "documents"),
    "a length": (lambda data, side: _rewrite(side, lambda t: _set(t, "length", 2, 3)), "row"),
    "a negative length": (lambda data, side: _rewrite(side, lambda t: _set(t, "length", 2, -(2**62))), "row"),
    "a twin": (lambda data, side: _rewrite(side, lambda t: _set(t, "doc_id", 2, t["doc_id"][1].as_py())),
               "two documents have the doc_id"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "format"),
    [
        *((case, "megatron") for case in BROKEN),
        *(pytest.param(case, "bin", marks=() if case == "other bytes" else pytest.mark.long) for case in BROKEN),
    ],
)
def test_a_table_that_does_not_fit_is_refused(run_dir: Path, tmp_path: Path, format: Any, case: str) -> None:
    change, told = BROKEN[case]
    export(str(run_dir), format, str(tmp_path / "out"), sources=["web"])
    data, side = tmp_path / "out" / "web_00000.bin", tmp_path / "out" / "web_00000.documents.parquet"
    change(data, side)
    ranks = str(run_dir / "tokens" / "encoding.tiktoken")
    refused([data], tmp_path / "run", options(ranks, format), told)
    if case != "other bytes" or format != "bin":
        ingest([str(data)], str(tmp_path / "run"), options(ranks, format, sidecars=False))


@pytest.mark.slow
def test_twins_are_found_among_more_documents_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "_JOIN_BYTES", 20 << 20)
    draw = random.Random(5)
    ids = [draw.randbytes(16) for _ in range(400_000)]
    ids[-1] = ids[7]
    (tmp_path / "verdicts").mkdir()
    schema = pa.schema([pa.field("doc_id", pa.binary(16)), *sidecar.RECORD])
    columns = [ids if field.name == "doc_id" else pa.nulls(len(ids), field.type) for field in schema]
    pq.write_table(pa.table(columns, schema=schema), tmp_path / "verdicts" / "a.parquet")
    (tmp_path / "scratch").mkdir()
    assert sidecar.find_twin(str(tmp_path / "verdicts"), str(tmp_path / "scratch")) == ids[7]
    assert list((tmp_path / "scratch").iterdir()) == []
