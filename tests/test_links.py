"""A run directory may come from anybody: a link, or a pipe, that stands where quern writes is never written through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quern.data_pipeline.execution.run_directory import sole_driver
from quern.errors import QuernError
from quern.train.batches.corpus import exclusive
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.config import MetricsConfig
from quern.train.history.consumers import announce
from quern.train.history.ledger import Ledger
from quern.train.step.metrics import Metrics


def drive(run: Path) -> None:
    with sole_driver(str(run)):
        pass


def share(run: Path) -> None:
    with exclusive(str(run / ".lock")):
        pass


#: What opens the file of a name in a folder: whether it may go on without it, else with which words it ends.
WRITERS: dict[str, tuple[str, Callable[[Path], object], str | None]] = {
    "a data run's lock": (".lock", drive, "cannot be written"),
    "a trainer's lock": (".lock", lambda run: FolderLock(str(run)).close(), "cannot be locked"),
    "a lock among ranks": (".lock", share, None),
    "the readers of a data run": (
        "consumers.jsonl",
        lambda run: announce("/t", "ab", {"r/w/1": f"{run}/tokens/w"}),
        None,
    ),
    "a ledger": ("ledger.jsonl", lambda run: Ledger(run / "ledger.jsonl").close(), "cannot be opened"),
    "metrics": ("metrics.jsonl", lambda run: Metrics(str(run), MetricsConfig(), 1).close(), "cannot be written"),
}


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_nothing_is_written_through(tmp_path: Path, what: str, kind: str) -> None:
    name, write, told = WRITERS[what]
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    if kind == "link":
        outside.write_text("{}\n")
    if kind == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(outside)
    if told is None:
        write(run)
    else:
        with pytest.raises(QuernError, match=rf"{name}: {told} \(is not a regular file\)") as caught:
            write(run)
        assert "\n" not in str(caught.value)
    assert (outside.read_text() if outside.exists() else None) == ("{}\n" if kind == "link" else None)


def test_a_lock_that_lies_is_no_reason_to_refuse_or_to_signal(tmp_path: Path) -> None:
    """What a lock file says is shown and never acted upon: who holds it is the kernel's to say."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for said in (json.dumps({"host": os.uname().nodename, "pid": bystander.pid}), "[" * 100_000, "\0" * 5_000_000):
            (tmp_path / ".lock").write_text(said)
            FolderLock(str(tmp_path)).close()
            drive(tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")
