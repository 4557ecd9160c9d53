"""What is said of a run from its files alone: one that works, one that was killed, one that ended, on any store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from quern import storage
from quern.cli.main import app
from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.monitoring import heartbeat, run_status
from quern.data_pipeline.monitoring.heartbeat import Heartbeat, process_lives, this_process
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.monitoring.run_status import describe, read_status
from quern.errors import InputError, QuernError
from support.waits import until

pytestmark = pytest.mark.slow


def commit(run_dir: str, piece: str, pages: int, kept: int, **more: Any) -> dict[str, Any]:
    return publish_commit(
        run_dir, "pages", "s", piece, inputs={}, config="c", outputs={}, counts={"pages": pages, "kept": kept, **more}
    )


@pytest.fixture(params=["file system", "object store"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    folder = str(tmp_path / "run") if request.param == "file system" else f"memory:///{uuid.uuid4().hex}"
    storage.write_json(storage.join(folder, "run.json"), {"status": "running", "counts": {}})
    return folder


def test_of_a_run_at_work_the_driver_s_own_counters_are_told(run_dir: str) -> None:
    now = [0.0]
    progress = RunProgress(background=False, clock=lambda: now[0])
    workers = {"wanted": 4, "up": 3, "starting": 1, "busy": 2}
    with Heartbeat(run_dir, lambda: {**progress.snapshot(), "workers": workers}) as beat:
        progress.start_phase("pages", 4, 400)
        for piece in range(2):
            now[0] += 10
            counts = {"by_stage": {"quarantine": 1}, "damage": ["x"], "damage_left_out": 2}
            entry = commit(run_dir, str(piece), 50, 40, **counts)
            progress.partition_done(entry["counts"], 100)
        progress.error("s/1: worker died, the partition goes on")
        beat._write("at work")
        found = read_status(run_dir)
        assert found["status"] == "running"
        assert found["driver"]["state"] == "at work"
        assert (found["driver"]["pid"], found["driver"]["host"]) == (os.getpid(), os.uname().nodename)
        assert found["phase"] is not None
        said = {key: found["phase"][key] for key in ("name", "partitions", "done", "left", "pages", "pages_per_s")}
        assert said == {"name": "pages", "partitions": 4, "done": 2, "left": 2, "pages": 100, "pages_per_s": 5.0}
        assert found["phase"]["eta_s"] == pytest.approx(20, abs=5)
        assert (found["quarantined"], found["damage"], found["workers"]) == (2, 6, workers)
        assert found["phases"] == {"pages": {"commits": 2, "pages": 100, "kept": 80}}
        assert found["errors"] == {"num": 1, "last": ["s/1: worker died, the partition goes on"]}
        text = "\n".join(describe(run_dir, found))
        assert "pages: 2/4 partitions (50%), 2 left, 100 pages (5/s), 20 s gone" in text
        assert "2 busy, 3 up, 4 wanted" in text
        assert "the last: s/1: worker died" in text
        progress.end_phase()


def test_of_a_run_without_a_driver_the_commits_are_counted(run_dir: str) -> None:
    """What the last driver said is older than what its workers did."""
    with pytest.raises(QuernError), Heartbeat(run_dir, lambda: {"phase": None, "past": []}):
        raise QuernError("s/3: no such file")
    for piece in range(3):
        commit(run_dir, str(piece), 10, 7, by_stage={"quarantine": 1}, damage=["x", "y"])
    found = read_status(run_dir)
    assert (found["status"], found["driver"]["state"]) == ("stopped", "failed")
    assert found["error"] == "s/3: no such file"
    assert "  failed      s/3: no such file" in list(describe(run_dir, found))
    assert (found["phase"], found["workers"]) == (None, None)
    assert found["phases"] == {"pages": {"commits": 3, "pages": 30, "kept": 21}}
    assert (found["quarantined"], found["damage"]) == (3, 6)


@pytest.mark.parametrize(("signals", "state"), [(["SIGTERM"], "ended by SIGTERM"), ([], "interrupted")])
def test_of_a_run_that_a_signal_ended_it_is_said_and_how_to_go_on(
    run_dir: str, signals: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "ended_by", signals)
    with pytest.raises(KeyboardInterrupt), Heartbeat(run_dir, lambda: {"phase": None, "past": []}):
        raise KeyboardInterrupt
    found = read_status(run_dir)
    assert (found["status"], found["driver"]["state"], found["error"]) == ("stopped", state, None)
    told = list(describe(run_dir, found))
    assert f" pid {os.getpid()}, {state}, heard of " in told[1]
    assert told[-1] == "  to go on    give the same command again"
    with Heartbeat(run_dir, lambda: {"phase": None, "past": []}):
        assert "to go on" not in "\n".join(describe(run_dir, read_status(run_dir)))


def test_a_complete_run_is_complete_whatever_its_driver_said_last(run_dir: str) -> None:
    heart = Heartbeat(run_dir, lambda: {"phase": {"name": "tokens", "partitions": 1, "done": 0}, "past": []})
    heart._write("failed", "s/3: no such file")  # of an earlier start; killed between the run's end and its own
    commit(run_dir, "0", 10, 7)
    storage.write_json(storage.join(run_dir, "run.json"), {"status": "complete", "counts": {"pages": 10}})
    found = read_status(run_dir)
    assert (found["status"], found["driver"]["state"], found["driver"]["lives"]) == ("complete", "complete", False)
    assert found["phases"]["pages"] == {"commits": 1, "pages": 10, "kept": 7}
    assert found["error"] is None
    assert not [line for line in describe(run_dir, found) if "failed" in line]


def test_a_run_without_any_word_of_a_driver_is_told_of_too(run_dir: str) -> None:
    commit(run_dir, "0", 10, 7)
    found = read_status(run_dir)
    assert (found["status"], found["driver"]["state"], found["error"]) == ("stopped", "never heard of", None)
    assert not [line for line in describe(run_dir, found) if "failed" in line]
    for stranger in (
        b"{torn",
        b"[]",
        b'{"driver": {"beat": "yesterday", "pid": 1, "interval_s": 5}}',
        b'{"driver": {}}',
    ):
        storage.publish_bytes(storage.join(run_dir, "status.json"), stranger)
        assert read_status(run_dir) == found
    with pytest.raises(InputError, match=r"-none: expected a data run: it has no run\.json"):
        read_status(f"{run_dir}-none")


@pytest.mark.parametrize(
    "wrong",
    [
        '"driver": {"beat": NaN, "interval_s": 5, "pid": 1}, "errors": 7',
        '"driver": {**}, "phase": ["x"]',
        '"driver": {**}, "past": [{"name": "pages", "damage": [1]}], "phase": null',
        '"driver": {**}, "workers": 3',
        '"driver": {**, "pid": NaN}',
        '"driver": {**, "pid": Infinity}',
    ],
)
def test_a_word_that_no_driver_wrote_is_one_line(run_dir: str, wrong: str) -> None:
    about = json.dumps({**this_process(), "beat": 1.0, "interval_s": 5.0})[1:-1]
    text = '{"state": "at work", ' + wrong.replace("**", about) + "}"
    with storage.publish(storage.join(run_dir, "status.json")) as file:
        file.write(text.encode())
    with pytest.raises(InputError, match=r"status\.json: is not as a driver writes it \(\w+: "):
        list(describe(run_dir, read_status(run_dir)))


def test_phases_are_told_in_the_order_in_which_they_run(run_dir: str) -> None:
    for phase in ("tokens", "later", "shards", "duplicates", "pages"):
        publish_commit(run_dir, phase, "s", "0", inputs={}, config="c", outputs={}, counts={})
    found = read_status(run_dir)
    assert list(found["phases"]) == ["pages", "duplicates", "tokens", "shards", "later"]
    shards = found["phases"]["shards"]["commits"]
    storage.write_json(storage.join(run_dir, "commits", "shards", "all", "version.json"), {})  # is no shard
    assert read_status(run_dir)["phases"]["shards"]["commits"] == shards
    rows = [line.split()[0] for line in describe(run_dir, found) if "committed" in line]
    assert rows == list(found["phases"])


def test_a_driver_elsewhere_is_given_up_when_its_beats_stay_out(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "time", SimpleNamespace(time=lambda: 1e9))
    about = {**this_process(), "host": "elsewhere", "started": 0, "interval_s": 5}
    for age, state in ((3, "at work"), (19, "at work"), (60, "silent")):
        said = {"state": "at work", "phase": None, "driver": {**about, "beat": 1e9 - age}}
        storage.write_json(storage.join(run_dir, "status.json"), said)
        found = read_status(run_dir)
        assert (found["driver"]["state"], found["driver"]["heard_s_ago"]) == (state, age)
        assert found["status"] == ("running" if state == "at work" else "stopped")


def test_a_killed_process_is_seen_at_once_and_its_pid_s_next_owner_is_not_it() -> None:
    code = "import json,time; from quern.data_pipeline.monitoring.heartbeat import this_process as p; print(json.dumps(p()), flush=True); time.sleep(600)"  # noqa: E501
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    about = json.loads(process.stdout.readline())
    assert process_lives(about) is True
    assert process_lives({**about, "ticks": about["ticks"] - 1}) is False, "another process with the same pid"
    assert process_lives({**about, "where": "another pod"}) is None
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    assert process_lives(about) is False
    process.wait()
    assert process_lives(about) is False


def test_a_beat_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where a folder should be")
    with Heartbeat(str(tmp_path / "run"), lambda: {}):
        pass
    assert caplog.text.count("cannot be written, the run goes on") == 1


def test_a_beat_comes_on_time_and_at_every_new_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.02)
    name = ["pages"]
    with Heartbeat(str(tmp_path), lambda: {"phase": {"name": name[0]}}) as heart:
        heart.interval_s = 1e9

        def told(expected: str) -> bool:
            return bool(storage.read_json(str(tmp_path / "status.json"))["phase"]["name"] == expected)

        name[0] = "duplicates"
        until(lambda: told("duplicates"))
    assert storage.read_json(str(tmp_path / "status.json"))["state"] == "complete"


def test_watching_ends_with_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_json(str(tmp_path / "run.json"), {"status": "running", "counts": {}})
    heart = Heartbeat(str(tmp_path), lambda: {"phase": None})
    heart._write("at work")
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            storage.write_json(str(tmp_path / "run.json"), {"status": "complete", "counts": {}})

    monkeypatch.setattr(time, "sleep", sleep)
    shown = CliRunner().invoke(app, ["data", "status", str(tmp_path), "--watch", "2"])
    assert shown.exit_code == 0, shown.output
    assert looks == [2.0, 2.0]
    assert [line.rsplit(": ")[-1] for line in shown.output.splitlines() if line.startswith(str(tmp_path))] == [
        "running", "running", "complete",
    ]  # fmt: skip


def test_a_driver_that_has_not_come_to_the_pages_yet_makes_no_commit_unseen(run_dir: str) -> None:
    """A run that goes on looks through its commits first; what they hold is known meanwhile."""
    commit(run_dir, "0", 10, 7, by_stage={"quarantine": 2}, damage=["x"])
    Heartbeat(run_dir, RunProgress(background=False).snapshot)._write("at work")
    found = read_status(run_dir)
    assert found["status"] == "running"
    assert found["phases"] == {"pages": {"commits": 1, "pages": 10, "kept": 7}}
    assert (found["quarantined"], found["damage"]) == (2, 1)
