"""What stands in the tokens of a run, by NumPy and pyarrow alone; and what purges of it must leave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True)
class Piece:
    """A document where it stands."""

    doc_id: bytes
    tokens: tuple[int, ...]
    purged: bool


Streams = dict[str, list[list[Piece]]]
"""Stream → its shards → their documents."""


def scan(run: Path) -> Streams:
    """Everything that VERSION.json lists, each file compared with its checksum."""
    root = run / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    found: Streams = {}
    for stream, entry in version["sources"].items():
        assert sha256(root / entry["manifest"]) == entry["sha256"]
        manifest = json.loads((root / entry["manifest"]).read_text())
        shards = []
        for listed, own in zip(entry["shards"], manifest["shards"], strict=True):
            assert listed["bin"] == f"{stream}/{own['bin']}"
            assert sha256(root / listed["bin"]) == listed["sha256"] == own["sha256"]
            assert sha256(root / listed["spans"]) == listed["spans_sha256"] == own["spans_sha256"]
            tokens = np.fromfile(root / listed["bin"], np.dtype(manifest["dtype"]).newbyteorder("<"))
            rows = pq.read_table(root / listed["spans"]).to_pylist()
            assert len(tokens) == listed["tokens"] == own["tokens"]
            assert len(rows) == listed["documents"] == own["documents"]
            at, pieces = 0, []
            for row in rows:
                assert row["start"] == at
                at += row["length"]
                pieces.append(Piece(row["doc_id"], tuple(tokens[row["start"] : at].tolist()), row["purged"]))
                key = place_key(manifest["seed"], row["doc_id"])
                assert int(own["first_key"], 16) <= key <= int(own["last_key"], 16)
            assert at == len(tokens)
            shards.append(pieces)
        assert sum(shard["tokens"] for shard in entry["shards"]) == entry["tokens"]
        assert sum(shard["documents"] for shard in entry["shards"]) == entry["documents"]
        found[stream] = shards
    return found


def place_key(seed: int, doc_id: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d\0place\0" % seed + doc_id, digest_size=8).digest(), "little")


def masked(before: Streams, gone: Collection[bytes], eot: int) -> Streams:
    """What a mask of ``gone`` makes of it."""
    return {
        stream: [
            [
                Piece(piece.doc_id, (eot,) * len(piece.tokens), True) if piece.doc_id in gone else piece
                for piece in shard
            ]
            for shard in shards
        ]
        for stream, shards in before.items()
    }


def rewritten(
    before: Streams, gone: Collection[bytes], arriving: Mapping[str, Iterable[Piece]], bounds: Mapping[str, list[int]],
    seed: int,
) -> Streams:  # fmt: skip
    """What a rewrite makes of it. ``bounds``: the last place key of each shard, stream by stream."""
    after: Streams = {}
    for stream, shards in before.items():
        new = [list(shard) for shard in shards]
        touched = {number for number, shard in enumerate(shards) if any(piece.doc_id in gone for piece in shard)}
        for piece in arriving.get(stream, ()):
            key = place_key(seed, piece.doc_id)
            new = new or [[]]
            number = next((n for n, last in enumerate(bounds[stream]) if key <= last), len(new) - 1)
            new[number].append(piece)
            touched.add(number)
        for number in touched:
            new[number] = sorted(
                (piece for piece in new[number] if piece.doc_id not in gone and not piece.purged),
                key=lambda piece: (place_key(seed, piece.doc_id), piece.doc_id),
            )
        after[stream] = new
    return after


def manifests(run: Path) -> dict[str, dict[str, Any]]:
    version = json.loads((run / "tokens" / "VERSION.json").read_text())
    return {
        stream: json.loads((run / "tokens" / entry["manifest"]).read_text())
        for stream, entry in version["sources"].items()
    }


def tree(run: Path, below: str = "") -> dict[str, str]:
    """File → SHA-256 of all but locks."""
    return {
        str(path.relative_to(run)): sha256(path)
        for path in sorted((run / below).rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def deletion_set_table(run: Path, doc_ids: Iterable[bytes]) -> pa.Table:
    """A table of condemned documents, as read from the verdicts of a run."""
    wanted, rows = set(doc_ids), []
    removed = {row["doc_id"]: row["kind"] for row in pq.read_table(run / "duplicates/decisions.parquet").to_pylist()}
    for path in sorted((run / "verdicts").rglob("*.parquet")):
        columns = ["doc_id", "source", "canonical_url", "post_filter_hash", "stage"]
        for row in pq.read_table(path, columns=columns).to_pylist():
            if row["doc_id"] in wanted:
                rows.append(
                    {**row, "partition": path.stem, "why": "selected", "through": None}
                    | {"removed_as": removed.get(row["doc_id"])}
                )
    from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA

    return pa.Table.from_pylist(rows, DELETION_SET_SCHEMA).sort_by("doc_id")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def verdicts(run: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Of every page of a run."""
    paths = sorted((run / "verdicts").rglob("*.parquet"))
    return [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]
