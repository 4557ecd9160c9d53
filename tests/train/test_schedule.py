"""The learning rate: tables worked out by hand, and torch's own schedulers."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from quern.errors import InputError
from quern.train.config import ScheduleConfig
from quern.train.step.schedule import check_schedule, learning_rate

WARMUP = [0.25, 0.5, 0.75, 1.0]
R2, R3 = sqrt(2), sqrt(3)


def schedule(kind: str, warmup: int, final: float = 0.1, decay: float = 0.1) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"kind": kind, "warmup": warmup, "final": final, "decay": decay})


def rates(steps: int, config: ScheduleConfig, lr: float = 1.0) -> list[float]:
    check_schedule(steps, config)
    return [learning_rate(step, steps, lr, config) for step in range(steps)]


@pytest.mark.parametrize(
    ("config", "steps", "expected"),
    [
        # cos of 0, 30, 60, 90, 120, 150 degrees
        (schedule("cosine", 4, 0.0), 10,
         [*WARMUP, 1, (2 + R3) / 4, 3 / 4, 1 / 2, 1 / 4, (2 - R3) / 4]),
        # cos of 0, 45, 90, 135 degrees, between 1 and 1/2
        (schedule("cosine", 0, 0.5), 4, [1, (6 + R2) / 8, 3 / 4, (6 - R2) / 8]),
        (schedule("linear", 4, 0.0), 9, [*WARMUP, 1, 0.8, 0.6, 0.4, 0.2]),
        (schedule("linear", 4, 0.5), 8, [*WARMUP, 1, 0.875, 0.75, 0.625]),
        (schedule("wsd", 4, 0.0, decay=0.4), 10, [*WARMUP, 1, 1, 1, 0.75, 0.5, 0.25]),
        (schedule("wsd", 4, 0.2, decay=0.4), 10, [*WARMUP, 1, 1, 1, 0.8, 0.6, 0.4]),
        (schedule("wsd", 0, 0.0, decay=1.0), 4, [1, 0.75, 0.5, 0.25]),
        (schedule("wsd", 0, 0.0, decay=0.001), 4, [1, 1, 1, 1]),  # the one decaying step is at share 0
        (schedule("constant", 4, 0.1), 7, [*WARMUP, 1, 1, 1]),
        (schedule("cosine", 4, 0.1), 4, WARMUP),
        (schedule("wsd", 3, 0.0, decay=0.25), 4, [1 / 3, 2 / 3, 1, 1]),
        (schedule("cosine", 1, 0.0), 3, [1, 1, 1 / 2]),
    ],
)  # fmt: skip
def test_rates_are_those_worked_out_by_hand(config: ScheduleConfig, steps: int, expected: list[float]) -> None:
    assert rates(steps, config) == pytest.approx(expected, rel=1e-12)
    assert rates(steps, config, 3e-4) == pytest.approx([3e-4 * rate for rate in expected], rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "end"), [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)]
)  # fmt: skip
def test_at_the_end_and_beyond_the_rate_stays(kind: str, end: float) -> None:
    config = schedule(kind, 3)
    assert [learning_rate(step, 20, 2.0, config) for step in (20, 21, 10**9)] == pytest.approx([2 * end] * 3)


def torch_rates(kind: str, steps: int, warmup: int, final: float, falling: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, dtype=torch.float64)], lr=1.0)
    parts: list[LRScheduler] = []
    edges: list[int] = []
    if warmup > 1:
        parts.append(LinearLR(optimizer, start_factor=1 / warmup, end_factor=1.0, total_iters=warmup - 1))
        edges.append(warmup)
    if kind == "wsd":
        parts.append(ConstantLR(optimizer, factor=1.0, total_iters=0))
        edges.append(steps - falling)
    if kind == "cosine":
        parts.append(CosineAnnealingLR(optimizer, T_max=steps - max(warmup, 0), eta_min=final))
    elif kind == "constant":
        parts.append(ConstantLR(optimizer, factor=1.0, total_iters=0))
    else:
        parts.append(LinearLR(optimizer, start_factor=1.0, end_factor=final, total_iters=falling))
    scheduler = SequentialLR(optimizer, parts, edges[: len(parts) - 1]) if len(parts) > 1 else parts[0]
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize(("steps", "warmup", "final"), [(50, 10, 0.1), (97, 13, 0.0), (40, 2, 0.5), (30, 0, 0.25)])
def test_rates_are_those_of_torch(kind: str, steps: int, warmup: int, final: float) -> None:
    falling = {"wsd": 2 * steps // 10, "linear": steps - warmup}.get(kind, 0)
    config = schedule(kind, warmup, final, decay=max(falling, 1) / steps)
    assert rates(steps, config) == pytest.approx(torch_rates(kind, steps, warmup, final, falling), rel=1e-9, abs=1e-12)


@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]), st.integers(1, 400), st.data(), st.floats(0, 1),
    st.floats(0.001, 1),
)  # fmt: skip
def test_a_rate_rises_then_falls_and_no_step_is_wasted(
    kind: str, steps: int, data: st.DataObject, final: float, decay: float
) -> None:
    config = schedule(kind, data.draw(st.integers(0, steps)), final, decay)
    try:
        found = rates(steps, config)
    except InputError:
        assert kind == "wsd"
        assert config.warmup + max(1, round(decay * steps)) > steps
        return
    top = config.warmup
    assert found[:top] == sorted(found[:top])
    assert all(a >= b for a, b in zip(found[top:], found[top + 1 :], strict=False))
    assert min(found) > 0
    assert max(found) == 1.0
    assert min(found[top:], default=1.0) >= final * (1 - 1e-12)


def test_a_schedule_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(InputError, match=r"^schedule\.warmup: expected at most steps \(100\), got 101$"):
        check_schedule(100, schedule("cosine", 101))
    with pytest.raises(InputError, match=r"^schedule\.warmup: expected at most 80, .*last 20 of 100 .*0\.2.*got 81$"):
        check_schedule(100, schedule("wsd", 81, decay=0.2))
    check_schedule(100, schedule("wsd", 80, decay=0.2))
    check_schedule(100, schedule("cosine", 100))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step: expected an integer ≥ 0, got -1"):
        learning_rate(-1, 10, 1.0, schedule("cosine", 0))
