"""The rate of checkpoint copies, on a clock that only the test moves."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from quern.errors import InputError
from quern.train.checkpoint.store.rate import RateLimit
from support.train.peer_case import MIB, content

pytestmark = pytest.mark.slow


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("rate", [10.0, 1000.0, 1e9])
def test_a_rate_is_kept_over_every_interval(clock, rate):
    random = np.random.default_rng(7)
    limit = RateLimit(rate, clock, clock.sleep)
    taken = []
    for _ in range(300):
        clock.now += float(random.choice([0.0, 0.0, 0.01, 3.0]))
        n = int(random.integers(0, int(3 * rate)))
        limit.take(n)
        taken.append((clock.now, n))
    for first in range(0, 300, 7):
        for last in range(first, 300, 5):
            seconds = taken[last][0] - taken[first][0]
            moved = sum(n for _, n in taken[first + 1 : last + 1])
            assert moved <= rate * (seconds + 1) * (1 + 1e-9) + 1


def test_a_rate_is_reached(clock):
    limit = RateLimit(1000.0, clock, clock.sleep)
    for _ in range(100):
        limit.take(500)
    assert clock.now - 100.0 == pytest.approx((100 * 500 - 1000) / 1000.0)  # all but the bucket is waited for
    clock.now += 1000
    before = clock.now
    limit.take(1000)  # the bucket is full again, and holds no more than a second
    assert clock.now == before
    limit.take(1000)
    assert clock.now - before == pytest.approx(1.0)


def test_threads_share_a_rate():
    waits: list[float] = []
    limit = RateLimit(1000.0, clock=lambda: 0.0, sleep=waits.append)  # time stands still: the debt only grows
    threads = [threading.Thread(target=lambda: [limit.take(10) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([place * 10 / 1000.0 for place in range(1, 301)])


def test_a_rate_that_is_none_and_rates_that_are_wrong():
    def never(seconds: float) -> None:
        raise AssertionError

    RateLimit(None, sleep=never).take(1 << 60)
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="bytes_per_s: expected a finite number > 0"):
            RateLimit(value)


def test_files_move_at_the_limit(there, clock, way):
    there.move(way, content(8 * MIB), limit=RateLimit(MIB, clock, clock.sleep))
    assert clock.now - 100.0 == pytest.approx(7.0)  # the first MiB is in the bucket
