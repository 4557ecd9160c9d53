"""Every table is opened in one place, by the caller's thread, and what is wrong with one names its file."""

from __future__ import annotations

import ast
import errno
import io
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.errors import InputError
from quern.storage.parquet import Table, null_count, open_table, read_batches, read_table, table_in

REPOSITORY = Path(__file__).parents[1]
TABLE = pa.table({"number": list(range(1000)), "text": [None if n % 5 else f"text {n}" for n in range(1000)]})
READERS = (
    "ParquetDataset",
    "ParquetFile",
    "ParquetReader",
    "read_metadata",
    "read_pandas",
    "read_schema",
    "read_table",
)


def written(path: str, table: pa.Table = TABLE) -> str:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=300)
    storage.publish_bytes(path, sink.getvalue())
    return path


def test_no_other_module_opens_a_table() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in sorted((REPOSITORY / "quern").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in READERS and ast.unparse(node.value) in ("pq", "parquet"))
        or (isinstance(node, ast.ImportFrom) and node.module == "pyarrow.parquet")
    ]
    assert [line.rpartition(":")[0] for line in found] == ["quern/storage/parquet.py"], found


@pytest.mark.parametrize("place", ["local", "url", "store"])
def test_what_was_written_is_read(tmp_path: Path, place: str) -> None:
    path = {"local": str(tmp_path / "a:b.parquet"), "url": f"file://{tmp_path}/t.parquet", "store": "memory://t/t"}[
        place
    ]
    written(path)
    assert read_table(path).equals(TABLE)
    assert read_table(path, ["text"]).equals(TABLE.select(["text"]))
    batches = list(read_batches(path, ["number"], 256))
    assert max(len(batch) for batch in batches) <= 256
    assert pa.Table.from_batches(batches).equals(TABLE.select(["number"]))
    with open_table(path, ["number", "text"]) as table:
        assert table.read_row_group(1, ["text"]).equals(TABLE.slice(300, 300).select(["text"]))
        assert table.read_row_groups(range(1, 3)).equals(TABLE.slice(300, 600))
        assert [null_count(table, 0, name) for name in ("number", "text")] == [0, 240]
    wanted = pa.schema([("text", pa.binary())])
    assert table_in(storage.read_bytes(path), wanted).equals(TABLE.select(["text"]).cast(wanted))
    with pytest.raises(InputError, match="Failed to parse string"):
        table_in(storage.read_bytes(path), pa.schema([("text", pa.int64())]))
    with pytest.raises(InputError, match="none"):
        table_in(storage.read_bytes(path), pa.schema([("none", pa.int64())]))


@pytest.mark.parametrize("store", [False, True])
def test_what_cannot_be_read_names_its_file(tmp_path: Path, store: bool) -> None:
    folder = "memory://damaged" if store else str(tmp_path)
    with pytest.raises(InputError, match=f"^{folder}/none: no such file$"):
        read_table(f"{folder}/none")
    with pytest.raises(FileNotFoundError):
        read_table(f"{folder}/none", missing=None)
    path = written(f"{folder}/t")
    data = storage.read_bytes(path)
    with pytest.raises(InputError, match=f"^{path}: has no column 'other'; expected a table of numbers$"):
        next(read_batches(path, ["number", "other"], expected="a table of numbers"))
    with pytest.raises(InputError, match=f"^{path}: cannot be read: "), open_table(path) as table:
        table.read(["text"])["text"].cast(pa.int64())
    twice = pa.Table.from_arrays([TABLE["number"]] * 2, ["number", "number"])
    with pytest.raises(InputError, match="has 2 columns 'number', expected one"):
        read_table(written(f"{folder}/twice", twice), ["number"])
    for damaged in (b"", data[:-1], b"\0" * 200 + data[200:]):
        storage.publish_bytes(path, damaged)
        with pytest.raises(InputError, match=f"^{path}: cannot be read: "):
            read_table(path)


def test_the_error_of_another_file_stays(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)), open_table(written(str(tmp_path / "t"))):
        tmp_path.read_bytes()


def test_a_block_that_fails_at_another_file_says_so(tmp_path: Path) -> None:
    path = written(str(tmp_path / "t.parquet"))
    for error in (FileNotFoundError(errno.ENOENT, "gone", "other"), BrokenPipeError(errno.EPIPE, "the reader left")):
        with pytest.raises(type(error)), open_table(path):
            raise error


def test_the_reason_is_told_whatever_the_length_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, f"[Errno 13] Failed to open local file '{path}'. Detail: [errno 13]")

    monkeypatch.setattr(pa, "OSFile", refused)
    long = str(tmp_path / ("x" * 200))
    with pytest.raises(InputError, match=r"x: cannot be read: Permission denied$"), open_table(long):
        pass


def test_the_callers_thread_alone_reads_python_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of pyarrow that lets go of a file's bytes while the process ends aborts it."""
    readers = set()

    class Noted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(threading.current_thread())
            return super().read(size)

    wide = pa.table({f"column {n}": list(range(5000)) for n in range(20)})
    path = written(str(tmp_path / "t"), wide)
    data = storage.read_bytes(path)
    with Table(Noted(data), pre_buffer=False) as table:
        assert table.read().equals(wide)
        assert pa.Table.from_batches(table.iter_batches(100)).equals(wide)
        assert table.read_row_group(0).equals(wide.slice(0, 300))
        assert table.read_row_groups([0, 1]).equals(wide.slice(0, 600))
    monkeypatch.setattr(io, "BytesIO", Noted)
    assert table_in(data).equals(wide)
    assert readers == {threading.current_thread()}
    monkeypatch.setattr(storage, "open_read", None)
    assert read_table(path).equals(wide)  # and of this machine's files there is none
