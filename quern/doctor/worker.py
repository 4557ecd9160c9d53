"""The process that measures: reads tasks as lines of JSON, writes what it does and finds as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from quern.errors import one_line

__all__: list[str] = []

Tell = Callable[[dict[str, Any]], None]


def _merged(into: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a part: texts and mappings by name, lists one behind the other."""
    for name, value in part.items():
        if isinstance(value, dict):
            into.setdefault(name, {}).update(value)
        elif isinstance(value, list) and name in into:
            into[name] = [*into[name], *value]
        else:
            into[name] = value


def _node(task: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """What belongs to the whole node."""
    from quern.doctor.alone import disks, network, software
    from quern.doctor.alone.gpus import open_nvml

    found: dict[str, Any] = {}

    def step(name: str, part: Callable[[], dict[str, Any]]) -> None:
        tell({"doing": name})
        _merged(found, part())
        tell({"partial": found})

    step("machine", software.machine)
    step("network", network.interfaces)
    step("ray", lambda: network.ray_answers(task["ray"]))
    for path in task["disks"]:
        step(f"disk {path}", lambda path=path: disks.measure_disk(path, task["repeats"]))  # type: ignore[misc]
    if task["store"]:
        step(f"store {task['store']}", lambda: disks.try_store(task["store"]))
    step("memory", lambda: disks.host_speeds(task["repeats"]))
    if task["torch"]:
        with open_nvml() as nvml:
            step("versions", lambda: software.versions(nvml, task["needs"]))
    step("limits", lambda: disks.limits(task["device"] != "cpu"))
    return found


def _device(task: dict[str, Any], tell: Tell) -> dict[str, Any]:
    import torch

    from quern.doctor.alone.gpus import open_nvml
    from quern.doctor.alone.software import cpu_model, kernels
    from quern.doctor.load import load
    from quern.train.processes.ranks import choose_device

    tell({"doing": "choose a device"})
    first = choose_device(task["device"], task["local_rank"])
    devices = [first]
    if first.type == "cuda" and task["all"]:
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if first.type == "cpu" and task["local_rank"]:
        return {}  # its processor is measured by the node's first rank
    found: dict[str, Any] = kernels(task["needs"], first) | {"devices": []}
    with open_nvml() as nvml:
        for device in devices:
            one: dict[str, Any] = {}
            found["devices"].append(one)
            kind = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
            for part in load(device, kind, task["repeats"], nvml, lambda doing: tell({"doing": doing})):
                _merged(found, {"problems": part.pop("problems", [])})
                _merged(one, part)
                if device.type == "cuda" and not task["all"]:  # a launcher may show each rank one GPU alone
                    one["name"] = f"cuda:{task['local_rank']}"
                tell({"partial": found})
    return found


def _link(task: dict[str, Any], tell: Tell) -> dict[str, Any]:
    from quern.doctor.links import measure_link
    from quern.train.processes.address import is_loopback
    from quern.train.processes.ranks import choose_device

    tell({"doing": f"{task['kind']} {task['ranks']}"})
    device = choose_device(task["device"], task["local_rank"])
    if is_loopback(task["address"]) and os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return measure_link(
        task["kind"], task["ranks"], task["rank"], device=device, meet=task["meet"], address=task["address"],
        repeats=task["repeats"], timeout_s=task["timeout_s"],
    )  # fmt: skip


_TASKS = {"node": _node, "device": _device, "link": _link}


def _main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(value: dict[str, Any]) -> None:
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
            tell({"done": _TASKS[task["what"]](task, tell)})
        except Exception as error:  # told to the other process, and the next task may go well
            tell({"error": f"{type(error).__name__}: {one_line(error)}"})


if __name__ == "__main__":
    _main()
