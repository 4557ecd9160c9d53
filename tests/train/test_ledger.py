"""The ledger's rules and answers, against a simulation that keeps what each attempt trained on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quern.errors import QuernError
from quern.mixtures.order import Order, Phase
from quern.train.history import ledger as module
from quern.train.history.ledger import (
    Ledger,
    Range,
    check_append,
    data_end,
    data_step,
    latest_order,
    reached,
    read_ledger,
    surviving,
)
from support.train.exposures import Exposure, exposures

Step = tuple[int, str, bool]  # data step, order hash, applied


@dataclass
class Run:
    """What the weights are made of, kept step by step; the ledger is written beside it and never read here."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    lineage: list[Step] = field(default_factory=list)
    known: int = 0
    next_data: int = 0

    def move(self, kind: str, step: int, data: int, order: str) -> None:
        self.entries.append({"kind": kind, "step": step, "data_step": data, "order": order})
        del self.lineage[step:]
        self.known = step
        self.next_data = data

    def train(self, steps: int, rng: random.Random, skips: float = 0.1) -> None:
        for _ in range(steps):
            applied = rng.random() >= skips
            step = len(self.lineage)
            self.lineage.append((self.next_data, self.order, applied))
            if not applied:
                self.note("skipped", step=step, data_step=self.next_data, reason="non_finite")
                self.known = step + 1
            self.next_data += 1
            if rng.random() < 0.2:
                self.note("checkpoint", step=step + 1, data_step=self.next_data, name=f"step_{step + 1:08d}")
                self.known = step + 1

    def note(self, kind: str, **fields: Any) -> None:
        self.entries.append({"kind": kind, **fields})

    @property
    def order(self) -> str:
        return next(entry["order"] for entry in reversed(self.entries) if "order" in entry)

    def end_of_data(self, step: int) -> int:
        return self.lineage[step - 1][0] + 1 if step else 0


def expand(ranges: tuple[Range, ...]) -> list[tuple[int, int, str]]:
    return [(t, r.data_step + t - r.step, r.order) for r in ranges for t in range(r.step, r.stop or 0)]


def random_run(rng: random.Random) -> Iterator[Run]:
    """A run, again and again as it stands after more attempts."""
    run = Run()
    for attempt in range(rng.randint(1, 7)):
        step = rng.choice([run.known, rng.randint(0, run.known)])
        data = run.end_of_data(step) + rng.choice([0, 0, 1, rng.randint(0, 9)])
        run.move("start" if attempt == 0 else rng.choice(["resume", "rollback"]), step, data, rng.choice("abc"))
        run.train(rng.choice([0, 1, rng.randint(0, 12)]), rng)
        yield run


@pytest.mark.slow
def test_ledger_tells_what_the_simulation_kept() -> None:
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(3000):
        for run in random_run(rng):
            kept = [(t, data, order) for t, (data, order, _) in enumerate(run.lineage)]
            for t_end in {len(kept), rng.randint(0, len(kept))}:
                ranges = surviving(run.entries, t_end)
                assert expand(ranges) == kept[:t_end]
                assert all(r.stop is not None and r.step < r.stop for r in ranges)
            assert reached(run.entries) == run.known
            going_on = [data for _, data, _ in kept] + list(range(run.next_data, run.next_data + 4))
            assert [data_step(run.entries, t) for t in range(len(going_on))] == going_on
            assert [data_end(run.entries, t) for t in range(len(kept) + 1)] == [
                run.end_of_data(t) for t in range(len(kept) + 1)
            ]
            by_data = {data: t for t, data in enumerate(going_on)}
            seen["gaps"] += len(by_data) < going_on[-1] + 1
            seen["ranges"] += len(surviving(run.entries, len(kept))) > 1
            seen["discarded"] += sum(e["kind"] in module.MOVES for e in run.entries) > len(surviving(run.entries, None))
    assert min(seen.values()) > 1000


def accepted(entries: list[dict[str, Any]], step: int, data: int, order: Any) -> bool:
    try:
        check_append(entries, step, data, order)
    except QuernError:
        return False
    return True


