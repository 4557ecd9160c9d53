"""The guard: against NumPy's medians, without a value read back, and its history through skips and restarts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quern.errors import InputError
from quern.train.config import GuardConfig
from quern.train.step.guard import Guard, Health

NAN, INF = math.nan, math.inf
F64 = torch.float64


def settings(**values: Any) -> GuardConfig:
    return GuardConfig(**{"window": 16, "min_history": 8, **values})


def judge(guard: Guard, loss: float, norm: float, dtype: torch.dtype = F64) -> Health:
    return guard.judge(torch.tensor(loss, dtype=dtype), torch.tensor(norm, dtype=dtype))


def verdict(health: Health) -> tuple[bool, bool, bool, bool]:
    return bool(health.non_finite), bool(health.loss_spike), bool(health.norm_spike), bool(health.skip)


def filled(
    config: GuardConfig, losses: list[float], norms: list[float] | None = None, dtype: torch.dtype = F64
) -> Guard:
    guard = Guard(config, "cpu", dtype)
    for loss, norm in zip(losses, norms or losses, strict=True):
        judge(guard, loss, norm, dtype)
    return guard


class Reference:
    """The rules once more, over Python lists and NumPy's medians."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.history: list[tuple[float, float]] = []

    def judge(self, loss: float, norm: float) -> tuple[tuple[bool, bool, bool, bool], tuple[float, float]]:
        config = self.config
        finite = math.isfinite(loss) and math.isfinite(norm)
        z = [0.0, 0.0]
        recent = np.array(self.history[-config.window :])
        if finite and len(recent) >= config.min_history:
            for i, value in enumerate((loss, norm)):
                median = np.median(recent[:, i])
                mad = 1.4826022185056018 * np.median(np.abs(recent[:, i] - median))
                z[i] = float((value - median) / max(mad, abs(median) / 1000, 1e-6))
        spikes = z[0] > config.loss_z, z[1] > config.grad_norm_z
        skip = (not finite and config.non_finite == "skip") or (any(spikes) and config.spike == "skip")
        if finite and not skip:
            self.history.append((loss, norm))
        return (not finite, *spikes, skip), (z[0], z[1])


def run_of_steps(seed: int, steps: int) -> list[tuple[float, float]]:
    """Losses that fall, with spikes, plateaus and values that are not finite."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(steps):
        loss, norm = 3 + 7 / (1 + step / 20) + 0.1 * rng.normal(), math.exp(0.3 * rng.normal())
        event = rng.random()
        if event < 0.03:
            loss += rng.uniform(0, 6)
        elif event < 0.06:
            norm *= rng.uniform(1, 50)
        elif event < 0.09:
            loss, norm = rng.permutation([rng.choice([NAN, INF, -INF]), rng.choice([1.0, INF, NAN])])
        elif event < 0.2 and found:
            loss, norm = found[-1]
        found.append((float(loss), float(norm)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("non_finite", "spike", "window", "min_history"),
    [("continue", "continue", 16, 8), ("continue", "skip", 9, 9), ("skip", "continue", 21, 4), ("skip", "skip", 16, 8)],
)
def test_verdicts_are_those_of_the_plain_rules(non_finite: str, spike: str, window: int, min_history: int) -> None:
    config = settings(
        non_finite=non_finite, spike=spike, window=window, min_history=min_history, loss_z=4.0, grad_norm_z=5.0
    )
    seen = np.zeros(4, int)
    for seed in range(2):
        guard, reference = Guard(config, "cpu", F64), Reference(config)
        for loss, norm in run_of_steps(seed, 250):
            health = judge(guard, loss, norm)
            expected, z = reference.judge(loss, norm)
            assert verdict(health) == expected
            assert (float(health.loss_z), float(health.norm_z)) == pytest.approx(z, rel=1e-12, abs=1e-12)
            seen += expected
    assert (seen[:3] > 5).all()  # the runs contain what is to be found


class NoReadBack(TorchDispatchMode):
    """Fails on every operation that hands a value, or a shape that depends on values, to Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        values = result if isinstance(result, tuple | list) else [result]
        if name in ("nonzero", "masked_select", "index", "_unique2"):
            raise AssertionError(f"{name}: its shape waits for the device")
        if any(value is not None and not isinstance(value, torch.Tensor) for value in values):
            raise AssertionError(f"{name}: reads a value back")
        return result


