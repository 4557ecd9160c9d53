"""Token files for imports, and how an import of one is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.tokenize.exchange.ingest import ImportOptions, ingest
from support.exchange import plain_formats as plain

EOT = 256
FORMATS = ("megatron", "datatrove", "bin")
SUFFIX = {"megatron": ".bin", "datatrove": ".ds", "bin": ".bin"}


def options(ranks: str, format: Any, **changes: Any) -> ImportOptions:
    return ImportOptions(format, "own", ranks, **changes)


def write(format: str, folder: Path, name: str, documents: list[list[int]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{SUFFIX[format]}"
    if format == "megatron":
        plain.write_megatron(folder / name, [[document] for document in documents])
    elif format == "datatrove":
        plain.write_datatrove(path, documents)
    else:
        path.write_bytes(plain.pack("uint16", [token for document in documents for token in document]))
    return path


def draw(seed: int, count: int = 50) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*(rng.randrange(256) for _ in range(rng.randint(0, 40))), EOT] for _ in range(count)]


def verdicts(run: Path, source: str = "imported") -> dict[bytes, dict[str, Any]]:
    rows = [row for path in sorted((run / "verdicts" / source).iterdir()) for row in pq.read_table(path).to_pylist()]
    assert len({row["doc_id"] for row in rows}) == len(rows)
    return {row["doc_id"]: row for row in rows}


def refused(files: list[Path], out: Path, given: ImportOptions, *told: str) -> None:
    before = sorted(out.parent.iterdir())
    with pytest.raises(InputError) as caught:
        ingest([str(file) for file in files], str(out), given)
    for text in told:
        assert text in str(caught.value)
    assert sorted(out.parent.iterdir()) == before
