"""The condemned are the least closed set: held against a fixpoint in plain Python, on random runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quern.data_pipeline.page import url as urls
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA, WHY, find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from support.lineage import runs

pytestmark = pytest.mark.slow

Row = dict[str, Any]


def own_url(row: Row) -> str | None:
    """The canonical URL of a record, also where the chain did not come to make it."""
    return row["canonical_url"] or (urls.canonicalize(row["url"]) if row["url"] is not None else None)


def bare(url: str | None) -> str | None:
    return None if url is None else url.removeprefix("https://").removeprefix("http://")


def fixpoint(found: runs.Listing, selected: set[bytes], *, duplicates: bool) -> set[bytes]:
    """By the words of the policy, a round at a time."""
    rows = found.rows
    deletion_set = set(selected)
    while True:
        known = [row for row in rows if row["doc_id"] in deletion_set]
        # a page that was dropped and has a condemned text brings no address of its own
        places = {bare(own_url(row)) for row in known if row["doc_id"] in selected or row["stage"] is None} - {None}
        texts = {row["post_filter_hash"] for row in rows if row["doc_id"] in deletion_set} - {None}
        more = {row["doc_id"] for row in rows if bare(own_url(row)) in places or row["post_filter_hash"] in texts}
        if duplicates:
            more |= {row["doc_id"] for row in found.decisions if row["duplicate_of"] in deletion_set}
        if more <= deletion_set:
            return deletion_set
        deletion_set |= more


def check(found: runs.Listing, table: pa.Table, selected: set[bytes], *, duplicates: bool) -> None:
    """All of the condemned, with what is known of each and a true reason for it."""
    assert table.schema == DELETION_SET_SCHEMA
    table.validate(full=True)
    rows = {row["doc_id"]: row for row in found.rows}
    kinds = {row["doc_id"]: row for row in found.decisions}
    listed = table.to_pylist()
    ids = [row["doc_id"] for row in listed]
    assert ids == sorted(set(ids))
    assert set(ids) == fixpoint(found, selected, duplicates=duplicates)
    for row in listed:
        own, through = rows[row["doc_id"]], rows.get(row["through"])
        assert f"{row['source']}/{row['partition']}.parquet" == own["file"]
        only_shown = row["why"] == "text" and own["stage"] is not None
        assert row["canonical_url"] == (None if only_shown else own_url(own))
        assert (row["post_filter_hash"], row["stage"]) == (own["post_filter_hash"], own["stage"])
        assert row["removed_as"] == (kinds[row["doc_id"]]["kind"] if row["doc_id"] in kinds else None)
        assert row["why"] in WHY
        assert (row["why"] == "selected") == (row["doc_id"] in selected) == (through is None)
        if through is None:
            continue
        assert through["doc_id"] in ids
        if row["why"] == "url":
            assert bare(own_url(own)) == bare(own_url(through))
        elif row["why"] == "text":
            assert own["post_filter_hash"] == through["post_filter_hash"]
        else:
            assert kinds[row["doc_id"]]["duplicate_of"] == row["through"]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))])
def test_the_closure_is_the_least_fixpoint(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shape: dict[str, Any] = {"seed": seed, "documents": draw.choice([60, 200, 400]), "files": draw.choice([1, 3, 7])}
    found = runs.listing(**shape)
    folder = runs.write_run(tmp_path / "run", **shape)
    assert {row["kind"] for row in found.decisions} >= {"exact", "near"}
    all_rows = found.rows
    for _ in range(3):
        chosen = draw.sample(all_rows, draw.choice([1, 2, 20]))
        selected = {row["doc_id"] for row in chosen}
        for duplicates in ("purge", "restore"):
            at_once = draw.choice([1, 10, 100, 10_000])
            table = find_deletion_set(
                str(folder), Wanted(doc_ids=frozenset(selected)), duplicates, rows_at_once=at_once
            )
            check(found, table, selected, duplicates=duplicates == "purge")
        url = draw.choice([row["url"] for row in all_rows if row["url"] is not None])
        canonical = urls.canonicalize(url)
        selected = {
            row["doc_id"]
            for row in all_rows
            if (bare(own_url(row)) == bare(canonical) if canonical else row["url"] == url)
        }
        table = find_deletion_set(str(folder), Wanted(urls=(canonical or url,)), rows_at_once=draw.choice([1, 10_000]))
        check(found, table, selected, duplicates=True)


@pytest.mark.parametrize("domain", ["example.com", "example.org", "com", "xn--bcher-kva.example", "[2001:db8::1]"])
def test_a_domain_is_its_host_and_all_below(pristine: Path, tmp_path: Path, domain: str) -> None:
    found = runs.listing(seed=4, documents=240, files=6)
    selected = set()
    for row in found.rows:
        url = own_url(row)
        name = urls.host(url) if url else ""
        if name == domain or name.endswith(f".{domain}"):
            selected.add(row["doc_id"])
    assert selected
    check(found, find_deletion_set(str(pristine), Wanted(domains=(domain,))), selected, duplicates=True)
