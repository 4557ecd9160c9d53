"""Attributes a rank's time in the traced steps, to the nanosecond. Imports no torch.

On the CPU the host is what computes: an instant belongs to the innermost operation of the thread of the step, or of
autograd's. On CUDA it belongs to the kernel under way, and where there is none to the host, unless the host stood still
as well. In either case compute comes first, so that communication has only what it does not hide behind compute.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quern.train.profiling.classes import (
    CLASSES,
    COMMUNICATION,
    COMPUTE,
    DATA,
    ELEMENTWISE,
    GEMM,
    HOST,
    IDLE,
    MARK_DATA,
    WAITING,
    collective,
    is_product,
    kernel_class,
    operation_class,
    waits_for_device,
)
from quern.train.profiling.intervals import Interval, assign, clipped, covered, nest
from quern.train.profiling.products import Product, product_of
from quern.train.step.trace import STEP, Event, Trace

__all__ = ["Account", "Collective", "Operation", "account"]


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in the traced steps. ``exposed_ns``: while nothing was computed."""

    kind: str
    count: int
    total_ns: int
    exposed_ns: int


@dataclass(frozen=True)
class Operation:
    """All of one name that are no products: a kernel, or on the CPU an operator without what it calls."""

    name: str
    kind: str
    count: int
    ns: int


@dataclass(frozen=True)
class Account:
    """Sums over the traced steps of one rank."""

    rank: int
    device: str
    """``cuda`` or ``cpu``."""
    steps: tuple[int, ...]
    """Nanoseconds of each."""
    classes: dict[str, int]
    """Nanoseconds of each class of :data:`CLASSES`; their sum is that of the steps."""
    communication_ns: int
    """In which a collective was under way, hidden or not."""
    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    """By shape, longest first."""
    operations: tuple[Operation, ...]
    """Longest first."""

    @property
    def total_ns(self) -> int:
        """The duration of all steps."""
        return sum(self.steps)

    @property
    def own_ns(self) -> int:
        """The time in which the rank itself was busy, and others may have waited for it."""
        return self.total_ns - self.classes[COMMUNICATION] - self.classes[IDLE]


@dataclass
class _Thread:
    """One thread of the host: its events, their nesting, and the innermost event at each instant."""

    events: list[Event]
    parents: list[int | None] = field(init=False)
    pieces: list[tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.parents, self.pieces = nest(self.events)

    def broken_off(self) -> set[int]:
        """By identity, products that never were: recomputation has what it needs as soon as the factors of a block's
        last product are packed, which they are inside its operator, and ends there."""
        callees: dict[int, set[str]] = defaultdict(set)
        for event, parent in zip(self.events, self.parents, strict=True):
            if parent is not None and is_product(self.events[parent].name):
                callees[parent].add(event.name)
        return {id(self.events[number]) for number, names in callees.items() if names == {"aten::detach"}}

    @property
    def runs_backward(self) -> bool:
        """Whether it is one of autograd's, or the loop's where that runs backward itself."""
        return any(event.name.startswith("autograd::engine") for event in self.events)

    def chain(self, number: int) -> list[Event]:
        """An event and what it was called from, the outermost last."""
        found: list[Event] = []
        at: int | None = number
        while at is not None:
            found.append(self.events[at])
            at = self.parents[at]
        return found


@dataclass
class _Sums:
    """What is gathered on the way through a trace: intervals by class, and what took how long."""

    windows: list[Interval]
    layers: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))
    collectives: dict[str, dict[Interval, Interval]] = field(default_factory=lambda: defaultdict(dict))
    """By kind, the spans in which one was under way, each with the extent of the one it is of."""
    called: dict[int, tuple[Event, int]] = field(default_factory=dict)
    """By identity of a product's operator: it, and its nanoseconds."""
    spent: Counter[tuple[str, str]] = field(default_factory=Counter)
    count: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, interval: Interval, kind: str, name: str, chain: Sequence[Event], *, begins: bool = True) -> None:
        """One piece of compute. ``begins``: it is not a later piece of one that was counted."""
        self.layers[kind].append(interval)
        if not (inside := clipped(interval, self.windows)):
            return
        operator = product_of(chain) if kind == GEMM else None
        if operator is not None:
            _, before = self.called.get(id(operator), (operator, 0))
            self.called[id(operator)] = operator, before + inside
        else:
            self.spent[name, kind] += inside
            self.count[name, kind] += begins

    def layered(self, *others: tuple[str, Sequence[Interval]]) -> dict[str, Sequence[Interval]]:
        """The layers in their order of precedence."""
        layers: dict[str, Sequence[Interval]] = {kind: self.layers[kind] for kind in COMPUTE}
        layers |= {_exposed(kind): list(self.collectives[kind]) for kind in self._kinds()}
        return layers | dict(others)

    def _kinds(self) -> list[str]:
        return sorted(self.collectives, key=lambda kind: (kind == WAITING, kind))

    def collect(self, rank: int, device: str, taken: dict[str | None, int], rest: str) -> Account:
        """The account; ``rest``: whose the time of no layer is."""
        classes = {kind: taken.get(kind, 0) for kind in CLASSES}
        classes[rest] += taken[None]
        classes[COMMUNICATION] = sum(taken[_exposed(kind)] for kind in self.collectives)
        spans = [span for kind in self.collectives.values() for span in kind]
        return Account(
            rank=rank,
            device=device,
            steps=tuple(stop - start for start, stop in self.windows),
            classes=classes,
            communication_ns=covered(spans, self.windows),
            collectives=tuple(
                Collective(
                    kind,
                    sum(clipped(span, self.windows) > 0 for span in set(self.collectives[kind].values())),
                    covered(list(self.collectives[kind]), self.windows),
                    taken[_exposed(kind)],
                )
                for kind in self._kinds()
            ),
            products=Product.gathered(self.called.values()),
            operations=tuple(
                Operation(name, kind, self.count[name, kind], ns) for (name, kind), ns in self.spent.most_common()
            ),
        )


