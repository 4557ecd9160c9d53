"""The real pages of the shared corpus, decoded by the charset its manifest names, and workers of Ray."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.execution.engine import Engine, open_engine


@dataclass(frozen=True)
class RealPage:
    record_id: str
    language: str
    html: str


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Engine]:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(request.module)  # workers cannot import a test module
    with open_engine(2) as engine:
        yield engine


@pytest.fixture(scope="session")
def real_pages(shared: Path) -> Callable[..., Iterator[RealPage]]:
    """``real_pages(every=1)``: every so-many-th page, in the order of the files."""
    lines = (shared / "data" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    manifest = {row["record_id"]: row for row in map(json.loads, lines)}

    def pages(every: int = 1) -> Iterator[RealPage]:
        number = 0
        for path in sorted((shared / "data" / "warc").glob("*.warc.gz")):
            with path.open("rb") as file:
                for record in ArchiveIterator(file):
                    if record.rec_type != "response":
                        continue
                    number += 1
                    if number % every:
                        continue
                    row = manifest[record.rec_headers.get_header("WARC-Record-ID")]
                    html = record.content_stream().read().decode(row["charset"] or "utf-8", "replace")
                    yield RealPage(row["record_id"], row["lang"], html)

    return pages
