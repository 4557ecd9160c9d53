"""Ranks that are slow are named, those that wait for them or only jitter are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.train.history.ledger import Ledger, read_ledger
from quern.train.supervision.stragglers import Straggler, Stragglers

HOSTS = [f"n{rank // 8}" for rank in range(64)]


def judged(times: np.ndarray[Any, Any], hosts: list[str]) -> list[Straggler]:
    own = Stragglers(hosts, None)
    return [found for step in times for found in own.judge(step)]


def jitter(rng: np.random.Generator, steps: int, ranks: int) -> np.ndarray[Any, Any]:
    """Half to twice as long, each rank by itself, in steps that all take half to twice as long."""
    return 2 ** rng.uniform(-1, 1, (steps, 1)) * 2 ** rng.uniform(-1, 1, (steps, ranks))


@pytest.mark.parametrize("ranks", [3, 4, 8, 64])
def test_time_that_jitters_names_nobody(ranks: int) -> None:
    for seed in range(5):
        assert judged(jitter(np.random.default_rng(seed), 2000, ranks), HOSTS[:ranks]) == []


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_one_that_takes_twice_as_long_is_named_and_no_other(ranks: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times, slow = jitter(rng, 300, ranks), int(rng.integers(ranks))
        times[100:200, slow] *= 2
        found = judged(times, HOSTS[:ranks])
        assert [(one.what, one.ranks) for one in found] == [(f"rank {slow} on {HOSTS[slow]}", (slow,))] * 2
        assert 0.4 < found[0].slower < 1.8
        assert found[1].slower == 0


def test_a_rank_15_percent_slower_on_quiet_machines_is_named() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times, slow = 1 + 0.02 * rng.standard_normal((50, 64)), int(rng.integers(64))
        times[:, slow] *= 1.15
        assert [found.ranks for found in judged(times, HOSTS)] == [(slow,)]


def test_a_machine_whose_ranks_are_all_slow_is_named_once() -> None:
    times = 1 + 0.02 * np.random.default_rng(1).standard_normal((50, 64))
    times[:, 16:24] *= 1.3
    times[:, 40] *= 1.5
    assert {found.what: found.ranks for found in judged(times, HOSTS)} == {
        "n2": tuple(range(16, 24)), "rank 40 on n5": (40,),
    }  # fmt: skip


def test_two_ranks_and_ranks_that_say_nothing_are_not_compared() -> None:
    assert judged(np.array([[1.0, 9.0]] * 100), HOSTS[:2]) == []
    assert judged(np.array([[1.0, 1.0, np.nan, 9.0]] * 100), HOSTS[:4]) == []


def test_it_stands_in_the_ledger_and_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        own = Stragglers(["n1"] * 2 + ["n2"] * 2, ledger, window=2)
        for step in range(4):
            own.observe(step, np.array([1.0, 1.0, 3.0 if step < 2 else 1.0, 1.0]))
    first, second = read_ledger(tmp_path / "ledger.jsonl")
    assert (first["step"], first["what"], first["ranks"], first["slower"]) == (1, "rank 2 on n2", [2], 2.0)
    assert (second["step"], second["slower"]) == (3, 0)
    assert "step 1: rank 2 on n2 computes 200 % longer than the median" in caplog.text
