"""A plan: what it says a budget reads, against samples that are counted one by one; what it refuses, and whether its
advice holds.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quern.errors import InputError
from quern.mixtures.order import Order, Phase
from quern.mixtures.recipe import MixtureSource, OrderPlan, plan_order

SEQ_LEN = 8


def source(name: str, tokens: int, weight: float = 1.0, max_epochs: float = 1e9) -> MixtureSource:
    windows = max(0, (tokens - 1) // SEQ_LEN)
    return MixtureSource(name, f"run/{name}/1", f"RUN/tokens/{name}", tokens, windows, weight, max_epochs)


def plan(sources: list[MixtureSource], phases: list[Phase] | None = None, **values: Any) -> OrderPlan:
    return plan_order(
        sources, phases or [], **{"seed": 3, "seq_len": SEQ_LEN, "global_batch": 4, "steps": 10, **values}
    )


def count(order: Order, first: int, stop: int) -> Counter[int]:
    """Samples of each source in steps [first, stop), one by one."""
    positions = np.arange(order.first_sample(first), order.first_sample(stop))
    return Counter(order.samples(positions)[0].tolist())


def random_recipe(rng: random.Random) -> tuple[list[MixtureSource], list[Phase], dict[str, Any]]:
    number = rng.randint(1, 4)
    sources = [source(f"s{i}", rng.randint(SEQ_LEN + 1, 300), rng.choice([0.5, 1, 3])) for i in range(number)]
    phases = []
    for first_step in sorted(rng.sample(range(1, 30), rng.randint(0, 3))):
        weights = (*(rng.choice([0.0, 0.25, 2.0]) for _ in range(number - 1)), 1.0)
        phases.append(Phase(first_step, rng.choice([None, weights]), rng.choice([None, 2, 7])))
    return sources, phases, {"global_batch": rng.randint(1, 8), "steps": rng.randint(1, 30), "seed": rng.randint(0, 99)}


@pytest.mark.slow
def test_a_plan_says_what_the_order_gives() -> None:
    rng = random.Random(4)
    seen: Counter[str] = Counter()
    for _ in range(60):
        sources, phases, values = random_recipe(rng)
        found = plan(sources, phases, **values)
        order = found.order
        triples = list(
            zip(*(part.tolist() for part in order.samples(np.arange(order.first_sample(values["steps"])))), strict=True)
        )
        assert found.samples == len(triples)
        assert found.planned_tokens == len(triples) * SEQ_LEN
        for index, (given, row) in enumerate(zip(sources, found.sources, strict=True)):
            own = [(epoch, window) for s, epoch, window in triples if s == index]
            visited = {window for _, window in own}
            assert row.samples == len(own)
            assert row.planned_tokens == SEQ_LEN * len(own)
            assert row.share == pytest.approx(len(own) / len(triples))
            assert row.epochs == pytest.approx(len(own) / given.windows)
            assert row.windows_left == given.windows - len(visited)
            targets = {w * SEQ_LEN + i for w in range(given.windows) for i in range(1, SEQ_LEN + 1)}
            assert row.tail_tokens + 1 == given.tokens - len(targets)
            assert {name: getattr(row, name) for name in vars(given)} == vars(given)
            seen["left"] += row.windows_left > 0
            seen["repeated"] += row.epochs > 1
        edges = [0, *(phase.first_step for phase in phases)]
        assert [row.first_step for row in found.phases] == edges
        batch = values["global_batch"]
        for row, edge, stop in zip(found.phases, edges, [*edges[1:], 10**9], strict=True):
            stop = min(stop, values["steps"])
            batch = next((p.global_batch for p in phases if p.first_step == edge and p.global_batch), batch)
            counts = count(order, edge, stop) if edge < stop else Counter()
            assert row.samples == tuple(counts[index] for index in range(len(sources)))
            assert row.stop_step == max(edge, stop)
            assert row.global_batch == batch
            seen["unreached"] += edge >= stop
        json.dumps(found.to_dict())
    assert min(seen.values()) > 5, seen


def test_shares_are_weights_over_their_sum() -> None:
    sources = [source("a", 10_000, 3), source("b", 10_000, 1), source("c", 10_000, 0)]
    found = plan(sources, [Phase(6, (1, 0, 4))], global_batch=20)
    assert [row.shares for row in found.phases] == [(0.75, 0.25, 0.0), (0.2, 0.0, 0.8)]
    assert [row.samples for row in found.phases] == [(90, 30, 0), (16, 0, 64)]
    assert [row.share for row in found.sources] == [0.53, 0.15, 0.32]


def test_order_is_that_of_the_sources_identities() -> None:
    sources = [source("a", 500, 3), source("b", 300, 1)]
    phases = [Phase(5, (1, 1)), Phase(7, None, 2)]
    wanted = Order(
        (3, 1), (62, 37), 3, phases, ids=["run/a/1", "run/b/1"], seq_len=SEQ_LEN, global_batch=4
    )  # fmt: skip
    assert plan(sources, phases).order.hash == wanted.hash
    assert plan(sources, phases).to_dict()["order"] == wanted.hash
    assert plan([replace(sources[0], ident="other/a/1"), sources[1]], phases).order.hash != wanted.hash


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        plan(*args, **kwargs)
    return str(caught.value)


@pytest.mark.slow
def test_a_source_read_too_often_is_refused_and_the_advice_holds() -> None:
    rng = random.Random(5)
    seen: Counter[str] = Counter()
    for _ in range(80):
        sources, phases, values = random_recipe(rng)
        if rng.random() < 0.5:
            phases = [Phase(phase.first_step, None, phase.global_batch) for phase in phases]
        capped = [replace(given, max_epochs=rng.choice([0.5, 1, 1.5, 4])) for given in sources]
        order = plan(sources, phases, **values).order

        def fits(steps: int, order: Order = order, capped: list[MixtureSource] = capped) -> bool:
            counts = count(order, 0, steps)
            return all(counts[i] <= given.max_epochs * given.windows for i, given in enumerate(capped))

        if fits(values["steps"]):
            assert plan(capped, phases, **values).order.hash == order.hash
            seen["fits"] += 1
            continue
        message = refusal(capped, phases, **values)
        named = next(i for i, given in enumerate(capped) if f"read source {given.name} " in message)
        samples = count(order, 0, values["steps"])[named]
        windows = capped[named].windows
        assert message.startswith(f"RUN/tokens/{capped[named].name}: {values['steps']:,} steps read source ")
        assert f"{samples / windows:.6g} times ({samples:,} samples of {windows:,} windows)" in message
        assert f"beyond max_epochs {capped[named].max_epochs:g}" in message
        counts = count(order, 0, values["steps"])
        beyond = sum(counts[i] > given.max_epochs * given.windows for i, given in enumerate(capped))
        assert (f"({beyond} sources go beyond their own)" in message) == (beyond > 1)
        seen["several"] += beyond > 1
        steps = re.search(r"steps=(\d+)", message)
        assert fits(int(steps[1]) if steps else 0)
        assert not fits(int(steps[1]) + 1 if steps else 1)
        weight = re.search(r"weight ([\d.]+)", message)
        if weight:
            lighter = list(capped)
            lighter[named] = replace(capped[named], weight=float(weight[1]))
            plan(lighter, phases, **values)
            seen["weight"] += 1
        seen["steps" if steps else "no steps"] += 1
    assert min(seen[key] for key in ("fits", "steps", "weight", "several")) > 3, seen


def test_advised_weight_uses_what_max_epochs_allows() -> None:
    sources = [source("big", 800_001, 2.0), source("small", 80_001, 2.0, max_epochs=2.0)]  # 100,000 and 10,000 windows
    message = refusal(sources, global_batch=1000, steps=100)
    # 20,000 of 100,000 samples: a fifth, a quarter of the other weight
    assert message == (
        "RUN/tokens/small: 100 steps read source small 5 times (50,000 samples of 10,000 windows), beyond max_epochs "
        "2; what fits: steps=40, weight 0.5 or a larger max_epochs"
    )


def test_phases_add_up() -> None:
    sources = [source("a", 8001, 1), source("b", 321, 1, max_epochs=1.0)]  # 1000 and 40 windows
    plan(sources, global_batch=4, steps=20)
    plan(sources, [Phase(20, (1, 0)), Phase(30, (9, 1))], global_batch=4, steps=30)
    message = refusal(sources, [Phase(20, (1, 0)), Phase(30, (1, 1))], global_batch=4, steps=31)
    assert "1.05 times (42 samples of 40 windows), beyond max_epochs 1; what fits: steps=30 or" in message


def test_max_epochs_may_be_used_up_exactly() -> None:
    sources = [source("a", 8 * 10 + 1, max_epochs=4.0)]
    assert plan(sources, global_batch=4, steps=10).sources[0].epochs == 4.0
    assert "steps=10 or" in refusal(sources, global_batch=4, steps=11)
    assert refusal(sources, global_batch=41, steps=1).endswith("no number of steps fits; expected a larger max_epochs")


def test_a_source_without_a_window_is_refused_unless_it_is_never_read() -> None:
    sources = [source("a", 100), source("tiny", 8)]
    expected = (
        "RUN/tokens/tiny: source tiny has 8 tokens; expected at least seq_len + 1 (9) for one window, or weight 0"
    )
    assert refusal(sources) == expected
    sources[1] = replace(sources[1], weight=0.0)
    assert refusal(sources, [Phase(5, (1, 1))]) == expected
    row = plan(sources).sources[1]
    assert (row.samples, row.epochs, row.tail_tokens) == (0, 0.0, 7)


def test_what_the_order_refuses_is_an_input_error() -> None:
    assert "1e-12" in refusal([source("a", 100), source("b", 100, 1e-12)])
    assert "(sources: a, b)" in refusal([source("a", 100), source("b", 100, 1e-12)])
    assert "phases[0]" in refusal([source("a", 100)], [Phase(2, (1, 2))])
    assert "phases[0]" in refusal([source("a", 100), source("tiny", 8, 0.0)], [Phase(2, (1,))])
