"""Tells this process's place among the ranks that torchrun, Slurm or ``--nproc`` have started."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from quern.errors import InputError
from quern.train.processes.address import own_address

__all__ = ["Place", "place_of"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
#: What tells one start from another; torchrun's agents count restarts each for itself.
_START = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE",
          "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")  # fmt: skip


class Place(NamedTuple):
    """A rank of ``world``, and ``local_rank`` of ``local_world`` on ``node``, which others reach by ``address``, a
    loopback where its own name is all that is known. ``start`` is the same for ranks of one start, and few others."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: str
    address: str = ""
    start: str = ""


def place_of(environment: Mapping[str, str] = os.environ) -> Place:
    """By RANK, WORLD_SIZE and LOCAL_RANK, else by the variables that srun sets for a step; without either, alone.

    Raises:
        InputError: a variable is no number, or the rank lies outside of its world.
    """
    host = environment.get("SLURMD_NODENAME") or socket.gethostname()
    names = _TORCHRUN if "RANK" in environment else _SLURM
    if names[1] not in environment and names is _SLURM:  # in a batch script, one process, only SLURM_NTASKS is set
        return Place(0, 1, 0, 1, host)
    texts = [environment.get(name, default) for name, default in zip(names, ("", "", "0", "1"), strict=True)]
    numbers = [text.partition("(")[0].partition(",")[0] for text in texts]  # Slurm: 8(x64)
    for name, number, text in zip(names, numbers, texts, strict=True):
        if not number.isdecimal():
            raise InputError(f"{name}: expected a number, got {text!r}")
    rank, world, local_rank, local_world = map(int, numbers)
    if rank >= world:
        raise InputError(f"{names[0]}: expected 0 to {world - 1} ({names[1]} is {world}), got {rank}")
    towards = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR") or socket.gethostname()
    start = hashlib.sha256("\0".join(environment.get(name, "") for name in _START).encode()).hexdigest()[:12]
    return Place(rank, world, local_rank, local_world, host, own_address(towards), start)
