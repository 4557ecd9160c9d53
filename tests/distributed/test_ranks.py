"""The harness itself: results by rank, tracebacks that name the rank, no process left over."""

from __future__ import annotations

import inspect
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.parallel import local
from quern.parallel.local import LocalRanks, RankError
from support.waits import has_ended, until


@dataclass
class Pair:
    """A value of this file: travels both ways."""

    left: int
    right: torch.Tensor


def add_up(pair: Pair) -> Pair:
    total = pair.right * (dist.get_rank() + 1)
    dist.all_reduce(total)
    environment = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    assert environment == [str(dist.get_rank()), str(dist.get_rank()), str(dist.get_world_size())]
    assert torch.get_num_threads() == 1
    return Pair(os.getpid(), total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such bird")
    dist.barrier()


def die_on(rank: int, folder: str) -> int:
    """Not before the others have come so far: one that still connects would fail with it."""
    Path(folder, str(dist.get_rank())).touch()
    if dist.get_rank() == rank:
        until(lambda: len(os.listdir(folder)) == dist.get_world_size())
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def fail_in_turn(folder: str) -> None:
    """Rank 1 first; rank 0 when nothing is left of it."""
    last = Path(folder, "pid")
    if dist.get_rank() == 1:
        part = last.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(last)
    else:
        until(lambda: last.exists() and not alive(int(last.read_text())))
    raise ValueError("no such bird")


def leave_at_once_on(rank: int) -> float:
    """One rank has nothing more to do while the others still talk to each other through it."""
    total = torch.ones(())
    dist.all_reduce(total)
    if dist.get_rank() != rank:
        time.sleep(0.3)
    return total.item()


def write_pid_and_hang(folder: str) -> None:
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        sleep_for_ever()
    if dist.get_rank() == 2:
        compute_for_ever()


def have_time(seconds: float) -> None:
    """For each of this rank's further calls."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not local._serve.__code__:
        frame = frame.f_back
    assert frame is not None
    object.__setattr__(frame.f_locals["job"], "timeout_s", seconds)


def sleep_for_ever() -> None:
    time.sleep(600)


def compute_for_ever() -> None:
    while True:
        sorted(range(9), key=lambda number: -number)


def read_variable() -> str | None:
    return os.environ.get("QUERN_TEST_VARIABLE")


def alive(pid: int) -> bool:
    return not has_ended(pid)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_returns_its_own_value(run_ranks: Any, world: int) -> None:
    results = run_ranks(add_up, world, Pair(0, torch.ones(2, dtype=torch.float64)))
    assert [result.right.tolist() for result in results] == [[world * (world + 1) / 2] * 2] * world
    pids = {result.left for result in results}
    assert len(pids) == world
    assert os.getpid() not in pids
    assert not any(alive(pid) for pid in pids)


def test_each_call_has_fresh_processes(run_ranks: Any) -> None:
    pair = Pair(0, torch.ones(1))
    first, second = ({result.left for result in run_ranks(add_up, 2, pair)} for _ in range(2))
    assert not first & second


@pytest.mark.timeout(300)  # peers of a failed rank are not waited for until their time is over
def test_an_exception_names_its_rank_and_keeps_its_traceback(ranks: Any) -> None:
    with pytest.raises(ranks.RankError, match="rank 2 failed first") as caught:
        ranks.run_ranks(fail_on, 3, 2, timeout_s=600)
    assert 'raise ValueError("no such bird")' in caught.value.failed[2]
    assert "ValueError: no such bird" in str(caught.value)
    assert next(iter(caught.value.failed)) == 2


def test_the_first_that_fails_is_named_in_whatever_order_they_are_heard(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = local.connection.wait

    def wait_for_all(channels: list[Any], timeout: float | None = None) -> list[Any]:
        until(lambda: all(channel.poll() for channel in channels))
        return wait(channels, timeout)

    monkeypatch.setattr(local, "connection", SimpleNamespace(wait=wait_for_all))
    with pytest.raises(ranks.RankError, match="rank 1 failed first") as caught:
        ranks.run_ranks(fail_in_turn, 2, str(tmp_path))
    assert list(caught.value.failed) == [1, 0]


def test_a_killed_rank_is_reported_and_the_others_results_kept(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_S", 60)  # however slowly the others get on
    with pytest.raises(ranks.RankError, match=r"(?s)rank 1 failed first.*exit code -9") as caught:
        ranks.run_ranks(die_on, 3, 1, str(tmp_path))
    assert list(caught.value.failed) == [1]
    assert caught.value.results == {0: 0, 2: 2}


@pytest.mark.slow
def test_a_hang_ends_at_the_time_out_and_shows_where(tmp_path: Path, here: dict[str, str]) -> None:
    """All have begun before the time is short: on a busy machine that takes long."""
    with LocalRanks(3, timeout_s=300, files=here) as ranks:
        ranks.call(have_time, 4.0)
        ranks.timeout_s = 4.0
        with pytest.raises(RankError, match="did not finish within 4 s") as caught:
            ranks.call(write_pid_and_hang, str(tmp_path))
    assert caught.value.failed.keys() == {1, 2}
    assert "in sleep_for_ever" in caught.value.failed[1]
    assert "in compute_for_ever" in caught.value.failed[2]
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_rank_that_is_done_waits_for_the_others(run_ranks: Any) -> None:
    assert run_ranks(leave_at_once_on, 3, 0) == [3.0] * 3


def test_ranks_see_the_environment_of_the_call(run_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(read_variable, 1) == [None]
    monkeypatch.setenv("QUERN_TEST_VARIABLE", "teal")
    assert run_ranks(read_variable, 1) == ["teal"]


def test_a_function_inside_another_is_refused(run_ranks: Any) -> None:
    def inside() -> None: ...

    with pytest.raises(TypeError, match="top level"):
        run_ranks(inside, 2)


def say(what: str) -> tuple[int, bool, str | None]:
    print(what, flush=True)
    return os.getpid(), dist.is_initialized(), os.environ.get("RANK")


@pytest.fixture
def here() -> dict[str, str]:
    """This file, by the name that pickles give it."""
    return {__name__: __file__}


def test_ranks_stay_from_call_to_call(here: dict[str, str]) -> None:
    with LocalRanks(2, files=here) as ranks:
        found = [ranks.call(say, word) for word in ("one", "two")]
        assert found[0] == found[1]
        assert [rank[1:] for rank in found[0]] == [(True, "0"), (True, "1")]
        assert ranks.output == ["two\n"] * 2
    assert not any(alive(pid) for pid, *_ in found[0])


def test_without_a_backend_a_rank_is_alone(here: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    with LocalRanks(1, backend=None, files=here) as ranks:
        assert ranks.call(say, "")[0][1:] == (False, None)


def test_one_set_of_ranks_fails_without_another(here: dict[str, str]) -> None:
    with LocalRanks(1, backend=None, files=here) as single, LocalRanks(2, files=here) as pair:
        with pytest.raises(RankError, match="no such bird"):
            pair.call(fail_on, 0)
        pair.close()
        assert single.call(say, "still here")[0][1:] == (False, None)
    assert single.output == ["still here\n"]
