"""Readers of an older corpus version, while purges make others and remove what nobody reads."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.errors import InputError
from quern.lineage.purge.apply.transaction import Request, purge, recover
from quern.tokenize import reader_lock
from quern.tokenize.shards import ShardReader
from support.lineage import runs
from support.processes import environment
from support.programs import kill, python
from support.purge import corpus_scan as C

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return runs.write_run(tmp_path / "run", seed=5, documents=120, sources=("web",), shard_tokens=2500)


def purge_of(run: Path, doc_ids: list[bytes], mode: Any) -> dict[str, Any]:
    return purge(Request(str(run), mode, lambda path: C.deletion_set_table(run, doc_ids), {}))


def documents(run: Path) -> list[bytes]:
    return [piece.doc_id for shard in C.scan(run)["web"] for piece in shard if not piece.purged]


def content(reader: ShardReader) -> str:
    """Of every window, and of the spans."""
    state = hashlib.sha256(reader.tokens(0, reader.total_tokens).tobytes())
    for shard in range(len(reader.shards)):
        for row in reader.spans(shard).to_pylist():
            state.update(repr(row).encode())
    for index in range(reader.num_windows(64)):
        state.update(reader.window(index, 64).tobytes())
    return state.hexdigest()


def shards(run: Path, suffix: str = "") -> set[str]:
    """Shards that are there of a generation."""
    names = (path.name for path in (run / "tokens/web").glob("shard_*.bin"))
    return {name for name in names if name.partition(".")[2] == f"{suffix}bin"}


def test_a_manifest_that_goes_while_it_is_looked_at_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge from beginning to end between a reader's finding the manifest and its reading it."""
    path = str(run / "tokens/web")
    found, late = storage.sha256, [f"{path}/manifest.json"]

    def sha256(file: str) -> str:
        if late and file == late[0]:
            late.clear()
            purge_of(run, documents(run)[:1], "mask")
        return found(file)

    monkeypatch.setattr(storage, "sha256", sha256)
    assert ShardReader(path).version == 2


def test_a_reader_keeps_what_it_opened(run: Path) -> None:
    ids, files = documents(run), C.tree(run)
    expected = content(ShardReader(str(run / "tokens/web")))
    assert C.tree(run) == files  # reading writes nothing
    all_shards = shards(run)
    reader = ShardReader(str(run / "tokens/web"))  # none of its shards is mapped yet
    report = purge_of(run, ids[::7], "mask")
    assert report["superseded"]["held"] == {"web": ["manifest.json"]}
    assert content(reader) == expected
    second = ShardReader(str(run / "tokens/web"))
    assert second.version == 2
    masked = content(second)
    second.close()
    report = purge_of(run, ids[1::7], "rewrite")  # of version 2 goes all that version 3 has not, of version 1 nothing
    assert report["superseded"]["held"] == {"web": ["manifest.json"]}
    assert (content(reader), shards(run)) == (expected, all_shards)
    assert not (run / "tokens/web/manifest.v2.json").exists()
    assert recover(str(run)) is None
    assert shards(run) == all_shards
    assert masked != content(ShardReader(str(run / "tokens/web"), verify=True))
    del reader
    gc.collect()
    assert recover(str(run)) is None
    listed = {name for shard in C.manifests(run)["web"]["shards"] for name in (shard["bin"], shard["spans"])}
    assert {path.name for path in (run / "tokens/web").iterdir()} == {"manifest.v3.json", *listed}
    assert not (run / ".purge").exists()


READER = """
import hashlib, sys
from lineage.purge.test_readers import content
from quern.tokenize.shards import ShardReader
reader = ShardReader(sys.argv[1])
for line in sys.stdin:
    reader._spans.clear()
    print(reader.version, content(reader), flush=True)
"""


def test_another_process_reads_on_while_and_after_its_version_is_purged(run: Path) -> None:
    ids, folder = documents(run), str(run / "tokens/web")
    expected = content(ShardReader(folder))
    command = [python(), "-c", READER, folder]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def said() -> Iterator[str]:
            process.stdin.write("read\n")
            process.stdin.flush()
            yield process.stdout.readline().strip()

        assert [*said()] == [f"1 {expected}"]
        for number, mode in enumerate(("mask", "rewrite", "mask")):
            process.stdin.write("read\n" * 3)  # it reads while the purge goes on
            process.stdin.flush()
            report = purge_of(run, ids[number::5], mode)
            assert report["superseded"]["held"] == {"web": ["manifest.json"]}
            assert [process.stdout.readline().strip() for _ in range(3)] == [f"1 {expected}"] * 3
        kill(process)
    recover(str(run))
    assert shards(run) <= {shard["bin"] for shard in C.manifests(run)["web"]["shards"]}


def test_a_version_that_is_replaced_while_it_is_opened_is_opened_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = documents(run)
    share, purges = reader_lock.share, iter((ids[:3], ids[3:6]))

    def late(manifest: str) -> int | None:
        for doc_ids in purges:
            with monkeypatch.context() as patch:
                patch.setattr(reader_lock, "share", share)
                purge_of(run, doc_ids, "rewrite")
            break
        return share(manifest)

    monkeypatch.setattr(reader_lock, "share", late)
    reader = None
    with suppress(InputError):  # what a reader took from the version before is gone
        reader = ShardReader(str(run / "tokens/web"), verify=True)
    assert reader is not None
    assert reader.version == 3
    assert reader.total_tokens == sum(len(piece.tokens) for shard in C.scan(run)["web"] for piece in shard)


def test_a_forked_reader_that_ends_leaves_its_parents_lock(run: Path) -> None:
    reader = ShardReader(str(run / "tokens/web"))
    child = multiprocessing.get_context("fork").Process(target=reader.close)
    child.start()
    child.join()
    assert child.exitcode == 0
    manifest = str(run / "tokens/web/manifest.json")
    assert reader_lock.take_alone(manifest) == (False, None)
    reader.close()
    free, lock = reader_lock.take_alone(manifest)
    assert free
    assert lock is not None
    os.close(lock)