def test_rules_allow_what_keeps_the_lineage_whole_and_nothing_else() -> None:
    rng = random.Random(2)
    seen: Counter[bool] = Counter()
    for _ in range(1500):
        for run in random_run(rng):
            same = SimpleNamespace(hash=run.order)
            step, data = rng.randint(-1, run.known + 2), rng.randint(0, run.next_data + 2)
            allowed = 0 <= step <= run.known and data >= run.end_of_data(step)
            assert accepted(run.entries, step, data, same) == allowed
            seen[allowed] += 1
    assert min(seen.values()) > 500
    assert accepted([], 0, 5, SimpleNamespace(hash="a"))
    assert not accepted([], 1, 5, SimpleNamespace(hash="a"))


def test_an_abandoned_attempts_checkpoint_is_not_gone_on_from() -> None:
    order = SimpleNamespace(hash="a")
    entries = [
        {"kind": "start", "step": 0, "data_step": 0, "order": "a"},
        {"kind": "checkpoint", "step": 100, "data_step": 100, "name": "step_00000100"},
        {"kind": "rollback", "step": 50, "data_step": 60, "order": "a"},
    ]
    with pytest.raises(QuernError, match="cannot go on from step 100: the ledger proves steps up to 50 only"):
        check_append(entries, 100, 110, order)  # type: ignore[arg-type]
    check_append(entries, 50, 50, order)  # type: ignore[arg-type]
    with pytest.raises(QuernError, match="cannot go on from step -1"):
        check_append(entries, -1, 110, order)  # type: ignore[arg-type]
    with pytest.raises(QuernError, match="seen the data before 50; expected a data step ≥ 50"):
        check_append(entries, 50, 49, order)  # type: ignore[arg-type]


def random_order(rng: random.Random) -> tuple[tuple[Any, ...], tuple[int, ...], int, int]:
    sources = rng.randint(1, 4)
    weights = (*(rng.randint(0, 5) for _ in range(sources - 1)), rng.randint(1, 5))
    windows = tuple(rng.randint(1, 12) for _ in range(sources))
    return weights, windows, rng.randint(0, 1000), rng.choice([1, 2, 3, 4, 6])


def samples_of(order: Order, step: int) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in order.batch(step)), strict=True))


