"""The process of a tracker: what fails or hangs is said once and holds up no run, and what it lacks is sent later."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quern.train.config import MetricsConfig
from quern.train.trackers.trackers import Trackers
from support.train import run_case as case
from support.train.tracker_case import idle, lines, state

FAKE = '''
"""A tracker that writes what it is given, and fails or hangs where the environment says."""
import json, os, sys, time, types

failed = []

def spoil(where):
    how = os.environ.get("SPOILT_" + where)
    if how == "hangs" or (how == "raises, then hangs" and failed):
        time.sleep(1000)
    if how is not None:
        failed.append(where)
        raise RuntimeError(f"no {where}\\x1b[31m today")

class Run:
    def __init__(self, **given):
        spoil("START")
        self.out = open(os.environ["FAKE_OUT"], "a")
        self.config = types.SimpleNamespace(update=lambda config, allow_val_change: None)
        self.write(given={key: value for key, value in given.items() if key in ("id", "group", "name")})
    def write(self, **what):
        print(json.dumps(what), file=self.out, flush=True)
    def log(self, numbers, step):
        spoil("STEP")
        self.write(number=step, step=numbers["step"], loss=numbers.get("train/loss"))
    def define_metric(self, name, step_metric=None):
        pass
    def finish(self, exit_code=0):
        spoil("END")
        self.write(exit=exit_code)

def init(**given):
    return Run(**given)

def Settings(**given):
    return given
'''


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: Any) -> Path:
    """A library called wandb that writes JSON lines; the path of what it writes."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(FAKE)
    path = [str(tmp_path / "site"), *(place for place in sys.path if place)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("FAKE_OUT", str(tmp_path / "out"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return tmp_path / "out"


def given(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def tracked(tmp_path: Path, timeout_s: float = 60, **changes: Any) -> Any:
    data = tmp_path / "data" / "tokens"
    paths = [str(data / name) for name in ("web", "code")] if data.exists() else case.write_corpus(tmp_path / "data")
    metrics = {"trackers": ["wandb"], "trackers_timeout_s": timeout_s}
    return case.settings(tmp_path / "run", paths, metrics=metrics, **changes)


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in lines(run) if row["kind"] == "step"}


def sent(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in given(out) if row.get("loss") is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param(how, where, marks=() if (how, where) == ("hangs", "STEP") else pytest.mark.long)
        for how in ("raises", "hangs", "raises, then hangs")
        for where in (("STEP",) if "then" in how else ("START", "STEP", "END"))
    ],
)
def test_a_tracker_that_fails_or_hangs_is_said_once_and_what_it_lacks_is_sent_later(
    where: str, how: str, fake: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv(f"SPOILT_{where}", how)
    began = time.monotonic()
    assert case.live(tracked(tmp_path, timeout_s=5 if how == "raises" else 10 if where == "END" else 2)).complete
    assert time.monotonic() - began < 60  # not the 1,000 s that a call hangs
    said = [record.getMessage() for record in caplog.records if record.name.endswith("trackers.trackers")]
    assert all("\x1b" not in line for line in said)
    assert len(said) == len(set(said)) <= 2
    if where != "END":
        assert (
            f"wandb: {case.STEPS} lines of metrics were not sent; the next start of the run sends what is left" in said
        )
        assert sent(fake) == {}
    else:
        assert said[-1] == "wandb: has everything, but its run was not ended"
    if how != "hangs":
        assert said[0].startswith(f"wandb: RuntimeError: no {where} [31m today; the run goes on")
    with open(run / "trackers" / "wandb.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its process has ended
    monkeypatch.delenv(f"SPOILT_{where}")
    caplog.clear()
    assert case.live(tracked(tmp_path)).complete
    assert sent(fake) == losses(run)
    assert len(losses(run)) == case.STEPS
    assert not [record for record in caplog.records if record.name.endswith("trackers.trackers")]
    assert given(fake)[-1] == {"exit": 0}


@pytest.mark.slow
def test_a_resume_goes_on_in_the_same_run(fake: Path, tmp_path: Path) -> None:
    run, often = tmp_path / "run", {"checkpoint": {"interval": 3}}
    case.live(tracked(tmp_path, **often), kill_at=5)
    idle(run, "wandb", 3.5)  # else its process may send what the second start writes, which then opens nothing
    case.live(tracked(tmp_path, **often), kill_at=8)  # from 3 on; the steps up to 3 are there
    idle(run, "wandb", 6.5)
    before = sent(fake)
    assert sorted(before) == [*range(7)]
    case.live(tracked(tmp_path, **often, optimizer={"lr": 0.5}))  # from 6 on, where step 6 was done before
    (first,) = state(run, "wandb")["branches"]
    opened = [row["given"] for row in given(fake) if "given" in row]
    assert {(row["id"], row["group"]) for row in opened} == {(first["id"], state(run, "wandb")["group"])}
    assert [row["name"] for row in opened] == ["run", None, None]
    assert [row["step"] for row in given(fake) if row.get("loss") is not None] == [*range(9)]
    assert sent(fake).items() >= before.items()


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_said(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("quern.train.trackers.trackers.module", lambda *arguments: [str(tmp_path / "none")])
    with Trackers(str(tmp_path), MetricsConfig(trackers=("wandb",))):
        pass
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "wandb: cannot be started (No such file or directory); the run goes on without it"
