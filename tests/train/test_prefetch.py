"""The background thread: what it gives, how it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from quern.train.batches.prefetch import Prefetch
from support.waits import until


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "quern-prefetch"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = running()
    yield
    assert running() == before


def test_values_come_in_order_and_the_thread_ends_with_them() -> None:
    prefetch = Prefetch(lambda n: n * n, 3, 200, 4)
    assert list(prefetch) == [n * n for n in range(3, 200)]
    until(lambda: not running())
    assert list(prefetch) == []


def test_no_more_than_depth_values_wait() -> None:
    made: list[int] = []
    with Prefetch(lambda n: made.append(n), 0, None, 3) as prefetch:
        until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3
        next(prefetch)
        until(lambda: len(made) == 4)
        time.sleep(0.05)
        assert len(made) == 4


def test_an_error_comes_after_the_values_before_it_and_is_the_original_one() -> None:
    error = KeyError("window 7")

    def make(number: int) -> int:
        if number == 2:
            raise error
        return number

    prefetch = Prefetch(make, 0, 10, 5)
    until(lambda: not running())
    assert [next(prefetch), next(prefetch)] == [0, 1]
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            next(prefetch)
        assert caught.value is error
    assert "in make" in "".join(traceback.format_tb(error.__traceback__))


def test_a_consumer_that_stops_early_leaves_no_thread() -> None:
    with Prefetch(lambda n: n, 0, None, 2) as prefetch:
        for value in prefetch:
            if value == 5:
                break
        assert len(running()) == 1
    assert not running()
    prefetch.close()
    assert list(prefetch) == []


def test_a_forgotten_prefetch_ends_its_thread() -> None:
    prefetch = Prefetch(lambda n: n, 0, None, 2)
    assert next(prefetch) == 0
    assert len(running()) == 1
    del prefetch
    gc.collect()
    assert not running()


def test_closing_wakes_a_consumer_that_waits() -> None:
    release = threading.Event()
    prefetch = Prefetch(lambda n: release.wait(120), 0, None, 1)
    ended: list[list[object]] = []
    consumer = threading.Thread(target=lambda: ended.append(list(prefetch)))
    consumer.start()
    time.sleep(0.02)
    closer = threading.Thread(target=prefetch.close)
    closer.start()
    time.sleep(0.02)
    release.set()
    for thread in (closer, consumer):
        thread.join(120)
        assert not thread.is_alive()
    assert len(ended) == 1


def test_an_interpreter_ends_though_nobody_closed() -> None:
    code = """
from quern.train.batches.prefetch import Prefetch
p = Prefetch(lambda n: n, 0, None, 2)
next(p)
print('done')
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_depth_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="depth: expected an integer ≥ 1, got 0"):
        Prefetch(lambda n: n, 0, 1, 0)
