"""Tells this process's place among the ranks that torchrun, Slurm or ``--nproc`` have started."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from quern.errors import InputError
from quern.train.processes.address import own_address

__all__ = ["Place", "place_of"]

#: What tells one start from another; torchrun's agents count restarts each for itself.
_START = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
          "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A rank of ``world``, and the ``local_rank``-th of ``local_world`` on ``node``."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: str
    address: str
    """By which other machines reach this one; a loopback where its own name is all that is known."""
    start: str
    """The same for all ranks of one start, and for few others."""


def place_of(environment: Mapping[str, str] = os.environ) -> Place:
    """By RANK, WORLD_SIZE and LOCAL_RANK, else by the variables that srun sets for a step; without either, alone.

    Raises:
        InputError: a variable is no number, or the rank lies outside of its world.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "SLURM_STEP_NUM_TASKS" in environment:  # in a batch script, which is one process, only SLURM_NTASKS is set
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return Place(0, 1, 0, 1, host, "127.0.0.1", f"{os.getpid()}")
    rank, world, local_rank, local_world = (
        _number(environment, name, default) for name, default in zip(names, (None, None, 0, 1), strict=True)
    )
    if not 0 <= rank < world:
        raise InputError(f"{names[0]}: expected 0 to {world - 1} ({names[1]} is {world}), got {rank}")
    towards = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    address = own_address(towards)
    start = hashlib.sha256("\0".join(environment.get(name, "") for name in _START).encode()).hexdigest()[:12]
    return Place(rank, world, local_rank, local_world, host, address, start)


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    with suppress(ValueError):
        return int(text.partition("(")[0].partition(",")[0])  # Slurm: 8(x64)
    raise InputError(f"{name}: expected a number, got {text!r}")
