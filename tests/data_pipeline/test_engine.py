"""Tasks are run once each, whatever dies; an error of a task is an error here."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.data_pipeline.execution import engine as engine_module
from quern.data_pipeline.execution import ray_life
from quern.data_pipeline.execution.engine import Death, Engine, InProcess, RayPool, open_engine
from quern.data_pipeline.execution.ray_life import Pulse
from quern.errors import InputError, QuernError


def square(x: int) -> int:
    return x * x


def refuse(x: int) -> int:
    raise InputError(f"record {x}: no")


def stumble(x: int) -> int:
    return 1 // x


def fill(path: str) -> None:
    with storage.publish(path) as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")


def fill_elsewhere() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def die_once(folder: str, x: int) -> int:
    """Ends its process the first time it sees 3."""
    mark = Path(folder) / "died"
    if x == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def die_always(x: int) -> int:
    os._exit(17)


def spared(x: int) -> int:
    if x < 0:
        return x
    os._exit(17)


def note_start(folder: str, x: int) -> int:
    (Path(folder) / f"{x}").touch()
    time.sleep(0.05)
    return x


@pytest.fixture(params=["in process", "ray"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return InProcess() if request.param == "in process" else request.getfixturevalue("pool")


def collected(engine: Engine, function: Any, tasks: list[tuple[Any, ...]], **options: Any) -> dict[int, Any]:
    results = list(engine.map(function, tasks, label="test", **options))
    assert len(results) == len({index for index, _ in results})
    return dict(results)


@pytest.mark.slow
def test_every_task_gives_one_result(engine: Engine) -> None:
    assert collected(engine, square, [(x,) for x in range(20)]) == {x: x * x for x in range(20)}
    assert collected(engine, square, []) == {}


@pytest.mark.slow
def test_an_error_keeps_its_type_and_words(engine: Engine) -> None:
    with pytest.raises(InputError, match="record 7: no"):
        collected(engine, refuse, [(7,)])
    with pytest.raises(ZeroDivisionError):
        collected(engine, stumble, [(0,)])
    assert collected(engine, square, [(2,)]) == {0: 4}, "the pool goes on after an error"


@pytest.mark.slow
def test_a_full_disk_is_told_with_its_path_whoever_wrote(engine: Engine, pool: Engine, tmp_path: Path) -> None:
    with pytest.raises(storage.FullError, match=rf"^{tmp_path}/a: No space left on device \(.* MiB are free on /"):
        collected(engine, fill, [(str(tmp_path / "a"),)])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(storage.FullError, match=rf"^{tempfile.gettempdir()}: No space left"):
        collected(pool, fill_elsewhere, [()])


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_task_repeated(pool: Engine, tmp_path: Path) -> None:
    assert collected(pool, die_once, [(str(tmp_path), x) for x in range(8)]) == {x: x for x in range(8)}
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_a_task_that_always_kills_ends_the_run_with_its_name(pool: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_module.MAX_DEATHS == 3
    monkeypatch.setattr(engine_module, "MAX_DEATHS", 1)
    with pytest.raises(QuernError, match=r"test: the worker process died 2 times on task 0"):
        collected(pool, die_always, [(1,)])


@pytest.mark.slow
def test_the_caller_decides_what_a_death_means(pool: Engine) -> None:
    deaths = []

    def on_death(index: int, task: tuple[Any, ...], death: Death) -> tuple[Any, ...]:
        deaths.append((index, death.lost_machine, death.ask(os.getcwd)))
        return (-task[0],)

    assert collected(pool, spared, [(-1,), (5,), (-2,)], on_death=on_death) == {0: -1, 1: -5, 2: -2}
    assert deaths == [(1, False, os.getcwd())]


@pytest.mark.slow
def test_no_more_tasks_start_than_there_are_workers(pool: Engine, tmp_path: Path) -> None:
    results = pool.map(note_start, [(str(tmp_path), x) for x in range(10)], label="test")
    next(results)
    time.sleep(1.5)  # long enough for all ten, were they in the workers' queues
    assert len(list(tmp_path.iterdir())) <= 4, "two ran, at most two more were started"
    results.close()


@pytest.mark.slow
def test_who_waits_for_a_worker_is_told(pool: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """Two pools want more CPUs than there are: the second waits, says so, and goes on when the first has ended."""
    monkeypatch.setattr(engine_module, "PATIENCE_S", 0.5)
    collected(pool, square, [(1,), (2,)])
    collected(pool, square, [(1,), (2,)])  # both of its actors are up now
    said = "test: waiting for a worker; the Ray cluster has 0 free CPUs"

    def free() -> None:
        end = time.monotonic() + 120
        while said not in caplog.text and time.monotonic() < end:
            time.sleep(0.05)
        pool.close()

    with open_engine(2) as second:
        freed = threading.Thread(target=free)
        freed.start()
        assert collected(second, square, [(3,)]) == {0: 9}
        freed.join()
    assert said in caplog.text


@pytest.mark.slow
def test_a_ray_that_was_there_is_left_running(pool: Engine) -> None:
    import ray

    assert ray.is_initialized()
    pool.close()  # its actors hold the CPUs that the second pool needs
    with open_engine(1) as second:
        assert collected(second, square, [(3,)]) == {0: 9}
    assert ray.is_initialized()
    assert collected(pool, square, [(4,)]) == {0: 16}


@pytest.mark.slow
def test_a_ray_that_is_gone_ends_the_map_and_is_asked_nothing(pool: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert isinstance(pool, RayPool)
    collected(pool, square, [(1,)])
    with monkeypatch.context() as patch:
        patch.setattr(pool, "pulse", Pulse([address], 0.0, "it has died"))
        patch.setattr(pool, "_grow", lambda tasks, now=False: None if now else pytest.fail("Ray was asked"))
        with pytest.raises(QuernError, match="it has died"):
            collected(pool, square, [(1,)])
    assert collected(pool, square, [(4,)]) == {0: 16}


@pytest.mark.slow
def test_the_pulse_is_of_ray_s_own_ports(pool: Engine) -> None:
    """Both of a local Ray are seen to be there; of a cluster it is the control store alone."""
    import ray

    (node,) = ray.nodes()
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    store = ray.get_runtime_context().gcs_address
    for local, expected in ((True, [store, raylet]), (False, [store])):
        pulse = ray_life.pulse_of(local)
        assert pulse._addresses == expected
        assert pulse.check()


@pytest.mark.slow
def test_a_sigterm_that_ray_hears_first_ends_the_run_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(*_: Any, **__: Any) -> None:  # what ray.init does first
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if kill:
            os.kill(os.getpid(), signal.SIGTERM)

    def listens(number: int, frame: Any) -> None: ...

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, listens)
    try:
        for kill in (True, False):
            with pytest.raises(KeyboardInterrupt) if kill else nullcontext():
                ray_life.start(1, None)
            assert ray_life.ended_by == ["SIGTERM"] * kill
            ray_life.ended_by.clear()
            assert signal.getsignal(signal.SIGTERM) is listens
    finally:
        signal.signal(signal.SIGTERM, before)
