"""A store that fails while a run trains, full disks, and whose store it is.

The store is an S3 server on loopback behind a proxy that breaks things; what is in it is looked at with boto3 and
``hashlib``, never with the code that put it there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import quern.train.checkpoint.tiers.tiers as tiers
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import Manifest
from quern.train.checkpoint.save import work
from quern.train.checkpoint.save.work import Work
from quern.train.checkpoint.tiers.upload import Uploader
from quern.train.config import CheckpointConfig
from support.remote import s3_server
from support.remote.s3_server import Fault
from support.train import checkpoint_case as case
from support.train import run_case
from support.train.saves import CheckpointManager
from support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

OFTEN = 10**6
STEPS = 6
NAME = "step_{:08d}".format
#: On which nothing can listen.
NOBODY = "http://127.0.0.1:1"

#: Each one a process that uploads; what a fault does to a transfer is proved in test_checkpoint_store.py.
LATER = ("answers that stall", "answers in drips", "requests cut off", "answers cut off", "ExpiredToken")
FAULTS = {
    "SlowDown": [Fault("SlowDown", "PUT", "step_", OFTEN)],
    "requests cut off": [Fault("cut request", "PUT", "step_", OFTEN)],
    "answers cut off": [Fault("lose answer", "PUT", "step_", OFTEN)],
    "answers that stall": [Fault("stall", "GET", "uploads", OFTEN), Fault("SlowDown", "PUT", "step_", OFTEN)],
    "answers in drips": [Fault("drip", "GET", "uploads", OFTEN), Fault("SlowDown", "PUT", "step_", OFTEN)],
    "ExpiredToken": [Fault("ExpiredToken", method, "step_", OFTEN) for method in ("PUT", "HEAD", "GET")],
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, where a run has minutes."""
    monkeypatch.setattr(tiers, "Uploader", partial(Uploader, retry_after_s=0.5, timeout_s=2.0, budget_s=1.0))
    monkeypatch.setattr(tiers, "_START_BUDGET_S", 1.0)


def settings(run: Path, paths: list[str], store: str, **changes: Any) -> Any:
    checkpoint = {"interval": 2, "mode": "thread", "store": store, "store_every": 1} | changes.pop("checkpoint", {})
    return run_case.settings(run, paths, steps=changes.pop("steps", STEPS), checkpoint=checkpoint, **changes)


def check_stored(server: s3_server.Server, run: Path, steps: list[int]) -> None:
    """These checkpoints, and no other, are whole in the bucket, as the run has them."""
    objects = server.objects()
    assert sorted(name.split("/")[0] for name in objects if name.endswith("manifest.json")) == [NAME(s) for s in steps]
    for step in steps:
        data = server.read(f"{NAME(step)}/manifest.json")
        assert data == (run / "checkpoints" / NAME(step) / "manifest.json").read_bytes()
        files = json.loads(data)["files"]
        assert {name for name in objects if name.startswith(NAME(step))} == {
            f"{NAME(step)}/{name}" for name in (*files, "manifest.json")
        }
        for name, record in files.items():
            stored = server.read(f"{NAME(step)}/{name}")
            assert (len(stored), hashlib.sha256(stored).hexdigest()) == (record["size"], record["sha256"]), name
    assert server.uploads() == []


def said(caplog: pytest.LogCaptureFixture, *parts: str) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in lines if all(part in line for part in parts)]


@pytest.mark.parametrize(
    ("what", "local"),
    [*(pytest.param(what, False, id=f"{what}-in the run's folder", marks=pytest.mark.long if what in LATER else ())
       for what in FAULTS if what != "SlowDown"),
     pytest.param("SlowDown", True, id="SlowDown-on the node's disk"),
    ],
)  # fmt: skip
def test_the_run_goes_on_while_the_store_fails(tmp_path, paths, server, caplog, what, local):
    """All steps are done before the store is well again: then everything gets there."""
    run = tmp_path / "run"
    done: list[int] = []

    def heal_at_the_end(data_step: int) -> float:
        if data_step == 0:
            server.proxy.faults = [replace(fault) for fault in FAULTS[what]]
        done.append(data_step)
        if data_step == STEPS - 1:
            until(lambda: said(caplog, NAME(2)) and server.proxy.struck(FAULTS[what][0].what))
            assert [name for name in server.objects() if name.endswith("manifest.json")] == []
            server.proxy.faults = []
        return 1.0

    changes = {"checkpoint": {"local": str(tmp_path / "nvme")}} if local else {}
    left = run_case.live(settings(run, paths, server.url, **changes), factor=heal_at_the_end)
    assert left.complete
    assert done == list(range(STEPS))
    check_stored(server, run, [2, 4, 6])
    assert server.proxy.struck(FAULTS[what][0].what) > 0
    lines = said(caplog)
    assert said(caplog, "s3://", f"{NAME(2)}/", "tried again later")
    assert len(lines) == len(set(lines))
    print(f"| {what} | {re.sub(r's3://b-[0-9a-f]+', 's3://bucket', lines[0])} |")


