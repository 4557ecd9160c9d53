"""A purged run that is looked at: where a document stands, and what the checks of the proof name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from quern.lineage.purge.proof.verify import Proof, verify
from support.purge import purge_case as P


def prove(case: P.Case, **more: Any) -> Proof:
    return verify(str(case.run), purge_list=str(case.purge_list), **more)


def failed(case: P.Case, **more: Any) -> dict[str, list[tuple[str, int | None, str | None]]]:
    """Check → (file, row, doc_id) of its findings."""
    return {
        check.name: [(found.file, found.row, found.doc_id) for found in check.findings]
        for check in prove(case, **more).checks
        if check.num_findings
    }


def spot(case: P.Case, doc_id: bytes) -> tuple[Path, Path, int, dict[str, Any]]:
    """Where a document stands now: shard, spans, row, span."""
    version = json.loads((case.run / "tokens/VERSION.json").read_text())
    for entry in version["sources"].values():
        for shard in entry["shards"]:
            rows = pq.read_table(case.run / "tokens" / shard["spans"]).to_pylist()
            for number, row in enumerate(rows):
                if row["doc_id"] == doc_id:
                    return case.run / "tokens" / shard["bin"], case.run / "tokens" / shard["spans"], number, row
    raise AssertionError(doc_id.hex())


def below(case: P.Case, path: Path) -> str:
    return str(path.relative_to(case.run))


def kept(case: P.Case) -> list[bytes]:
    """Documents that still have tokens."""
    placed = {row["doc_id"] for rows in case.listing.spans.values() for row in rows}
    return sorted(placed - set(case.deletion_set))


def relist(case: P.Case) -> None:
    """Give VERSION.json and the manifests the checksums that files have now: who planted the fault covers it up."""
    root = case.run / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    for stream, entry in version["sources"].items():
        manifest = json.loads((root / entry["manifest"]).read_text())
        for own, listed in zip(manifest["shards"], entry["shards"], strict=True):
            own["sha256"] = listed["sha256"] = P.versions.sha256(root / listed["bin"])
            own["spans_sha256"] = listed["spans_sha256"] = P.versions.sha256(root / listed["spans"])
        (root / entry["manifest"]).write_text(json.dumps(manifest))
        entry["sha256"] = P.versions.sha256(root / entry["manifest"])
        assert stream
    (root / "VERSION.json").write_text(json.dumps(version))


def put_back(path: Path, row: dict[str, Any], text: str) -> None:
    """A document's tokens where its span is: a token is a byte in these runs."""
    tokens = np.fromfile(path, "<u2")
    tokens[row["start"] : row["start"] + row["length"] - 1] = np.frombuffer(text.encode(), np.uint8)
    tokens.tofile(path)
