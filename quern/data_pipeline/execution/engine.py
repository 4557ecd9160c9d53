"""Executes tasks on a pool of Ray actors, or in this process.

Every phase is a function mapped over small task tuples; data moves through files, never through return values. An
engine keeps one task an actor in flight, so nothing piles up in the object store: at any moment it holds at most one
task and one result a worker. A dead actor is replaced. The caller decides what happens to its task (``on_death``), and
is told whether the process died or its whole machine was lost.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quern import storage
from quern.data_pipeline.execution.fence import Fence
from quern.data_pipeline.execution.ray_life import Pulse, pulse_of, start
from quern.data_pipeline.execution.tasks import MAX_DEATHS, Death, Engine, InProcess, OnDeath
from quern.errors import QuernError, first_line

__all__ = ["Death", "Engine", "InProcess", "RayPool", "on_each_machine", "open_engine"]

log = logging.getLogger(__name__)

R = TypeVar("R")

#: Machines that one task may lose before it is taken for what takes them down.
MAX_LOST_MACHINES = 10
#: Seconds without any worker after which a line says what is waited for.
PATIENCE_S = 30.0
#: Seconds between two looks at whether the pool can have more workers.
REGROW_S = 10.0
#: Seconds for which a worker that cannot be reached may still turn out to be alive, or Ray to say what became of it.
DOUBT_S = 60.0


class _Worker:
    """The actor: a process that keeps its caches (chain, models, encodings) warm from task to task.

    It works in the driver's folder where that exists, so that relative paths mean the same file to both.
    """

    def __init__(self, folder: str, fence: Fence | None) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self.fence = fence

    def call(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        try:
            if self.fence is not None:
                self.fence.check()
            guard = nullcontext() if self.fence is None else storage.guarded(self.fence.check)
            with storage.needs_room(tempfile.gettempdir()), guard:  # else: whatever libraries write, they write there
                return function(*task)
        except QuernError as error:
            return error  # a value: Ray would wrap it and lose its type

    def ready(self) -> str:
        """The id of the machine this process is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


@dataclass(eq=False)
class _WorkerHandle:
    """One worker as the driver sees it."""

    actor: Any
    machine: str | None = None
    """Known once it has come up."""


