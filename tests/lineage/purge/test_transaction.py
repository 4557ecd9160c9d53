"""A purge of tokens: what a mask and a rewrite leave, what an error leaves, and what is finished or undone."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.cli.open_run import open_run
from quern.data_pipeline.dedup.schemas import DECISION_SCHEMA
from quern.data_pipeline.execution.run_directory import sole_driver
from quern.errors import InputError, QuernError
from quern.lineage.purge.apply import finish, transaction
from quern.lineage.purge.apply.transaction import Request, purge
from quern.lineage.purge.restoration.restore import MOVED_SCHEMA
from quern.lineage.store import IndexedRun
from quern.tokenize.shards import ShardReader
from support.damage import flip
from support.lineage import runs
from support.purge import corpus_scan as C

pytestmark = pytest.mark.slow

SEED = 21
EOT = 999
#: At which file there is no space, of each mode; the others in the long tests.
NO_SPACE = ((0, "rewrite"), (2, "rewrite"), (3, "mask"), (5, "mask"), (6, "rewrite"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("purge") / "run", seed=SEED, documents=160, shard_tokens=3000)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def request(run: Path, doc_ids: Sequence[bytes], mode: Any = "mask", **more: Any) -> Request:
    def find_deletion_set(path: str) -> pa.Table:
        return C.deletion_set_table(run, doc_ids)

    return Request(str(run), mode, find_deletion_set, {"doc": [own.hex() for own in doc_ids]}, **more)


def some(run: Path, *, share: int = 9, stream: str | None = None) -> list[bytes]:
    """Every so-manieth document that has tokens."""
    streams = C.scan(run)
    names = [stream] if stream else sorted(streams)
    pieces = [piece for name in names for shard in streams[name] for piece in shard if not piece.purged]
    return [piece.doc_id for piece in pieces[::share]]


def version(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "tokens/VERSION.json").read_text()))


def test_a_mask_leaves_everything_where_it_stands(run: Path) -> None:
    before, gone = C.scan(run), some(run)
    report = purge(request(run, gone))
    assert C.scan(run) == C.masked(before, gone, EOT)
    record = version(run)
    assert (record["version"], record["parent"], record["kind"]) == (2, 1, "mask")
    assert not any("since" in entry for entry in record["sources"].values())
    assert report["documents_purged"] == len(gone)
    tokens = sum(len(p.tokens) for shards in before.values() for s in shards for p in s if p.doc_id in gone)
    assert report["tokens_purged"] == tokens
    assert not (run / ".purge").exists()


def test_only_touched_shards_are_written(run: Path) -> None:
    (one,) = some(run, stream="web")[3:4]
    files = C.tree(run, "tokens")
    report = purge(request(run, [one]))
    (number,) = [n for n, shard in enumerate(C.scan(run)["web"]) if any(piece.doc_id == one for piece in shard)]
    assert report["touched"] == {"web": [number]}
    after = C.tree(run, "tokens")
    new = {"tokens/VERSION.json", "tokens/changes.v2.parquet", "tokens/web/manifest.v2.json"}
    new |= {f"tokens/web/shard_{number:05d}.v2.{end}" for end in ("bin", "spans.parquet")}
    assert {name for name in after if files.get(name) != after[name]} == new
    old = {"tokens/web/manifest.json"} | {f"tokens/web/shard_{number:05d}.{end}" for end in ("bin", "spans.parquet")}
    assert files.keys() - after.keys() == old


@pytest.mark.parametrize(
    ("share", "mode"),
    [(1, "mask"), (7, "rewrite"),
     *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, "rewrite"), (7, "mask")))],
)  # fmt: skip
def test_a_version_after_a_version(run: Path, mode: str, share: int) -> None:
    """Each leaves what the one before left, but for what it purges."""
    before, gone = C.scan(run), some(run, share=share)
    purge(request(run, gone[::2], mode))
    seed, bounds = runs.PLACE_SEED, last_keys(run)
    middle = C.masked(before, gone[::2], EOT) if mode == "mask" else C.rewritten(before, gone[::2], {}, bounds, seed)
    assert C.scan(run) == middle
    if gone[1::2]:
        purge(request(run, gone[1::2], "rewrite"))
        assert C.scan(run) == C.rewritten(middle, gone[1::2], {}, bounds, seed)
        assert version(run)["version"] == 3
    for stream, entry in version(run)["sources"].items():
        reader = ShardReader(str(run / "tokens" / stream), verify=True)
        assert reader.total_tokens == entry["tokens"]
    assert readable(run)


def last_keys(run: Path) -> dict[str, list[int]]:
    return {name: [int(s["last_key"], 16) for s in own["shards"]] for name, own in C.manifests(run).items()}


def readable(run: Path) -> bool:
    """Lineage opens it, and finds every span where the scan does."""
    lineage = IndexedRun(str(run))
    starts = {}
    for stream in C.scan(run).values():
        at = 0
        for piece in (piece for shard in stream for piece in shard):
            starts[piece.doc_id] = at
            at += len(piece.tokens)
    numbers = np.arange(lineage.num_documents)
    spans = lineage.spans_of(numbers)
    ids = lineage.documents(spans.numbers).doc_ids
    return dict(zip(ids, spans.starts.tolist(), strict=True)) == starts


def test_what_is_restored_stands_by_its_place_key(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = C.scan(run)
    gone = some(run, share=20, stream="web")
    pieces = [piece for shard in before["web"] for piece in shard if not piece.purged]
    displaced = [piece.doc_id for piece in pieces[3::40] if piece.doc_id not in gone]
    texts = runs.listing(seed=SEED, documents=160, shard_tokens=3000).texts
    seed, bounds = runs.PLACE_SEED, last_keys(run)
    removed = [own for own in C.deletion_set_table(run, all_ids(run)).to_pylist() if own["removed_as"]]
    arriving: dict[str, list[C.Piece]] = {}
    rows = []
    for number, row in enumerate(removed):
        stream = row["source"] if number % 5 else f"{row['source']}.val"
        ids = (*texts[row["doc_id"]].encode(), EOT)
        arriving.setdefault(stream, []).append(C.Piece(row["doc_id"], ids, False))
        rows.append({**row, "stream": stream, "place_key": C.place_key(seed, row["doc_id"])})
    rows.sort(key=lambda row: (row["stream"], row["place_key"]))
    other = [{**row, "stream": "web", "place_key": 0} for row in C.deletion_set_table(run, displaced).to_pylist()]

    def decided(path: str, deletion_set: pa.Table) -> SimpleNamespace:
        names = MOVED_SCHEMA.names
        tables = [
            pa.Table.from_pylist([{name: row.get(name) for name in names} for row in own], MOVED_SCHEMA)
            for own in (rows, other)
        ]
        return SimpleNamespace(restored=tables[0], displaced=tables[1], decisions=DECISION_SCHEMA.empty_table())

    monkeypatch.setattr(transaction, "reconsider", decided)
    report = purge(request(run, gone, "rewrite", duplicates="restore"))
    assert C.scan(run) == C.rewritten(before, [*gone, *displaced], arriving, bounds, seed)
    assert report["documents_restored"] == len(removed) > 20
    assert report["tokens_restored"] == sum(len(piece.tokens) for own in arriving.values() for piece in own)
    changes = pq.read_table(run / "tokens/changes.v2.parquet").to_pylist()
    assert {row["doc_id"]: row["action"] for row in changes} == {
        **dict.fromkeys([*gone, *displaced], "purged"), **{row["doc_id"]: "restored" for row in removed},
    }  # fmt: skip
    assert {name for name, entry in version(run)["sources"].items() if entry.get("since") == 2} >= {"web", *arriving}
    assert readable(run)
    back = [removed[0]["doc_id"], removed[1]["doc_id"]]  # what was put back may be purged again
    middle = C.scan(run)
    purge(request(run, back))
    assert C.scan(run) == C.masked(middle, back, EOT)
    assert readable(run)


def all_ids(run: Path) -> list[bytes]:
    return [
        doc_id for path in (run / "verdicts").rglob("*.parquet") for doc_id in pq.read_table(path)["doc_id"].to_pylist()
    ]


@pytest.mark.parametrize(
    ("number", "mode"),
    [pytest.param(number, mode, marks=() if (number, mode) in NO_SPACE else pytest.mark.long)
     for number in range(7) for mode in ("mask", "rewrite")],
)  # fmt: skip
def test_no_space_left_is_said_and_undone(run: Path, monkeypatch: pytest.MonkeyPatch, mode: str, number: int) -> None:
    files, gone = C.tree(run), some(run, stream="web")[:1]
    published = storage.publish
    calls = iter(range(10**6))

    @contextmanager
    def full(path: str) -> Iterator[IO[bytes]]:
        with published(path) as file:
            yield file
            if next(calls) == number:
                raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "publish", full)
        with pytest.raises(
            QuernError, match=r"no space left on the device .* the purge was undone, nothing is changed"
        ):
            purge(request(run, gone, mode, workers=1))
    assert C.tree(run) == files
    purge(request(run, gone, mode))
    assert version(run)["version"] == 2


@pytest.mark.parametrize("mode", ["mask", "rewrite"])
@pytest.mark.parametrize("end", ["bin", "spans.parquet"])
def test_damage_is_found_before_anything_is_purged(run: Path, mode: str, end: str) -> None:
    (one,) = some(run, stream="web")[:1]
    (number,) = [n for n, shard in enumerate(C.scan(run)["web"]) if any(piece.doc_id == one for piece in shard)]
    path = run / f"tokens/web/shard_{number:05d}.{end}"
    flip(path, -1)  # behind what is purged
    files = C.tree(run)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: is damaged"):
        purge(request(run, [one], mode))
    assert C.tree(run) == files


def test_a_second_purge_at_the_same_time_is_refused(run: Path) -> None:
    gone = some(run)
    with sole_driver(str(run)), pytest.raises(QuernError, match="at work in this run"):
        purge(request(run, gone))


def test_who_has_lost_the_run_removes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken it over meanwhile, and writes files of the same names."""
    seen: list[dict[str, str]] = []

    def lost() -> None:
        raise QuernError("another driver has taken this run over")

    def fail(*given: Any) -> None:
        seen.append(C.tree(run))
        monkeypatch.setattr(storage, "_guards", [lost])
        raise OSError("gone")

    monkeypatch.setattr(transaction.version, "publish", fail)
    with pytest.raises(QuernError, match=r"could not be undone .another driver has taken this run over"):
        purge(request(run, some(run)))
    assert C.tree(run) == seen[0]
    assert any(".v2." in name for name in seen[0])


