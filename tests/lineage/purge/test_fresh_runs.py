"""What was purged stays out of later runs, and nothing else does: whole runs over crawls with planted duplicates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quern.lineage.purge.record.remember import Signatures, purge_list_of, remember, tombstones_name
from quern.lineage.purge.restoration.affected import capped_bands
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import select
from support.purge import crawls
from support.purge.crawls import Crawled


def purge(run: Path, given: dict[str, list[str]], *, similar: bool = False) -> tuple[str, pa.Table]:
    """Condemn and remember; the purge list and the condemned."""
    deletion_set = find_deletion_set(str(run), select(str(run), given))
    folder, _ = purge_list_of(str(run))
    name = tombstones_name("run", 2, deletion_set, similar=similar)
    remember(folder, name, deletion_set, Signatures(str(run)) if similar else None)
    return folder, deletion_set


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (0, {"duplicates": {"url_keep": "latest", "threshold": 0.7}}),
        pytest.param(1, {}, marks=pytest.mark.long),
        pytest.param(2, {"duplicates": {"exact": False}}, marks=pytest.mark.long),
    ],
)
def test_a_fresh_run_with_the_purge_list_keeps_what_was_kept_without_the_condemned(
    tmp_path: Path, seed: int, changes: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    pages = crawls.planted(draw, 40)
    half = len(pages) // 2
    warcs = [
        crawls.write_warc(tmp_path / "in" / f"{number}.warc.gz", own)
        for number, own in enumerate((pages[:half], pages[half:]))
    ]
    run = crawls.run(tmp_path / "run", warcs, **changes)
    before, rows = crawls.kept(run), crawls.verdicts(run)
    assert {row["removed"] for row in rows} >= {None, "near", "url"}
    assert {row["stage"] for row in rows} == {None, "quality"}
    assert capped_bands(str(run)) == 0
    removed = [row for row in rows if row["removed"] is not None]
    chosen = [draw.choice(removed)["url"] for _ in range(4)] + [draw.choice(rows)["url"] for _ in range(4)]
    folder, deletion_set = purge(run, {"url": chosen})
    purge(run, {"domain": ["www3.example"]})
    gone = set(deletion_set["doc_id"].to_pylist())
    gone |= set(find_deletion_set(str(run), select(str(run), {"domain": ["www3.example"]}))["doc_id"].to_pylist())
    assert {"selected", "url", "text", "duplicate"} >= set(deletion_set["why"].to_pylist()) > {"selected"}
    fresh = crawls.run(tmp_path / "fresh", warcs, purge_list=folder, **changes)
    after = {pair for pair in before if pair[0] not in gone}
    assert after < before
    assert crawls.kept(fresh) == after
    purged = {row["doc_id"] for row in crawls.verdicts(fresh) if row["stage"] == "purged"}
    assert purged == gone


@pytest.mark.slow
def test_what_returns_stays_out_and_what_only_looks_alike_comes_in_unless_asked(tmp_path: Path) -> None:
    draw = random.Random(9)
    secret, other = crawls.prose(draw, 30), crawls.prose(draw, 30)
    old = [Crawled("https://a.example/x", secret), Crawled("https://b.example/", other)]
    run = crawls.run(tmp_path / "run", [crawls.write_warc(tmp_path / "in" / "old.warc.gz", old)])
    again = {
        "https://c.example/copy": secret,
        "http://a.example/x?utm_source=mail": crawls.prose(draw, 30),
        "https://c.example/similar": crawls.changed(draw, secret, 3),
        "https://c.example/half": " ".join([*secret.split()[:150], *crawls.prose(draw, 15).split()]),
        "https://b.example/": other,
        "https://c.example/new": crawls.prose(draw, 30),
    }
    warc = crawls.write_warc(tmp_path / "in" / "new.warc.gz", [Crawled(*item) for item in again.items()])
    plain, deletion_set = purge(run, {"url": ["https://a.example/x"]})
    assert len(deletion_set) == 1
    expected = {
        "https://c.example/copy": "purged.text",
        "http://a.example/x?utm_source=mail": "purged.canonical_url",
        "https://c.example/similar": None,
        "https://c.example/half": None,
        "https://b.example/": None,
        "https://c.example/new": None,
    }
    later = crawls.verdicts(crawls.run(tmp_path / "later", [warc], purge_list=plain))
    assert {row["url"]: row["reason"] for row in later} == expected
    purge(run, {"url": ["https://a.example/x"]}, similar=True)
    later = crawls.verdicts(crawls.run(tmp_path / "latest", [warc], purge_list=plain))
    assert {row["url"]: row["reason"] for row in later} == expected | {"https://c.example/similar": "purged.similar"}
    assert {row["stage"] for row in later} == {None, "purged"}
