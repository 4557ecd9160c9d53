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
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from quern import storage
from quern.doctor import run
from quern.doctor.meeting import Meeting
from quern.doctor.place import Place
from quern.doctor.readings import Reading
from quern.doctor.run import Options, Result
from quern.doctor.worker import Worker
from quern.errors import InputError, QuernError
from support.programs import python
from support.waits import has_ended, until

FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 100.0


def rank_of(folder: Path, rank: int, clock: Any, go: Any, stops: bool) -> None:
    """A rank by a clock that the test turns."""
    meeting = Meeting(str(folder / "share"), rank, 4, TIMEOUT_S, lambda: float(clock.value))
    meeting.begin(f"node-{rank}")
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    go.wait()
    try:
        told: Any = {
            "answers": [meeting.meet({"n": [rank, number], "more": 1}, "n") for number in range(3)],
            "missing": meeting.missing,
        }
    except QuernError as error:
        told = str(error)
    (folder / f"told.{rank}.part").write_text(json.dumps(told))
    (folder / f"told.{rank}.part").rename(folder / f"told.{rank}")


def test_a_stopped_rank_costs_the_others_one_time_out(tmp_path: Path) -> None:
    clock, go, share = FORK.Value("d", 0.0), FORK.Event(), tmp_path / "share.0"
    ranks = [FORK.Process(target=rank_of, args=(tmp_path, rank, clock, go, rank == 3)) for rank in range(4)]
    for one in ranks:
        one.start()
    try:
        stopped = ranks[3].pid
        assert stopped is not None
        assert os.WIFSTOPPED(os.waitpid(stopped, os.WUNTRACED)[1])
        go.set()
        until(lambda: all((share / f"0/{rank}.json").exists() for rank in range(3)))
        clock.value = TIMEOUT_S - 1
        time.sleep(0.6)  # two looks or more
        assert not (share / "0.json").exists(), "nobody is given up before the time-out"
        clock.value = TIMEOUT_S
        for rank in range(3):  # the clock stands from here on: what comes after the first meeting waits for nobody
            told = json.loads(wait_for(tmp_path / f"told.{rank}"))
            assert told["answers"] == [{f"{one}": {"n": [one, number]} for one in range(3)} for number in range(3)]
            assert told["missing"] == {"3": "node-3"}, "it is named by what it said when it began"
        os.kill(stopped, signal.SIGCONT)
        late = json.loads(wait_for(tmp_path / "told.3"))
        assert late == "rank 3: the others waited 100 s and went on without it"
    finally:
        for one in ranks:
            one.kill()
            one.join()


def wait_for(path: Path) -> str:
    until(path.exists)
    return path.read_text()


def timed_out(meetings: list[Meeting], clock: list[float]) -> None:
    """Let these ranks meet, and wait in vain for the others."""
    for meeting in meetings:
        meeting.begin("")
    threads = [threading.Thread(target=meeting.meet, args=(None,)) for meeting in meetings]
    for thread in threads:
        thread.start()
    until(lambda: all(Path(meeting.folder, f"0/{meeting.rank}.json").exists() for meeting in meetings))
    clock[0] = TIMEOUT_S
    for thread in threads:
        thread.join()


def late(folder: Path, rank: int, clock: Any) -> None:
    meeting = Meeting(str(folder / "share"), rank, 4, TIMEOUT_S, lambda: float(clock.value))
    meeting.begin("")
    with pytest.raises(QuernError) as caught:
        meeting.meet(None)
    (folder / f"late.{rank}").write_text(str(caught.value))


@pytest.mark.parametrize("ended", [False, True], ids=["others measure", "others have left"])
def test_ranks_that_begin_late_say_so_and_name_nobody(ended: bool, tmp_path: Path) -> None:
    clock = [0.0]
    others = [Meeting(str(tmp_path / "share"), rank, 4, TIMEOUT_S, lambda: clock[0]) for rank in range(2)]
    timed_out(others, clock)
    for one in others[::-1] if ended else ():
        one.leave()
    now = FORK.Value("d", 0.0)
    ranks = [FORK.Process(target=late, args=(tmp_path, rank, now)) for rank in (2, 3)]
    for process in ranks:
        process.start()
    until(lambda: all([*tmp_path.glob(f"share.*/0/{rank}.json")] for rank in (2, 3)))
    now.value = TIMEOUT_S
    for process in ranks:
        process.join()
    for rank in (2, 3):
        told = (tmp_path / f"late.{rank}").read_text()
        assert told == f"rank {rank}: came late, the others have met without it ({tmp_path}/share.0)"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late.2", "late.3", "share.0"]
    if ended:
        (left,) = (tmp_path / "share.0").iterdir()
        assert json.loads(left.read_text()) == {"answers": {}, "missing": {"2": "", "3": ""}}


