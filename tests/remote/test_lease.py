"""Who may drive a run on a store: one at a time, and the next one when the first is gone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quern import storage
from quern.errors import QuernError
from quern.remote import lease
from quern.remote.lease import hold
from support.remote.s3_server import Fault, Server
from support.waits import until

pytestmark = pytest.mark.slow

OFTEN = 10**6


def take(server: Server, period_s: float = 0.2, stale_s: float = 2.0) -> Any:
    return hold(f"{server.url}/.lease.json", server.url, period_s=period_s, stale_s=stale_s)


def written(server: Server) -> dict[str, Any]:
    return json.loads(server.read(".lease.json"))


def of_another_machine(server: Server, beat: int = 0) -> None:
    said = {"owner": "f" * 32, "beat": beat, "host": "elsewhere", "boot": "other", "pid": 1, "began": "1"}
    server.write(".lease.json", json.dumps(said).encode())


@pytest.fixture(params=[signal.SIG_IGN, signal.default_int_handler], ids=["background", "terminal"])
def sigint(request: pytest.FixtureRequest) -> Iterator[None]:
    """A shell that starts something in the background has it ignore SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_beats_while_it_is_held_and_goes_with_the_block(server: Server) -> None:
    with take(server):
        first = written(server)
        until(lambda: written(server)["beat"] > first["beat"] + 1)
        assert written(server)["owner"] == first["owner"]
    assert server.objects() == {}


def test_a_second_one_is_refused_while_the_first_beats(server: Server) -> None:
    patient = {"stale_s": 600.0}  # a heartbeat may be late
    with (
        take(server, **patient),
        pytest.raises(QuernError, match=r"another driver is at work in this run \(process \d+ on "),
    ):
        take(server, **patient).__enter__()


