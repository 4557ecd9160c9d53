"""A page that takes too much memory to read is told of its fault; what lacks memory is never taken for damage."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.page.document import OUT_OF_MEMORY
from quern.data_pipeline.sources import ReadLog, SourceConfig, jsonl, parquet, plan, read, tree, warc

TEXTS = ("before", "too much", "behind")


def write(folder: Path, kind: str) -> Path:
    if kind == "jsonl":
        path = folder / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif kind == "parquet":
        path = folder / "a.parquet"
        pq.write_table(pa.table({"text": list(TEXTS)}), path)
    elif kind == "text":
        path = folder
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
    else:
        path = folder / "a.wet"
        head = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{}\r\n\r\n"
        path.write_bytes("".join(head.format(len(text), text) for text in TEXTS).encode())
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text", "wet"])
def test_a_page_that_takes_too_much_memory_to_read_has_that_as_its_fault(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((jsonl, "fill"), (parquet, "fill"), (tree, "decode"), (warc, "decode")):
        plain = getattr(module, name)

        def short(*args: object, plain: object = plain, **given: object) -> object:
            if any("too much" in str(value) for value in args):
                raise MemoryError
            return plain(*args, **given)  # type: ignore[operator]

        monkeypatch.setattr(module, name, short)
    source = SourceConfig(name="s", kind=kind, paths=str(write(tmp_path, kind)))  # type: ignore[arg-type]
    log = ReadLog()
    pages = [page for partition in plan(source) for page in read(source, partition, log)]
    assert sorted(page.raw for page in pages) == ["", "before", "behind"]
    assert [page.fault for page in pages].count(OUT_OF_MEMORY) == 1
    assert not log.damage


def test_memory_that_is_short_is_no_damage_of_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: object, **given: object) -> object:
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", short)
    source = SourceConfig(name="s", kind="parquet", paths=str(write(tmp_path, "parquet")))
    with pytest.raises(MemoryError):
        list(read(source, plan(source)[0], ReadLog()))