def account(trace: Trace) -> Account:
    """Of the steps that are annotated as torch.profiler does (``ProfilerStep#7``); without any, of the whole trace as
    one step.

    Raises:
        InputError: a field of the trace is not as it should be; it is named.
    """
    return _on_cuda(trace) if trace.device else _on_host(trace)


def _exposed(kind: str) -> str:
    return f"{COMMUNICATION}: {kind}"


def _is_span_of_gloo(event: Event) -> bool:
    """gloo annotates a collective from its start to its end, beside whatever its thread does meanwhile."""
    return event.category == "user_annotation" and event.name.startswith("gloo:")


def _threads(trace: Trace) -> dict[object, _Thread]:
    lanes: dict[object, list[Event]] = defaultdict(list)
    for event in trace.host:
        if not _is_span_of_gloo(event):
            lanes[event.lane].append(event)
    return {lane: _Thread(events) for lane, events in lanes.items()}


def _steps(trace: Trace) -> list[Event]:
    return [event for event in trace.host if event.category == "user_annotation" and event.name.startswith(STEP)]


def _main(trace: Trace, steps: Sequence[Event]) -> object:
    """The lane of the training loop: that of the steps, or the busiest."""
    lanes = Counter(event.lane for event in steps or trace.host)
    return lanes.most_common(1)[0][0]


def _on_host(trace: Trace) -> Account:
    steps = _steps(trace)
    threads, main = _threads(trace), _main(trace, steps)
    windows = _apart([(step.start, step.stop) for step in steps]) or [_extent(trace.host)]
    sums = _Sums(windows)
    rings = [event for event in trace.host if event.name.startswith("quern::context")]
    for event in trace.host:
        if _is_span_of_gloo(event):
            span = (event.start, event.stop)
            around = [own.name for own in rings if own.lane == event.lane and own.start <= event.start < own.stop]
            sums.collectives[collective(event.name, around)][span] = span
    for lane, thread in threads.items():
        if lane == main or thread.runs_backward:
            _compute_of(thread, sums)
    waits = _marked(trace, MARK_DATA)
    taken = assign(sums.layered((DATA, waits)), windows)
    return sums.collect(trace.rank or 0, "cpu", taken, HOST)


