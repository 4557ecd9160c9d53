"""Places that take over from those that failed, and processes that wait to be ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.config import dump_yaml
from quern.train.history.ledger import Ledger
from quern.train.processes import launch
from quern.train.supervision.events import EVENTS_FILE, Events
from quern.train.supervision.restarts import Attempt, Restarts
from quern.train.supervision.supervisor import Supervisor
from support.programs import forked, kill, python
from support.train import run_case as case
from support.waits import has_ended, until

#: Begins a rank: it may have waited, and writes who it is.
BEGINS = """
import json, os, sys, time
from quern.train.processes import launch, waiting

def begin(folder, prepare, open_spare):
    waited = "QUERN_WAITS" in os.environ
    waiting.wait(prepare, open_spare)
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own = {"rank": int(os.environ["RANK"]), "place": gpus[int(os.environ["QUERN_GPU"])], "pid": os.getpid(),
           "waited": waited, "sees": [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["QUERN_GPU"]],
           "mark": os.environ["MARK"]}
    with open(os.path.join(folder, "begun"), "a") as file:
        file.write(json.dumps(own) + "\\n")
    launch.end_with_launcher()
"""
#: A rank that fails as it is told in its start by the number of lines in the file, when the file ``go`` is there.
PROGRAM = (
    BEGINS
    + """
from quern.train.supervision import beats
folder, opens, *fails = sys.argv[1:]
def opened():
    if opens == "no":
        raise RuntimeError("no device")
    with open(os.path.join(folder, f"opened-{os.getpid()}"), "x") as file:
        json.dump([os.environ["CUDA_VISIBLE_DEVICES"], os.environ["QUERN_GPU"]], file)

begin(folder, lambda: None, opened)
rank = int(os.environ["RANK"])
start = (sum(json.loads(line)["rank"] == rank for line in open(os.path.join(folder, "begun"))) - 1)
with beats.telling() as tell:
    tell(start)
    tell(start + 1)
    if start < len(fails):
        while not os.path.exists(os.path.join(folder, f"go{start}")):
            time.sleep(0.01)
        if rank == 1:
            exec(fails[start])
        time.sleep(600)