@pytest.mark.parametrize("policy", ["continue", "skip"])
def test_no_value_is_read_back(policy: str) -> None:
    loss, norm = torch.tensor(2.0), torch.tensor(1.0)
    for reading in (loss.item, lambda: bool(loss > 1), lambda: loss[loss > 1], lambda: torch.equal(loss, norm)):
        with pytest.raises(AssertionError), NoReadBack():
            reading()
    guard = Guard(settings(non_finite=policy, spike=policy), "cpu")
    with NoReadBack():
        for _ in range(20):
            guard.judge(loss, norm)
    # tensors without storage have no value to read
    guard = Guard(settings(non_finite=policy, spike=policy), "meta")
    for _ in range(3):
        health = guard.judge(torch.empty((), device="meta"), torch.empty((), device="meta"))
    assert {value.device.type for value in [*vars(health).values(), *guard.state_dict().values()]} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_synchronisation_on_cuda() -> None:
    guard = Guard(settings(spike="skip"), "cuda")
    values = torch.tensor([2.0, 2.1, NAN, 90.0], device="cuda").repeat(8)
    cells = values.unbind()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [guard.judge(cell, cell) for cell in cells]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack([health.skip for health in found]).tolist()[-4:] == [0, 0, 1, 1]


@pytest.mark.parametrize("bad", [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (-INF, 1.0), (NAN, INF)])
@pytest.mark.parametrize("policy", ["continue", "skip"])
def test_what_is_not_finite_is_flagged_and_never_remembered(bad: tuple[float, float], policy: str) -> None:
    losses = [2.0 + 0.01 * (i % 5) for i in range(12)]
    guard = filled(settings(non_finite=policy), losses)
    before = guard.state_dict()
    health = judge(guard, *bad)
    assert verdict(health) == (True, False, False, policy == "skip")
    assert all(torch.equal(value, before[name]) for name, value in guard.state_dict().items())
    assert verdict(judge(guard, 2.02, 2.02)) == (False, False, False, False)
    assert verdict(judge(guard, 9.0, 2.02)) == (False, True, False, False)
    for _ in range(40):
        judge(guard, *bad)
    assert all(torch.isfinite(value).all() for value in guard.state_dict().values())


def test_no_spike_before_the_history_suffices() -> None:
    config = settings(min_history=8)
    losses = [2.0 + 0.01 * i for i in range(7)]
    assert verdict(judge(filled(config, losses), 1e6, 1e6)) == (False, False, False, False)
    assert verdict(judge(filled(config, [*losses, 2.0]), 1e6, 1e6)) == (False, True, True, False)


def test_only_above_is_a_spike() -> None:
    guard = filled(settings(), [2.0 + 0.01 * i for i in range(12)])
    assert verdict(judge(guard, -1e6, 0.0)) == (False, False, False, False)


def test_a_history_without_spread_calls_no_rounding_a_spike() -> None:
    guard = filled(settings(loss_z=6.0), [2.5] * 12)
    # a thousandth of the median stands in for the spread: 6 · 0.0025 above it
    assert verdict(judge(guard, 2.5149, 2.5)) == (False, False, False, False)
    assert verdict(judge(guard, 2.5151, 2.5)) == (False, True, False, False)
    guard = filled(settings(loss_z=6.0), [-2.5] * 12)
    assert verdict(judge(guard, -2.4851, -2.5)) == (False, False, False, False)
    assert verdict(judge(guard, -2.4849, -2.5)) == (False, True, False, False)
    guard = filled(settings(loss_z=6.0), [0.0] * 12)
    assert verdict(judge(guard, 5.9e-6, 0.0)) == (False, False, False, False)
    assert verdict(judge(guard, 6.1e-6, 0.0)) == (False, True, False, False)


def test_a_skipped_spike_touches_nothing_and_an_applied_one_is_remembered() -> None:
    losses = [2.0 + 0.01 * (i % 7) for i in range(20)]
    skipping, going_on = filled(settings(spike="skip"), losses), filled(settings(spike="continue"), losses)
    before = {name: value.clone() for name, value in skipping.state_dict().items()}
    assert verdict(judge(skipping, 50.0, 2.0)) == (False, True, False, True)
    assert verdict(judge(skipping, 2.0, 50.0)) == (False, False, True, True)
    assert all(torch.equal(value, before[name]) for name, value in skipping.state_dict().items())
    assert verdict(judge(going_on, 50.0, 2.0)) == (False, True, False, False)
    assert 50.0 in going_on.state_dict()["losses"]


