"""How the time of a function grows with its input, on a machine that may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Input = TypeVar("Input")

#: How often what seems to grow too fast is measured once more, and for how many seconds of CPU time in all.
AGAIN, AGAIN_S = 10, 20


def assert_grows_tamely(
    work: Callable[[Input], object], short: Input, long: Input, times: float, grain_s: float = 0.001
) -> None:
    """``work(long)`` takes less than ``times`` the CPU time of ``work(short)``, or of ``grain_s`` where that is more.

    The best of several measurements counts, and only what is slow in all of them is too slow: others on the machine
    make a measurement longer, never shorter.
    """

    def seconds(given: Input) -> float:
        start = time.process_time()
        work(given)
        return time.process_time() - start

    least = seconds(short)
    most = seconds(long)
    until_s = time.process_time() + AGAIN_S
    for again in range(AGAIN):
        if most < times * max(least, grain_s):
            return
        if again >= 2 and time.process_time() > until_s:
            break
        least, most = min(least, seconds(short)), min(most, seconds(long))
    assert most < times * max(least, grain_s), (least, most)
