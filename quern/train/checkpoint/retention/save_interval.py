"""Chooses the save interval that wastes least time, from the cost of a save and the failure rate.

Young (1974) and Daly (2006) for a save that blocks; here also for one that is written in the background and counts
only once it is published. The mean time between failures is configured or derived from the ledger
(:func:`estimate_mtbf`); costs are measured while training (:class:`SaveInterval`). Nothing here reads a file or clock.

All times are in seconds. A number that is negative, NaN or infinite where it must not be raises an
:class:`~quern.errors.InputError` that names the field.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal

from quern.errors import InputError
from quern.train.history.ledger import MOVES

__all__ = [
    "Decision", "Mtbf", "SaveInterval", "best_interval", "daly_interval", "estimate_mtbf", "expected_waste",
    "observed_failures", "young_interval",
]  # fmt: skip

#: Between failures of one GPU: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024, The
#: Llama 3 Herd of Models, section 3.3.4), which is 50,700 hours.
GPU_MTBF_S = 54 * 86_400 * 16_384 / 419

#: What is assumed until it is measured. A long step and a short stall err towards saving, and so measuring, early.
ASSUMED_COST_S, ASSUMED_STEP_S, ASSUMED_RESTART_S = 10.0, 60.0, 300.0

#: Measured figures are medians of this many: one slow save, or a step that waited for data, moves nothing.
WINDOW = 8

#: An interval is kept while a better one would lower the waste by less than this share of it.
HYSTERESIS = 0.01

#: Lines that a trainer writes while it runs. An ``order`` line is not one: the next start writes it, after the outage.
_RUNNING = ("checkpoint", "skipped", "spike", "stopped", "end")


def expected_waste(
    interval_s: float, cost_s: float, mtbf_s: float, *, restart_s: float = 0.0, delay_s: float | None = None
) -> float:
    """The expected share of wall time, 0 to 1, that is not first-time useful training, over a long run.

    With τ = ``interval_s`` (useful work between saves), δ = ``cost_s`` (how long a save blocks training), M =
    ``mtbf_s`` (of the whole job; inf: it never fails), R = ``restart_s`` (from a failure to the first step) and D =
    ``delay_s`` (from a save's begin to its publication; None, or less than δ: it is published when training goes on).

    Failures are a Poisson process that runs through work, saves and restarts alike; a failed restart begins again; a
    save that is not published is lost. Writes do not overlap: a save that comes due before the last is published waits.
    From one publication to the next, training needs L = max(τ + δ, D) without a failure (the rest of the period, then
    the delay). If it fails, every new attempt needs R + τ + D at a stretch: restart, the work again, the delay.
    A stretch a without a failure takes M (e^(a/M) - 1) on average to come by, so the expected time is ::

        T = M (1 - e^(-L/M)) + (1 - e^(-L/M)) M (e^((R+τ+D)/M) - 1)
          = M (1 - e^(-L/M)) e^((R+τ+D)/M)

    for τ of progress, and the waste is 1 - τ/T. When writes do not collide (D ≤ τ + δ) this is
    M e^((R+D-δ)/M) (e^((τ+δ)/M) - 1): Daly's exact model (2006, "A higher order estimate of the optimum checkpoint
    interval for restart dumps") with a restart longer by D - δ, and for D = δ Daly's model itself.
    """
    _check("interval_s", interval_s, above=True)
    delay = _check_costs(cost_s, mtbf_s, delay_s)
    _check("restart_s", restart_s)
    period = max(interval_s + cost_s, delay)
    if math.isinf(mtbf_s):
        return 1.0 - interval_s / period
    survives = math.exp(-(restart_s + interval_s + delay) / mtbf_s)  # 1/T is built from e^-x, which cannot overflow
    if survives == 0.0:
        return 1.0
    return min(1.0, max(0.0, 1.0 - interval_s / mtbf_s / -math.expm1(-period / mtbf_s) * survives))


def young_interval(cost_s: float, mtbf_s: float) -> float:
    """Young's first-order interval √(2δM) (1974, "A first order approximation to the optimum checkpoint interval")."""
    _check_costs(cost_s, mtbf_s, None)
    return math.inf if math.isinf(mtbf_s) else math.sqrt(2.0 * cost_s * mtbf_s)


def daly_interval(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order estimate (2006): √(2δM) (1 + √(δ/2M)/3 + δ/18M) - δ, and M from δ = 2M on."""
    young = young_interval(cost_s, mtbf_s)
    if math.isinf(mtbf_s) or cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2.0 * mtbf_s)
    return young * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - cost_s


def best_interval(cost_s: float, mtbf_s: float, *, delay_s: float | None = None) -> float:
    """The interval of the least :func:`expected_waste`, which does not depend on the restart.

    While writes do not collide, R and D only scale T, so u = τ/M solves Daly's 1 - u = e^(-u-δ/M) (u = 1 +
    W(-e^(-1-δ/M)), W being Lambert's function): √(2δM) for small δ, and never more than M. Below D - δ a save waits for
    the last write and the useful share is proportional to u e^(-u), which rises up to u = 1. The best is therefore
    max(that, min(D - δ, M)). A free save (δ = 0, no delay) has 0: as often as possible. Without failures it is inf.
    """
    delay = _check_costs(cost_s, mtbf_s, delay_s)
    if math.isinf(mtbf_s):
        return math.inf
    return max(mtbf_s * _optimum(cost_s / mtbf_s), min(delay - cost_s, mtbf_s))


def _optimum(ratio: float) -> float:
    """u > 0 of 1 - u = e^(-u-ratio). Newton from above, where the function is convex: every iterate is ≥ u."""
    if ratio < 1e-16:
        return math.sqrt(2.0 * ratio)  # the next term is smaller by √(2·ratio)/3
    u = 1.0
    for _ in range(100):  # at most 30 halvings to come near a small root, then 5 steps
        slope = -math.expm1(-u - ratio)
        following = u - (u - slope) / slope
        if following >= u:
            break
        u = following
    return u


@dataclass(frozen=True)
class Mtbf:
    """The mean time between failures of the whole job, and its origin."""

    seconds: float
    source: Literal["configured", "observed", "assumed"]
    """``observed``: the ledger says more than the prior; ``assumed``: the prior says more."""
    failures: int = 0
    running_s: float = 0.0
    """The time in which the ledger has them."""

    def __str__(self) -> str:
        if self.source == "configured":
            return f"{_span(self.seconds)} (configured)"
        failures = f"{self.failures} failure{'' if self.failures == 1 else 's'}"
        return f"{_span(self.seconds)} ({self.source}; {failures} in {_span(self.running_s)})"


def observed_failures(entries: Iterable[Mapping[str, Any]]) -> tuple[int, float]:
    """How often the run failed, and in how many seconds of running, by its ledger's lines.

    A failure is a ``resume`` of an attempt that has neither ``stopped`` nor ``end``. A ``rollback`` is a person's
    decision and none, also when the attempt before it has broken off. An attempt runs from the line that opens it to
    the last line it wrote: what it did after that is not known, so that a failed attempt counts short by up to one
    interval between saves and the rate errs towards saving more often. A clock that goes back adds nothing.

    Raises:
        InputError: a line's ``time`` is not ISO 8601; the line is named.
    """
    failures, running = 0, 0.0
    opened: datetime | None = None
    last, clean = datetime.min.replace(tzinfo=UTC), False
    for number, entry in enumerate(entries, 1):
        kind = entry.get("kind")
        if kind in MOVES:
            if opened is not None:
                running += max(0.0, (last - opened).total_seconds())
                failures += kind == "resume" and not clean
            opened = last = _time(number, entry)
            clean = False
        elif kind in _RUNNING and opened is not None:
            last = _time(number, entry)
            clean = clean or kind in ("stopped", "end")
    if opened is not None:
        running += max(0.0, (last - opened).total_seconds())
    return failures, running


def _time(number: int, entry: Mapping[str, Any]) -> datetime:
    value = entry.get("time")
    try:
        found = datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"ledger: line {number}: time: expected an ISO 8601 time, got {value!r}") from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def estimate_mtbf(
    entries: Iterable[Mapping[str, Any]],
    ranks: int,
    *,
    configured_s: float | None = None,
    prior_s: float | None = None,
) -> Mtbf:
    """The mean time between failures of a job of ``ranks`` GPUs: ``configured_s`` as it is, else from the ledger.

    Few failures say little, so the rate has a Gamma prior with the weight of one failure in ``prior_s`` (None:
    :data:`GPU_MTBF_S` / ``ranks``). After n failures in the time t its posterior mean is (1 + n) / (``prior_s`` + t)
    (Gelman et al., Bayesian Data Analysis, section 2.6: Poisson with exposure), and what is returned is one over it:
    the waste is linear in the rate to first order, so the rate's mean, not the mean of M, has the least expected waste.
    It is ``observed`` once there is a failure or t is ``prior_s``, the prior's own weight; ``assumed`` before.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise InputError(f"ranks: expected an integer ≥ 1, got {ranks!r}")
    if configured_s is not None:
        return Mtbf(_check("mtbf_s", configured_s, above=True, infinite=True), "configured")
    prior = GPU_MTBF_S / ranks if prior_s is None else _check("prior_s", prior_s, above=True)
    failures, running = observed_failures(entries)
    informed = failures > 0 or running >= prior
    return Mtbf((prior + running) / (1 + failures), "observed" if informed else "assumed", failures, running)


@dataclass(frozen=True)
class Decision:
    """The next save interval, and every number it was computed from. ``str`` gives one line."""

    steps: int
    """Optimizer steps between saves, ≥ 1."""
    interval_s: float
    """``steps`` in seconds of useful work."""
    waste: float
    """Of this interval, as :func:`expected_waste`."""
    reason: Literal["best", "kept", "bounded"]
    """``kept``: the last answer is as good, up to the hysteresis; ``bounded``: ``max_interval_s`` is shorter than the
    best interval."""
    best_s: float
    """:func:`best_interval`, not bounded and not rounded to steps."""
    best_waste: float
    """Of the best whole number of steps within the bound."""
    young_s: float
    daly_s: float
    cost_s: float
    delay_s: float
    restart_s: float
    step_s: float
    mtbf: Mtbf
    max_interval_s: float
    measured: tuple[str, ...]
    """Which of ``cost``, ``delay`` and ``step`` are medians of measurements; the others are assumed."""

    def __str__(self) -> str:
        def figure(name: str, seconds: float) -> str:
            return _span(seconds) + ("" if name in self.measured else " (assumed)")

        why = {"best": "", "kept": ", kept", "bounded": f", bounded by max_interval_s {_span(self.max_interval_s)}"}
        return (
            f"save every {self.steps} step{'' if self.steps == 1 else 's'} = {_span(self.interval_s)}"
            f"{why[self.reason]}; waste {self.waste:.3%} (best {self.best_waste:.3%}); "
            f"stall {figure('cost', self.cost_s)}, published after {figure('delay', self.delay_s)}, "
            f"step {figure('step', self.step_s)}, restart {_span(self.restart_s)}; mtbf {self.mtbf}; "
            f"best {_span(self.best_s)}, Young {_span(self.young_s)}, Daly {_span(self.daly_s)}"
        )


class SaveInterval:
    """Chooses the interval between saves from what they cost here. Rank 0 asks; its answer is every rank's.

    It is fed seconds: of each step, of each save's stall, of each publication since its save's begin; the figure of
    each is the median of its last :data:`WINDOW`. Until there is one, ``ASSUMED_*`` stand in, and a publication is
    assumed to come with the end of the stall. The answer follows from these, :attr:`mtbf` and the last answer alone.

    The last answer is kept while the best would lower the waste, and raise the useful share, by less than
    :data:`HYSTERESIS` of it. Near its minimum the waste is so flat that intervals 15 % apart differ by 1 %, while
    measured figures jitter by more than that: without it the interval would change at every save for no gain, and no
    log would show when the job's condition has really changed. ``max_interval_s`` bounds what a wrong MTBF can cost;
    one step is the shortest interval, however long a step takes.
    """

    def __init__(self, mtbf: Mtbf, *, restart_s: float = ASSUMED_RESTART_S, max_interval_s: float = 3600.0) -> None:
        self.mtbf = mtbf
        """To be replaced (:func:`estimate_mtbf`) when the ledger has grown. Not part of :meth:`state`."""
        self.restart_s = _check("restart_s", restart_s)
        self.max_interval_s = _check("max_interval_s", max_interval_s, above=True)
        self._figures: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in ("cost", "delay", "step")}
        self._steps: int | None = None

    def observe(self, figure: Literal["step", "cost", "delay"], seconds: float) -> None:
        """Record the duration of a ``step`` without its saves; the ``cost`` of a save, for which training waited or
        which it lost; its ``delay``, from its start to its publication."""
        self._figures[figure].append(_check(f"{figure}_s", seconds, above=figure == "step"))

    def next_interval(self) -> Decision:
        """The interval from now on; it is remembered as the last answer."""
        figures = {name: median(values) for name, values in self._figures.items() if values}
        cost, step = figures.get("cost", ASSUMED_COST_S), figures.get("step", ASSUMED_STEP_S)
        delay = max(cost, figures.get("delay", cost))
        mtbf = self.mtbf.seconds

        def waste(steps: int) -> float:
            return expected_waste(steps * step, cost, mtbf, restart_s=self.restart_s, delay_s=delay)

        optimum = best_interval(cost, mtbf, delay_s=delay)
        limit = max(1, math.floor(self.max_interval_s / step))
        best = _whole_steps(optimum / step, limit, waste)
        least = waste(best)
        last = self._steps
        steps = last if last is not None and last <= limit and _as_good(waste(last), least) else best
        self._steps = steps
        bounded = steps == limit and optimum > max(limit * step, self.max_interval_s)
        return Decision(
            steps=steps,
            interval_s=steps * step,
            waste=waste(steps),
            reason="bounded" if bounded else "kept" if steps != best else "best",
            best_s=optimum,
            best_waste=least,
            young_s=young_interval(cost, mtbf),
            daly_s=daly_interval(cost, mtbf),
            cost_s=cost,
            delay_s=delay,
            restart_s=self.restart_s,
            step_s=step,
            mtbf=self.mtbf,
            max_interval_s=self.max_interval_s,
            measured=tuple(figures),
        )

    def state(self) -> dict[str, float | int]:
        """What :meth:`restore` takes: measured figures and the last answer, as JSON scalars under flat names."""
        state: dict[str, float | int] = {
            f"{name}.{place}": value for name, values in self._figures.items() for place, value in enumerate(values)
        }
        return state if self._steps is None else state | {"steps": self._steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`.

        Raises:
            InputError: the field that is none of a state; nothing has changed.
        """
        left = dict(state)
        steps = left.pop("steps", None)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise InputError(f"steps: expected an integer ≥ 1, got {steps!r}")
        figures: dict[str, deque[float]] = {}
        for name in self._figures:
            values = figures[name] = deque(maxlen=WINDOW)
            while len(values) < WINDOW and (field := f"{name}.{len(values)}") in left:
                values.append(_check(field, left.pop(field), above=name == "step"))
        if left:
            raise InputError(f"{min(left, key=str)}: is not a field of the save interval's state")
        self._figures, self._steps = figures, steps


def _whole_steps(steps: float, limit: int, waste: Callable[[int], float]) -> int:
    """The better of the two whole numbers around ``steps``, within 1 and ``limit``; the larger if they are equal."""
    if steps >= limit:
        return limit
    below = max(1, math.floor(steps))
    above = min(below + 1, limit)
    return below if waste(below) < waste(above) else above


def _as_good(waste: float, least: float) -> bool:
    """Of both shares: where nearly all is wasted, 1 % of the waste may be half of what is useful."""
    return waste <= (1.0 + HYSTERESIS) * least and 1.0 - waste >= (1.0 - HYSTERESIS) * (1.0 - least)


def _check_costs(cost_s: float, mtbf_s: float, delay_s: float | None) -> float:
    """Returns the delay, which is at least the cost."""
    _check("cost_s", cost_s)
    _check("mtbf_s", mtbf_s, above=True, infinite=True)
    return cost_s if delay_s is None else max(cost_s, _check("delay_s", delay_s))


def _check(field: str, value: Any, *, above: bool = False, infinite: bool = False) -> float:
    """``above``: 0 is refused too. ``infinite``: inf is not."""
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not (value > 0 if above else value >= 0) or (math.isinf(value) and not infinite):
        raise InputError(f"{field}: expected a number of seconds {'>' if above else '≥'} 0, got {value!r}")
    return float(value)


def _span(seconds: float) -> str:
    """Three digits in the largest unit of which there are two."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
