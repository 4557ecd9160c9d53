"""A run that a signal or a full disk ends: one line, an exit code, a status, and the same bytes afterwards."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quern.cli import main as cli
from quern.data_pipeline import partition, run_status
from quern.data_pipeline.ending import EndedBySignalError, ends_by_signal, full_disk_named
from quern.errors import QuernError
from support.data_pipeline import in_process
from support.programs import python


def config(folder: Path, run: str = "run") -> dict[str, Any]:
    source = folder / "in.jsonl"
    lines = [f"The water of river number {n} is under bridge {n * 7 % 31} in the old town." for n in range(40)]
    source.write_text("".join(json.dumps({"id": str(n), "text": line}) + "\n" for n, line in enumerate(lines)))
    return {
        "run_dir": str(folder / run), "sources": [{"name": "s", "kind": "jsonl", "paths": str(source)}],
        "language": {"keep": None, "threshold": 0, "pre_skip": False}, "quality": {"order": []},
        "tokenize": {"encoding": "trained", "vocab_size": 280, "validation": 0},
    }  # fmt: skip


def tokens(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.glob("tokens/**/*.bin"))]


class OfRayError(OSError):
    """As Ray raises a worker's error: its class, without its fields, and the error itself in ``cause``."""

    def __init__(self, cause: OSError) -> None:
        super().__init__()
        self.cause = cause


def test_a_full_disk_is_named(tmp_path):
    there, run = str(tmp_path / "not" / "yet"), str(tmp_path / "run")
    for error, start in (
        (OSError(errno.ENOSPC, "No space left on device", there), f"{there}: no space is left ("),
        (OSError(errno.EDQUOT, "Disk quota exceeded", there), f"{there}: the quota of its disk is used up ("),
        (OfRayError(OSError(errno.ENOSPC, "No space left on device", there)), f"{there}: no space is left ("),
        (OSError(errno.ENOSPC, "No space left on device"), f"{run}: no space is left ("),
    ):
        with pytest.raises(QuernError) as told, full_disk_named(run):
            raise error
        assert str(told.value).startswith(start)
        assert str(told.value).endswith(" MB are free there); free some, then the same command goes on, or give a "
                                        "run_dir elsewhere")  # fmt: skip
    with pytest.raises(OfRayError), full_disk_named(run):
        raise OfRayError(OSError(errno.EIO, "Input/output error", there))


@pytest.mark.slow
def test_a_run_goes_on_when_there_is_room_again(tmp_path, monkeypatch):
    in_process.run_config(config(tmp_path, "whole"))
    publish = partition._publish

    def full(*arguments: Any) -> Any:
        publish(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(partition, "_publish", full)
    with pytest.raises(QuernError, match=r"no space is left"):
        in_process.run_config(config(tmp_path))
    said = run_status.read_status(str(tmp_path / "run"))
    assert (said["status"], said["driver"]["state"]) == ("stopped", "failed")
    assert "no space is left" in said["error"]
    monkeypatch.undo()
    in_process.run_config(config(tmp_path))
    assert tokens(tmp_path / "run") == tokens(tmp_path / "whole")


def unwind(unwound: list[Any]) -> None:
    with ends_by_signal("RUN"):
        with pytest.raises(KeyboardInterrupt):  # no Exception, which would be taken for a failure
            signal.raise_signal(signal.SIGTERM)
        unwound.append(signal.getsignal(signal.SIGTERM))
        raise KeyboardInterrupt  # as Ray does


def test_a_signal_unwinds_the_block_and_says_which():
    before = signal.getsignal(signal.SIGTERM)
    unwound: list[Any] = []
    with pytest.raises(EndedBySignalError, match=r"^RUN: ended by SIGTERM; the same command goes on$"):
        unwind(unwound)
    assert unwound == [signal.SIG_DFL]  # a second one kills
    assert EndedBySignalError.exit_code == 3
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyboardInterrupt), ends_by_signal("RUN"):
        raise KeyboardInterrupt


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_by_signal("RUN"):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


STANDING = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from quern.cli import main
from quern.data_pipeline import run as pages
from support.data_pipeline import in_process

mark = Path(sys.argv[2])

def wait(*_):
    mark.touch()
    for _ in range(6000):
        time.sleep(0.1)

pages.process_partition = wait
sys.argv = ["quern", "data", "run", sys.argv[1]]
with in_process.engine():
    main.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_run_in_one_line(tmp_path, number):
    (tmp_path / "config.yaml").write_text(json.dumps(config(tmp_path)))
    (tmp_path / "standing.py").write_text(STANDING)
    mark, tests = tmp_path / "at work", str(Path(__file__).parents[1])
    command = [python(), str(tmp_path / "standing.py"), str(tmp_path / "config.yaml"), str(mark), tests]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not mark.exists() and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    lines = [line for line in said.splitlines() if not line.startswith("pages: ")]
    status = run_status.read_status(str(tmp_path / "run"))
    assert status["driver"]["state"] == "interrupted"
    if number == signal.SIGINT:
        assert (process.returncode, lines) == (130, ["interrupted; run the same command again to go on"])
        return
    told = f"{tmp_path}/run: ended by {number.name}; the same command goes on"
    assert (process.returncode, lines) == (3, [f"error: {told}"])
    assert f"  interrupted {told}" in run_status.describe(str(tmp_path / "run"), status)


def test_an_interrupt_amid_the_imports_is_one_line(monkeypatch, capsys):
    def interrupted(names: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_build", interrupted)
    monkeypatch.setattr(sys, "argv", ["quern", "data", "run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


RAY_DIES = """
import os, signal, sys, threading, time
from quern.data_pipeline import engine
from quern.errors import QuernError
engine.PATIENCE_S = engine.REGROW_S = 2.0
ours = lambda *_: None
signal.signal(signal.SIGTERM, ours)
with engine.open_engine(1) as pool:
    import ray
    assert signal.getsignal(signal.SIGTERM) is ours
    (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
    threading.Timer(2.0, lambda: os.kill(raylet.process.pid, signal.SIGKILL)).start()
    try:
        list(pool.map(time.sleep, [(600,)], label="pages"))
    except QuernError as error:
        print(error)
os._exit(0)
"""


@pytest.mark.long
def test_a_ray_of_our_own_that_dies_is_an_error():
    done = subprocess.run([sys.executable, "-c", RAY_DIES], capture_output=True, text=True, timeout=300)
    last = done.stdout.splitlines()[-1]  # Ray prints the end of its log before it
    assert last == "pages: the Ray on this machine has ended; the same command starts it and goes on", done.stderr
    assert done.returncode == 0
