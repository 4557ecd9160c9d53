"""Waits that grow lead to a measurement of the links, which names the slow one; those that only jitter lead to none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quern.train.history.ledger import Ledger, read_ledger
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.setup import open_trainer
from quern.train.supervision import link_probe
from quern.train.supervision.link_probe import LinkProbe
from support.distributed.ranks import run_ranks
from support.train import run_case as case

STEPS = 2000


def asked(work: np.ndarray[Any, Any], wait: np.ndarray[Any, Any]) -> list[int]:
    """The steps after which links are to be measured."""
    own, found = LinkProbe(["a"] * work.shape[1], None, Ranks(0, work.shape[1], torch.device("cpu"))), []
    for step, (work_s, wait_s) in enumerate(zip(work, wait, strict=True)):
        own.observe(work_s, wait_s)
        if own.take_request():
            found.append(step)
    return found


def times(rng: np.random.Generator, ranks: int, transfer: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Work that jitters between half and twice as long, and waits: for the last rank, and ``transfer`` [steps]."""
    work = 2 ** rng.uniform(-1, 1, (STEPS, ranks))
    return work, work.max(axis=1, keepdims=True) - work + transfer[:, None] * 2 ** rng.uniform(-1, 1, (STEPS, 1))


@pytest.mark.parametrize(
    "ranks", [4, pytest.param(8, marks=pytest.mark.long), pytest.param(64, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("transfer", [0.3, pytest.param(0.001, marks=pytest.mark.long)])
def test_times_that_jitter_and_slow_ranks_are_no_reason(ranks: int, transfer: float) -> None:
    for seed in range(3):
        work, wait = times(np.random.default_rng(seed), ranks, np.full(STEPS, transfer))
        work[1000:, 1] *= 4
        wait[1000:] = work[1000:].max(axis=1, keepdims=True) - work[1000:] + transfer
        assert asked(work, wait) == []


@pytest.mark.parametrize(
    "ranks", [4, pytest.param(8, marks=pytest.mark.long), pytest.param(64, marks=pytest.mark.long)]
)
def test_transfers_that_take_three_times_as_long_are_one_until_they_are_as_before(ranks: int) -> None:
    transfer = np.full(STEPS, 0.3)
    transfer[500:1000] *= 3
    transfer[1500:] *= 3
    for seed in range(3):
        assert asked(*times(np.random.default_rng(seed), ranks, transfer)) == [549, 1549]


def test_what_is_not_known_of_a_rank_is_left_out() -> None:
    work, wait = times(np.random.default_rng(1), 4, np.repeat([0.3, 0.9], STEPS // 2))
    work[:, :3] = wait[:, 0] = np.nan  # in a pipeline the last stage alone tells its work
    assert asked(work, wait) == [1049]
    assert asked(np.full_like(work, np.nan), wait) == []


def slow_pair(run: str, data: list[str]) -> tuple[list[str], list[Any]]:
    """Train on four ranks that say that 1 and 3 exchange slowly, and that waits grow in step 6; the phases, and the
    real times."""
    exchange, phases, waits = link_probe.exchange, list[str](), list[Any]()

    def slowly(got: Any, sent: Any, other: int) -> float:
        got.zero_()
        assert exchange(got, sent, other) > 0
        assert bool((got == 1).all())
        return 1e9 if {other, dist.get_rank()} == {1, 3} else 50e9

    link_probe.exchange, link_probe._BYTES = slowly, {"cpu": 4096}
    config = case.settings(run, data, global_batch=4, micro_batch=1, steps=12)
    with open_ranks(config.device) as ranks, open_trainer(config, ranks) as trainer:
        own, enter = trainer.link_probe, trainer.watchdog.enter
        link_probe.WINDOW, observe = 3, own.observe

        def growing(work_s: Any, wait_s: Any) -> None:
            waits.append((work_s.copy(), wait_s.copy()))
            observe(np.ones(4), np.full(4, 0.1 if len(waits) <= 6 else 0.5))

        def told(phase: str, *step: int) -> None:
            phases.append(phase)
            enter(phase, *step)

        own.observe, trainer.watchdog.enter = growing, told  # type: ignore[method-assign]
        trainer.fit()
    return phases, waits


def test_a_run_whose_waits_grow_names_the_slow_pair(tmp_path: Path) -> None:
    told = run_ranks(slow_pair, 4, str(tmp_path / "run"), case.write_corpus(tmp_path / "data"))
    assert [phases.count("links") for phases, _ in told] == [1] * 4
    assert [len(waits) for _, waits in told] == [12, 0, 0, 0]
    for work_s, wait_s in told[0][1][4:]:
        assert work_s.shape == wait_s.shape == (4,)
        assert np.all(work_s > 0)
        assert np.all(wait_s > 0)
    (entry,) = (own for own in read_ledger(tmp_path / "run" / "ledger.jsonl") if own["kind"] == "slow_links")
    assert (entry["links"], entry["before"], entry["now"]) == (6, 0.1, 0.5)
    (text,) = entry["found"]
    assert text.endswith("(ranks 1 and 3): -98% against the median (1 local pair link)")
    assert 8 < entry["step"] <= 11


def no_memory_on_rank_2() -> None:
    ranks, empty = Ranks(dist.get_rank(), 4, torch.device("cpu")), torch.empty

    def without(*size: Any, **how: Any) -> torch.Tensor:
        if dist.get_rank() == 2:
            raise torch.OutOfMemoryError("none left")
        return empty(*size, **how)

    own = LinkProbe(["a"] * 4, None, ranks)
    own.asked = True
    torch.empty, link_probe.exchange = without, None  # type: ignore[assignment]
    own.measure(3)
    assert not own.asked


def test_a_rank_without_memory_for_it_ends_the_measurement_and_not_the_run(tmp_path: Path) -> None:
    assert run_ranks(no_memory_on_rank_2, 4) == [None] * 4


@pytest.mark.parametrize(
    ("hosts", "kinds"),
    [("aa", []), ("aaa", []), ("aabb", []), ("abcd", ["pair"] * 3), ("aaaabbbb", ["local pair"] * 3 + ["pair"])],
)
def test_links_are_measured_where_enough_can_be_compared(hosts: str, kinds: list[str]) -> None:
    own = LinkProbe([*hosts], None, Ranks(0, len(hosts), torch.device("cpu")))
    assert [kind for kind, _ in own._rounds] == kinds
    for share in [0.1] * 50 + [0.5] * 50:
        own.observe(np.ones(len(hosts)), np.full(len(hosts), share))
    assert own.take_request() is bool(kinds)


def test_waits_that_were_nothing_before_are_told_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        own = LinkProbe(["a"] * 4, ledger, Ranks(0, 4, torch.device("cpu")))
        for share in [0.0] * 50 + [0.5] * 50:
            own.observe(np.ones(4), np.full(4, share))
        assert own.take_request()
        own._tell(99, {"local pair": {(0, 1): 1e9, (2, 3): 1e9}}, ledger)
    (entry,) = read_ledger(tmp_path / "ledger.jsonl")
    assert (entry["before"], entry["now"], entry["links"]) == (0.0, 0.5, 2)
    assert "none of 2 links is slower than the others" in caplog.text
