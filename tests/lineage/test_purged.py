"""What a run saw of documents that were purged, by the corpus version that it read."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.lineage.exposure import Exposures, Tally, clean, exposures, walk
from quern.lineage.index.changes import CHANGES_SCHEMA, Purges, changes_file, purged_at, written_by
from quern.lineage.selection import select
from quern.lineage.sql.query import query
from quern.lineage.steps import read_step
from quern.lineage.store import IndexedRun
from quern.lineage.trace import trace
from quern.lineage.training import TrainingRun
from quern.mixtures.order import Order
from quern.train.history.ledger import Ledger
from support.lineage import histories as H
from support.lineage import runs
from support.lineage.versions import mask, write_changes
from support.named_cases import with_each

SEQ_LEN = 16
STEPS = 3
"""Of each attempt."""


@pytest.fixture(scope="module")
def purged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A run at version 3: the first document went in version 2, the second in version 3, the third never."""
    run = runs.write_run(tmp_path_factory.mktemp("purged") / "run", seed=11, documents=60, files=1, sources=("web",))
    spans = runs.listing(seed=11, documents=60, files=1, sources=("web",)).spans["web"]
    chosen = [row["doc_id"] for row in spans if not row["purged"] and row["length"] > 2 * SEQ_LEN][:3]
    assert (mask(run, chosen[:1]), mask(run, chosen[1:2])) == (2, 3)
    return run, chosen


