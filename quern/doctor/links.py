"""Measures the connection of a pair or ring of ranks: gloo on the CPU, NCCL on CUDA.

Each has a process group of its own, whose ends meet by a file.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quern import storage
from quern.errors import QuernError

__all__ = ["measure_link"]

_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}


def measure_link(
    kind: str, place: int, world: int, *, device: torch.device, meet: str, address: str, repeats: int, timeout_s: float
) -> dict[str, Any]:
    """``speeds`` of a :class:`~quern.doctor.readings.Link`, or its ``problem``. Collective among ``world`` ranks, the
    first of which writes into the file ``meet`` where it is found.

    Raises:
        QuernError: the others did not come.
    """
    timeout, cuda, ring = timedelta(seconds=timeout_s), device.type == "cuda", kind == "ring"
    store = _meet(meet, address, place == 0, timeout)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.PrefixStore(kind, store), rank=place, world_size=world, timeout=timeout,
        device_id=device if cuda else None,
    )  # fmt: skip
    try:
        other, size = 1 - place, _BYTES[device.type]
        payload = 2 * (world - 1) / world * size if ring else size
        got = torch.empty(size // 4, device=device)
        sent, expected = torch.full_like(got, 17 + place), float(world if ring else 17 + other)
        speeds, intact = [], True
        for number in range(repeats + 1):
            got.fill_(1.0)
            _begin_together(device)
            began = time.perf_counter()
            if ring:
                dist.all_reduce(got)
            else:  # both send at once
                both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
            _wait(device)
            if number:  # the first makes the connections
                speeds.append(payload / (time.perf_counter() - began))
            intact = intact and bool((got == expected).all())
        _begin_together(device)  # nobody leaves while another is in it
        return {"speeds": speeds} if intact else {"problem": "other bytes arrived than were sent"}
    finally:
        dist.destroy_process_group()


def _meet(meet: str, address: str, first: bool, timeout: timedelta) -> dist.TCPStore:
    if first:
        store = dist.TCPStore(address, 0, None, True, timeout, wait_for_workers=False)
        storage.write_json(meet, {"address": address, "port": store.port})
        return store
    end = time.monotonic() + timeout.total_seconds()
    while not storage.is_file(meet):
        if time.monotonic() > end:
            raise QuernError("the other rank did not come")
        time.sleep(0.05)
    told = storage.read_json(meet)
    return dist.TCPStore(str(told["address"]), int(told["port"]), None, False, timeout, wait_for_workers=False)


def _begin_together(device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device))
    _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