class RayPool:
    """Up to ``num_workers`` actors of one CPU each on a Ray cluster.

    An actor is given work when its process has come up, and not before: a cluster with fewer CPUs, or with busy ones,
    does the work with the actors it has room for. Every :data:`REGROW_S` seconds the pool is brought back to its size.

    Args:
        num_workers: the size; None follows the CPUs of the cluster, as they come and go.
        autoscaled: ask the cluster's autoscaler for as many CPUs as there is work for, while there is.
        fence: what a worker checks before each task and each file.
    """

    def __init__(self, num_workers: int | None, *, autoscaled: bool = False, fence: Fence | None = None) -> None:
        self.pulse = Pulse([], 0.0, "")
        """Whether Ray is there. Without it nothing is asked of Ray: no answer would come."""
        self._follows = num_workers is None
        self.num_workers = num_workers or _cluster_cpus()
        self._autoscaled = autoscaled
        self._asked = 0
        self._fence = fence
        self._handles: list[_WorkerHandle] = []
        self._starting: dict[Any, _WorkerHandle] = {}
        """Reference of the answer to ``ready`` → worker."""
        self._failed_starts = 0
        self._grown = float("-inf")
        self._waited = 0.0
        self._busy = 0

    def counts(self) -> dict[str, int]:
        """``wanted``, ``up``, ``starting`` and ``busy`` workers."""
        starting = len(self._starting)
        up = len(self._handles) - starting
        return {"wanted": self.num_workers, "up": up, "starting": starting, "busy": min(self._busy, up)}

    def _grow(self, tasks: int, *, now: bool = False) -> None:
        """Start what is missing for ``tasks``, at most every :data:`REGROW_S` seconds unless ``now``."""
        if not now and time.monotonic() - self._grown < REGROW_S:
            return
        self._grown = time.monotonic()
        if self._follows:
            self.num_workers = _cluster_cpus()
        wanted = min(self.num_workers, tasks)
        self._ask_for(wanted)
        while len(self._handles) < wanted:
            self._spawn()

    def _ask_for(self, cpus: int) -> None:
        """Tell the autoscaler how many CPUs there is work for; it keeps to the last figure until it is told another."""
        if not self._autoscaled or cpus == self._asked or not self.pulse.beats:
            return
        from ray.autoscaler.sdk import request_resources

        try:
            request_resources(num_cpus=cpus)
            self._asked = cpus
        except Exception as error:  # a cluster without an autoscaler does its work with what it has
            log.warning("the cluster's autoscaler cannot be asked for %d CPUs: %s", cpus, error)

    def _spawn(self) -> None:
        import ray

        actor: Any = (
            ray.remote(_Worker).options(num_cpus=1, max_restarts=0, max_task_retries=0).remote(os.getcwd(), self._fence)
        )
        self._handles.append(handle := _WorkerHandle(actor))
        self._starting[actor.ready.remote()] = handle

    def _started(self, reference: Any, label: str) -> list[_WorkerHandle]:
        """The worker that has come up; none if its process died, and another is started in its place."""
        import ray

        handle = self._starting.pop(reference)
        try:
            handle.machine = ray.get(reference)
        except _deaths() as death:
            self._dismiss(handle)
            if not self._lost(death, None):
                self._failed_starts += 1
            if self._failed_starts > MAX_DEATHS:
                raise QuernError(f"{label}: {self._failed_starts} worker processes did not come up: {death}") from None
            self._spawn()
            return []
        self._failed_starts = 0
        return [handle]

    def _lost(self, death: Exception, machine: str | None) -> bool:
        """See :func:`_is_loss`. A Ray that has died takes its workers with it, and answers no question about them."""
        self.pulse.check(again=True)
        return _is_loss(death, machine)

    def _dismiss(self, handle: _WorkerHandle) -> None:
        """It is no worker of this pool any more; if its process lives, it is ended when it can be reached."""
        import ray

        with suppress(ValueError):
            self._handles.remove(handle)
        if self.pulse.beats:
            with suppress(Exception):
                ray.kill(handle.actor)

    def map(
        self,
        function: Callable[..., R],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, R]]:
        """See :class:`Engine`."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayTaskError

        waiting = list(range(len(tasks)))[::-1]
        current = list(tasks)
        deaths, losses = [0] * len(tasks), [0] * len(tasks)
        idle = [handle for handle in self._handles if handle not in self._starting.values()]
        running: dict[Any, tuple[int, _WorkerHandle]] = {}
        doubtful: dict[Any, tuple[int, _WorkerHandle, float]] = {}
        """Reference of a second question → what could not be reached, and since when (Unix seconds)."""

        def died(index: int, handle: _WorkerHandle, why: BaseException | str, *, lost: bool) -> None:
            self._dismiss(handle)
            losses[index] += lost
            deaths[index] += not lost
            if losses[index] > MAX_LOST_MACHINES:
                raise QuernError(f"{label}: {losses[index]} machines were lost with task {index}: {why}") from None
            death = Death(lost, partial(_call_on, handle.machine))
            if on_death is not None:
                current[index] = on_death(index, current[index], death)
            elif deaths[index] > MAX_DEATHS:
                raise QuernError(
                    f"{label}: the worker process died {deaths[index]} times on task {index}: {why}"
                ) from None
            waiting.append(index)
            self._grow(len(waiting) + len(running) + len(doubtful), now=True)

        self._grow(len(tasks), now=True)
        try:
            while waiting or running or doubtful:
                if self.pulse.check():
                    self._grow(len(waiting) + len(running) + len(doubtful))
                while waiting and idle:
                    index, handle = waiting.pop(), idle.pop()
                    running[handle.actor.call.remote(function, current[index])] = (index, handle)
                self._busy = len(running)
                done: Any = self._next([*running, *self._starting, *doubtful], label, alone=not running)
                for reference, (index, handle, since) in list(doubtful.items()):
                    if reference is not done and time.time() - since > DOUBT_S:
                        del doubtful[reference]
                        died(index, handle, "it cannot be reached", lost=True)
                if done in self._starting:
                    idle += self._started(done, label)
                elif done in doubtful:
                    index, handle, since = doubtful.pop(done)
                    try:
                        ray.get(done)  # the actor exists after all, but its result is lost
                        died(index, handle, "its answer was lost", lost=True)
                    except ActorUnavailableError:
                        doubtful[handle.actor.ready.remote()] = (index, handle, since)
                    except _deaths() as death:
                        died(index, handle, death, lost=self._lost(death, handle.machine))
                elif done in running:
                    index, handle = running.pop(done)
                    try:
                        result = ray.get(done)
                    except ActorUnavailableError:
                        doubtful[handle.actor.ready.remote()] = (index, handle, time.time())
                        continue
                    except _deaths() as death:
                        died(index, handle, death, lost=self._lost(death, handle.machine))
                        continue
                    except RayTaskError as error:
                        raise error.as_instanceof_cause() from None
                    idle.append(handle)
                    if isinstance(result, QuernError):
                        raise result
                    yield index, result
        finally:
            # Left early: running tasks must not write into a run that has ended.
            for handle in [
                *(handle for _, handle in running.values()),
                *(handle for _, handle, _ in doubtful.values()),
            ]:
                self._dismiss(handle)
            self._busy = 0
            self._ask_for(0)

    def _next(self, references: list[Any], label: str, *, alone: bool) -> Any | None:
        """The next reference that is ready, or None when it is time to look after the pool.

        Who waits for a first worker is told so: no CPU may be free.
        """
        import ray

        pause = min(PATIENCE_S, REGROW_S)
        ready, _ = ray.wait(references, num_returns=1, timeout=pause)
        self._waited = self._waited + pause if alone and not ready else 0.0
        if self._waited >= PATIENCE_S and self.pulse.check():
            self._waited = 0.0
            free = ray.available_resources().get("CPU", 0)
            log.warning("%s: waiting for a worker; the Ray cluster has %g free CPUs", label, free)
        return ready[0] if ready else None

    def close(self) -> None:
        """Stop the actors."""
        for handle in list(self._handles):
            self._dismiss(handle)
        self._starting.clear()


def _cluster_cpus() -> int:
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _is_loss(death: Exception, machine: str | None) -> bool:
    """Whether a process, or the answer it had given, went because its whole machine did."""
    import ray
    from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError, RayActorError

    if isinstance(death, NodeDiedError | ActorUnavailableError | ObjectLostError) or "node has died" in str(death):
        return True
    if isinstance(death, RayActorError) and death.preempted:
        return True
    return machine is not None and not any(node["NodeID"] == machine and node["Alive"] for node in ray.nodes())


def _call_on(machine: str | None, function: Callable[..., Any], args: tuple[Any, ...]) -> Any | None:
    """``function(*args)`` on that machine of the cluster; None if the machine is lost before it has answered."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    if machine is None:
        return None
    try:
        return ray.get(_started_on(machine, function, args), timeout=PATIENCE_S)
    except (GetTimeoutError, RayError) as error:
        log.warning("machine %s does not say what its worker died of: %s", machine[:8], first_line(error))
        return None