def train(folder: Path, run: Path, versions: Sequence[int | None]) -> TrainingRun:
    """An attempt a version, None: one that does not tell it. Each begins anew and reads all windows of the stream; the
    last one leaves a checkpoint."""
    stream = IndexedRun(str(run)).streams[0]
    windows = (stream.total_tokens - 1) // SEQ_LEN
    order = Order([1], [windows], 5, ids=[stream.identity], seq_len=SEQ_LEN, global_batch=-(-windows // STEPS))
    with Ledger(folder / "ledger.jsonl") as ledger:
        for number, version in enumerate(versions):
            told: dict[str, Any] = {} if version is None else {"versions": {stream.identity: version}}
            ledger.move(
                "rollback" if number else "start", 0, 0, order, document_mask=False,
                paths={stream.identity: stream.path}, dp=1, micro_batch=1, **told,
            )  # fmt: skip
            ledger.append("checkpoint", step=STEPS, data_step=STEPS, name=f"step_{STEPS:08d}")
        offset = ledger.offset
    opened = TrainingRun(str(folder))
    H.publish(opened, STEPS, offset)
    return opened


@pytest.fixture(scope="module")
def trained(purged: tuple[Path, list[bytes]], tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return train(tmp_path_factory.mktemp("trained"), purged[0], (1, 2, 3, None))


def targets_of(rows: Any, number: int, attempt: int) -> int:
    mine = (rows.numbers == number) & (rows.attempts == attempt)
    return int((rows.target_stops - rows.target_starts)[mine].sum())


#: Whether each of the three documents was there for those who read version 1, 2, 3, and a version nobody knows.
THERE = np.array([[True, True, True], [False, True, True], [False, False, True], [True, True, True]])


def test_a_document_is_seen_by_those_who_read_it_before_it_was_purged(
    purged: tuple[Path, list[bytes]], trained: TrainingRun
) -> None:
    run, chosen = purged
    lineage = IndexedRun(str(run))
    numbers = [int(lineage.find(doc=doc_id)[0]) for doc_id in chosen]
    assert lineage.spans_of(numbers).purged_since.tolist() == [2, 3, 0]
    rows = exposures(trained, [(lineage, numbers)])
    lengths = lineage.spans_of(numbers).lengths.tolist()
    for attempt in range(4):
        for place, number in enumerate(numbers):
            mine = (rows.numbers == number) & (rows.attempts == attempt)
            assert mine.any()
            assert rows.purged[mine].tolist() == [not THERE[attempt, place]] * int(mine.sum())
            seen = targets_of(rows, number, attempt)
            assert seen >= lengths[place] - 1 if THERE[attempt, place] else seen == 0


def test_a_step_says_the_same(purged: tuple[Path, list[bytes]], trained: TrainingRun) -> None:
    run, chosen = purged
    numbers = [int(IndexedRun(str(run)).find(doc=doc_id)[0]) for doc_id in chosen]
    for attempt in range(4):
        there = dict.fromkeys(numbers, 0)
        for step in range(STEPS):
            parts = read_step(trained, step, attempt).documents
            for number in numbers:
                mine = parts.numbers == number
                there[number] += int((parts.target_stops - parts.target_starts)[mine].sum())
                place = numbers.index(number)
                assert parts.purged[mine].tolist() == [not THERE[attempt, place]] * int(mine.sum())
        assert [count > 0 for count in there.values()] == THERE[attempt].tolist()


def test_what_hangs_on_a_version_that_the_ledger_does_not_tell_is_counted(
    purged: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    run, chosen = purged
    lineage = IndexedRun(str(run))
    for place, doc_id in enumerate(chosen):
        for number, version in enumerate((1, None)):
            trained = train(tmp_path / f"{place}{number}", run, [version])
            tally = Tally(trained)
            rows = Exposures.join(list(walk(trained, [select(lineage, lineage.find(doc=doc_id))], tally)))
            assert len(rows)
            assert tally.unsure == (len(rows) if version is None and place < 2 else 0)


@pytest.mark.parametrize(("attempt", "version"), list(enumerate((1, 2, 3, None))))
def test_a_checkpoint_is_clean_of_what_was_purged_before_it_was_read(
    purged: tuple[Path, list[bytes]], tmp_path: Path, attempt: int, version: int | None
) -> None:
    run, chosen = purged
    trained, lineage = train(tmp_path, run, [version]), IndexedRun(str(run))
    for place, doc_id in enumerate(chosen):
        found = clean(trained, exposures(trained, [(lineage, lineage.find(doc=doc_id))]))
        assert (found.last is None) == THERE[attempt, place]
        assert len(found.seen) == THERE[attempt, place]


def test_a_document_says_since_when_it_is_purged(purged: tuple[Path, list[bytes]]) -> None:
    run, chosen = purged
    lineage = IndexedRun(str(run))
    for doc_id, since in zip(chosen, (2, 3, None), strict=True):
        life = trace(lineage, int(lineage.find(doc=doc_id)[0]))
        assert (life["span"]["purged"], life["span"]["purged_since"]) == (since is not None, since)
        assert life["text"]["why_none"] == (None if since is None else "its tokens were purged")


def test_without_a_table_of_changes_a_document_was_there_until_its_file_was_written(
    purged: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    """And the index is of the tables that are there."""
    run, chosen = tmp_path / "run", purged[1]
    shutil.copytree(purged[0], run)
    IndexedRun(str(run))
    (run / "tokens" / "changes.v2.parquet").unlink()
    lineage = IndexedRun(str(run))
    numbers = [int(lineage.find(doc=doc_id)[0]) for doc_id in chosen]
    same_shard = len({int(row) for row in _shards_of(lineage, numbers[:2])}) == 1
    assert lineage.spans_of(numbers).purged_since.tolist() == [3 if same_shard else 2, 3, 0]
    write_changes(run, 2, {chosen[0]: "purged"})
    assert IndexedRun(str(run)).spans_of(numbers).purged_since.tolist() == [2, 3, 0]
    write_changes(run, 4, {chosen[2]: "purged"})  # of a version that is not published yet
    assert IndexedRun(str(run)).spans_of(numbers).purged_since.tolist() == [2, 3, 0]


def _shards_of(lineage: IndexedRun, numbers: list[int]) -> list[int]:
    reader = lineage.streams[0].reader
    return (np.searchsorted(reader.offsets, lineage.spans_of(numbers).starts, "right") - 1).tolist()


def test_changes_of_many_versions_beside_a_book_of_them(tmp_path: Path) -> None:
    draw = random.Random(3)
    ids = [draw.randbytes(14) + end for end in (b"\0\0", b"\0a", b"aa") for _ in range(20)]
    since: dict[bytes, int] = {}
    for version in range(2, 9):
        actions = {doc_id: draw.choice(["purged", "restored"]) for doc_id in draw.sample(ids, 15)}
        (tmp_path / "tokens").mkdir(exist_ok=True)
        write_changes(tmp_path, version, actions)
        for doc_id, action in actions.items():
            if action == "restored":
                since.pop(doc_id, None)
            else:
                since.setdefault(doc_id, version)
        found = Purges(str(tmp_path / "tokens"), version)
        assert len(found) == len(since)
        assert found.since(b"".join(ids), 100).tolist() == [since.get(doc_id, 100) for doc_id in ids]
        assert found.since(b"".join(ids), 4).tolist() == [min(4, since.get(doc_id, 4)) for doc_id in ids]
    assert found.since(b"", 1).tolist() == []


def test_names_of_versions() -> None:
    assert changes_file(12) == "changes.v12.parquet"
    assert [written_by(name) for name in ("shard_00000.spans.parquet", "shard_00000.v12.spans.parquet")] == [1, 12]
    assert purged_at([0, 1, 2, 3], 2).tolist() == [False, True, True, False]
    assert purged_at([2, 2], [1, 2]).tolist() == [False, True]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"doc_id": [b"x" * 16]}, "has no column 'action'"),
        ({"doc_id": [b"x" * 15], "action": ["purged"]}, "cannot be read"),
        ({"doc_id": [None], "action": ["purged"]}, "cannot be read: Casting field 'doc_id' with null"),
        ({"doc_id": [b"x" * 16], "action": ["erased"]}, "row 0: action: expected purged or restored, got 'erased'"),
        ({"doc_id": [b"x" * 16], "action": [None]}, "cannot be read: Casting field 'action' with null"),
        (
            {"doc_id": [b"x" * 16] * 2, "action": pa.array([b"purged", b"a\xff"]).view(pa.string())},
            r"row 1: action: expected purged or restored, got 'a\\xff'",
        ),
    ],
)
def test_a_table_that_is_none_of_changes_is_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / changes_file(2))
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / changes_file(2)}: {message}")):
        Purges(str(tmp_path), 2)
    (tmp_path / changes_file(2)).write_bytes(b"no parquet")
    with pytest.raises(InputError, match="cannot be read"):
        Purges(str(tmp_path), 2)


