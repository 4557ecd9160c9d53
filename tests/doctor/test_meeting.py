"""Four real processes exchange values through files; one of them is stopped, and costs the others one time-out."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from quern.doctor import run
from quern.doctor.child import Child, ChildError
from quern.doctor.meeting import Meeting
from quern.doctor.place import Place
from quern.doctor.run import Options
from quern.errors import InputError, QuernError
from support.programs import python
from support.waits import has_ended, until

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 100.0


def rank_of(folder: Path, rank: int, clock: Any, go: Any, stops: bool) -> None:
    """A rank by a clock that the test turns."""
    meeting = Meeting(str(folder / "share"), rank, 4, TIMEOUT_S, lambda: float(clock.value))
    meeting.begin({"node": f"node-{rank}"})
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    go.wait()
    try:
        said = [meeting.meet(name, rank) for name in ("alone", "round-0", "round-1")]
        waits = [vars(wait) for wait in meeting.waits]
        told: Any = {"present": said, "waits": waits, "hellos": meeting.hellos}
    except QuernError as error:
        told = str(error)
    (folder / f"told.{rank}.part").write_text(json.dumps(told))
    (folder / f"told.{rank}.part").rename(folder / f"told.{rank}")


def test_a_stopped_rank_costs_the_others_one_time_out(tmp_path: Path) -> None:
    clock, go, share = FORK.Value("d", 0.0), FORK.Event(), tmp_path / "share"
    ranks = [FORK.Process(target=rank_of, args=(tmp_path, rank, clock, go, rank == 3)) for rank in range(4)]
    for one in ranks:
        one.start()
    try:
        stopped = ranks[3].pid
        assert stopped is not None
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        go.set()
        until(lambda: all((share / f"alone/{rank}.json").exists() for rank in range(3)))
        clock.value = TIMEOUT_S - 1
        time.sleep(0.3)  # three looks or more
        assert not (share / "alone.list.json").exists(), "nobody is given up before the time-out"
        clock.value = TIMEOUT_S
        told = [json.loads(wait_for(tmp_path / f"told.{rank}")) for rank in range(3)]
        for one in told:
            assert one["present"] == [[0, 1, 2]] * 3
            assert [wait["missing"] for wait in one["waits"]] == [[3], [], []]
            assert one["hellos"]["3"] == {"node": "node-3"}, "it is named by what it said when it began"
            # the clock stands since the first: what came after has waited for nobody
            assert [wait["waited_s"] for wait in one["waits"]][1:] == [0.0, 0.0]
            assert sum(wait["waited_s"] for wait in one["waits"]) <= TIMEOUT_S
        assert len({one["waits"][0]["closed_by"] for one in told}) == 1
        os.kill(stopped, signal.SIGCONT)
        late = json.loads(wait_for(tmp_path / "told.3"))
        assert late == "rank 3: the others waited 100 s for 'alone' and went on without it"
    finally:
        for one in ranks:
            one.kill()
            one.join()


def wait_for(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def test_an_earlier_check_of_the_same_id_is_not_read(tmp_path: Path) -> None:
    Meeting(str(tmp_path / "a"), 0, 2, 1.0).begin("x")
    with pytest.raises(InputError, match="was not ended; remove it, or give another --id"):
        Meeting(str(tmp_path / "a"), 0, 2, 1.0).begin("y")
    Meeting(str(tmp_path / "a"), 1, 2, 1.0).begin("y")


def test_a_damaged_list_is_one_line(tmp_path: Path) -> None:
    meeting = Meeting(str(tmp_path), 0, 2, 1.0)
    meeting.begin(None)
    (tmp_path / "alone.list.json").write_text('{"present": ["0"]}')
    with pytest.raises(InputError, match=r"alone.list.json: expected present, a list of ranks"):
        meeting.meet("alone", None)


class Hung:
    """A child whose links hang: it takes longer than half of a link's time."""

    asked = 0

    def ask(self, task: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked += 1
        time.sleep(timeout_s)
        raise ChildError("hung", "pair", {}, hung=True)

    def close(self) -> None: ...


def test_who_waited_long_for_a_link_measures_no_more_with_others(tmp_path: Path) -> None:
    options, hung = Options(timeout_s=0.1), [Hung() for _ in range(3)]
    meetings = [Meeting(str(tmp_path), rank, 3, 240.0) for rank in range(3)]

    def rounds(rank: int) -> None:
        meetings[rank].begin(None)
        place = Place(rank, 3, 0, 1, f"node-{rank}", "127.0.0.1", "")
        for number, group in enumerate([(0, 1), (0, 2), (1, 2), (0, 1, 2)]):
            child = cast(Child, hung[rank])
            run._measure(meetings[rank], child, place, options, f"round-{number}", "pair", [group], str(tmp_path))

    threads = [threading.Thread(target=rounds, args=(rank,)) for rank in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.asked for one in hung] == [1, 1, 0]
    assert [one.active() for one in meetings] == [[2]] * 3


def test_the_last_to_leave_removes_the_files(tmp_path: Path) -> None:
    one, two = (Meeting(str(tmp_path / "a"), rank, 2, 60.0) for rank in range(2))
    two.begin(None)
    one.begin(None)
    two.leave(last=False)
    one.leave(last=True)
    assert not (tmp_path / "a").exists()
    with pytest.raises(QuernError, match="rank 1: the others have ended the check without it"):
        two.meet("alone", None)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    monkeypatch.setattr(sys, "executable", python())
    one = Child()
    yield one
    one.close()


def task(*disks: Path, store: str | None = None) -> dict[str, Any]:
    return {"what": "node", "disks": [*map(str, disks)], "store": store, "ray": None, "torch": False, "repeats": 1,
            "needs": {}, "device": "cpu"}  # fmt: skip


@pytest.mark.slow
def test_a_task_that_hangs_is_ended_and_the_next_one_runs(child: Child, tmp_path: Path) -> None:
    stopped = child._started()
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(ChildError, match=r"hung for 0\.1 s in: start") as caught:
        child.ask(task(tmp_path), 0.1)
    assert caught.value.hung
    assert has_ended(stopped.pid)
    told = child.ask(task(tmp_path, store=f"{tmp_path}/store"), 60)
    assert {f"disk write {tmp_path}", f"disk sync {tmp_path}", "memory copy", "cpu sha256"} <= told["speeds"].keys()
    assert all(value > 0 for values in told["speeds"].values() for value in values)
    assert f"store {tmp_path}/store" in told["shown"]
    assert told["problems"] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "what was written is gone"


def test_a_process_that_ends_is_told(child: Child, tmp_path: Path) -> None:
    process = child._started()
    process.kill()
    with pytest.raises(ChildError, match=r"ended with code .* in: start") as caught:
        child.ask(task(tmp_path), 60)
    assert not caught.value.hung