def test_a_lasting_new_level_becomes_normal_within_the_window() -> None:
    guard = filled(settings(window=16), [2.0 + 0.01 * (i % 7) for i in range(30)])
    flags = [bool(judge(guard, 3.0 + 0.01 * (i % 7), 2.0).loss_spike) for i in range(16)]
    assert flags[0]
    assert flags == sorted(flags, reverse=True)
    assert not flags[9]


@pytest.mark.slow
def test_a_resumed_guard_decides_as_the_uninterrupted_one() -> None:
    config = settings(spike="skip", loss_z=3.0)
    steps = run_of_steps(5, 150)
    for cut in (0, 3, 15, 16, 17, 100):
        whole = Guard(config, "cpu", F64)
        for step in steps[:cut]:
            judge(whole, *step)
        saved = whole.state_dict()
        kept = {name: value.clone() for name, value in saved.items()}
        expected = [judge(whole, *step) for step in steps[cut:]]
        assert all(torch.equal(saved[name], kept[name]) for name in kept)  # a checkpoint's writer has time
        resumed = Guard(config, "cpu", F64)
        resumed.load_state_dict(saved)
        for step, health in zip(steps[cut:], expected, strict=True):
            found = judge(resumed, *step)
            assert all(torch.equal(value, getattr(health, name)) for name, value in vars(found).items())


@pytest.mark.parametrize("steps", [5, 12, 16, 23, 61])
@pytest.mark.parametrize("window", [8, 11, 24])
def test_another_window_goes_on_with_the_newest_values_that_fit(steps: int, window: int) -> None:
    losses = [2.0 + 0.1 * i for i in range(steps)]
    guard = Guard(settings(window=window), "cpu", F64)
    guard.load_state_dict(filled(settings(window=16), losses).state_dict())
    following = [90.0 + i for i in range(5)]
    for value in following:
        judge(guard, value, value)
    expected = (losses[-min(16, window) :] + following)[-window:]
    state = guard.state_dict()
    known = min(int(state["entered"]), window)
    assert sorted(state["losses"][:known].tolist()) == expected
    assert sorted(state["grad_norms"][:known].tolist()) == expected


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_arithmetic_stays_in_its_precision(dtype: torch.dtype) -> None:
    guard = filled(settings(), [2.0 + 0.01 * i for i in range(12)], dtype=dtype)
    health = judge(guard, 2.0, 2.0, dtype)
    assert {value.dtype for value in (health.loss_z, health.norm_z)} == {dtype}
    assert {value.dtype for name, value in guard.state_dict().items() if name != "entered"} == {dtype}
    assert [value.dtype for value in (health.non_finite, health.loss_spike, health.norm_spike)] == [torch.bool] * 3
    # below the resolution of float32: 2 ± 1e-9
    fine = filled(settings(), [2.0 + 1e-9 * (i % 3) for i in range(12)], dtype=dtype)
    distinct = len(set(fine.state_dict()["losses"][:12].tolist()))
    assert distinct == (3 if dtype == F64 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA"))])  # fmt: skip
def test_fused_adamw_leaves_everything_as_it_is_when_told_to_skip(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(5, 4, dtype=dtype, device=device))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = Guard(settings(), device, dtype)

    def step(gradient: torch.Tensor) -> list[torch.Tensor]:
        weight.grad = gradient
        health = guard.judge(torch.ones((), dtype=dtype, device=device), gradient.norm())
        optimizer.found_inf = health.skip  # type: ignore[attr-defined]
        optimizer.step()
        return [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]

    first = step(torch.randn_like(weight))
    poisoned = torch.randn_like(weight)
    poisoned[2, 1] = NAN
    after = step(poisoned)
    assert all(torch.equal(a, b) for a, b in zip(first, after, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, step(torch.randn_like(weight)), strict=True))


def test_a_window_too_small_for_the_history_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_history: expected at most window \(8\), got 32"):
        GuardConfig(window=8)
    unchecked = GuardConfig().model_copy(update={"window": 8})
    with pytest.raises(InputError, match=r"^guard\.min_history: expected at most guard\.window \(8\), got 32$"):
        Guard(unchecked, "cpu")