"""
)
KILLED = "os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MARK", "\udcff ä\n")


class Run:
    """A supervisor at work in this process. ``before``: what is done before start ``number`` may fail, when all that
    shall wait does."""

    def __init__(self, folder: Path, *fails: str, spares: int = 1, opens: str = "yes", **how: bool) -> None:
        self.folder, self.said = folder, list[str]()
        self.events = Events(str(folder), None)
        command = [sys.executable, "-c", PROGRAM, str(folder), opens, *fails]
        self.restarts = Restarts(9)
        self.supervisor = Supervisor(
            str(folder), command, 2, self.restarts, self.events, self.said.append, spares, **how
        )  # fmt: skip

    def run(self, before: Callable[[int], object] = lambda number: None, starts: int = 1) -> Attempt:
        def go() -> None:
            for number in range(starts):
                until(self.all_wait)
                before(number)
                (self.folder / f"go{number}").touch()
                until(lambda number=number: len(self.begun()) >= 2 * (number + 2))

        thread = threading.Thread(target=go)
        thread.start()
        attempt = self.supervisor.run()
        thread.join()
        return attempt

    def all_wait(self) -> bool:
        own = self.waiting()
        return len(own) == 2 + len(self.restarts.spares) and all(one.ready for one in own)

    def waiting(self) -> list[Any]:
        return [*self.supervisor._waiting._waiting]  # type: ignore[union-attr]

    def begun(self) -> list[dict[str, Any]]:
        file = self.folder / "begun"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / EVENTS_FILE).read_text().splitlines()]


def places(begun: list[dict[str, Any]]) -> list[str]:
    return [own["place"] for own in sorted(begun, key=lambda own: own["rank"])]


def test_a_spare_place_takes_over_and_all_ranks_go_on_in_processes_that_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = Run(tmp_path, KILLED), list[Any]()

    def look(number: int) -> None:
        seen.extend(run.waiting())
        assert run.supervisor._waiting is not None
        assert run.supervisor._waiting.take(0, {"OMP_NUM_THREADS": "77"}) is None

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run.run(look).code == 0
    first, second = run.begun()[:2], run.begun()[2:]
    assert (places(first), places(second)) == (["0", "1"], ["0", "2"])
    assert [own["waited"] for own in first + second] == [False, False, True, True]
    assert {own["pid"] for own in second} < {own.worker.pid for own in seen}
    assert {own["mark"] for own in second} == {os.environ["MARK"]}
    spare = next(own.worker.pid for own in seen if own.place == 2)
    assert [path.name for path in tmp_path.glob("opened-*")] == [f"opened-{spare}"]
    (taken,) = (own for own in second if own["rank"] == 1)
    assert taken["pid"] == spare
    assert taken["sees"] == json.loads((tmp_path / f"opened-{spare}").read_text()), "the GPU that it has opened"
    assert next(own["sees"] for own in second if own["rank"] == 0) == ["0,2", "0"], "and not the one that failed"
    assert all(has_ended(own.worker.pid) for own in seen)
    assert run.said[1:] == [
        "place 1 has failed: place 2 takes over rank 1, 0 spares left",
        "failed in step 1: started again at once (restart 1 of 9)",
    ]
    (event,) = run.told()
    assert (event["moves"], event["spares"]) == ([[1, 2]], 0)


def test_without_a_spare_place_the_same_one_goes_on_and_a_rollback_leaves_none(tmp_path: Path) -> None:
    run = Run(tmp_path, "os._exit(4)", KILLED, KILLED)
    assert run.run(starts=3).code == 0
    begun = run.begun()
    found = [places(begun[at : at + 2]) for at in range(0, 8, 2)]
    assert found == [["0", "1"], ["0", "1"], ["0", "2"], ["0", "2"]]
    assert [own["waited"] for own in begun] == [False] * 2 + [True] * 6
    assert [(row["event"], row["moves"]) for row in run.told()] == [
        ("goes_back", []), ("failed", [[1, 2]]), ("failed", []),
    ]  # fmt: skip


def test_a_restart_replaces_ranks_that_were_slow_if_it_is_told_to(tmp_path: Path) -> None:
    run = Run(tmp_path, KILLED, spares=2, replace_slow=True)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append("straggler", step=49, what="rank 1 on a", ranks=[1], slower=0.4)

    def slow(number: int) -> None:
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            for what, rank, slower in (("rank 1 on a", 1, 0.0), ("rank 0 on a", 0, 0.5)):
                ledger.append("straggler", step=99, what=what, ranks=[rank], slower=slower)

    assert run.run(slow).code == 0
    (event,) = run.told()
    assert sorted(left for left, _ in event["moves"]) == [0, 1]
    assert event["moves"][0][0] == 1, "the one that failed comes first"
    assert sorted(places(run.begun()[2:])) == ["2", "3"]
    assert "place 0 is slow: place 3 takes over rank 0, 0 spares left" in run.said or (
        "place 0 is slow: place 2 takes over rank 0, 0 spares left" in run.said
    )


@pytest.mark.parametrize("place", [pytest.param(None, marks=pytest.mark.long), 2])
def test_a_waiting_process_that_is_killed_costs_nothing_but_time(tmp_path: Path, place: int | None) -> None:
    run = Run(tmp_path, KILLED)

    def kill(number: int) -> None:
        for own in run.waiting():
            if own.place == place:
                os.kill(own.worker.pid, signal.SIGKILL)
                own.worker.wait()

    assert run.run(kill).code == 0
    second = sorted(run.begun()[2:], key=lambda own: own["rank"])
    assert places(second) == ["0", "2"]
    # a spare place takes any that waits, where its own is gone
    assert [own["waited"] for own in second] == ([False, True] if place is None else [True, True])


def test_a_spare_place_whose_device_cannot_be_opened_takes_nothing_over(tmp_path: Path, capfd: Any) -> None:
    run = Run(tmp_path, KILLED, opens="no")
    run.all_wait = lambda: sum(own.ready for own in run.waiting()) == 2 and run.supervisor._waiting.failed(2)  # type: ignore[method-assign,union-attr]
    assert run.run().code == 0
    assert places(run.begun()[2:]) == ["0", "1"]
    assert run.told()[0]["spares"] == 0
    assert "warning: a process cannot wait for its rank: RuntimeError: no device" in capfd.readouterr().err


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Of a program whose first start goes on for ever."""
    code = (
        "import sys\n"
        "from quern.train.supervision.events import Events\n"
        "from quern.train.supervision.restarts import Restarts\n"
        "from quern.train.supervision.supervisor import Supervisor\n"
        "Supervisor(sys.argv[1], sys.argv[2:], 2, Restarts(1), Events(sys.argv[1], None), print, 1).run()"
    )
    slow = PROGRAM.replace("lambda: None", "lambda: time.sleep(600)")
    with subprocess.Popen(
        [python(), "-c", code, str(tmp_path), sys.executable, "-c", slow, str(tmp_path), "yes", "0"]
    ) as process:
        yield process
        kill(process)


