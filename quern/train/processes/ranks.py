"""This process's rank, world and device, initialised once and closed once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from quern.errors import InputError
from quern.train.debug import recorder
from quern.train.processes import launch, machine

__all__ = ["Ranks", "choose_device", "open_device", "open_ranks"]


@dataclass(frozen=True)
class Ranks:
    """This process's rank. With ``world == 1`` there may be no process group, and collectives return their input."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes the files that are written once per run."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` summed over all ranks, in place; no host sync."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait for all ranks, on the host: the tensor is the CPU's, so that gloo sums it and no GPU is waited for."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, dtype=torch.int64))

    def wait_at_most(self, seconds: float) -> None:
        """Let collectives of every process group wait at most so long from here on. Collective: no clock starts
        before all ranks are here."""
        if self.world > 1:
            self.barrier()
            for group in (*c10d._world.pg_map,):
                c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """``auto`` is this rank's GPU when there is one. Where a launcher shows each process one GPU alone (Slurm's
    ``--gpus-per-task=1`` sets ``CUDA_VISIBLE_DEVICES``), that is the rank's, whatever its number. With spares
    our launcher says which it is.

    Raises:
        InputError: CUDA asked for where there is none, or more local ranks than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("device: expected a machine with CUDA, and torch finds none; give device=cpu")
    local_rank = int(os.environ.get(launch.GPU, local_rank))
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if count == 1 and visible and "," not in visible and not launch.launched():
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise InputError(
            f"device: local rank {local_rank} has no GPU of its own ({count} here); start at most one process a GPU"
        )
    return torch.device("cuda", local_rank)


def open_device(wanted: str, *, bind_cores: bool = False) -> torch.device:
    """Make the device that :func:`choose_device` gives this rank the process's own. ``bind_cores``: run on the cores
    near the GPU.

    Raises:
        InputError: as there.
    """
    device = choose_device(wanted, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        machine.set_allocator()
        torch.cuda.set_device(device)
        if bind_cores:  # before CUDA's threads and the group's are started, which run where this one does
            machine.bind_cores(device)
    return device


@contextmanager
def open_ranks(
    wanted: str, timeout_s: float = 1800.0, run_dir: str | None = None, *, bind_cores: bool = False
) -> Iterator[Ranks]:
    """Join the process group of ``torchrun``'s environment; without one, run as a single process. ``timeout_s``: how
    long a rank waits for the others, until :meth:`Ranks.wait_at_most`. ``run_dir``: in whose ``debug/`` a failed rank's
    record of collectives is left. ``bind_cores``: run on the cores near the GPU.

    Where the block raises, a group with GPUs is left as it is, and the process has to end: to close it, NCCL would wait
    for ranks that wait for this one.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = open_device(wanted, bind_cores=bind_cores)
    already = dist.is_initialized()
    joins = "RANK" in os.environ and not already
    if joins:
        if run_dir is not None:
            recorder.begin(run_dir)
        # gloo beside nccl: objects and barriers of the host travel without touching the GPU's streams
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        # of this one GPU, so that groups are split from the first one's connections, and none opens a context elsewhere
        bound = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=timeout, device_id=bound, **_meeting(timeout))
    failed = True
    try:
        if dist.is_initialized():
            yield Ranks(dist.get_rank(), dist.get_world_size(), device)
        else:
            if world > 1:
                raise InputError(f"WORLD_SIZE is {world} and RANK is not set; start with torchrun or --nproc")
            yield Ranks(0, 1, device)
        failed = False
    finally:
        if joins and dist.is_initialized() and not (failed and device.type == "cuda"):
            dist.destroy_process_group()


def _meeting(timeout: timedelta) -> dict[str, Any]:
    """Where ranks that our launcher has started meet: this machine's loopback, as torch by itself listens on every
    address of the machine. Of other ranks nothing, torch finds what their launcher has set.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not launch.launched() or address != launch.LOOPBACK:
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    heard = socket.create_server((address, port)).detach() if rank == 0 else None
    store = dist.TCPStore(address, port, world, rank == 0, timeout, wait_for_workers=False, master_listen_fd=heard)
    return {"store": store, "rank": rank, "world_size": world}
