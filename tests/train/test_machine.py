"""What a rank asks of its process: the allocator's setting, cores by a made-up machine, garbage by collected cycles."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quern.train.processes.machine import available_memory, bind_cores, collecting, set_allocator

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
def test_the_allocators_segments_grow_unless_the_user_says_otherwise(given: str | None) -> None:
    environment = {} if given is None else {given: "backend:native"}
    set_allocator(environment)
    assert environment == (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if given is None else {given: "backend:native"}
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Eight cores in two nodes; the GPU 0000:c1:00.0 is at the node of 0-1 and 4-5. Returns what is asked for."""
    asked: list[set[int]] = []
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(set(cores)), raising=False)
    for name, text in {
        "bus/pci/devices/0000:c1:00.0/numa_node": "1\n",
        "devices/system/node/node0/cpulist": "2-3,6-7\n",
        "devices/system/node/node1/cpulist": "0-1,4,5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return asked


def test_a_rank_runs_on_the_cores_of_its_gpus_node(tmp_path: Path, machine: Any) -> None:
    assert bind_cores(GPU, str(tmp_path)) == {0, 1, 4, 5}
    assert machine == [{0, 1, 4, 5}]


@pytest.mark.parametrize("why", ["cpu", "restricted", "one node", "unknown", "damaged"])
def test_a_rank_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Any, why: str) -> None:
    numa = tmp_path / "bus/pci/devices/0000:c1:00.0/numa_node"
    if why == "restricted":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 8)))
    elif why == "one node":
        numa.write_text("-1\n")
    elif why == "unknown":
        numa.unlink()
    elif why == "damaged":
        numa.write_text("x\n")
    assert bind_cores(torch.device("cpu") if why == "cpu" else GPU, str(tmp_path)) is None
    assert machine == []


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def test_garbage_is_collected_in_the_steps_that_are_due_and_in_no_other() -> None:
    frozen, left = gc.get_freeze_count(), []
    with collecting(3) as collect:
        assert not gc.isenabled()
        cycle = weakref.ref(_Cycle())
        for step in range(6):
            collect(step)
            if cycle() is None:
                left.append(step)
                cycle = weakref.ref(_Cycle())
        assert gc.get_freeze_count() > frozen
    assert left == [0, 2, 5]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_is_pythons_where_the_interval_is_0() -> None:
    with collecting(0) as collect:
        assert gc.isenabled()
        collect(0)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {"sys/fs/cgroup": ("max", "50")}, 1000),
        ("0::/", {"sys/fs/cgroup": ("900", "700")}, 230),
        ("0::/pod/job", {"sys/fs/cgroup/pod/job": ("max", "40"), "sys/fs/cgroup/pod": ("400", "350")}, 80),
        ("0::/pod/job", {"sys/fs/cgroup": ("100", "250")}, 0),  # a container sees its own group as the root
        ("4:cpu,memory:/docker/1\n1:name=systemd:/", {"sys/fs/cgroup/memory": ("300", "200")}, 130),
        ("0::/système/job", {"sys/fs/cgroup/système": ("400", "350")}, 80),
        ("no groups", {"sys/fs/cgroup": ("900", "700")}, 1000),
        ("3:cpuset:/", {"sys/fs/cgroup/memory": ("300", "200")}, 1000),
    ],
)  # fmt: skip
def test_memory_is_what_machine_and_control_groups_leave(
    tmp_path: Path, group: str, files: dict[str, tuple[str, str]], expected: int
) -> None:
    """In KiB; 30 of what is used are files, which can be dropped."""
    written = {"proc/self/cgroup": group, "proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"}
    for folder, sizes in files.items():
        names = ("limit_in_bytes", "usage_in_bytes") if folder.endswith("memory") else ("max", "current")
        for name, size in zip(names, sizes, strict=True):
            written[f"{folder}/memory.{name}"] = size if size == "max" else str(int(size) * 1024)
        prefix = "total_" if folder.endswith("memory") else ""
        cache = f"{prefix}inactive_file {10 * 1024}\n{prefix}active_file {20 * 1024}\n"
        written[f"{folder}/memory.stat"] = f"anon 1\n{cache}"
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(str(tmp_path)) == expected * 1024


def test_a_system_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    assert available_memory(str(tmp_path)) is None