def _compute_of(thread: _Thread, sums: _Sums) -> None:
    kinds: dict[int, tuple[str, list[Event]]] = {}
    never = thread.broken_off()
    for start, stop, number in thread.pieces:
        begins = number not in kinds
        if begins:
            chain = thread.chain(number)
            kinds[number] = operation_class(tuple(event.name for event in chain)), chain
        kind, chain = kinds[number]
        if kind == GEMM and any(id(event) in never for event in chain):
            continue
        if kind in COMPUTE:
            sums.add((start, stop), kind, chain[0].name, chain, begins=begins)
        elif kind == COMMUNICATION:
            outer = next(event for event in chain[::-1] if operation_class((event.name,)) == COMMUNICATION)
            sums.collectives[collective(outer.name, [own.name for own in chain])][start, stop] = outer.start, outer.stop


def _on_cuda(trace: Trace) -> Account:
    steps = _steps(trace)
    threads, main = _threads(trace), _main(trace, steps)
    launches = _launches(threads)
    windows = _device_windows(trace, steps, launches)
    sums, copies = _Sums(windows), []
    for event in trace.device:
        span, correlation = (event.start, event.stop), event.whole("correlation")
        thread, number = launches.get(correlation, (None, None)) if correlation is not None else (None, None)
        chain = thread.chain(number) if thread is not None and number is not None else []
        if event.category == "gpu_memcpy" and any(way in event.name for way in ("HtoD", "DtoH")):
            copies.append(span)
            continue
        names = tuple(each.name for each in chain)
        kind = kernel_class(event.name, names)
        if kind == COMMUNICATION:
            sums.collectives[collective(event.name, names)][span] = span
        else:
            sums.add(span, kind if event.category == "kernel" or chain else ELEMENTWISE, event.name, chain)
    waits = [*copies, *_marked(trace, MARK_DATA)]
    loop = [thread for lane, thread in threads.items() if lane == main or thread.runs_backward]
    busy = _at_work([event for thread in loop for event in thread.events], windows)
    taken = assign(sums.layered((DATA, waits), (HOST, busy)), windows)
    return sums.collect(trace.rank or 0, "cuda", taken, IDLE)


def _launches(threads: dict[object, _Thread]) -> dict[int, tuple[_Thread, int]]:
    """By correlation, the call of the runtime that put a kernel on its stream."""
    return {
        correlation: (thread, number)
        for thread in threads.values()
        for number, event in enumerate(thread.events)
        if event.category in ("cuda_runtime", "cuda_driver") and (correlation := event.whole("correlation")) is not None
    }


def _device_windows(trace: Trace, steps: Sequence[Event], launches: dict[int, tuple[_Thread, int]]) -> list[Interval]:
    """The host runs ahead: a step begins when the host begins it and the device has done all it was given before."""
    if not steps:
        return [_extent([*trace.host, *trace.device])]
    given: list[tuple[int, int]] = []
    for event in trace.device:
        correlation = event.whole("correlation")
        thread, number = launches.get(correlation, (None, 0)) if correlation is not None else (None, 0)
        given.append((event.start if thread is None else thread.events[number].start, event.stop))
    given.sort()
    bounds = sorted(step.start for step in steps)
    edges, last, place = [], 0, 0
    for bound in [*bounds, max(step.stop for step in steps)]:
        while place < len(given) and given[place][0] < bound:
            last, place = max(last, given[place][1]), place + 1
        edges.append(max(bound, last))
    return list(pairwise(edges))


def _at_work(events: Sequence[Event], windows: Sequence[Interval]) -> list[Interval]:
    """When the host did something, in an operation or in Python, and did not wait for the device."""
    busy, now = [], windows[0][0]
    end = min(windows[-1][1], max(event.stop for event in events))
    for start, stop in sorted((event.start, event.stop) for event in events if waits_for_device(event.name)):
        busy.append((now, min(start, end)))
        now = max(now, stop)
    return [*busy, (now, end)]


def _marked(trace: Trace, name: str) -> list[Interval]:
    return [(event.start, event.stop) for event in trace.host if event.name == name]


def _apart(windows: Iterable[Interval]) -> list[Interval]:
    """Cut where the next begins, so that no instant is in two."""
    ordered = sorted(windows)
    cut = [(start, min(stop, following)) for (start, stop), (following, _) in pairwise(ordered)]
    return cut + ordered[-1:]


def _extent(events: Sequence[Event]) -> Interval:
    return min(event.start for event in events), max(event.stop for event in events)
