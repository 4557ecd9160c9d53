"""A step that takes longer than a process group waits: every rank gives a sign of life, and all see the same end."""

from __future__ import annotations

import threading

import pytest

from quern.errors import InputError, QuernError
from quern.train.processes import agree
from quern.train.processes.agree import Agreement
from support.train.rank_threads import Meeting, ThreadAgreement, run_all


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """A sign of life in every moment."""
    monkeypatch.setattr(agree, "_SIGN_OF_LIFE_S", 0.002)


def test_each_rank_has_its_own_result():
    found = run_all(3, lambda ranks: ranks.all_or_raise_with_keepalive(lambda: ranks.rank * 10), inline=False)
    assert found == [0, 10, 20]


def test_a_world_of_one():
    assert Agreement(0, 1).all_or_raise_with_keepalive(lambda: "done") == "done"
    with pytest.raises(QuernError, match="no room"):
        Agreement(0, 1).all_or_raise_with_keepalive(fail(QuernError("no room")))


def fail(error):
    def action():
        raise error

    return action


def test_ranks_say_that_they_live_while_one_works():
    """Rank 1's work ends only after the ranks have met several times meanwhile."""
    meeting, met = Meeting(2), threading.Event()
    gather = meeting.exchange
    calls = []

    def exchange(rank, value):
        if rank == 0:
            calls.append(value)
            if len(calls) == 5:
                met.set()
        return gather(rank, value)

    meeting.exchange = exchange
    outcomes = []

    def rank_1():
        outcomes.append(ThreadAgreement(1, meeting).all_or_raise_with_keepalive(lambda: met.wait(60)))

    thread = threading.Thread(target=rank_1)
    thread.start()
    assert ThreadAgreement(0, meeting).all_or_raise_with_keepalive(lambda: "quick") == "quick"
    thread.join(60)
    assert outcomes == [True]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (InputError("x.bin: missing"), InputError, "x.bin: missing"),
        (QuernError("no room"), QuernError, "rank 1: no room"),
        (OSError(28, "No space left on device", "/nvme/x"), QuernError, "rank 1: /nvme/x: No space left on device"),
        (ZeroDivisionError("division by zero"), QuernError, "rank 1: ZeroDivisionError: division by zero"),
        (SystemExit(3), QuernError, "rank 1: was ended"),  # what a library may do to its thread
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_on_one_rank_is_the_same_on_all(error, kind, text):
    def call(ranks):
        with pytest.raises(QuernError) as found:
            ranks.all_or_raise_with_keepalive(fail(error) if ranks.rank == 1 else lambda: None)
        return type(found.value), str(found.value)

    assert run_all(3, call, inline=False) == [(kind, text)] * 3


def test_the_next_step_is_nobodys_leftover():
    """Each call takes part in as many exchanges on every rank, whoever is slow."""

    def call(ranks):
        gate = threading.Event()
        found = []
        for turn in range(6):
            slow = turn % 3 == ranks.rank
            found.append(
                ranks.all_or_raise_with_keepalive(lambda turn=turn, slow=slow: gate.wait(0.02 if slow else 0) or turn)
            )
            found.append(ranks.gather((turn, ranks.rank)))
        return found

    expected = [item for turn in range(6) for item in (turn, [(turn, 0), (turn, 1), (turn, 2)])]
    assert run_all(3, call, inline=False) == [expected] * 3
