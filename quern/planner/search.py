"""Finds the layouts of a model on a cluster that fit, and the fastest among them. Imports no torch."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from operator import itemgetter

from quern.parallel.planning.host_state import host_state
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.step import Step
from quern.parallel.planning.traffic import elements_held
from quern.planner.candidates import Choice, Wish, candidates, step_of
from quern.planner.hardware import Hardware
from quern.planner.memory.peak import State, moments
from quern.planner.time.estimate import AtLeast, StepTime, estimate
from quern.words import size

__all__ = ["Found", "Room", "Search", "pareto", "room"]

GIB = 2**30
AS_FAST = 0.03
"""Times closer than this share are not told apart, as estimates are not that exact: a plainer layout goes before a
faster one."""
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

    @property
    def lacks(self) -> str:
        """The same in words."""
        where = " of the host's memory for a GPU" if self.short > max(0, self.needs - self.has) else ""
        return f"{size(self.short)}{where}"


@dataclass(frozen=True)
class Found:
    """A layout with what it needs, and how long a step takes."""

    choice: Choice
    step: Step
    room: Room
    time: StepTime | None
    """None where it does not fit."""


class Search:
    """All legal layouts. Each is looked at when a question needs it: those that are too slow for an answer by
    :class:`.estimate.AtLeast` are never counted."""

    def __init__(self, wish: Wish, state: State, hardware: Hardware) -> None:
        self._state, self._hardware = state, hardware
        steps = [(choice, step_of(choice, wish)) for choice in candidates(wish)]
        at_least = AtLeast(hardware)
        self._legal = sorted(((at_least(step), choice, step) for choice, step in steps), key=itemgetter(0))
        self._looked: list[Found | None] = [None] * len(self._legal)
        self._too_large: dict[Choice, int] = {}
        self._known: dict[Choice, bool] = {}

    def __len__(self) -> int:
        """How many layouts are legal."""
        return len(self._legal)

    def fastest(self, most: int | None = None, keep: Callable[[Choice], bool] = lambda _: True) -> list[Found]:
        """Of those that fit, and that ``keep`` takes, so many; the fastest first. None = all."""
        found: list[Found] = []
        for number, (floor, choice, _) in enumerate(self._legal):
            if most is not None and len(found) >= most and floor > _seconds(found[most - 1]):
                break
            if keep(choice) and (one := self._look(number)) is not None and one.time is not None:
                insort(found, one, key=_seconds)
        return found[:most]

    def within(self, seconds: float) -> list[Found]:
        """Those that fit and take no longer, the fastest first."""
        numbers = takewhile(lambda number: self._legal[number][0] <= seconds, range(len(self)))
        looked = [one for one in map(self._look, numbers) if one is not None and one.time is not None]
        return sorted((one for one in looked if _seconds(one) <= seconds), key=_seconds)

    def nearest(self, most: int | None = None, keep: Callable[[Choice], bool] = lambda _: True) -> list[Found]:
        """Of those that do not fit, and that ``keep`` takes, so many; the least short first. None = all but larger
        micro-batches of others among them."""
        looked = (self._look(number, short=True) for number, (_, choice, _) in enumerate(self._legal) if keep(choice))
        short = [one for one in looked if one is not None and one.time is None]
        return sorted(short, key=lambda one: (one.room.short, one.room.needs, one.choice.pp))[:most]

    @cached_property
    def best(self) -> Found | None:
        """The plainest of those that take at most :data:`AS_FAST` longer than the fastest; the least short where none
        fits; None where there is no layout."""
        if not (fastest := self.fastest(1)):
            return next(iter(self.nearest(1)), None)
        return min(self.within((1 + AS_FAST) * _seconds(fastest[0])), key=_plainness)

    def without(self, name: str) -> Found | None:
        """The fastest, or the least short where none fits, that differs from the best in a field of :class:`Choice`;
        None where no other value is legal."""
        assert self.best is not None
        value = getattr(self.best.choice, name)

        def other(choice: Choice) -> bool:
            return bool(getattr(choice, name) != value)

        return next(iter(self.fastest(1, other) or self.nearest(1, other)), None)

    def _look(self, number: int, *, short: bool = False) -> Found | None:
        """None: it needs no less than one that does not fit, with smaller micro-batches; or, but where it is asked
        how ``short`` it is, its state alone is larger than the GPU's memory."""
        if (known := self._looked[number]) is not None:
            return known
        _, choice, step = self._legal[number]
        alike = replace(choice, micro_batch=1)
        # but where one micro-batch alone is left, or fewer messages are kept until the step ends
        grows = step.num_micro_batches > 1 and step.layout.num_stages <= step.plan.pp
        if grows and self._too_large.get(alike, choice.micro_batch) < choice.micro_batch:
            return None
        if not short and self._state_is_too_large(choice, step):
            return None
        place = room(step, self._state, self._hardware, _telling(step))
        if place.short:
            self._too_large[alike] = min(choice.micro_batch, self._too_large.get(alike, choice.micro_batch))
        time = None if place.short else estimate(step, self._hardware, self._state.moment_bytes)
        self._looked[number] = found = Found(choice, step, place, time)
        return found

    def _state_is_too_large(self, choice: Choice, step: Step) -> bool:
        """Of weights, moments and gradients, which the device has at the end of a step whatever micro-batches were."""
        alike = replace(choice, micro_batch=1, checkpointing="none")
        if alike not in self._known:
            bytes_of_one = step.reduce_bytes + 2 * self._state.moment_bytes + step.gradient_bytes
            held = 0 if choice.host_state else elements_held(step) * bytes_of_one
            self._known[alike] = held > self._hardware.memory_gib * GIB
        return self._known[alike]


def pareto(fastest: Iterable[Found]) -> list[Found]:
    """Of layouts in the order of their time each that no other one is both faster and smaller than."""
    found: list[Found] = []
    for one in fastest:
        if not found or one.room.needs < found[-1].room.needs:
            found.append(one)
    return found


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
            components = {part: number for part, number in told.items() if number}
            found = Room(place, name, components, int(hardware.memory_gib * GIB), on_host, int(hardware.host_gib * GIB))
            if worst is None or (found.short, found.needs) > (worst.short, worst.needs):
                worst = found
    assert worst is not None
    return worst


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
