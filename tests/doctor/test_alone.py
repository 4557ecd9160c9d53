"""What a machine tells about itself: NVML's counters by a stand-in, limits and network by a made-up root, disks."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from quern.doctor import fleet, load, machine
from quern.doctor.fleet import judge
from quern.doctor.place import place_of
from quern.doctor.readings import Device, Disk, Reading
from quern.errors import InputError
from quern.train.processes import address, gpus
from support.nvml import Driver


@pytest.mark.parametrize(
    ("driver", "codes"),
    [
        (Driver(), []),
        (Driver(ecc=3), ["ecc"]),
        (Driver(rows=(1, 2, 1, 0)), ["rows"]),
        (Driver(rows=(1, 2, 0, 1)), ["rows"]),
        (Driver(why=0x04), []),  # a power cap
        (Driver(why=0x40 | 0x80), ["throttled"]),
        (Driver(xids=[79, 48]), ["xid"]),
        (Driver(ecc=None, rows=None), []),
    ],
)
def test_what_nvml_counts_is_judged(driver: Driver, codes: list[str]) -> None:
    with gpus.watched(driver, "0000:1b:00.0") as state:
        device = Device(name="cuda:0", kind="H100", **state())
    assert driver.events == 0
    assert [one.code for one in judge([Reading(rank=0, node="n", devices=[device])])] == codes
    assert device.sm_clock_mhz == 1755


def test_pynvml_has_what_is_asked_of_it() -> None:
    api = pytest.importorskip("pynvml")
    asked = {name for name in vars(Driver) if name.startswith("nvml")}
    assert asked <= vars(api).keys()
    assert api.NVML_CLOCK_SM == 1
    assert api.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == 0x80
    assert api.nvmlClocksThrottleReasonSwThermalSlowdown == 0x20


def test_versions_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Driver()
    assert gpus.system(nvml) == {"driver": "570.86.15", "driver's cuda": "12.8", "gpus": "2 × NVIDIA H100 80GB HBM3"}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = machine._versions(nvml, "")["problems"]
    assert problem["text"] == "the driver 570.86.15 supports CUDA 12.8, and torch is built for 13.0"
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    (problem,) = machine._versions(nvml, "")["problems"]
    assert problem["text"].endswith("and torch finds no GPU")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    (problem,) = machine._versions(None, "compile.enabled")["problems"]
    assert (problem["code"], machine._versions(None, "")["problems"]) == ("compiler", [])


def test_without_the_package_nothing_is_read() -> None:
    with gpus.open_nvml() as nvml:
        assert nvml is None or gpus.system(nvml)


def test_disks_that_cannot_be_written_and_stores_that_lie_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = machine._measure_disk(str(tmp_path / "not" / "there"), 2)
    assert found["disks"][0]["path"] == str(tmp_path / "not" / "there"), "the disk it will be on"
    assert len(found["speeds"][f"disk sync {tmp_path}/not/there"]) == 2
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, 1 << 20))
    full = machine._measure_disk(str(tmp_path), 2)
    assert "speeds" not in full, "a full disk is not written to"
    (problem,) = machine._try_store("nothere://bucket")["problems"]
    assert problem["code"] == "store"
    monkeypatch.setattr(machine.storage, "read_bytes", lambda path: b"other")
    (problem,) = machine._try_store(str(tmp_path))["problems"]
    assert problem["text"] == f"{tmp_path}: compare: read other bytes than were written"
    assert [*tmp_path.iterdir()] == []


def test_limits_and_interfaces_are_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, speed, hardware in (("eth0", "100000", True), ("eth1", "100000", True), ("veth7", "-1", False)):
        folder = tmp_path / "class/net" / name
        (folder / "device" if hardware else folder).mkdir(parents=True)
        for file, text in (("operstate", "up"), ("speed", speed), ("mtu", "9000")):
            (folder / file).write_text(text + "\n")
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    found = machine._interfaces(str(tmp_path))
    assert found["facts"] == {"infiniband": "1 × 4: ACTIVE 400 Gb/sec (4X NDR)"}
    assert found["shown"] == {"interfaces": "eth0, eth1, veth7 (2 × 100000 Mb/s, MTU 9000)"}
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "sys").symlink_to(tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (65536, 65536))
    found = machine._limits(True, str(tmp_path))
    assert [one["code"] for one in found["problems"]] == ["shm", "memlock"]
    assert machine._limits(False, str(tmp_path))["problems"] == []


def test_a_device_that_computes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"device": "cpu", "local_rank": 0, "all": True, "repeats": 1, "config": None}

    def problems() -> list[dict[str, str]]:
        told = [part for part in load.device(task) if isinstance(part, dict)]
        return [problem for part in told for problem in part.get("problems", [])]

    assert problems() == []
    exact = torch.Tensor.__matmul__

    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = exact(a, b)
        if product.dtype == torch.float32:
            product[5, 7] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    (problem,) = problems()
    assert problem["text"] == "cpu: a product of integers in fp32 differs from float64's"


def test_places_are_told_by_torchrun_and_by_slurm() -> None:
    alone = place_of({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    assert (alone.rank, alone.world) == (0, 1), "a batch script is one process"
    numbers = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    place = place_of({**numbers, "MASTER_ADDR": "127.0.0.1"})
    assert (place.rank, place.world, place.local_rank, place.local_world) == (9, 16, 1, 8)
    assert place.address == "127.0.0.1"
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7",
            "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURMD_NODENAME": "n3", "SLURM_STEP_ID": "0"}  # fmt: skip
    place = place_of(step)
    assert (place.rank, place.world, place.local_world, place.node) == (3, 4, 1, "n3")
    assert place.start == place_of({**step, "SLURM_PROCID": "1", "SLURMD_NODENAME": "n1"}).start
    assert place.start != place_of({**step, "SLURM_STEP_ID": "1"}).start
    with pytest.raises(InputError, match=r"RANK: expected 0 to 1 \(WORLD_SIZE is 2\), got 2"):
        place_of({"RANK": "2", "WORLD_SIZE": "2"})
    with pytest.raises(InputError, match=r"WORLD_SIZE: expected a number, got ''"):
        place_of({"RANK": "2"})


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("10.0.0.7", ["10.0.0.8"], "10.0.0.7"),
        ("127.0.1.1", ["127.0.0.1", "10.0.0.8", "10.0.0.9"], "on the way to 10.0.0.8"),
        ("127.0.0.1", ["127.0.0.1", "::1"], "on the way to 127.0.0.1"),
    ],
)
def test_a_name_that_means_the_machine_itself_is_no_address(
    monkeypatch: pytest.MonkeyPatch, own: str, others: list[str], expected: str
) -> None:
    monkeypatch.setattr(address, "own_address", lambda towards: f"on the way to {towards}")
    assert address.reached_by(own, others) == expected


def test_a_large_disk_is_not_full_for_a_small_share() -> None:
    def full(free: int, total: int) -> bool:
        return fleet._is_full(Disk(path="/d", free=free, total=total))

    assert not full(40 << 40, 1 << 50)
    assert full(90 << 30, 1 << 50)
    assert full(4 << 30, 100 << 30)
    assert not full(6 << 30, 100 << 30)
