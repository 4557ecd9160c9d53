"""A result of ``match`` that was kept, taken up again: by place and doc_id, whatever numbers documents have by then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.lineage.match import Matches, match
from quern.lineage.match.matches import documents_at
from quern.lineage.store import IndexedRun
from support.lineage import runs
from support.lineage.versions import mask

LINES = '{"id": "a", "text": "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two sources; the benchmark's text stands in a document of each and in one that is held out."""
    (tmp_path / "items.jsonl").write_text(LINES)
    found = runs.listing(seed=2, documents=80)
    text = "Begin. one two THREE four five six seven eight nine ten eleven twelve thirteen fourteen! End"
    for name in ("web", "text", "web.val"):
        host = next(row for row in found.spans[name] if not row["purged"])
        found.texts[host["doc_id"]] = text
    for rows in found.spans.values():
        start = 0
        for row in rows:
            row["start"], row["length"] = start, len(found.texts[row["doc_id"]].encode()) + 1
            start += row["length"]
    runs.write_listing(tmp_path / "run", found, identity="r")
    return tmp_path / "run"


def saved(run: Path) -> Matches:
    path = str(run.parent / "kept.parquet")
    match(IndexedRun(str(run)), str(run.parent / "items.jsonl")).save(path)
    assert Matches.is_saved(path)
    assert not Matches.is_saved(str(run.parent / "items.jsonl"))
    return Matches.load(path)


@pytest.mark.slow
def test_it_says_what_looking_again_says(run: Path) -> None:
    """Also with the index cut otherwise, so that every document has another number."""
    kept = saved(run)
    assert len(kept) == 3
    shutil.rmtree(run / "lineage")
    lineage = IndexedRun(str(run), segment_documents=16)
    again = match(lineage, str(run.parent / "items.jsonl"))
    assert kept.numbers.tolist() != again.numbers.tolist()
    found = kept.in_run(lineage)
    expected = (again.numbers, again.streams, again.starts, again.stops)
    assert [column.tolist() for column in found] == [column.tolist() for column in expected]


def test_of_a_document_that_was_purged_since_it_says_where_it_stood(run: Path) -> None:
    kept = saved(run)
    mask(run, kept.doc_ids[:1])
    lineage = IndexedRun(str(run))
    numbers, _, _, _ = kept.in_run(lineage)
    assert lineage.documents(numbers).doc_ids == kept.doc_ids
    assert lineage.spans_of(numbers).purged_since.tolist() == [2, 0, 0]
    assert len(match(lineage, str(run.parent / "items.jsonl"))) == 2


def test_what_is_not_of_this_run_is_refused(run: Path) -> None:
    kept, lineage = saved(run), IndexedRun(str(run))
    wrong = {
        "are of another data run, other": replace(kept, run_id="other"),
        r"has no stream r/(web|text)(\.val)?/2 \(any more\)": replace(
            kept, identities=tuple(identity.replace("/1", "/2") for identity in kept.identities)
        ),
        "of other documents than stand there": replace(kept, doc_ids=[kept.doc_ids[1], *kept.doc_ids[1:]]),
        "of other documents than stand there now": replace(kept, stops=kept.stops + 10_000),
        "tokens, got token": replace(kept, starts=kept.starts + 10**9),
    }
    for message, matches in wrong.items():
        with pytest.raises(InputError, match=message):
            matches.in_run(lineage)


def test_nothing_found_is_nothing(run: Path) -> None:
    kept, lineage = saved(run), IndexedRun(str(run))
    (run.parent / "items.jsonl").write_text('{"text": "zebra zebu zorilla civet genet linsang fossa mongoose"}\n')
    kept = match(lineage, str(run.parent / "items.jsonl"))
    assert [len(column) for column in kept.in_run(lineage)] == [0, 0, 0, 0]
    assert documents_at(lineage, np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        Matches.is_saved(str(tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("stop", lambda column: pc.if_else(pa.array([True, False, False]), None, column), "field 'stop' with null"),
        ("start", lambda column: pc.add(pc.cast(column, pa.float64()), 0.5), "truncated"),
        ("doc_id", lambda column: pa.array(["a", "b", "c"]), "fixed_size_binary"),
        ("url", lambda column: pa.array([b"\xff"] * 3).view(pa.string()), "UTF8"),
        ("grams", None, "has no column 'grams'"),
    ],
)
def test_a_kept_result_whose_columns_are_changed_is_refused(
    run: Path, name: str, change: Callable[[pa.ChunkedArray], pa.Array] | None, message: str
) -> None:
    saved(run)
    path = run.parent / "kept.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    changed = table.drop_columns([name]) if change is None else table.set_column(place, name, change(table[name]))
    pq.write_table(changed, path)
    with pytest.raises(
        InputError, match=rf"kept\.parquet: expected a result of quern lineage match --out \(.*{message}"
    ):
        Matches.load(str(path))
    pq.write_table(
        pa.table([*table.columns, table[name]], [*table.column_names, name], metadata=table.schema.metadata), path
    )
    with pytest.raises(InputError, match=f"has 2 columns '{name}', expected one"):
        Matches.load(str(path))