@pytest.mark.slow
def test_newest_order_and_the_ledger_explain_every_exposure(tmp_path: Path) -> None:
    rng = random.Random(3)
    seen: Counter[str] = Counter()
    for case in range(40):
        weights, windows, seed, batch = random_order(rng)
        phases: list[Phase] = []

        def build(phases: list[Phase], given: tuple[Any, ...] = (weights, windows, seed, batch)) -> Order:
            weights, windows, seed, batch = given
            return Order(weights, windows, seed, phases, global_batch=batch, seq_len=8)

        order = build(phases)
        run = Run()
        checkpoints: list[tuple[int, int, list[Step], dict[str, Order]]] = []
        orders: dict[str, Order] = {}
        with Ledger(tmp_path / f"{case}.jsonl") as ledger:
            run.entries = ledger.entries
            run.note = lambda kind, _ledger=ledger, **fields: _ledger.append(kind, **fields)  # type: ignore[method-assign]
            for attempt in range(rng.randint(2, 6)):
                step = rng.choice([run.known, rng.randint(0, run.known)])
                end = run.end_of_data(step)
                data = end + rng.choice([0, 0, rng.randint(0, 4)])
                if data and attempt and rng.random() < 0.6:
                    changed = (*(rng.randint(0, 5) for _ in weights[:-1]), rng.randint(1, 5))
                    phases = [phase for phase in phases if phase.first_step < data]
                    phases.append(Phase(data, changed, rng.choice([None, 1, 2, 5])))
                    order = build(phases)
                    seen["recipes"] += 1
                orders[order.hash] = order
                ledger.move("resume" if attempt else "start", step, data, order)
                del run.lineage[step:]
                run.known, run.next_data = step, data
                run.train(rng.randint(0, 8), rng)
                checkpoints.append((ledger.offset, len(run.lineage), list(run.lineage), dict(orders)))
        for offset, t_end, lineage, known in [
            checkpoints[-1],
            rng.choice(checkpoints),
        ]:  # perhaps of an abandoned attempt
            entries = read_ledger(tmp_path / f"{case}.jsonl", offset)
            newest = latest_order(entries)
            assert newest is not None
            trained: dict[tuple[int, int, int], list[Exposure]] = {}
            for t, (data, name, applied) in enumerate(lineage):
                for triple in samples_of(known[name], data):  # the order as it was when the step was taken
                    trained.setdefault(triple, []).append(Exposure(t, data, applied))
            assert all(len(found) == 1 for found in trained.values())
            seen["skipped"] += sum(not found[0].applied for found in trained.values())
            far = Counter(source for source, _, _ in trained)
            asked = [
                (source, epoch, window)
                for source, size in enumerate(windows)
                for epoch in range(far[source] // size + 2)
                for window in range(size)
            ]
            for triple in rng.sample(asked, min(30, len(asked))):
                expected = trained.get(triple, [])
                assert exposures(entries, t_end, newest, *triple) == expected
                seen["found" if expected else "none"] += 1
    assert min(seen.values()) > 50, seen


def test_an_order_that_rewrites_what_was_read_is_refused(tmp_path: Path) -> None:
    def order(*phases: Phase, seed: int = 1) -> Order:
        return Order((1, 2), (50, 70), seed, list(phases), global_batch=4)

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.move("start", 0, 0, order())
        ledger.append("checkpoint", step=10, data_step=10, name="step_00000010")
        for other in (order(Phase(9, (2, 1))), order(seed=2), order(Phase(3, None, 8))):
            with pytest.raises(QuernError, match=r"gives other samples than .* before data step 10"):
                ledger.move("resume", 10, 10, other)
        with pytest.raises(QuernError, match=r"gives other samples than .* before data step 15"):
            ledger.move("resume", 10, 15, order(Phase(12, (2, 1))))  # what is skipped is skipped of the same order
        size = ledger.offset
        ledger.move("resume", 10, 10, order(Phase(10, (2, 1))))
        assert ledger.offset > size
        ledger.move("rollback", 0, 0, order(seed=2))  # nothing was read before data step 0
        ledger.move("resume", 0, 0, order(seed=2))
    kinds = [entry["kind"] for entry in read_ledger(tmp_path / "ledger.jsonl")]
    assert kinds == ["order", "start", "checkpoint", "order", "resume", "order", "rollback", "resume"]


def test_an_attempts_skip_is_its_own() -> None:
    order = Order((1,), (40,), 5, global_batch=2)
    g = order.first_sample(3)
    start = {"kind": "start", "step": 0, "data_step": 0, "order": order.hash}
    skip = {"kind": "skipped", "step": 3, "data_step": 3, "reason": "non_finite"}
    again = {"kind": "rollback", "step": 2, "data_step": 2, "order": order.hash}
    assert exposures([start, skip], 6, order, *order.sample(g)) == [Exposure(3, 3, False)]
    assert exposures([start, skip, again], 6, order, *order.sample(g)) == [Exposure(3, 3, True)]
    assert exposures([start, again, skip], 6, order, *order.sample(g)) == [Exposure(3, 3, False)]
    assert exposures([start, again, skip], 3, order, *order.sample(g)) == []


def test_a_ledger_without_a_spec_of_its_order_is_refused() -> None:
    order, other = Order((1,), (40,), 5, global_batch=2), Order((1,), (40,), 6, global_batch=2)
    start = {"kind": "start", "step": 0, "data_step": 0, "order": order.hash}
    with pytest.raises(QuernError, match=f"reads from order {order.hash} but has no line with its spec"):
        latest_order([start])
    with pytest.raises(QuernError, match=f"makes an order with hash {other.hash}"):
        latest_order([{"kind": "order", "hash": order.hash, "spec": other.to_dict()}, start])
    with pytest.raises(QuernError, match=f"the spec of order {order.hash} in the ledger cannot be used: order: "):
        latest_order([{"kind": "order", "hash": order.hash, "spec": order.to_dict() | {"constants": {}}}, start])
    assert latest_order([]) is None


def test_step_without_a_start_is_an_error() -> None:
    with pytest.raises(QuernError, match="no line that says which data step 3 reads"):
        data_step([{"kind": "checkpoint", "step": 3, "data_step": 3, "name": "x"}], 3)