def test_who_was_missed_in_an_earlier_check_and_comes_first_names_who_is_silent(tmp_path: Path) -> None:
    """Rank 2 was missed by the check before; in this one ranks 1 and 2 come, and rank 0 does not."""
    clock = [0.0]
    (tmp_path / "a.0").mkdir()
    (tmp_path / "a.0/0.json").write_text('{"answers": {}, "missing": {"2": ""}}')
    ranks = [Meeting(str(tmp_path / "a"), rank, 3, TIMEOUT_S, lambda: clock[0]) for rank in (1, 2)]
    timed_out(ranks, clock)
    assert [one.missing for one in ranks] == [{0: ""}] * 2


def test_an_earlier_check_of_the_same_id_is_passed_over(tmp_path: Path) -> None:
    """Of an earlier start rank 0 was killed when it had begun, of another one when it had met rank 1."""

    def ranks() -> list[Meeting]:
        return [Meeting(str(tmp_path / "a"), rank, 2, 60.0) for rank in range(2)]

    for meeting in ranks():  # killed before they met: their own files alone say that they have been here
        meeting.begin("killed")
    (tmp_path / "a.1").mkdir()
    (tmp_path / "a.1/0.json").write_text("killed")
    one, two = ranks()
    for meeting in (two, one):
        meeting.begin("again")
    assert (one.folder, two.folder) == (f"{tmp_path}/a.2", f"{tmp_path}/a.2")
    threads = [threading.Thread(target=meeting.meet, args=({"n": meeting.rank}, "n")) for meeting in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "a.2/0.json").read_text())["answers"] == {"0": {"n": 0}, "1": {"n": 1}}


def test_a_damaged_list_is_one_line(tmp_path: Path) -> None:
    meeting = Meeting(str(tmp_path / "a"), 0, 2, 1.0)
    meeting.begin("")
    (tmp_path / "a.0/0.json").write_text('{"answers": {"x": 1}, "missing": {}}')
    with pytest.raises(InputError, match=r"a\.0/0\.json: answers\.x.* expected an integer, got \"x\""):
        meeting.meet(None)


class Hung:
    """A process whose links hang."""

    asked = 0

    def ask(self, task: dict[str, Any], timeout_s: float, found: dict[str, Any]) -> None:
        self.asked += 1
        time.sleep(timeout_s)
        raise TimeoutError("hung")

    def close(self) -> None: ...


def test_who_waited_long_for_a_link_measures_no_more_with_others(tmp_path: Path) -> None:
    """Rounds of three: ranks 1 and 2; 0 and 2; 0 and 1; the ring."""
    options, hung = Options(timeout_s=0.1), [Hung() for _ in range(3)]
    readings = [Reading(rank=rank, node=f"node-{rank}", address="127.0.0.1") for rank in range(3)]
    told: dict[int, Any] = {}

    def rounds(rank: int) -> None:
        meeting = Meeting(str(tmp_path / "a"), rank, 3, 240.0)
        meeting.begin("")
        place = Place(rank, 3, 0, 1, f"node-{rank}", "127.0.0.1", "")
        run._measure_links(meeting, cast(Worker, hung[rank]), place, options, readings)
        told[rank] = meeting.values()

    threads = [threading.Thread(target=rounds, args=(rank,)) for rank in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.asked for one in hung] == [0, 1, 1]
    assert told[0] == told[1] == told[2]
    links = [(one["ranks"], one["problem"], one["late"]) for values in told[0] for one in values.values() if one]
    assert links == [([1, 2], "hung", True)] * 2


def checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, world: int, shown: list[Result]
) -> tuple[list[Any], list[int]]:
    """How :func:`run.check` ends on each rank, a thread, of which the second has a problem; bytes each has read."""
    ended: list[Any] = [None] * world
    read = [0] * world
    exact = storage.read_bytes

    def read_bytes(path: str) -> bytes:
        data = exact(path)
        read[int(threading.current_thread().name)] += len(data)
        return data

    def read_alone(worker: Worker, place: Place, options: Options) -> dict[str, Any]:
        problems = [{"code": "store", "text": "denied"}] * (place.rank == 1)
        speeds = {"copy torch": [1.0] * 200}
        device = {"name": "cpu", "kind": "x", "speeds": speeds}
        return {"rank": place.rank, "node": place.node, "local_rank": 0, "address": "127.0.0.1", "devices": [device],
                "problems": problems}  # fmt: skip

    def rank_of(rank: int) -> None:
        place = Place(rank, world, 0, 1, f"node-{rank}", "127.0.0.1", "start")
        try:
            ended[rank] = run.check(place, Options(share=str(folder), timeout_s=TIMEOUT_S, rounds=0), shown.append)
        except QuernError as error:
            ended[rank] = str(error)

    monkeypatch.setattr(storage, "read_bytes", read_bytes)
    monkeypatch.setattr(run, "_read_alone", read_alone)
    monkeypatch.setattr(run, "_measure", lambda *of: {"kind": "ring", "ranks": [*range(world)], "speeds": [1.0] * 200})
    threads = [threading.Thread(target=rank_of, args=(rank,), name=str(rank)) for rank in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return ended, read


def test_only_the_first_rank_reads_what_all_say_and_all_know_whether_something_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Result] = []
    ended, read = checked(tmp_path, monkeypatch, 8, shown)
    assert ended == [1] * 8
    (result,) = shown
    assert [(one.code, one.nodes) for one in result.findings] == [("store", ("node-1",))]
    assert (len(result.readings), len(result.links)) == (8, 8)
    assert read[0] > 2 * 8 * 200 * len("1.0, ")
    assert max(read[1:]) < 8 * 200, "of each rank some hundred bytes, once"