@pytest.mark.parametrize("name", CHANGES_SCHEMA.names)
def test_a_table_of_changes_with_a_column_twice_is_named(tmp_path: Path, name: str) -> None:
    columns = {"doc_id": pa.array([b"x" * 16]), "action": pa.array(["purged"])}
    pq.write_table(pa.table([*columns.values(), columns[name]], [*columns, name]), tmp_path / changes_file(2))
    with pytest.raises(InputError, match=rf"v2\.parquet: has 2 columns '{name}', expected one"):
        Purges(str(tmp_path), 2)


@with_each("shard_00000.v0.spans.parquet", "shard_00000.v02.spans.parquet", "shard_00000-v2.spans.parquet", "x.parquet")
def test_a_spans_file_whose_name_tells_no_version_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"^/tokens/web/{re.escape(name)}: expected a spans file"):
        written_by(f"/tokens/web/{name}")


def gone_at(run: Path, version: int) -> dict[bytes, bool]:
    """Whether nothing but EOT is left of each document, by the bytes of the files that a version lists."""
    eot = json.loads((run / "tokens" / "VERSION.json").read_text())["encoding"]["eot_id"]
    manifest = "manifest.json" if version == 1 else f"manifest.v{version}.json"
    listed = json.loads((run / "tokens" / "web" / manifest).read_text())
    found = {}
    for shard in listed["shards"]:
        tokens = np.fromfile(run / "tokens" / "web" / shard["bin"], listed["dtype"])
        for row in pq.read_table(run / "tokens" / "web" / shard["spans"]).to_pylist():
            found[row["doc_id"]] = bool((tokens[row["start"] : row["start"] + row["length"]] == eot).all())
    return found


def test_a_document_is_purged_in_the_versions_whose_files_have_nothing_of_it(purged: tuple[Path, list[bytes]]) -> None:
    run, chosen = purged
    lineage = IndexedRun(str(run))
    columns = query(str(run), "SELECT doc_id, purged_since FROM spans WHERE source = 'web' AND NOT held_out").rows
    first = [pq.read_table(path) for path in sorted((run / "tokens" / "web").glob("shard_?????.spans.parquet"))]
    whole = {row["doc_id"] for table in first for row in table.to_pylist() if not row["purged"]}  # else marked alone
    told = {bytes.fromhex(doc_id): since for doc_id, since in columns if bytes.fromhex(doc_id) in whole}
    spans = {doc_id: lineage.spans_of(lineage.find(doc=doc_id)) for doc_id in told}
    for version in (1, 2, 3):
        gone = {doc_id: own for doc_id, own in gone_at(run, version).items() if doc_id in told}
        assert any(gone[doc_id] for doc_id in chosen) == (version > 1)
        assert {doc_id: bool(own.purged_at(version)[0]) for doc_id, own in spans.items()} == gone
        assert {doc_id: since is not None and since <= version for doc_id, since in told.items()} == gone


def test_a_document_that_was_restored_where_it_stands_is_refused(
    purged: tuple[Path, list[bytes]], tmp_path: Path
) -> None:
    """Purged, restored and purged again in one stream: no one version says who saw it. Written anew, the stream is
    another, and only its own readers count."""
    run, chosen = tmp_path / "run", purged[1]
    shutil.copytree(purged[0], run, ignore=shutil.ignore_patterns("lineage"))
    write_changes(run, 3, {chosen[0]: "restored", chosen[1]: "purged"})
    assert mask(run, chosen[:1]) == 4
    message = rf"changes\.v3\.parquet: restored document {chosen[0].hex()}, but web stands since version 1"
    with pytest.raises(InputError, match=message):
        IndexedRun(str(run))
    path = run / "tokens" / "VERSION.json"
    record = json.loads(path.read_text())
    record["sources"]["web"]["since"] = 3
    path.write_text(json.dumps(record))
    lineage = IndexedRun(str(run))
    assert lineage.spans_of(lineage.find(doc=chosen[0])).purged_since.tolist() == [4]
    record["sources"]["web"]["since"] = "3"
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"sources\.web\.since: expected an integer"):
        IndexedRun(str(run))


def test_the_table_that_these_tests_write_is_the_format_s(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    write_changes(tmp_path, 2, {b"x" * 16: "purged"})
    assert pq.read_schema(tmp_path / "tokens" / changes_file(2)).equals(CHANGES_SCHEMA.remove_metadata())
