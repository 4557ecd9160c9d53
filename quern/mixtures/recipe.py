"""Plans an order from sources and their weights, and reports what a run will read of each source.

Weights are shares of tokens: every sample has the same number of them. A plan counts what the order gives, it estimates
nothing: the samples of each source are :meth:`Order.consumed` at the end of the budget, over all phases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_FLOOR, Decimal
from typing import Any

from quern.errors import InputError
from quern.mixtures.order import MAX_SAMPLES, Order, Phase

__all__ = ["MixtureSource", "OrderPlan", "PhaseRow", "SourceRow", "plan_order"]


@dataclass(frozen=True)
class MixtureSource:
    """A source as a recipe needs it."""

    name: str
    """For messages and tables."""
    ident: str
    """Its identity, which keys the order."""
    path: str
    tokens: int
    windows: int
    """Windows of ``seq_len + 1`` tokens at stride ``seq_len``: ``(tokens - 1) // seq_len``."""
    weight: float
    max_epochs: float


@dataclass(frozen=True)
class SourceRow(MixtureSource):
    """What the planned budget reads of a source, whose ``weight`` is that of the first phase."""

    share: float
    """Of all planned samples."""
    samples: int
    planned_tokens: int
    """Targets: ``samples · seq_len``."""
    epochs: float
    windows_left: int
    """Windows that the budget never reads."""
    tail_tokens: int
    """Tokens after the last window's: no epoch reads them as a target, nor the stream's first token."""


@dataclass(frozen=True)
class PhaseRow:
    """A phase within the budget. ``shares`` and ``samples`` are by source."""

    first_step: int
    stop_step: int
    """At most the budget's end; equal to ``first_step`` for a phase that begins at or beyond it."""
    first_sample: int
    global_batch: int
    shares: tuple[float, ...]
    """Of the recipe: integer weights over their sum."""
    samples: tuple[int, ...]
    """Given in the phase."""


@dataclass(frozen=True)
class OrderPlan:
    """A planned order and its summary."""

    order: Order
    steps: int
    seq_len: int
    samples: int
    sources: tuple[SourceRow, ...]
    phases: tuple[PhaseRow, ...]

    @property
    def planned_tokens(self) -> int:
        """The targets of the whole budget."""
        return self.samples * self.seq_len

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = {"sources": [asdict(row) for row in self.sources], "phases": [asdict(row) for row in self.phases]}
        order = {"order": self.order.hash, "seed": self.order.seed}
        return {**vars(self), "planned_tokens": self.planned_tokens, **order, **rows}


def plan_order(
    sources: Sequence[MixtureSource],
    phases: Sequence[Phase] = (),
    *,
    seed: int,
    seq_len: int,
    global_batch: int,
    steps: int,
) -> OrderPlan:
    """Plan a recipe's order, and count what its first ``steps`` data steps read. ``phases``: the changes after the
    first.

    A block is a global batch, so every step's shares are exact to a few samples and a phase's cut leaves no window out.

    Raises:
        InputError: a source is too small for one window, a weight or phase is wrong, or the plan repeats a source more
            often than its ``max_epochs``; the message says what would fit.
    """
    plan = _plan(sources, phases, seed=seed, seq_len=seq_len, global_batch=global_batch, steps=steps)
    if excess := _excess(sources, [row.samples for row in plan.sources]):
        worst = max(excess, key=lambda index: plan.sources[index].epochs / sources[index].max_epochs)
        raise InputError(_refusal(plan, sources, phases, worst, others=len(excess) - 1))
    return plan


def _plan(
    sources: Sequence[MixtureSource], phases: Sequence[Phase], *, seed: int, seq_len: int, global_batch: int, steps: int
) -> OrderPlan:
    recipes = [[source.weight for source in sources], *(phase.weights for phase in phases if phase.weights is not None)]
    for index, source in enumerate(sources):
        if source.windows == 0 and any(index < len(recipe) and recipe[index] for recipe in recipes):
            raise InputError(
                f"{source.path}: source {source.name} has {source.tokens:,} tokens; expected at least seq_len + 1 "
                f"({seq_len + 1:,}) for one window, or weight 0"
            )
    try:
        windows, ids = [source.windows for source in sources], [source.ident for source in sources]
        order = Order(recipes[0], windows, seed, phases, ids=ids, seq_len=seq_len, global_batch=global_batch)
    except ValueError as error:
        raise InputError(f"{error} (sources: {', '.join(source.name for source in sources)})") from None
    samples = order.first_sample(steps)
    if samples >= MAX_SAMPLES:
        raise InputError(f"steps: expected fewer than 2^62 samples in all, got {steps:,} steps of {samples:,} samples")
    rows = tuple(
        _source_row(source, count, samples, seq_len)
        for source, count in zip(sources, order.consumed(samples), strict=True)
    )
    return OrderPlan(order, steps, seq_len, samples, rows, _phase_rows(order, steps))


