"""A few seeds of the fuzzer (``make fuzz`` runs as many as one likes), and that it does find what is wrong."""

from __future__ import annotations

import os
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from support.data_pipeline import fuzz, fuzz_cases

pytestmark = pytest.mark.slow

NUM_CASES = {"reader": 60, "real": 25, "extract": 12, "charset": 150, "url": 300}


@pytest.mark.parametrize("target", list(fuzz_cases.TARGETS))
def test_the_first_cases_of_each_target_hold(target: str) -> None:
    for number in range(NUM_CASES[target]):
        fuzz.run_case(target, 1, number)


def busy(draw: random.Random) -> None:
    while draw.random() >= 0:
        pass


def greedy(draw: random.Random) -> None:
    bytearray((300 + draw.randrange(2)) << 20)


def failing(draw: random.Random) -> None:
    assert draw.random() > 0.5, "too small"


@pytest.mark.parametrize(
    ("case", "said"), [(busy, "SIGPROF"), (greedy, "MemoryError"), (failing, "AssertionError: too small")]
)
def test_a_case_beyond_its_limits_is_a_finding_with_its_seed(
    case: object, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def guarded(draw: random.Random) -> None:
        if begun:
            case(draw)  # type: ignore[operator]
        begun.append(True)

    begun: list[bool] = []
    looks: Counter[int] = Counter()
    parent = os.getpid()

    def clock() -> float:
        """So many looks of this process and of its child, not so many seconds; none of them while a child loads."""
        looks[os.getpid()] += 1
        return float(looks[parent] + (max(0, looks[os.getpid()] - 2) if os.getpid() != parent else 0))

    monkeypatch.setattr(fuzz, "time", SimpleNamespace(time=clock))
    monkeypatch.setitem(fuzz_cases.TARGETS, "reader", guarded)
    cases, findings = fuzz.run_for("reader", 3, 6, cpu_s=0.1, memory=64 << 20)
    assert 0 < findings <= cases
    told = capfd.readouterr().out
    assert said in told
    assert "--- reader:3:" in told


def test_the_same_seed_is_the_same_case() -> None:
    files = [fuzz_cases._file(random.Random("x:1:2")) for _ in range(2)]
    assert files[0] == files[1]
    assert fuzz_cases._file(random.Random("x:1:3")) != files[0]
