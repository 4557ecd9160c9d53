"""Whose checkpoints a run's folder and store have: what is taken, what is refused, and what is put back."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import HISTORY_FILE, FileRecord, Manifest, sha256_of
from quern.train.checkpoint.store.identity import identify
from quern.train.checkpoint.store.store import Store
from quern.train.history.branch import LEDGER_FILE
from support.train.tier_case import SHA, manifest

ID, OTHER = "ab" * 16, "cd" * 16


class Faulty(Store):
    """A store of which some requests fail."""

    broken: tuple[str, ...] = ()

    def _fail(self, what: str) -> None:
        if what in self.broken:
            raise StoreError(f"{self.url}: {what}: cannot be reached", transient=True)

    def checkpoints(self) -> list[int]:
        self._fail("checkpoints")
        return super().checkpoints()

    def manifest(self, step: int) -> Manifest:
        self._fail("manifest")
        return super().manifest(step)

    def fetch(self, *args: Any, **options: Any) -> str:
        self._fail("fetch")
        return super().fetch(*args, **options)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return Faulty(f"file://{tmp_path}/store", backoff=Backoff(budget_s=0.0))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def put(store: Store, step: int, run: str, ledger: bytes | None = None, offset: int | None = None) -> Path:
    """A checkpoint in the store; returns its folder."""
    folder = Path(store.url.removeprefix("file://")) / f"step_{step:08d}"
    folder.mkdir()
    files = {".metadata": FileRecord(SHA, 10)}
    if ledger is not None:
        (folder / HISTORY_FILE).write_bytes(ledger)
        files[HISTORY_FILE] = FileRecord(sha256_of(ledger), len(ledger))
    length = len(ledger or b"") if offset is None else offset
    (folder / "manifest.json").write_bytes(manifest(step, files, ledger_offset=length, run=run).to_bytes())
    return folder


def known(run: Path, identity: str = ID) -> Path:
    (run / "run_id").write_text(f"{identity}\n")
    return run


# --- the id


def test_a_new_run_gets_an_id_of_its_own(tmp_path, store):
    found = set()
    for number, its_store in enumerate((None, store)):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        identity = identify(str(folder), its_store, from_store=False)
        assert re.fullmatch("[0-9a-f]{32}", identity.run)
        assert identity.stored == ()
        assert (folder / "run_id").read_text().split() == [identity.run]
        found.add(identity.run)
    assert len(found) == 2


@pytest.mark.parametrize("from_store", [False, True])
def test_the_id_stays(run, store, from_store):
    first = identify(str(run), store, from_store)
    put(store, 4, first.run)
    put(store, 2, first.run)
    assert identify(str(run), store, from_store) == type(first)(first.run, (2, 4))
    assert identify(str(run), None, from_store).run == first.run


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", ID[:-1].encode(), ID.upper().encode(), f"{ID}0".encode(), f"{ID} {ID}".encode(), b"\xff\xfe" * 16,
     b"\0" * 33, "\u0664".encode() * 32],
)  # fmt: skip
def test_a_damaged_id(run, store, content):
    put(store, 2, OTHER)
    (run / "run_id").write_bytes(content)
    for its_store in (None, store):
        with pytest.raises(InputError, match=r"run/run_id: expected the run's id, 32 hex digits, got '"):
            identify(str(run), its_store, from_store=True)
    assert (run / "run_id").read_bytes() == content


# --- whose store it is


def test_a_store_of_another_run(run, store):
    put(store, 2, OTHER)
    known(run)
    for from_store in (False, True):
        with pytest.raises(InputError, match=f"another run .{OTHER}; this one is {ID}.") as error:
            identify(str(run), store, from_store)
        assert store.url in str(error.value)
    assert not (run / LEDGER_FILE).exists()


def test_a_fresh_run_and_a_used_store(run, store):
    put(store, 2, OTHER)
    put(store, 14, OTHER, b"line\n")
    with pytest.raises(InputError, match=r"holds checkpoints up to step 14.*resume\.from_store=true"):
        identify(str(run), store, from_store=False)
    assert list(run.iterdir()) == []  # the next try finds what this one found
    identity = identify(str(run), store, from_store=True)
    assert (identity.run, identity.stored) == (OTHER, (2, 14))
    assert (run / "run_id").read_text() == f"{OTHER}\n"
    assert (run / LEDGER_FILE).read_bytes() == b"line\n"
    assert identify(str(run), store, from_store=False) == identity  # from now on it is the run's


@pytest.mark.parametrize("begun", ["checkpoint", "ledger"])
def test_a_run_from_before_there_was_a_store(run, store, begun):
    """It has checkpoints or a ledger, and no id: nobody knows that the store's are not another's."""
    if begun == "checkpoint":
        (run / "checkpoints" / "step_00000002").mkdir(parents=True)
    else:
        (run / LEDGER_FILE).write_bytes(b"mine\n")
    empty = identify(str(run), store, from_store=False)  # an empty store it may have
    os.unlink(run / "run_id")
    put(store, 2, OTHER)
    for from_store in (False, True):
        with pytest.raises(InputError, match="has not written them"):
            identify(str(run), store, from_store)
    assert not (run / "run_id").exists()
    assert empty.stored == ()


def test_a_store_of_checkpoints_that_are_of_no_run(run, store):
    """Copies that somebody put there: there is no id to go on with."""
    put(store, 2, "")
    with pytest.raises(InputError, match="without an id"):
        identify(str(run), store, from_store=True)
    assert not (run / "run_id").exists()
    with pytest.raises(InputError, match="without an id"):
        identify(str(known(run)), store, from_store=False)


def test_the_newest_manifest_that_can_be_read_says_whose_they_are(run, store, caplog):
    put(store, 2, OTHER)
    put(store, 4, ID)
    (put(store, 6, OTHER) / "manifest.json").write_bytes(b"{}")
    identity = identify(str(known(run)), store, from_store=False)
    assert identity.stored == (2, 4, 6)
    assert "step_00000006" in caplog.text
    (Path(store.url.removeprefix("file://")) / "step_00000004" / "manifest.json").write_bytes(b"")
    with pytest.raises(InputError, match=f"another run .{OTHER}"):
        identify(str(run), store, from_store=False)


def test_files_without_a_manifest_are_no_checkpoint(run, store):
    os.unlink(put(store, 2, OTHER) / "manifest.json")
    assert identify(str(run), store, from_store=False).stored == ()


# --- a store that does not answer


@pytest.mark.parametrize("broken", ["checkpoints", "manifest"])
def test_a_first_start_needs_its_store(run, store, broken):
    put(store, 2, OTHER)
    store.broken = (broken,)
    for from_store in (False, True):
        with pytest.raises(StoreError, match="cannot be reached"):
            identify(str(run), store, from_store)
    assert list(run.iterdir()) == []


@pytest.mark.parametrize("broken", ["checkpoints", "manifest"])
@pytest.mark.parametrize("owner", [ID, OTHER])
def test_a_later_start_goes_on_without_it(run, store, caplog, broken, owner):
    """What is there does not count: nobody has seen whose it is."""
    put(store, 2, owner, b"a\nb\n")
    (run / LEDGER_FILE).write_bytes(b"a\n")
    store.broken = (broken,)
    identity = identify(str(known(run)), store, from_store=False)
    assert (identity.run, identity.stored) == (ID, ())
    assert "goes on without what is there" in caplog.text
    assert (run / LEDGER_FILE).read_bytes() == b"a\n"


@pytest.mark.parametrize("broken", ["checkpoints", "manifest"])
def test_a_later_start_that_would_begin_anew_needs_its_store(run, store, broken):
    """It has an id and nothing else: its folder was lost, or its first start was killed before it had the ledger."""
    put(store, 2, ID, b"a\n")
    store.broken = (broken,)
    with pytest.raises(StoreError, match="cannot be reached"):
        identify(str(known(run)), store, from_store=True)
    assert {path.name for path in run.iterdir()} == {"run_id"}


# --- the ledger


def test_the_longest_ledger_is_put_back(run, store, caplog):
    """A checkpoint of a branch that was left may have a higher step and know less."""
    put(store, 2, ID, b"a\n")
    put(store, 4, ID, b"a\nb\nc\n")
    put(store, 6, ID, b"a\nb\n")
    put(store, 8, ID)  # has none
    with caplog.at_level(logging.INFO):
        identify(str(run), store, from_store=True)
    assert (run / LEDGER_FILE).read_bytes() == b"a\nb\nc\n"
    assert f"{run}/ledger.jsonl: put back from {store.url}" in caplog.text


def test_it_is_the_manifest_that_says_how_long_a_ledger_is(run, store):
    put(store, 2, ID, b"a\nb\nc\n", offset=5)
    put(store, 4, ID, b"a\n", offset=7)
    identify(str(run), store, from_store=True)
    assert (run / LEDGER_FILE).read_bytes() == b"a\n"


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_an_older_ledger_where_the_newest_is_damaged(run, store, caplog, damage):
    put(store, 2, ID, b"a\n")
    put(store, 4, ID, b"a\nb\n")
    newest = put(store, 6, ID, b"a\nb\nc\n") / HISTORY_FILE
    if damage == "gone":
        newest.unlink()
    else:
        newest.write_bytes({"flipped": b"a\nb\nX\n", "short": b"a\nb\n"}[damage])
    identify(str(run), store, from_store=True)
    assert (run / LEDGER_FILE).read_bytes() == b"a\nb\n"
    assert "an older ledger is taken" in caplog.text
    assert {path.name for path in run.iterdir()} == {"run_id", LEDGER_FILE}  # no temporary file


def test_a_damaged_manifest_brings_no_ledger(run, store):
    put(store, 2, ID, b"a\n")
    (put(store, 4, ID, b"a\nb\n") / "manifest.json").write_bytes(b"")
    identify(str(run), store, from_store=True)
    assert (run / LEDGER_FILE).read_bytes() == b"a\n"


def test_a_ledger_that_is_there_stays(run, store):
    put(store, 2, ID, b"a\nb\nc\n")
    (known(run) / LEDGER_FILE).write_bytes(b"a\n")
    identify(str(run), store, from_store=False)
    assert (run / LEDGER_FILE).read_bytes() == b"a\n"


def test_a_start_that_was_killed_while_it_went_on_from_the_store(run, store, monkeypatch):
    """Whatever it had written, the next start goes on from there with the same config."""
    put(store, 2, ID, b"a\n")
    replace = os.replace
    for killed_after in range(3):
        done = []

        def stop(*paths: Any, killed_after: int = killed_after, done: list[Any] = done, **options: Any) -> None:
            if len(done) == killed_after:
                raise KeyboardInterrupt
            replace(*paths, **options)
            done.append(paths)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            try:
                identify(str(run), store, from_store=True)
            except KeyboardInterrupt:
                assert killed_after < 2
        identity = identify(str(run), store, from_store=True)
        assert (identity.run, identity.stored) == (ID, (2,))
        assert (run / LEDGER_FILE).read_bytes() == b"a\n"
        for path in run.iterdir():
            path.unlink()
