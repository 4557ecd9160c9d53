"""Measures the connection of a pair or ring of ranks: gloo on the CPU, NCCL on CUDA.

Each has a process group of its own, whose ends meet by a file.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quern import storage
from quern.errors import QuernError

__all__ = ["measure_link"]

_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


def measure_link(
    kind: str, ranks: Sequence[int], rank: int, *, device: torch.device, meet: str, address: str, repeats: int,
    timeout_s: float,
) -> dict[str, Any]:  # fmt: skip
    """``speeds`` of a :class:`~quern.doctor.readings.Link`, or its ``problem``. Collective among ``ranks``, the first
    of which writes into the file ``meet`` where it is found.

    Raises:
        QuernError: the others did not come.
    """
    place, timeout = list(ranks).index(rank), timedelta(seconds=timeout_s)
    store = _meet(meet, address, place == 0, timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(
        backend, store=dist.PrefixStore(kind, store), rank=place, world_size=len(ranks), timeout=timeout,
        device_id=bound,
    )  # fmt: skip
    try:
        step, payload = (_exchange, 1.0) if "pair" in kind else (_reduce, 2 * (len(ranks) - 1) / len(ranks))
        size = _BYTES[device.type]
        speeds, intact = [], True
        for number in range(repeats + 1):
            dist.all_reduce(torch.zeros(1, device=device))  # all begin at one time
            _wait(device)
            seconds, right = step(place, len(ranks), size, device)
            intact = intact and right
            if number:  # the first makes the connections
                speeds.append(payload * size / seconds)
        dist.all_reduce(torch.zeros(1, device=device))
        _wait(device)
        return {"speeds": speeds} if intact else {"problem": "other bytes arrived than were sent"}
    finally:
        dist.destroy_process_group()


def _meet(meet: str, address: str, first: bool, timeout: timedelta) -> dist.TCPStore:
    if first:
        heard = socket.create_server((address, 0))
        port = heard.getsockname()[1]
        store = dist.TCPStore(
            address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=heard.detach()
        )
        storage.write_json(meet, {"address": address, "port": port})
        return store
    end = time.monotonic() + timeout.total_seconds()
    while not storage.is_file(meet):
        if time.monotonic() > end:
            raise QuernError("the other rank did not come")
        time.sleep(0.05)
    told = storage.read_json(meet)
    return dist.TCPStore(str(told["address"]), int(told["port"]), None, False, timeout, wait_for_workers=False)


def _exchange(place: int, world: int, size: int, device: torch.device) -> tuple[float, bool]:
    """Both send at once. Seconds, and whether the right bytes arrived."""
    other = 1 - place
    sent = torch.full((size,), 17 + place, dtype=torch.uint8, device=device)
    got = torch.zeros_like(sent)
    _wait(device)
    began = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    _wait(device)
    return time.perf_counter() - began, bool((got == 17 + other).all())


def _reduce(place: int, world: int, size: int, device: torch.device) -> tuple[float, bool]:
    """All-reduce of ones, in float32."""
    values = torch.ones(size // 4, device=device)
    _wait(device)
    began = time.perf_counter()
    dist.all_reduce(values)
    _wait(device)
    return time.perf_counter() - began, bool((values == world).all())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
