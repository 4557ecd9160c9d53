"""Loads devices with products and copies, compares a product with what it must be, tries the kernels of a config, and
measures the link of a pair or ring of ranks: gloo on the CPU, NCCL on CUDA."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quern import storage
from quern.doctor.machine import cpu_model
from quern.errors import InputError
from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe
from quern.train.config import TrainConfig
from quern.train.flash import check_flash, use_flash
from quern.train.processes.address import is_loopback
from quern.train.processes.exchange import exchange
from quern.train.processes.gpus import open_nvml, watched
from quern.train.processes.machine import pci_address
from quern.train.processes.ranks import choose_device
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling
from quern.train.setup import check_float8
from quern.train.step.precision import precision_of

__all__ = ["device", "link", "transfer"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CHECKED = 512  # rows and columns of the product whose result is compared; it sums 4,096 terms
Told = Iterator[str | dict[str, Any]]


def device(task: dict[str, Any]) -> Told:
    """This rank's device, or all of a machine with one rank: what is done next, and ``problems`` and ``devices``, by
    name, of a :class:`~quern.doctor.readings.Reading`."""
    yield "choose a device"
    devices = [choose_device(task["device"], task["local_rank"])]
    cuda = devices[0].type == "cuda"
    if not cuda and task["local_rank"]:
        return  # its processor is measured by the node's first rank
    if task["config"] is not None:
        yield "kernels"
        yield {"problems": _kernels(TrainConfig.model_validate(task["config"]), devices[0])}
    if cuda and task["all"]:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    with open_nvml() as nvml:
        for device in devices:  # a launcher may show each rank one GPU alone, so that its number says nothing
            number = device.index if task["all"] else task["local_rank"]
            yield from _load(device, f"cuda:{number}" if cuda else "cpu", task["repeats"], nvml)


def _kernels(config: TrainConfig, device: torch.device) -> list[dict[str, str]]:
    """What a config asks for and has no kernel; tried as a run tries it."""
    precision, shape = precision_of(config.precision), config.model.shape(1000)
    try:
        check_float8(config, precision, device)
        check_flash(config, shape, precision, device.type)
        use_flash(config, shape, precision, "varlen", device)
    except InputError as error:
        return [{"code": "kernel", "text": str(error)}]
    return []


def _load(device: torch.device, name: str, repeats: int, nvml: Any) -> Told:
    """In FLOP/s and bytes/s."""
    cuda = device.type == "cuda"

    def of(**part: Any) -> dict[str, Any]:
        return {"devices": {name: part}}

    def timed(what: str, measure: Callable[[], float | None]) -> Told:
        yield f"{what} on {name}"
        yield of(speeds={what: [measure() for _ in range(repeats)]})

    yield of(kind=torch.cuda.get_device_name(device) if cuda else cpu_model())
    watch: Any = nullcontext(dict)
    if cuda:
        torch.cuda.set_device(device)  # events are of the current one
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if nvml is not None:
            watch = watched(nvml, pci_address(device))
    sizes = {torch.bfloat16: 8192, torch.float16: 8192, torch.float32: 4096} if cuda else {torch.float32: 512}
    with watch as state:
        for dtype, size in sizes.items():
            product = partial(gemm_ceiling, size, size, size, dtype, device, seconds=0.02)
            yield from timed(f"product {_NAMES[dtype]}", product)
            yield of(**state())  # right after the load
            if not _is_right(dtype, device):
                text = f"{name}: a product of integers in {_NAMES[dtype]} differs from float64's"
                yield {"problems": [{"code": "wrong-result", "text": text}]}
        recipe = Recipe("tensorwise")
        if cuda and available(recipe, device, torch.bfloat16):
            yield from timed("product fp8", partial(float8_ceiling, 8192, 8192, 8192, recipe, device, seconds=0.02))
        copy = partial(copy_ceiling, device, size=2**28 if cuda else 2**24, seconds=0.02)
        yield from timed("copy device" if cuda else "copy torch", copy)
        if cuda:
            host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(2**28, dtype=torch.uint8, device=device)
            yield from timed("transfer to device", partial(transfer, there, host))
            yield from timed("transfer from device", partial(transfer, host, there))
        yield of(xids=state().get("xids", []))


def _is_right(dtype: torch.dtype, device: torch.device) -> bool:
    """A product of -1, 0 and 1 is exact in any order of summation, so rounding excuses nothing."""
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-1, 2, (_CHECKED, 4096), generator=draw).double() for _ in range(2))
    expected = (a @ b.T).to(dtype)
    found = a.to(device, dtype) @ b.to(device, dtype).T
    return torch.equal(found.cpu(), expected)


def transfer(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second between pinned memory and the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return source.numel() / (time.perf_counter() - began)


def link(task: dict[str, Any]) -> Told:
    """``speeds`` of a :class:`~quern.doctor.readings.Link`, or its ``problem``. Collective among the task's ``ranks``,
    which have a process group of their own; the first writes into the file ``meet`` where it is found."""
    yield f"{task['kind']} {task['ranks']}"
    if is_loopback(task["address"]) and os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place, world, ring = task["ranks"].index(task["rank"]), len(task["ranks"]), task["kind"] == "ring"
    device, timeout = choose_device(task["device"], task["local_rank"]), timedelta(seconds=task["timeout_s"])
    while place and not storage.is_file(task["meet"]):  # until this process is killed
        time.sleep(0.05)
    at = storage.read_json(task["meet"]) if place else {"address": task["address"], "port": 0}
    store = dist.TCPStore(at["address"], at["port"], None, not place, timeout, wait_for_workers=False)
    if not place:
        storage.write_json(task["meet"], {**at, "port": store.port})
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=place, world_size=world, timeout=timeout,
        device_id=device if cuda else None,
    )  # fmt: skip
    try:
        other, size = 1 - place, 256 << 20 if cuda else 4 << 20
        payload = 2 * (world - 1) / world * size  # of a ring
        got = torch.empty(size // 4, device=device)
        sent, expected = torch.full_like(got, 17 + place), world if ring else 17 + other
        for number in range(task["repeats"] + 1):
            got.fill_(1.0)
            dist.all_reduce(torch.zeros(1, device=device))  # all begin at one time
            wait()
            began = time.perf_counter()
            if ring:
                dist.all_reduce(got)
                wait()
            speed = payload / (time.perf_counter() - began) if ring else exchange(got, sent, other)
            if number:  # the first makes the connections
                yield {"speeds": [speed]}
            if not bool((got == expected).all()):
                yield {"problem": "other bytes arrived than were sent"}
        dist.all_reduce(torch.zeros(1, device=device))  # nobody leaves while another is in it
        wait()
    finally:
        dist.destroy_process_group()