@pytest.mark.parametrize("what", ["SlowDown", pytest.param("ExpiredToken", marks=pytest.mark.long)])
def test_the_next_start_uploads_what_was_left(tmp_path, paths, server, caplog, what):
    run = tmp_path / "run"

    def fail(data_step: int) -> float:
        server.proxy.faults = [replace(fault) for fault in FAULTS[what]]
        return 1.0

    config = settings(run, paths, server.url, checkpoint={"upload_wait_s": 0, "interval": 0})
    assert run_case.live(config, factor=fail).complete
    assert not any(name.endswith("manifest.json") for name in server.objects())
    assert said(caplog, "not moved yet: ", "the next start moves the checkpoint it goes on from")
    server.proxy.faults = []
    again = run_case.live(settings(run, paths, server.url, checkpoint={"interval": 0}))
    assert (again.start.step, again.complete) == (6, True)
    check_stored(server, run, [6])


@pytest.mark.parametrize("what", [pytest.param("nobody", marks=pytest.mark.long), "ExpiredToken"])
def test_a_store_that_is_away_at_a_start(tmp_path, paths, server, monkeypatch, caplog, what):
    """A first start is refused: nobody knows whose the store is. A later one goes on, and uploads when it is back."""
    run, config = tmp_path / "run", settings(tmp_path / "run", paths, server.url, steps=6)

    def away(is_away: bool) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY if is_away and what == "nobody" else server.proxy.url)
        faults = [Fault("ExpiredToken", method, "", OFTEN) for method in ("PUT", "HEAD", "GET")]
        server.proxy.faults = faults if is_away and what != "nobody" else []

    away(True)
    with pytest.raises(QuernError, match=r"s3://.*(cannot be reached|renew the credentials)") as caught:
        run_case.live(config)
    assert not isinstance(caught.value, InputError)  # the same may be tried again later
    assert not (run / "ledger.jsonl").exists()
    assert not (run / "run_id").exists()
    away(False)
    assert not run_case.live(config, stop_at=0).complete
    check_stored(server, run, [2])
    away(True)
    caplog.clear()
    last = settings(run, paths, server.url, steps=6, checkpoint={"upload_wait_s": 0, "interval": 0})
    assert run_case.live(last).start.step == 2
    assert said(caplog, "s3://", "goes on without what is there")
    away(False)
    assert run_case.live(config).start.step == 6
    check_stored(server, run, [2, 6])


# ---- whose the store is; its ledger


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def test_a_store_belongs_to_one_run(tmp_path, paths, store):
    first = settings(tmp_path / "one", paths, store, steps=4)
    assert run_case.live(first).complete
    whose = (tmp_path / "one" / "run_id").read_text()
    before = {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()}

    with pytest.raises(InputError, match=r"holds checkpoints up to step 4, and .*two has not written them"):
        run_case.live(settings(tmp_path / "two", paths, store, steps=4))
    run_case.live(settings(tmp_path / "two", paths, f"file://{tmp_path}/other", steps=4))
    for from_store in (False, True):
        with pytest.raises(InputError, match="holds checkpoints of another run"):
            run_case.live(settings(tmp_path / "two", paths, store, steps=6, resume={"from_store": from_store}))
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before

    three = settings(tmp_path / "three", paths, store, steps=6, resume={"from_store": True})
    with pytest.raises(InputError, match=r"belongs to the run [0-9a-f]{32} in .*one, and .*three is a copy of it"):
        run_case.live(three)
    assert {path: path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()} == before
    shutil.rmtree(tmp_path / "one")
    assert run_case.live(three).start.step == 4
    assert (tmp_path / "three" / "run_id").read_text() == whose
    assert run_case.rows(tmp_path / "three").keys() >= {4, 5}


def test_checkpoints_in_a_store_that_no_run_has_written(tmp_path, paths, store):
    """Written by a tool, or by a version without ids: they are nobody's."""
    assert run_case.live(settings(tmp_path / "one", paths, store, steps=4)).complete
    for file in (tmp_path / "store").glob("*/manifest.json"):
        manifest = Manifest.from_dict(json.loads(file.read_bytes()), name="m")
        file.write_bytes(replace(manifest, run="").to_bytes())
    with pytest.raises(InputError, match="of another run \\(without an id"):
        run_case.live(settings(tmp_path / "two", paths, store, steps=6, resume={"from_store": True}))


