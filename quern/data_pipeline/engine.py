"""Where tasks run: a pool of fat Ray actors, or this process.

Every phase is a function mapped over small task tuples; data moves through files, never through return values. An
engine keeps one task an actor in flight, so nothing piles up in the object store, and replaces an actor that died.
What a death means for the task is the caller's to say (``on_death``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from quern.errors import InputError, QuernError

__all__ = ["Engine", "InProcess", "RayPool", "open_engine"]

log = logging.getLogger(__name__)

R = TypeVar("R")
OnDeath = Callable[[int, tuple[Any, ...]], tuple[Any, ...]]

#: Deaths of one task without an ``on_death`` before the run gives up: a machine may vanish, a bug stays.
MAX_DEATHS = 3
OBJECT_STORE_BYTES = 256 << 20
#: Seconds without any worker after which a line says what is waited for.
PATIENCE_S = 30.0


class Engine(Protocol):
    """Runs a function over tasks."""

    num_workers: int

    def map(
        self,
        function: Callable[..., R],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, R]]:
        """Run ``function(*task)`` for every task; yield (task index, result) as they finish, in any order.

        ``on_death(index, task)`` is called when the process that ran a task died; it returns the task to run instead
        or raises. Without it a task is repeated as it is, at most :data:`MAX_DEATHS` times. The first exception a
        task raises ends the map and is raised here.
        """
        ...


class InProcess:
    """Runs tasks one after the other in this process: for tests and for looking at one task in a debugger."""

    num_workers = 1

    def map(
        self,
        function: Callable[..., R],
        tasks: Sequence[tuple[Any, ...]],
        *,
        label: str,
        on_death: OnDeath | None = None,
    ) -> Iterator[tuple[int, R]]:
        """See :class:`Engine`."""
        for index, task in enumerate(tasks):
            yield index, function(*task)


class _Worker:
    """The actor: a process that keeps its caches (chain, models, encodings) warm from task to task.

    It works in the driver's folder where that exists, so that relative paths mean the same file to both.
    """

    def __init__(self, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)

    def call(self, function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
        try:
            return function(*task)
        except QuernError as error:
            return error  # a value: Ray would wrap it and lose its type

    def ready(self) -> int:
        return os.getpid()


class RayPool:
    """Up to ``num_workers`` actors of one CPU each on a Ray cluster.

    An actor is given work when its process has come up, and not before: a cluster with fewer CPUs, or with busy ones,
    does the work with the actors it has room for.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._actors: list[Any] = []
        self._starting: dict[Any, Any] = {}
        """Reference of the answer to ``ready`` → actor."""
        self._failed_starts = 0

    def _spawn(self) -> None:
        import ray

        actor: Any = ray.remote(_Worker).options(num_cpus=1, max_restarts=0, max_task_retries=0).remote(os.getcwd())
        self._actors.append(actor)
        self._starting[actor.ready.remote()] = actor

    def _started(self, reference: Any, label: str) -> list[Any]:
        """The actor that has come up; none if its process died, and another is started in its place."""
        import ray

        actor = self._starting.pop(reference)
        try:
            ray.get(reference)
        except _deaths() as death:
            self._actors.remove(actor)
            self._failed_starts += 1
            if self._failed_starts > MAX_DEATHS:
                raise QuernError(f"{label}: {self._failed_starts} worker processes did not come up: {death}") from None
            self._spawn()
            return []
        self._failed_starts = 0
        return [actor]

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
        from ray.exceptions import RayTaskError

        waiting = list(range(len(tasks)))[::-1]
        current = list(tasks)
        deaths = [0] * len(tasks)
        while len(self._actors) < min(self.num_workers, len(tasks)):
            self._spawn()
        starting = list(self._starting.values())
        idle = [actor for actor in self._actors if actor not in starting]
        running: dict[Any, tuple[int, Any]] = {}
        try:
            while waiting or running:
                while waiting and idle:
                    index, actor = waiting.pop(), idle.pop()
                    running[actor.call.remote(function, current[index])] = (index, actor)
                done = self._next([*running, *self._starting], label, alone=not running)
                if done in self._starting:
                    idle += self._started(done, label)
                    continue
                index, actor = running.pop(done)
                try:
                    result = ray.get(done)
                except _deaths() as death:
                    self._actors.remove(actor)
                    self._spawn()
                    deaths[index] += 1
                    if on_death is not None:
                        current[index] = on_death(index, current[index])
                    elif deaths[index] > MAX_DEATHS:
                        raise QuernError(
                            f"{label}: the worker process died {deaths[index]} times on task {index}: {death}"
                        ) from None
                    waiting.append(index)
                    continue
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from None
                idle.append(actor)
                if isinstance(result, QuernError):
                    raise result
                yield index, result
        finally:
            if running:  # left early: what still runs must not write into a run that has ended
                for _, actor in running.values():
                    ray.kill(actor)
                    self._actors.remove(actor)

    def _next(self, references: list[Any], label: str, *, alone: bool) -> Any:
        """The next reference that is ready; who waits for a first worker is told so: no CPU may be free."""
        import ray

        while True:
            ready, _ = ray.wait(references, num_returns=1, timeout=PATIENCE_S if alone else None)
            if ready:
                return ready[0]
            free = ray.available_resources().get("CPU", 0)
            log.warning("%s: waiting for a worker; the Ray cluster has %g free CPUs", label, free)

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._starting.clear()


def _deaths() -> tuple[type[Exception], ...]:
    """What Ray raises for a task whose process ended, whoever ended it; its memory monitor has an error of its own."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError

    return (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)


@contextmanager
def open_engine(workers: int | None, address: str | None = None) -> Iterator[Engine]:
    """A Ray pool on the cluster at ``address`` ("auto", "host:port"), or on a local Ray started and ended here.

    ``workers`` defaults to the CPUs of the cluster. A Ray that was already running in this process is used and left
    as it is.

    Raises:
        InputError: ``address`` is none.
        QuernError: no cluster answers there.
    """
    import ray
    from ray.exceptions import RayError

    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if address is None:
            # "local": never a cluster that RAY_ADDRESS or an earlier `ray start` names. Without workers, Ray counts the
            # CPUs, and those of a container's share only.
            ray.init(
                "local",
                num_cpus=workers,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                **quiet,
            )
        else:
            try:
                ray.init(address=address, **quiet)
            except ValueError as error:
                raise InputError(
                    f'ray.address: expected "auto" or host:port, got {address!r} ({_line(error)})'
                ) from None
            except (ConnectionError, RuntimeError, RayError) as error:
                raise QuernError(f"ray.address: no Ray cluster at {address!r} ({_line(error)})") from None
    pool = RayPool(workers or max(1, int(ray.cluster_resources().get("CPU", 1))))
    try:
        yield pool
    finally:
        pool.close()
        if mine:
            ray.shutdown()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