def test_of_many_that_begin_at_once_one_gets_it(server: Server) -> None:
    """Threads of one process: each has an owner of its own, and conditional writes decide."""
    got, refused = [], []
    together = threading.Barrier(4)

    def begin() -> None:
        mine = lease.Lease(f"{server.url}/.lease.json", "run", 0.2, 30.0)
        together.wait()
        try:
            mine.take()
        except QuernError as error:
            refused.append(error)
        else:
            got.append(mine)
            mine.keep()

    threads = [threading.Thread(target=begin, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(refused) == 3)
    assert len(got) == 1
    got[0].let_go()
    for thread in threads:
        thread.join(10)
    assert server.objects() == {}


def test_one_that_is_heard_of_no_more_is_taken_over(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = [0.0, 300.0, 600.0, 601.0]
    of_another_machine(server)
    monkeypatch.setattr(lease.Lease, "_age_s", lambda self: ages.pop(0))
    with take(server, stale_s=600.0):
        assert ages == []
        assert written(server)["owner"] != "f" * 32


def test_its_age_is_the_time_since_it_was_written(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the store's clock: where that cannot be told, by watching."""
    of_another_machine(server)
    mine = lease.Lease(f"{server.url}/.lease.json", "run", 0.2, 30.0)
    until(lambda: mine._age_s() >= 1)
    with take(server, stale_s=0.5):
        assert written(server)["owner"] != "f" * 32
    of_another_machine(server)
    monkeypatch.setattr(lease.Lease, "_age_s", lambda self: 0.0)
    with take(server, stale_s=0.5):
        assert written(server)["owner"] != "f" * 32


def test_one_that_beats_on_another_machine_is_left_alone(server: Server) -> None:
    of_another_machine(server)
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(0.3):
            number += 1
            of_another_machine(server, number)

    beating = threading.Thread(target=beat)
    beating.start()
    try:
        with pytest.raises(QuernError, match="process 1 on elsewhere"):
            take(server, stale_s=600.0).__enter__()
    finally:
        ended.set()
        beating.join()
    assert written(server)["owner"] == "f" * 32


def test_of_a_killed_process_of_this_machine_it_is_taken_at_once(server: Server) -> None:
    code = (
        "import sys, time\nfrom quern.remote.lease import hold\n"
        "with hold(sys.argv[1], 'run', period_s=60, stale_s=600):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, f"{server.url}/.lease.json"], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    first.kill()
    first.wait()
    assert written(server)["pid"] == first.pid
    with take(server, 0.2, 600.0):
        assert written(server)["pid"] != first.pid


def test_who_loses_it_is_stopped(server: Server, sigint: None) -> None:
    def work() -> None:
        with take(server):
            of_another_machine(server)
            until(lambda: False)

    with pytest.raises(QuernError, match=r"another driver has taken this run over.*not heard of for 2 s"):
        work()
    assert written(server)["owner"] == "f" * 32  # what is not one's own is not removed


def test_who_loses_the_outer_of_two_is_stopped_in_the_inner(server: Server) -> None:
    def work() -> None:
        with take(server), hold(f"{server.url}/inner.json", "inner", period_s=60, stale_s=120):
            of_another_machine(server)
            until(lambda: False)

    with pytest.raises(QuernError, match="another driver has taken this run over"):
        work()
    assert set(server.objects()) == {".lease.json"}


def test_the_signal_of_a_loss_is_nothing_to_who_has_lost_nothing(server: Server) -> None:
    before = signal.getsignal(signal.SIGURG)
    with take(server):
        signal.raise_signal(signal.SIGURG)  # urgent data on somebody's socket
    assert signal.getsignal(signal.SIGURG) == before


def test_a_handler_that_python_knows_nothing_of_is_no_error_at_the_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with take(server):
        pass
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


def test_who_slept_asks_before_it_writes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that sleeps sends no heartbeat, and wakes up in the midst of its work, before the next one."""

    def work() -> None:
        with storage.lease(f"{server.url}/.lease.json", "run"):
            storage.publish_bytes(f"{server.url}/before", b"1")
            of_another_machine(server)
            now_s = lease._now_s() + 100
            monkeypatch.setattr(lease, "_now_s", lambda: now_s)
            with pytest.raises(QuernError, match="another driver has taken this run over"):
                storage.publish_bytes(f"{server.url}/after", b"1")

    with pytest.raises(QuernError, match="another driver has taken this run over"):
        work()
    assert set(server.objects()) == {".lease.json", "before"}


def test_who_slept_and_has_it_still_goes_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with storage.lease(f"{server.url}/.lease.json", "run"):
        now_s = lease._now_s() + 100
        monkeypatch.setattr(lease, "_now_s", lambda: now_s)
        storage.publish_bytes(f"{server.url}/after", b"1")
    assert set(server.objects()) == {"after"}


def test_who_loses_it_as_its_block_ends_is_interrupted_in_nothing_else(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block ends in the moment between the heartbeat's finding and its interruption."""
    outside: list[bool] = []

    class Late:
        @staticmethod
        def interrupt_main(signum: int) -> None:
            time.sleep(0.5)
            outside.append(held[0]._ended.is_set())

    monkeypatch.setattr(lease, "_thread", Late)
    held: list[Any] = []

    def work() -> None:
        with take(server) as one:
            held.append(one)
            of_another_machine(server)
            until(lambda: one.lost)

    with pytest.raises(QuernError, match="another driver has taken this run over"):
        work()
    until(lambda: outside)
    assert outside == [False]


@pytest.mark.parametrize("what", ["SlowDown", "lose answer"])
def test_a_store_that_fails_for_a_while_takes_nothing_away(server: Server, what: str) -> None:
    with take(server):
        beat = written(server)["beat"]
        server.proxy.faults = [Fault(what, "PUT", ".lease", 5)]
        until(lambda: server.proxy.struck(what) == 5)
        until(lambda: written(server)["beat"] > beat + 3)
    assert server.objects() == {}


def test_an_answer_that_is_lost_while_it_is_created_or_taken_over(server: Server) -> None:
    server.proxy.faults = [Fault("lose answer", "PUT", ".lease")]
    with take(server):
        assert server.proxy.struck("lose answer") == 1
    of_another_machine(server)
    server.proxy.faults = [Fault("lose answer", "PUT", ".lease")]
    with take(server):
        assert server.proxy.struck("lose answer") == 2


@pytest.mark.parametrize("wrong", [b"[]", b"[" * 100_000])
def test_a_lease_that_is_no_lease_is_taken_once_it_is_old(server: Server, wrong: bytes) -> None:
    server.write(".lease.json", wrong)
    with take(server):
        assert written(server)["beat"] >= 0


def test_who_finds_something_else_where_its_lease_was_is_stopped(server: Server) -> None:
    def work() -> None:
        with take(server):
            server.write(".lease.json", b"[" * 100_000)
            until(lambda: False)

    with pytest.raises(QuernError, match="another driver has taken this run over"):
        work()
