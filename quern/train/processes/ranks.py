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

from quern.errors import InputError
from quern.train.processes import launch

__all__ = ["Ranks", "choose_device", "open_ranks"]

#: A collective that waits longer than this has lost a peer.
TIMEOUT = timedelta(minutes=10)


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
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """``auto`` is this rank's GPU when there is one.

    Raises:
        InputError: CUDA asked for where there is none, or more local ranks than GPUs.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("device: expected a machine with CUDA, and torch finds none; give device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"device: local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} here); "
            f"start at most one process a GPU"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def open_ranks(wanted: str) -> Iterator[Ranks]:
    """Join the process group of ``torchrun``'s environment; without one, run as a single process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(wanted, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    already = dist.is_initialized()
    joins = "RANK" in os.environ and not already
    if joins:
        # gloo beside nccl: objects and barriers of the host travel without touching the GPU's streams
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, **_meeting())
    try:
        if dist.is_initialized():
            yield Ranks(dist.get_rank(), dist.get_world_size(), device)
        else:
            if world > 1:
                raise InputError(f"WORLD_SIZE is {world} and RANK is not set; start with torchrun or --nproc")
            yield Ranks(0, 1, device)
    finally:
        if joins and dist.is_initialized():
            dist.destroy_process_group()


def _meeting() -> dict[str, Any]:
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
    store = dist.TCPStore(address, port, world, rank == 0, TIMEOUT, wait_for_workers=False, master_listen_fd=heard)
    return {"store": store, "rank": rank, "world_size": world}