@pytest.fixture
def branched(tmp_path, paths, store):
    """Steps 2 to 8; then from step 4 anew, beyond two data steps, to step 6. Only the store is left."""
    run = tmp_path / "run"
    assert not run_case.live(settings(run, paths, store, steps=12), stop_at=6).complete
    back = settings(run, paths, store, steps=12, resume={"step": 4}, data_skip=2)
    assert run_case.live(back, stop_at=4).start.step == 4
    assert sorted(path.name for path in (tmp_path / "store").glob("step_*")) == [NAME(step) for step in (2, 4, 6, 8)]
    shutil.copytree(run, tmp_path / "kept")
    shutil.rmtree(run)
    return tmp_path


@pytest.mark.long
def test_the_branch_that_was_left_stays_left(branched, paths, store):
    straight = run_case.live(settings(branched / "kept", paths, f"file://{branched}/elsewhere", steps=12))
    left = run_case.live(settings(branched / "run", paths, store, steps=12, resume={"from_store": True}))
    assert (straight.start.step, left.start.step) == (6, 6)
    assert left.start.data_step == straight.start.data_step == 8
    assert run_case.differences(left.state, straight.state) == []


def test_a_damaged_ledger_in_the_store(tmp_path, paths, store, caplog):
    """Without it nobody knows what its checkpoint was followed by: the run goes on from the one before."""
    run = tmp_path / "run"
    run_case.live(settings(run, paths, store, steps=6))
    shutil.rmtree(run)
    file = tmp_path / "store" / NAME(6) / "ledger.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    left = run_case.live(settings(run, paths, store, steps=6, resume={"from_store": True}))
    assert said(caplog, "ledger.jsonl", "an older ledger is taken")
    assert (left.start.step, left.complete) == (4, True)


# ---- full disks


@pytest.fixture
def one(tmp_path):
    """A manager of one rank whose files go to a disk of its own, with checkpoints 2 and 4; and its state."""
    state = case.make(tmp_path)
    config = CheckpointConfig(mode="sync", keep_last=20, local=str(tmp_path / "nvme"))
    with CheckpointManager(str(tmp_path / "run"), config) as checkpoints:
        for step in (2, 4):
            save(checkpoints, state, step)
        yield checkpoints, state


def save(checkpoints: CheckpointManager, state: Any, step: int) -> None:
    case.fill(state, step)
    checkpoints.save(step, state, case.position(step))


def full(*arguments: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


@pytest.mark.parametrize("where", ["the node's disk", "the run's folder"])
def test_a_full_disk(tmp_path, one, monkeypatch, where):
    """The save fails, leaves nothing, and what was saved before stands; with room again the same step is saved."""
    checkpoints, state = one
    before = everything(tmp_path)
    write = Work.write

    def half(self: Work, folder: str, fetch: Any = None) -> Any:
        files = write(self, folder, fetch)
        (name,) = files
        os.truncate(os.path.join(folder, name), 100)
        full()

    with monkeypatch.context() as patched:
        if where == "the node's disk":
            patched.setattr(Work, "write", half)
        else:
            patched.setattr(work, "complete_folder", full)
        for _ in range(2):
            with pytest.raises(QuernError, match="No space left on device"):
                save(checkpoints, state, 6)
    assert everything(tmp_path) == before
    assert checkpoints.latest_valid().step == 4
    save(checkpoints, state, 6)
    found = checkpoints.latest_valid()
    case.fill(state, 99)
    checkpoints.load(found.path, state)
    assert (found.step, case.differences(state, 6)) == (6, [])


def everything(folder: Path) -> dict[str, bytes | None]:
    places = (folder / "nvme", folder / "run")
    return {str(path): path.read_bytes() if path.is_file() else None for at in places for path in at.rglob("*")}


def test_a_disk_that_is_full_when_files_come_back(tmp_path, monkeypatch, caplog):
    """From the store to an empty disk: what is said names the file and why; with room again the same start goes on."""
    state = case.make(tmp_path)
    config = CheckpointConfig(mode="sync", local=str(tmp_path / "nvme"), store=f"file://{tmp_path}/store")
    with CheckpointManager(str(tmp_path / "run"), config) as checkpoints:
        save(checkpoints, state, 2)
        checkpoints.tiers.finish()
    shutil.rmtree(tmp_path / "nvme")
    replaced = os.replace

    def no_room(source: str, target: str) -> None:
        if "nvme" in str(target):
            full()
        replaced(source, target)

    with CheckpointManager(str(tmp_path / "run"), config) as checkpoints:
        monkeypatch.setattr(os, "replace", no_room)
        with pytest.raises(QuernError, match="no checkpoint is whole"):
            checkpoints.latest_valid()
        assert said(caplog, "distcp", "No space left on device")
        monkeypatch.setattr(os, "replace", replaced)
        assert not [path for path in (tmp_path / "nvme").rglob("*") if path.is_file()]
        checkpoints.load(checkpoints.latest_valid().path, state)
    assert case.differences(state, 2) == []