def test_what_waits_or_prepares_to_ends_with_a_supervisor_that_is_killed(
    tmp_path: Path, supervised: subprocess.Popen[bytes]
) -> None:
    pid = forked(supervised)
    children = Path(f"/proc/{pid}/task/{pid}/children")

    def waiting() -> list[int]:
        found = [int(pid) for pid in children.read_text().split()]
        return found if len(found) == 5 and all(threads(pid) > 2 for pid in found[2:]) else []

    def threads(pid: int) -> int:  # of one that prepares: its first, the one that prepares, the one that watches
        return len(os.listdir(f"/proc/{pid}/task"))

    until(waiting)
    pids = waiting()
    kill(supervised)
    until(lambda: all(has_ended(pid) for pid in pids))


#: ``quern.train``, of which rank 1 is killed in step 5 of the first start, when all others wait.
TRAINER = (
    BEGINS
    + """
from functools import partial
from quern.train import __main__ as program
from quern.train.trainer import Trainer

folder, *arguments = sys.argv[1:]
plain = Trainer.clip

def clip(self, step):
    if step == 5 and self.ranks.rank == 1 and not os.path.exists(os.path.join(folder, "done")):
        while not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)
        open(os.path.join(folder, "done"), "x").close()
        os.kill(os.getpid(), 9)
    return plain(self, step)

begin(folder, partial(program.prepare, arguments), partial(program.open_spare, arguments))
Trainer.clip = clip
program.leave(program.main(arguments))
"""
)
LAUNCHER = """
import sys, threading, time
from quern.cli.train import ranks
from quern.train.init_from import load_run_config
from quern.train.processes.waiting import WaitingProcesses

folder, program, config = sys.argv[1:]
keep = WaitingProcesses.keep

def kept(self, *given):
    keep(self, *given)
    def tell():
        while not all(own.ready for own in self._waiting):
            time.sleep(0.01)
        open(folder + "/go", "x").close()
    if not threading.active_count() > 1:
        threading.Thread(target=tell, daemon=True).start()

WaitingProcesses.keep = kept
ranks.module = lambda *_: [sys.executable, program, folder, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], 2, 3, None, 1))
"""


def train(folder: Path, paths: list[str]) -> tuple[subprocess.CompletedProcess[str], Path]:
    run = folder / "run"
    config = case.settings(run, paths, global_batch=4, micro_batch=1, checkpoint={"interval": 2})
    (folder / "config.yaml").write_text(dump_yaml(config))
    (folder / "program.py").write_text(TRAINER)
    command = [python(), "-c", LAUNCHER, str(folder), str(folder / "program.py"), str(folder / "config.yaml")]
    known = {name: os.environ[name] for name in os.environ if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = known | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False), run


@pytest.mark.long
def test_the_weights_are_those_of_a_run_that_met_nothing(tmp_path: Path) -> None:
    paths = case.write_corpus(tmp_path / "data")
    for name in ("plain", "killed"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain" / "done").touch()
    whole, plain = train(tmp_path / "plain", paths)
    killed, again = train(tmp_path / "killed", paths)
    assert (whole.returncode, killed.returncode) == (0, 0), killed.stderr
    assert "place 1 has failed: place 2 takes over rank 1, 0 spares left" in killed.stderr
    begun = [json.loads(line) for line in (tmp_path / "killed" / "begun").read_text().splitlines()]
    assert [own["waited"] for own in begun] == [False, False, True, True]
    assert places(begun[2:]) == ["0", "2"]
    files = sorted((plain / "checkpoints" / f"step_{case.STEPS:08d}").glob("*.distcp"))
    assert files
    for file in files:
        assert file.read_bytes() == (again / file.relative_to(plain)).read_bytes()
