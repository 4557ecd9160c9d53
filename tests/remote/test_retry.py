"""How long is waited between tries, and when no more are made."""

from __future__ import annotations

import pytest

from quern.remote.retry import Backoff, StoreError


def test_the_delays_between_tries():
    """Full jitter over doubling bounds; the bounds are written out here."""
    bounds = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    for portion in (0.0, 0.25, 0.99):
        slept, left = [], [len(bounds)]

        def action(left=left):
            if not left[0]:
                return "done"
            left[0] -= 1
            raise StoreError("busy", transient=True)

        backoff = Backoff(clock=lambda: 0.0, sleep=slept.append, random=lambda portion=portion: portion)
        assert backoff.run(action) == "done"
        assert slept == [bound * portion for bound in bounds]


def test_the_budget_is_of_all_tries_and_their_delays():
    now, tries = [100.0], []

    def sleep(seconds):
        now[0] += seconds

    def action():
        now[0] += 7
        tries.append(now[0])
        raise StoreError("busy", transient=True)

    backoff = Backoff(base_s=1, cap_s=3, budget_s=36, clock=lambda: now[0], sleep=sleep, random=lambda: 1.0)
    with pytest.raises(StoreError, match="busy; given up after 4 tries in 34 s") as caught:
        backoff.run(action)
    assert tries == [107, 115, 124, 134]  # 1, 2 and 3 seconds between; another try would begin after 37
    assert caught.value.transient
    tries.clear()
    with pytest.raises(StoreError):
        backoff.run(action, stopped=lambda: True)
    assert len(tries) == 1


def test_machines_do_not_draw_the_same_delays():
    assert len({Backoff().random() for _ in range(20)}) == 20
