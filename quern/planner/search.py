"""Finds the layouts of a model on a cluster that fit, and the fastest among them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quern.parallel.planning.host_state import host_state
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.step import Step
from quern.planner.candidates import Choice, Wish, candidates, step_of
from quern.planner.hardware import Hardware
from quern.planner.memory.peak import State, moments
from quern.planner.time.estimate import StepTime, estimate

__all__ = ["Found", "Room", "Search", "room", "search"]

GIB = 2**30
AS_FAST = 0.01
"""Times closer than this share are not told apart: a plainer layout goes before a faster one."""
#: Of a step's memory what an allocator gives and takes back within it.
COMES_AND_GOES = ("activations", "block in work", "gathered weights", "logits and loss", "whole gradients")


@dataclass(frozen=True)
class Room:
    """What the rank of a layout needs that needs the most."""

    place: int
    """Of the pipeline."""
    moment: str
    """See :mod:`quern.planner.memory.peak`."""
    components: dict[str, int]
    """[bytes] By component, with what the device takes besides."""
    has: int
    """[bytes] Of a GPU."""
    on_host: int = 0
    """[bytes] That it needs of the host's memory, with ``optimizer.state: host``."""
    host_has: int = 0
    """[bytes] Of the host's memory for a GPU."""

    @property
    def needs(self) -> int:
        return sum(self.components.values())

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 = it fits."""
        return max(0, self.needs - self.has, self.on_host - self.host_has)


@dataclass(frozen=True)
class Found:
    """A layout with what it needs, and how long a step takes."""

    choice: Choice
    step: Step
    room: Room
    time: StepTime | None
    """None where it does not fit."""


@dataclass(frozen=True)
class Search:
    """All layouts that were looked at."""

    fitting: Sequence[Found]
    """The fastest first."""
    short: Sequence[Found]
    """The least short first."""

    @property
    def best(self) -> Found | None:
        """The plainest of those that take at most :data:`AS_FAST` longer than the fastest; the least short where none
        fits; None where there is no layout."""
        if not self.fitting:
            return self.short[0] if self.short else None
        most = (1 + AS_FAST) * _seconds(self.fitting[0])
        return min((one for one in self.fitting if _seconds(one) <= most), key=_plainness)

    @property
    def pareto(self) -> list[Found]:
        """Of those that fit each that no other one is both faster and smaller than, the fastest first."""
        found: list[Found] = []
        for one in self.fitting:
            if not found or one.room.needs < found[-1].room.needs:
                found.append(one)
        return found

    def without(self, name: str) -> Found | None:
        """The fastest, or the least short where none fits, that differs from the best in a field of :class:`Choice`;
        None where no other value was tried."""
        assert self.best is not None
        value = getattr(self.best.choice, name)
        return next((one for one in (*self.fitting, *self.short) if getattr(one.choice, name) != value), None)


def room(step: Step, state: State, hardware: Hardware, places: Iterable[int] | None = None) -> Room:
    """Of the place in the pipeline that needs the most; ``places``: those that are looked at, None = all."""
    plan, worst = step.plan, None
    each = plan.world_size // plan.pp
    for place in range(plan.pp) if places is None else places:
        on_host = 0
        if step.layout.host_state:
            host = host_state(step, place * each, state.moment_bytes)
            on_host = host["host"] + host["staging"]
        for name, components in moments(step, state, place * each).items():
            going = sum(components.get(part, 0) for part in COMES_AND_GOES)
            told = components | {
                "allocator": int(going * hardware.fragmentation),
                "context and libraries": int(hardware.reserved_gib * GIB),
            }
            components = {part: size for part, size in told.items() if size}
            found = Room(place, name, components, int(hardware.memory_gib * GIB), on_host, int(hardware.host_gib * GIB))
            if worst is None or (found.short, found.needs) > (worst.short, worst.needs):
                worst = found
    assert worst is not None
    return worst


def search(wish: Wish, state: State, hardware: Hardware, most: int = 20) -> Search:
    """Look at every legal layout. Of those that fit all are timed; ``most`` of those that do not are kept."""
    fitting: list[Found] = []
    short: list[Found] = []
    too_large: set[Choice] = set()
    for choice in candidates(wish):
        alike = replace(choice, micro_batch=1)
        step = step_of(choice, wish)
        # larger micro-batches of what does not fit need no less, but where one alone is left
        if alike in too_large and step.num_micro_batches > 1:
            continue
        found = room(step, state, hardware, _telling(step))
        if found.short:
            short.append(Found(choice, step, found, None))
            too_large.add(alike)
        else:
            fitting.append(Found(choice, step, found, estimate(step, hardware)))
    fitting.sort(key=_seconds)
    short.sort(key=lambda one: (one.room.short, one.choice.pp))
    return Search(fitting, short[:most] + _others(short, most))


def _seconds(found: Found) -> float:
    assert found.time is not None
    return found.time.seconds


def _plainness(found: Found) -> tuple[int | float, ...]:
    """How many axes there are, then ranks on those that talk within a layer, then the time."""
    sizes = found.choice.pp, found.choice.tp, found.choice.cp, found.choice.ep, found.choice.dp_replicate
    return sum(size > 1 for size in sizes), *sizes, _seconds(found)


def _telling(step: Step) -> list[int]:
    """Places of a pipeline of which one needs the most: of those with as many layers the first, which has most
    micro-batches under way, and the last, which has logits."""
    layout, pp = step.layout, step.plan.pp
    if SCHEDULES[layout.scheduling].v_shaped:
        return list(range(pp))
    layers = layout.layers_of_stages(step.shape)
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for place in range(pp):
        stages = [layers[stage] for stage in layout.stages_of(place)]
        first.setdefault(tuple((len(own), sum(map(step.shape.is_sparse, own))) for own in stages), place)
    return sorted({*first.values(), 0, pp - 1})


def _others(short: Sequence[Found], most: int) -> list[Found]:
    """The least short with each value of each field, of those beyond the first ``most``."""
    seen: set[tuple[str, Any]] = set()
    kept: list[Found] = []
    for number, one in enumerate(short):
        values = {(name, getattr(one.choice, name)) for name in ("tp", "pp", "cp", "dp_shard", "checkpointing", "zero")}
        if number >= most and values - seen:
            kept.append(one)
        seen |= values
    return kept