def _started_on(machine: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The reference of the answer of ``function(*args)`` on that machine, which runs it beside its workers."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(machine, soft=False)
    return ray.remote(_run).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(function, args)


def on_each_machine(
    address: str, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[tuple[str, Any]]:
    """``function(*args)`` once on every machine of the cluster at ``address``, all at once: the machine's name with the
    answer, with an exception where it failed, or None where no answer came within ``timeout_s``."""
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            start(None, address)
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"])
        )
        hosts = [str(node["NodeManagerHostname"]) for node in nodes]
        asked = [_started_on(node["NodeID"], function, args) for node in nodes]
        answered: list[Any] = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0] if asked else []
        found: list[tuple[str, Any]] = []
        for node, host, reference in zip(nodes, hosts, asked, strict=True):
            name = host if hosts.count(host) == 1 else f"{host}/{node['NodeID'][:6]}"
            try:
                found.append((name, ray.get(reference) if reference in answered else None))
            except Exception as error:  # also what the function raised there
                found.append((name, error))
        return found


def _run(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _deaths() -> tuple[type[Exception], ...]:
    """The errors that Ray raises for a task whose process died, for whatever reason; its memory monitor has its own."""
    from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, WorkerCrashedError

    return (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, ObjectLostError)


@contextmanager
def open_engine(workers: int | None, address: str | None = None, fence: Fence | None = None) -> Iterator[RayPool]:
    """A Ray pool on the cluster at ``address`` ("auto", "host:port"), or on a local Ray started and ended here.

    ``workers`` defaults to the CPUs of the cluster, and follows them. A cluster at an address is asked to grow to
    ``workers``, where it can. A Ray that was already running in this process is used and left as it is. Workers do
    nothing more when ``fence`` is another's.

    Raises:
        InputError: ``address`` is none.
        QuernError: no cluster answers there.
    """
    import ray

    with ExitStack() as stack:
        mine = not ray.is_initialized()
        if mine:
            stack.callback(ray.shutdown)
            start(workers, address)
        pool = RayPool(workers, autoscaled=address is not None and workers is not None, fence=fence)
        stack.callback(pool.close)
        pool.pulse = pulse_of(mine and address is None)
        yield pool
