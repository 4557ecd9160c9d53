"""A GPU that fails beside a run ends it after a save. NVML is stood in for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.errors import FAILING, DeviceError
from quern.train.processes.gpus import watched
from quern.train.processes.ranks import Ranks
from quern.train.supervision import device_watch
from quern.train.supervision.device_watch import DeviceWatch, failure
from quern.train.trainer import Trainer
from support.nvml import Driver
from support.train import run_case as case
from support.waits import until

PCI = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {}, None),
        ({"ecc": 3}, {"ecc": 3}, None),  # of before the run
        ({"ecc": 3}, {"ecc": 5}, "2 uncorrected memory errors"),
        ({"ecc": None, "rows": None}, {"ecc": None, "rows": None}, None),
        ({}, {"rows": (1, 1, 1, 0)}, None),  # remapped, as it should be
        ({"rows": (0, 1, 0, 1)}, {"rows": (0, 1, 0, 1)}, None),
        ({}, {"rows": (0, 1, 0, 1)}, "a row of its memory could not be remapped"),
        ({}, {"xids": [13, 31]}, None),  # a program's fault
        ({}, {"xids": [13, 79, 48]}, "XID 48, 79"),
        ({}, {"why": 0x40}, None),
        ({}, {"clock": None}, "it does not answer NVML any more"),
    ],
)
def test_what_makes_a_gpu_one_that_fails(before: dict[str, Any], after: dict[str, Any], found: str | None) -> None:
    driver = Driver()
    with watched(driver, PCI) as state:
        vars(driver).update(before)
        first = state()
        vars(driver).update(after)
        assert failure(first, state()) == found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    monkeypatch.setattr(device_watch, "pci_address", lambda device: PCI)
    return made


def test_it_is_watched_beside_the_run(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), DeviceWatch(0.01, Ranks(3, 4, torch.device("cuda", 1))) as watch:
        driver.why = 0x40
        until(lambda: "the clock of its GPU is slowed by temperature (hardware)" in caplog.text)
        driver.why = 0
        until(lambda: "free again" in caplog.text)
        assert watch.failing is None
        driver.ecc = 2
        until(lambda: watch.failing is not None)
    assert watch.failing == "2 uncorrected memory errors"
    assert "rank 3: its GPU fails: 2 uncorrected memory errors" in caplog.text
    until(lambda: driver.events == 0)


@pytest.mark.parametrize(("interval_s", "device"), [(0.0, "cuda"), (0.01, "cpu")])
def test_nothing_is_watched(driver: Driver, interval_s: float, device: str) -> None:
    driver.xids = [79]
    with DeviceWatch(interval_s, Ranks(0, 1, torch.device(device))) as watch:
        assert watch._thread is None


def test_the_run_is_saved_and_left_and_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = case.write_corpus(tmp_path / "data")
    config = case.settings(tmp_path / "run", paths)
    plain = Trainer.clip

    def fails(self: Trainer, step: int) -> torch.Tensor:
        if step == 4:
            self.device_watch.failing = "XID 79"
        return plain(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "clip", fails)
        with pytest.raises(DeviceError, match=r"the GPU of rank 0 on .* fails: XID 79; a checkpoint after step 7 "):
            case.live(config)
    assert DeviceError.exit_code == FAILING
    last = case.ledger(tmp_path / "run")[-1]
    assert (last["kind"], last["step"]) == ("stopped", 7)
    assert "the GPU of rank 0" in last["signal"]
    assert case.steps_of(tmp_path / "run") == [7]
    left, straight = case.live(config), case.live(case.settings(tmp_path / "straight", paths))
    assert case.differences(left.state, straight.state) == []
