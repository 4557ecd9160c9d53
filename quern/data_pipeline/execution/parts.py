"""Finished rows of an unfinished partition, flushed to the scratch folder, one atomically published file per part.

A file is a line of JSON (what the rows were made from, how far the partition is, where its tables stand) and the tables
behind it, each in Arrow's file format. One file costs one round trip to a store, and commits its own progress.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from quern import storage

__all__ = ["read_head", "read_tables", "write_part"]

#: Where tables begin: Arrow maps columns where they lie, and wants them so.
_ALIGN = 64


def write_part(path: str, head: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> None:
    """Publish a part. ``head`` is plain data; :func:`read_head` gives it back."""
    body, places = io.BytesIO(), {}
    for name, table in tables.items():
        body.write(bytes(-body.tell() % _ALIGN))
        start = body.tell()
        with pa.ipc.new_file(body, table.schema) as writer:
            writer.write_table(table)
        places[name] = [start, body.tell() - start]
    with storage.publish(path) as file:
        line = json.dumps({"head": dict(head), "tables": places}).encode()
        file.write(line + b" " * (-(len(line) + 1) % _ALIGN) + b"\n")
        file.write(body.getbuffer())


def read_head(path: str) -> dict[str, Any] | None:
    """What the part was written with; None where there is none."""
    try:
        with storage.open_read(path) as file:
            head: dict[str, Any] = json.loads(file.readline())["head"]
            return head
    except FileNotFoundError:
        return None


def read_tables(path: str) -> dict[str, pa.Table]:
    """The tables of a part, by name."""
    data = storage.read_bytes(path)
    line, _, _ = data.partition(b"\n")
    body = pa.py_buffer(data)
    return {
        name: pa.ipc.open_file(body.slice(len(line) + 1 + start, size)).read_all()
        for name, (start, size) in json.loads(line)["tables"].items()
    }