def test_a_first_rank_that_hangs_while_it_judges_is_told_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def hang(*of: Any) -> list[Any]:
        until((tmp_path / "doctor-start.0/1/1.json").exists)  # the other one has looked at the clock
        clock[0] = TIMEOUT_S
        until(lambda: not (tmp_path / "doctor-start.0").exists())  # it has left
        return []

    monkeypatch.setattr(run, "judge", hang)
    monkeypatch.setattr(run, "Meeting", lambda *of: Meeting(*of, clock=lambda: clock[0]))
    ended, _ = checked(tmp_path, monkeypatch, 2, [])
    assert ended[1] == "rank 1: waited 100 s in vain for what the first rank found"
    assert ended[0] == "rank 0: the others have ended the check without it"


def test_the_table_is_told_though_another_rank_never_comes_to_the_last_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Result] = []
    told_before: list[int] = []
    gone = threading.Event()

    class Last(Meeting):
        def meet(self, value: Any, brief: Any = ()) -> Any:
            if brief == ["found"]:
                if self.rank:
                    gone.set()
                    raise SystemExit  # of its thread
                gone.wait()
                told_before.append(len(shown))
                times = count(0.0, TIMEOUT_S)
                self._clock = lambda: next(times)
            return super().meet(value, brief)

    monkeypatch.setattr(run, "Meeting", Last)
    ended, _ = checked(tmp_path, monkeypatch, 2, shown)
    assert told_before == [1], "a launcher may end the first rank as soon as it waits for the other"
    assert [(one.code, one.nodes) for one in shown[0].findings] == [("store", ("node-1",))]
    assert ended == [1, None]


def test_the_first_rank_removes_the_files(tmp_path: Path) -> None:
    one, two = (Meeting(str(tmp_path / "a"), rank, 2, 60.0) for rank in range(2))
    two.begin("")
    one.begin("")
    two.leave()
    one.leave()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(QuernError, match="rank 1: the others have ended the check without it"):
        two.meet(None)
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(sys, "executable", python())
    with Worker() as one:
        yield one


def task(*disks: Path, store: str | None = None) -> dict[str, Any]:
    return {"what": "machine.measure", "disks": [*map(str, disks)], "store": store, "repeats": 1, "device": "none"}


@pytest.mark.slow
def test_a_task_that_hangs_is_ended_and_the_next_one_runs(worker: Worker, tmp_path: Path) -> None:
    stopped = worker._started().pid
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"hung for 0\.1 s in: start"):
        worker.ask(task(tmp_path), 0.1, {})
    assert has_ended(stopped)
    told: dict[str, Any] = {}
    worker.ask(task(tmp_path, store=f"{tmp_path}/store"), 60, told)
    assert {f"disk write {tmp_path}", f"disk sync {tmp_path}", "memory copy", "cpu sha256"} == told["speeds"].keys()
    assert all(value > 0 for values in told["speeds"].values() for value in values)
    assert f"store {tmp_path}/store" in told["shown"]
    assert told["facts"].keys() >= {"python", "quern", "ray"}
    assert told["problems"] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [], "what was written is gone"


@pytest.mark.slow
def test_what_a_task_told_before_it_failed_is_kept(worker: Worker) -> None:
    told: dict[str, Any] = {}
    with pytest.raises(QuernError, match=r"^disk 5: TypeError: "):
        worker.ask({**task(), "disks": [5]}, 60, told)
    assert "processor" in told["shown"]


def test_a_process_that_ends_is_told(worker: Worker, tmp_path: Path) -> None:
    os.kill(worker._started().pid, signal.SIGKILL)
    with pytest.raises(QuernError, match=r"ended with code .* in: start"):
        worker.ask(task(tmp_path), 60, {})
