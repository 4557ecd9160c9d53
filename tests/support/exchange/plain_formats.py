"""Token files of other trainers, read and written from their formats' definitions with struct alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

LETTERS = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H", "uint32": "I"}
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

Document = list[int]


def pack(dtype: str, values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}{LETTERS[dtype]}", *values)


def unpack(dtype: str, data: bytes) -> list[int]:
    letter = LETTERS[dtype]
    size = struct.calcsize(letter)
    assert len(data) % size == 0
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


def read_megatron(prefix: Path) -> tuple[str, list[list[Document]]]:
    """The dtype, and the sequences of each document."""
    index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1
    place = 34
    lengths = struct.unpack_from(f"<{sequences}i", index, place)
    place += 4 * sequences
    pointers = struct.unpack_from(f"<{sequences}q", index, place)
    place += 8 * sequences
    edges = struct.unpack_from(f"<{entries}q", index, place)
    assert place + 8 * entries == len(index)
    dtype = CODES[code]
    size = struct.calcsize(LETTERS[dtype])
    read = [unpack(dtype, data[p : p + size * n]) for p, n in zip(pointers, lengths, strict=True)]
    assert edges[0] == 0
    assert edges[-1] == sequences
    assert sum(lengths) * size == len(data)
    return dtype, [read[a:b] for a, b in pairwise(edges)]


def megatron_index(
    code: int, lengths: Sequence[int], pointers: Sequence[int], edges: Sequence[int], *,
    magic: bytes = b"MMIDIDX\x00\x00", version: int = 1, sequences: int | None = None, entries: int | None = None,
) -> bytes:  # fmt: skip
    counts = len(lengths) if sequences is None else sequences, len(edges) if entries is None else entries
    return (
        magic
        + struct.pack("<QBQQ", version, code, *counts)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(edges)}q", *edges)
    )


def write_megatron(prefix: Path, documents: Sequence[Sequence[Document]], code: int = 8, gap: bytes = b"") -> None:
    """Each document's sequences one after the other, ``gap`` before each document."""
    dtype = CODES[code]
    data, lengths, pointers, edges = b"", [], [], [0]
    for document in documents:
        data += gap
        for sequence in document:
            pointers.append(len(data))
            lengths.append(len(sequence))
            data += pack(dtype, sequence)
        edges.append(len(lengths))
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(megatron_index(code, lengths, pointers, edges))


def read_datatrove(path: Path) -> tuple[str, list[Document]]:
    name, tokens, _ = Path(f"{path}.metadata").read_text().split("\n")
    dtype = {"2": "uint16", "4": "uint32"}[name.split("|")[-1]]
    ids = unpack(dtype, path.read_bytes())
    assert len(ids) == int(tokens)
    index = Path(f"{path}.index").read_bytes()
    ends = struct.unpack(f"<{len(index) // 8}Q", index)
    assert ends[-1] == len(ids)
    return dtype, [ids[a:b] for a, b in zip((0, *ends), ends, strict=False)]


def write_datatrove(path: Path, documents: Sequence[Document], dtype: str = "uint16", metadata: bool = True) -> None:
    path.write_bytes(b"".join(pack(dtype, document) for document in documents))
    ends = [sum(map(len, documents[: n + 1])) for n in range(len(documents))]
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        size = struct.calcsize(LETTERS[dtype])
        Path(f"{path}.metadata").write_text(f"gpt2|{size}\n{sum(map(len, documents))}\n1 T")


def read_run(run: Path, source: str) -> list[tuple[bytes, Document]]:
    """(doc_id, tokens) of every document of a run, from VERSION.json and the files it names."""
    import pyarrow.parquet as pq

    root = run / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    dtype = version["encoding"]["dtype"]
    found = []
    for shard in version["sources"][source]["shards"]:
        ids = unpack(dtype, (root / shard["bin"]).read_bytes())
        for row in pq.read_table(root / shard["spans"]).to_pylist():
            found.append((row["doc_id"], ids[row["start"] : row["start"] + row["length"]]))
    return found


def place_id(source: str, relative: str, position: int) -> bytes:
    return blake2b(b"\0".join([source.encode(), relative.encode(), str(position).encode()]), digest_size=16).digest()
