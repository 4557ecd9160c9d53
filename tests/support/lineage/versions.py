"""Later corpus versions of a data run, written by hand as the contract has them: new files, no old one touched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def mask(run: Path, doc_ids: Collection[bytes], *, changes: bool = True) -> int:
    """Purge documents: their tokens become EOT where they stand. The new version; ``changes``: write what it did."""
    root = run / "tokens"
    record = json.loads((root / "VERSION.json").read_text())
    version, eot = record["version"] + 1, record["encoding"]["eot_id"]
    for stream, listed in record["sources"].items():
        manifest = json.loads((root / listed["manifest"]).read_text())
        for number, (info, entry) in enumerate(zip(manifest["shards"], listed["shards"], strict=True)):
            spans = pq.read_table(root / stream / info["spans"])
            rows = spans.to_pylist()
            if not any(row["doc_id"] in doc_ids for row in rows):
                continue
            tokens = np.fromfile(root / stream / info["bin"], manifest["dtype"])
            for row in rows:
                if row["doc_id"] in doc_ids:
                    row["purged"] = True
                    tokens[row["start"] : row["start"] + row["length"]] = eot
            info |= {
                name: f"shard_{number:05d}.v{version}.{end}"
                for name, end in (("bin", "bin"), ("spans", "spans.parquet"))
            }
            tokens.tofile(root / stream / info["bin"])
            pq.write_table(pa.Table.from_pylist(rows, spans.schema), root / stream / info["spans"])
            info |= {
                "sha256": sha256(root / stream / info["bin"]),
                "spans_sha256": sha256(root / stream / info["spans"]),
            }
            entry |= {name: info[name] for name in ("sha256", "spans_sha256")}
            entry |= {name: f"{stream}/{info[name]}" for name in ("bin", "spans")}
        listed["manifest"] = f"{stream}/manifest.v{version}.json"
        (root / listed["manifest"]).write_text(json.dumps(manifest))
        listed["sha256"] = sha256(root / listed["manifest"])
    if changes:
        write_changes(run, version, {doc_id: "purged" for doc_id in doc_ids})
    record |= {"version": version, "parent": version - 1, "kind": "mask"}
    (root / "VERSION.json").write_text(json.dumps(record))
    return version


def write_changes(run: Path, version: int, actions: dict[bytes, str]) -> None:
    """``tokens/changes.v<version>.parquet``."""
    schema = pa.schema(
        [pa.field("doc_id", pa.binary(16), nullable=False), pa.field("action", pa.string(), nullable=False)]
    )
    rows = [{"doc_id": doc_id, "action": action} for doc_id, action in sorted(actions.items())]
    pq.write_table(pa.Table.from_pylist(rows, schema), run / "tokens" / f"changes.v{version}.parquet")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