def _source_row(source: MixtureSource, samples: int, total: int, seq_len: int) -> SourceRow:
    return SourceRow(
        **vars(source),
        share=samples / total if total else 0.0,
        samples=samples,
        planned_tokens=samples * seq_len,
        epochs=samples / source.windows if source.windows else 0.0,
        windows_left=max(0, source.windows - samples),
        tail_tokens=max(0, source.tokens - 1 - source.windows * seq_len),
    )


def _phase_rows(order: Order, steps: int) -> tuple[PhaseRow, ...]:
    rows = []
    starts = [phase.first_step for phase in order.phases]
    for phase, stop in zip(order.phases, [*starts[1:], steps], strict=True):
        first, end = min(phase.first_step, steps), min(stop, steps)
        before, after = (order.consumed(order.first_sample(step)) for step in (first, end))
        weight = sum(phase.weights)
        rows.append(
            PhaseRow(
                first_step=phase.first_step,
                stop_step=max(end, phase.first_step),
                first_sample=phase.first_sample,
                global_batch=phase.global_batch,
                shares=tuple(own / weight for own in phase.weights),
                samples=tuple(b - a for a, b in zip(before, after, strict=True)),
            )
        )
    return tuple(rows)


def _excess(sources: Sequence[MixtureSource], samples: Sequence[int]) -> list[int]:
    """The sources that are read more often than their ``max_epochs``."""
    most = [source.max_epochs * source.windows for source in sources]
    return [index for index, count in enumerate(samples) if count > most[index]]


def _refusal(
    plan: OrderPlan, sources: Sequence[MixtureSource], phases: Sequence[Phase], worst: int, *, others: int
) -> str:
    source, row = sources[worst], plan.sources[worst]
    more = f" ({others + 1} sources go beyond their own)" if others else ""
    steps, weight = _fitting_steps(plan, sources), _fitting_weight(plan, sources, phases, worst)
    fits = ([f"steps={steps}"] if steps else []) + ([f"weight {weight}"] if weight is not None else [])
    advice = f"what fits: {', '.join(fits)} or a" if fits else "no number of steps fits; expected a"
    return (
        f"{source.path}: {plan.steps:,} steps read source {source.name} {row.epochs:.6g} times "
        f"({row.samples:,} samples of {row.windows:,} windows), beyond max_epochs {source.max_epochs:g}{more}; "
        f"{advice} larger max_epochs"
    )


def _fitting_steps(plan: OrderPlan, sources: Sequence[MixtureSource]) -> int:
    """The largest number of steps within every source's ``max_epochs``; counts never fall with the steps."""
    consumed, first_sample = plan.order.consumed, plan.order.first_sample
    excess = range(1, plan.steps)
    return bisect_left(excess, True, key=lambda step: bool(_excess(sources, consumed(first_sample(step)))))


def _fitting_weight(
    plan: OrderPlan, sources: Sequence[MixtureSource], phases: Sequence[Phase], worst: int
) -> str | None:
    """A weight of the first phase with which the whole budget fits, to three digits, rounded down; None if another
    source or another recipe stands in the way.
    """
    source = sources[worst]
    rest = sum(other.weight for index, other in enumerate(sources) if index != worst)
    if rest == 0 or any(phase.weights is not None for phase in phases):
        return None
    share = source.max_epochs * source.windows / plan.samples
    exact = Decimal(share / (1 - share) * rest)
    weight = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 2), rounding=ROUND_FLOOR).normalize()
    changed = [*sources[:worst], replace(source, weight=float(weight)), *sources[worst + 1 :]]
    try:
        trial = _plan(
            changed, phases, seed=plan.order.seed, seq_len=plan.seq_len,
            global_batch=plan.order.phases[0].global_batch, steps=plan.steps,
        )  # fmt: skip
    except InputError:
        return None
    # the counts may lie a sample or two above the share
    return None if _excess(changed, [row.samples for row in trial.sources]) else f"{weight:f}"