def test_a_run_can_be_read_though_its_purge_cannot_be_finished(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finish, "clean", full)
    with pytest.raises(QuernError, match=r"corpus version 2 holds, but the purge is not at its end \(texts: "):
        purge(request(run, some(run)))
    open_run(str(run))
    assert readable(run)
    assert "version 2 holds, but the purge is not at its end (texts: " in capsys.readouterr().err
    assert (run / ".purge/intent.json").exists()


def test_a_purge_list_is_found_from_any_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = some(run)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(finish, "remember", lambda *given: 1 / 0)
        with pytest.raises(QuernError, match="is not at its end"):
            purge(request(Path("run"), gone, purge_list="gone"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "is finished" in str(transaction.recover(str(run)))
    assert not list((tmp_path / "elsewhere").iterdir())
    (file,) = (tmp_path / "gone").glob("*.parquet")
    assert set(gone) == set(pq.read_table(file)["doc_id"].to_pylist())
    entry = json.loads((run / "audit/00001.json").read_text())
    assert entry["purge_list"]["list"] == str(tmp_path / "gone")


@pytest.mark.parametrize("lacks", [None, "canonical_url", "post_filter_hash"])
def test_a_list_holds_a_document_with_all_by_which_it_may_return(run: Path, tmp_path: Path, lacks: str | None) -> None:
    gone = some(run)
    table = C.deletion_set_table(run, gone).select(["doc_id", "canonical_url", "post_filter_hash"])
    if lacks is not None:
        at = table.schema.names.index(lacks)
        table = table.set_column(at, lacks, pa.nulls(len(table), table.schema.field(lacks).type))
    (tmp_path / "list").mkdir()
    pq.write_table(table, tmp_path / "list/by-hand.parquet")
    report = purge(request(run, gone, purge_list=str(tmp_path / "list")))
    assert (report["tombstones"] is None) == (lacks is None)
    entry = json.loads((run / "audit/00001.json").read_text())
    assert entry["purge_list"]["list"] == str(tmp_path / "list")
    assert ("file" in entry["purge_list"]) == (lacks is not None)


def test_requests_that_cannot_be(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no document is selected"):
        purge(request(run, []))
    with pytest.raises(InputError, match="use --mode rewrite"):
        purge(request(run, some(run), duplicates="restore"))
    with pytest.raises(InputError, match=r"nowhere: expected a complete data run"):
        purge(request(tmp_path / "nowhere", []))
    assert not (tmp_path / "nowhere").exists()


def test_a_dry_run_tells_the_same_and_does_nothing(run: Path) -> None:
    files, gone = C.tree(run), some(run)
    told = purge(request(run, gone), dry_run=True)
    assert C.tree(run) == files
    done = purge(request(run, gone))
    assert told.keys() - done.keys() == set()
    assert {**told, "seconds": None} == {**{key: done[key] for key in told}, "dry_run": True, "seconds": None}


@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_what_is_purged_already_makes_no_version(run: Path, mode: str) -> None:
    gone = some(run)
    purge(request(run, gone, mode))
    files = C.tree(run)
    report = purge(request(run, gone, mode))
    assert report["version"] == {"before": 2, "after": 2}
    assert report["documents_purged"] == 0
    assert C.tree(run) == files
