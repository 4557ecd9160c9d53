"""Starts the processes of a row: fresh ones for every row, here or under every process of a launcher.

A process of a launcher (torchrun, srun) touches no GPU itself; it starts the rank at its place anew for each row. So
memory and compiled code begin empty, and what ends a rank, be it the driver, ends a row and not the table.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from quern import storage
from quern.errors import InputError
from quern.safe_path import module
from quern.train.processes import launch
from quern.train.processes.agree import Agreement

__all__ = ["Crew", "open_crew"]

#: Seconds between two looks at whether a rank elsewhere has failed.
_LOOK_S = 2.0
#: Of what the launcher's processes say to each other between rows.
_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Crew:
    """Starts the ranks of every row."""

    together: Agreement
    """Of the launcher's processes; alone without a launcher."""
    world: int
    """Ranks of a row."""
    hosts: int
    environments: Callable[[int], Sequence[Mapping[str, str]]]
    """Of the ranks that this process starts; given a free port of the first rank's host."""
    failure: Callable[[str, bool], bool]
    """Tells the others that a rank here has failed in this row, or asks whether one of theirs has."""

    def run(self, folder: str, port: int) -> list[dict[str, Any]]:
        """Run the row in ``folder``; return every rank's result, by rank. Collective.

        A rank that ends without a word, or is ended since another has failed, has ``error``, ``kind`` and ``time``.
        """
        places = self.environments(port)
        command = module("quern.train.bench.worker", folder)
        with ExitStack() as opened:
            logs = [opened.enter_context(open(_log(folder, place), "wb")) for place in places]
            how = [{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT} for log in logs]
            with launch.started(command, places, _leave, how) as workers:
                launch.wait(workers, lambda failed: self.failure(folder, failed))
                codes = [worker.poll() for worker in workers]
                if any(codes):
                    self.failure(folder, True)
        own = [_result(folder, place, code) for place, code in zip(places, codes, strict=True)]
        return [result for part in self.together.gather(own) for result in part]


@contextmanager
def open_crew(nproc: int) -> Iterator[Crew]:
    """The ranks of a launcher when there is one (its RANK is set), else ``nproc`` on this machine; 1 is a process
    without a group.

    Raises:
        InputError: both a launcher and ``nproc``.
    """
    if "RANK" in os.environ:
        if nproc > 1:
            raise InputError(f"--nproc: the launcher has started the ranks already; expected none, got {nproc}")
        with _launched() as crew:
            yield crew
        return

    def environments(port: int) -> list[dict[str, str]]:
        if nproc == 1:
            return [{**os.environ}]
        return [{**place, "MASTER_PORT": str(port)} for place in launch.environments(nproc)]

    yield Crew(Agreement(0, 1), nproc, 1, environments, lambda folder, failed: failed)


@contextmanager
def _launched() -> Iterator[Crew]:
    import torch.distributed as dist

    store, rank, world = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    own = dist.PrefixStore("quern-bench", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=_TIMEOUT)
    looked = [time.monotonic()]

    def failure(folder: str, failed: bool) -> bool:
        if failed:
            own.set(f"failed {folder}", "")
            return True
        if time.monotonic() - looked[0] < _LOOK_S:
            return False
        looked[0] = time.monotonic()
        return bool(own.check([f"failed {folder}"]))

    def environments(port: int) -> list[dict[str, str]]:
        # no word of torchrun's own store: the ranks of a row meet at a port of theirs
        same = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        return [{**same, "MASTER_PORT": str(port)}]

    try:
        together = Agreement(rank, world)
        hosts = len(set(together.gather(socket.gethostname())))
        yield Crew(together, world, hosts, environments, failure)
        together.gather(None)  # the store is in one of these processes: none leaves before all are done
    finally:
        dist.destroy_process_group()


def _leave(workers: Sequence[launch.Worker], number: int) -> NoReturn:
    raise SystemExit(128 + number)  # the workers are ended on the way


def _log(folder: str, place: Mapping[str, str]) -> str:
    return os.path.join(folder, f"rank-{place.get('RANK', '0')}.log")


def _result(folder: str, place: Mapping[str, str], code: int | None) -> dict[str, Any]:
    path = os.path.join(folder, f"result.{place.get('RANK', '0')}.json")
    if os.path.exists(path):
        result: dict[str, Any] = storage.read_json(path)
        return result
    if code is None:
        return {"error": "was ended after another rank had failed", "kind": "failed", "time": time.time() + 1e9}
    with open(_log(folder, place), errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return {"error": ": ".join([launch.how_ended(code), *lines[-1:]]), "kind": "failed", "time": time.time()}
