"""The process that measures: reads tasks as lines of JSON, and writes what it does next and what it finds, likewise."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from quern.errors import one_line

__all__: list[str] = []

Told = Iterator[str | dict[str, Any]]
"""What is done next, or something of a :class:`~quern.doctor.readings.Reading` or ``Link``."""


def _node(task: dict[str, Any]) -> Told:
    """What belongs to the whole node."""
    from quern.doctor import disks, machine
    from quern.doctor.gpus import open_nvml

    yield "machine"
    yield machine.machine()
    yield machine.limits(task["device"] != "cpu")
    yield "network"
    yield machine.interfaces()
    for path in task["disks"]:
        yield f"disk {path}"
        yield disks.measure_disk(path, task["repeats"])
    if task["store"]:
        yield f"store {task['store']}"
        yield disks.try_store(task["store"])
    yield "memory"
    yield disks.host_speeds(task["repeats"])
    if task["device"] != "none":
        yield "versions"
        with open_nvml() as nvml:
            yield machine.versions(nvml, task["compiler"])


def _device(task: dict[str, Any]) -> Told:
    import torch

    from quern.doctor.gpus import open_nvml
    from quern.doctor.load import load
    from quern.doctor.machine import kernels
    from quern.train.processes.ranks import choose_device

    yield "choose a device"
    devices = [choose_device(task["device"], task["local_rank"])]
    if devices[0].type == "cpu" and task["local_rank"]:
        return  # its processor is measured by the node's first rank
    yield "kernels"
    yield kernels(task["config"], devices[0])
    if devices[0].type == "cuda" and task["all"]:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    with open_nvml() as nvml:
        for device in devices:  # a launcher may show each rank one GPU alone, so that its number says nothing
            number = device.index if task["all"] else task["local_rank"]
            yield from load(device, f"cuda:{number}" if device.type == "cuda" else "cpu", task["repeats"], nvml)


def _link(task: dict[str, Any]) -> Told:
    from quern.doctor.links import measure_link
    from quern.train.processes.address import is_loopback
    from quern.train.processes.ranks import choose_device

    yield f"{task['kind']} {task['ranks']}"
    if is_loopback(task["address"]) and os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    yield measure_link(
        task["kind"], task["ranks"].index(task["rank"]), len(task["ranks"]), meet=task["meet"], address=task["address"],
        device=choose_device(task["device"], task["local_rank"]), repeats=task["repeats"], timeout_s=task["timeout_s"],
    )  # fmt: skip


_TASKS = {"node": _node, "device": _device, "link": _link}


def _main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(**value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    tasks: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)  # the other process has ended: also out of a call that hangs

    threading.Thread(target=read, name="tasks", daemon=True).start()
    while True:
        task = json.loads(tasks.get())
        try:
            for told in _TASKS[task["what"]](task):
                tell(doing=told) if isinstance(told, str) else tell(found=told)
            tell(done=True)
        except Exception as error:  # told to the other process, and the next task may go well
            tell(error=f"{type(error).__name__}: {one_line(error)}")


if __name__ == "__main__":
    _main()
