"""What the policy promises, held against duplicate removal itself: without the condemned it keeps what it kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes.run import DuplicatesReport, run
from quern.data_pipeline.execution.commits import publish_commit
from quern.lineage.purge.restoration.affected import capped_bands
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from support.data_pipeline import random_runs

pytestmark = pytest.mark.slow


class Here:
    """An engine that runs every task at once."""

    num_workers = 1

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, label: str, on_death: Any = None
    ) -> Iterator[tuple[int, Any]]:
        yield from ((index, function(*task)) for index, task in enumerate(tasks))


PRIORITIES = {"a": 1}
_REMEMBERED = ("doc_id", "canonical_url", "post_filter_hash")


def kept(
    folder: Path, docs: Sequence[random_runs.Doc], config: DuplicatesConfig
) -> tuple[set[bytes], DuplicatesReport]:
    """Write the documents as a run, remove its duplicates, and tell what is left."""
    partitions = random_runs.write(folder, docs)
    report = run(str(folder), partitions, PRIORITIES, config, Here(), str(folder / ".work"))
    removed = set(pq.read_table(folder / "duplicates" / "decisions.parquet")["doc_id"].to_pylist())
    return {doc.doc_id for doc in docs if doc.kept} - removed, report


def corpus(draw: random.Random, size: int) -> list[random_runs.Doc]:
    """With URLs as the chain makes them, some of which differ in their scheme only."""
    docs = random_runs.corpus(draw, size)
    return [
        doc if doc.url is None else replace(doc, url=f"{draw.choice(['http', 'https'])}://site.example/{doc.url}")
        for doc in docs
    ]


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 10))])
def test_without_the_condemned_duplicate_removal_keeps_what_it_kept(tmp_path: Path, seed: int) -> None:
    """Left out as tombstones do: by id, URL under any scheme, and text."""
    draw = random.Random(seed)
    config = random_runs.config(draw).model_copy(update={"max_band_members": 1000})
    docs = corpus(draw, draw.choice([60, 150, 300]))
    before, report = kept(tmp_path / "run", docs, config)
    assert report.capped_bands == 0
    for turn in range(3):
        selected = {doc.doc_id for doc in draw.sample(docs, draw.choice([1, 3, 20]))}
        deletion_set = find_deletion_set(str(tmp_path / "run"), Wanted(doc_ids=frozenset(selected))).to_pylist()
        gone, places, texts = ({row[name] for row in deletion_set} for name in _REMEMBERED)
        places = {place.partition("://")[2] for place in places - {None}}
        assert selected <= gone
        left = [
            doc
            for doc in docs
            if not (doc.doc_id in gone or doc.text in texts or (doc.url and doc.url.partition("://")[2] in places))
        ]
        after, _ = kept(tmp_path / f"fresh-{turn}", left, config)
        assert after == before - gone


def test_a_band_too_large_to_be_compared_is_the_one_reservation_and_is_told(tmp_path: Path) -> None:
    """Three share a band of which only the first is compared; without it the second is, and is like the third."""
    config = DuplicatesConfig(num_perm=12, bands=5, rows=2, max_band_members=1)
    shapes = [(range(100, 120), 50), (range(20), 40), (range(1, 20), 30)]
    docs = [
        random_runs.Doc(bytes([n]) * 16, "a", "p", bytes([n]) * 16, None, 0, words, (7,) * 12, frozenset(shingles))
        for n, (shingles, words) in enumerate(shapes)
    ]
    ids = [doc.doc_id for doc in docs]
    before, report = kept(tmp_path / "run", docs, config)
    counts = asdict(report)
    publish_commit(
        str(tmp_path / "run"), "duplicates", "all", "decisions", inputs={}, config="", outputs={}, counts=counts
    )
    assert capped_bands(str(tmp_path / "run")) == 5
    gone = find_deletion_set(str(tmp_path / "run"), Wanted(doc_ids=frozenset(ids[:1])))["doc_id"].to_pylist()
    after, _ = kept(tmp_path / "fresh", docs[1:], config)
    assert (before, gone, after) == (set(ids), ids[:1], {ids[1]})
