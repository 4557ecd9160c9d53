"""Metrics: lines a JSON parser takes, both MFU conventions by hand and as published, the board, the live line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.model.config import ModelConfig, ModelShape
from quern.train.config import MetricsConfig
from quern.train.step.metrics import Mark, Metrics, Utilisation, memory_gib, peak_flops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step, "data_step": step, "loss": 4.5 - step, "grad_norm": 1.25, "lr": 3e-4, "tokens": 100 * (step + 1),
        "tokens_per_s": 1234.5, "data_wait_s": 0.001, "memory_gib": 0.5, "mfu_full": None, "mfu_causal": None, **values,
    }  # fmt: skip


def strict(line: str) -> dict[str, Any]:
    """JSON by the letter: Python's parser alone would take NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def quiet(**values: bool) -> MetricsConfig:
    return MetricsConfig(**{"tensorboard": False, "live": False, **values})


def opened(folder: Path, steps: int = 3, **values: bool) -> contextlib.closing[Metrics]:
    return contextlib.closing(Metrics(str(folder), quiet(**values), steps=steps))


# --- lines -----------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_null(tmp_path):
    with opened(tmp_path) as metrics:
        metrics.report(row(0, loss=math.nan, grad_norm=math.inf, non_finite=True))
        metrics.report(row(1, grad_norm=-math.inf))
    first, second = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert first["non_finite"] is True
    assert second["grad_norm"] is None
    assert second["loss"] == 3.5
    assert first["kind"] == second["kind"] == "step"


def test_a_validation_that_is_not_finite_is_null_in_every_source(tmp_path):
    with opened(tmp_path) as metrics:
        metrics.validation(2, {"loss": math.nan, "tokens": 7, "sources": {"web": {"loss": math.inf, "tokens": 7}}})
    (line,) = map(strict, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["kind"] == "validation"
    assert line["step"] == 2
    assert line["loss"] is None
    assert line["sources"] == {"web": {"loss": None, "tokens": 7}}


def test_a_held_out_loss_that_is_not_finite_is_said(tmp_path, capfd):
    with opened(tmp_path, live=True, tensorboard=True) as metrics:
        metrics.validation(2, {"loss": math.nan, "tokens": 7, "sources": {"web": {"loss": math.nan, "tokens": 7}}})
    assert capfd.readouterr().err == "step 2  held-out loss not finite over 7 tokens\n"


def test_lines_are_there_before_the_end_and_a_restart_appends(tmp_path):
    with opened(tmp_path) as metrics:
        metrics.report(row(0))
        assert strict((tmp_path / "metrics.jsonl").read_text())["step"] == 0  # flushed: a killed run keeps its lines
    again = Metrics(str(tmp_path), quiet(), steps=3)
    again.report(row(1))
    again.close()
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["time"].endswith("+00:00") for line in lines)


# --- utilisation -----------------------------------------------------------------------------------------------------


def llama3_8b() -> ModelShape:
    return ModelConfig(preset="llama3-8b").shape(vocab_size=128_256)


def test_flops_a_token_of_llama3_8b_are_the_published_ones():
    """744 TFLOP/s at 14,451 tokens/s a device (Megatron-Bridge, sequences of 8192, causal half), and PaLM's formula."""
    used = Utilisation(llama3_8b(), 8192, world=1, peak=None)
    assert used.causal == pytest.approx(744e12 / 14_451, rel=2e-3)
    assert used.causal == pytest.approx(5.15e10, rel=1e-3)
    assert used.full == pytest.approx(5.79e10, rel=1e-3)


def test_both_conventions_by_hand():
    # matmuls: 4 layers of q, o 256 × 256, k, v 256 × 128, three of 256 × 768, two norms; the head 256 × 1000
    block = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768 + 2 * 256
    six_n = 6 * (4 * block + 1000 * 256)
    attention = 12 * 4 * 4 * 64 * 512
    used = Utilisation(ModelConfig(preset="debug").shape(1000), 512, world=8, peak=1e12)
    assert used.full == six_n + attention
    assert used.causal == six_n + attention / 2
    found = used.of(40_000.0)
    assert found["mfu_full"] == pytest.approx(5_000 * (six_n + attention) / 1e12, rel=1e-12)
    assert found["mfu_causal"] == pytest.approx(5_000 * (six_n + attention / 2) / 1e12, rel=1e-12)


def test_without_a_peak_there_is_no_utilisation():
    assert peak_flops(CPU, "fp32", None) is None
    assert Utilisation(llama3_8b(), 8192, 1, None).of(1e6) == {"mfu_full": None, "mfu_causal": None}


def test_a_peak_that_is_given_counts_on_any_device():
    assert peak_flops(CPU, "bf16", 0.25) == 0.25e12
    assert peak_flops(CUDA, "fp64", 67.0) == 67e12


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA H200 NVL", 835.5e12, 60e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA GH200 480GB", 989.4e12, 67e12),
        ("NVIDIA B200", 2250e12, 80e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA RTX 9999", None, None),
    ],
)
def test_peaks_by_the_names_that_devices_give_themselves(name, half, single, monkeypatch):
    """Dense figures of NVIDIA's data sheets."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, "bf16", None) == half
    assert peak_flops(CUDA, "fp16", None) == half
    assert peak_flops(CUDA, "fp32", None) == single
    assert peak_flops(CUDA, "fp64", None) is None


@pytest.mark.slow
def test_memory_is_that_of_the_process():
    before = memory_gib(CPU)
    resident = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    assert before >= 0.99 * resident / 2**20
    held = torch.ones(2**27)  # half a GiB, every page written
    assert memory_gib(CPU) >= max(before, resident / 2**20 + 0.45)  # the most so far may be of before
    del held


# --- board and live line ---------------------------------------------------------------------------------------------


def test_tensorboard_reads_the_board(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with opened(tmp_path, tensorboard=True) as metrics:
        for step in range(3):
            metrics.report(row(step, mfu_full=0.4 if step else None))
        metrics.validation(3, {"loss": 3.25, "tokens": 8, "sources": {"web": {"loss": 3.5, "tokens": 8}}})
        losses = {name: {"loss": value, "tokens": 4} for name, value in (("loss", 1.5), ("web", 2.5))}
        metrics.validation(4, {"loss": 2.0, "tokens": 8, "sources": losses})  # a source of that name
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()

    def values(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in board.Scalars(tag)]

    assert values("train/loss") == [(0, 4.5), (1, 3.5), (2, 2.5)]
    assert values("train/grad_norm") == [(0, 1.25), (1, 1.25), (2, 1.25)]
    assert values("train/mfu_full") == [(1, pytest.approx(0.4)), (2, pytest.approx(0.4))]
    assert values("validation/loss") == [(3, 3.25), (4, 1.5)]
    assert values("validation/web") == [(3, 3.5), (4, 2.5)]
    assert values("validation/loss of all sources") == [(4, 2.0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_board_on_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    gfile = pytest.importorskip("tensorboard.compat.tensorflow_stub.io.gfile")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    metrics = Metrics(str(tmp_path), quiet(tensorboard=True), steps=3)
    monkeypatch.setattr(gfile.LocalFileSystem, "append", full)
    assert metrics._board is not None
    metrics.report(row(0))
    with contextlib.suppress(OSError):  # its thread writes when it likes: now
        metrics._board.writer.flush()
    metrics.report(row(1))
    metrics.validation(2, {"loss": 3.25, "tokens": 8, "sources": {}})
    metrics.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"metrics are missing .*: {tmp_path}/tensorboard: No space left .* are free on /.*", said)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_lines_on_a_full_disk_are_whole_or_not_there(tmp_path, monkeypatch, caplog):
    metrics = Metrics(str(tmp_path), quiet(), steps=3)
    metrics.report(row(0))

    class Half:
        """Takes a few bytes, and then there is no room."""

        def __init__(self, file: Any) -> None:
            self.file, self.fileno, self.left = file, file.fileno, 5

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken, self.left = self.file.write(data[: self.left]), 0
            return taken

    with monkeypatch.context() as patched:
        patched.setattr(metrics, "_file", Half(metrics._file))
        metrics.report(row(1))
        metrics.report(row(2))
    metrics.report(row(3))
    metrics.close()
    assert [strict(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 3]
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path}/metrics.jsonl: No space left" in said


def test_no_board_and_no_line_when_they_are_off(tmp_path, capfd):
    with opened(tmp_path, steps=1) as metrics:
        metrics.report(row(0))
        metrics.validation(1, {"loss": 3.25, "tokens": 8, "sources": {}})
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_the_live_line_in_a_log_file(tmp_path, capfd):
    """Not a terminal: whole lines, the last step's always, none of the cursor's codes; stdout stays free."""
    with opened(tmp_path, live=True, steps=2) as metrics:
        metrics.report(row(0, mfu_full=0.4123))
        metrics.report(row(1, loss=math.nan, grad_norm=math.inf))
        metrics.validation(2, {"loss": 3.25, "tokens": 8000, "sources": {}})
    out, err = capfd.readouterr()
    assert out == ""
    assert "\x1b" not in err
    assert "\r" not in err
    first, last, held_out = err.splitlines()
    assert first.startswith("step 1/2  loss 4.5000  norm 1.250  lr 3.00e-04  1,234 tokens/s  MFU 41.2 %")
    assert last.startswith("step 2/2  loss not finite  norm not finite")
    assert last.endswith("0:00:00 to go")
    assert held_out == "step 2  held-out loss 3.2500 over 8,000 tokens"


def test_a_log_file_gets_a_line_in_ten_seconds_at_most(tmp_path, capfd):
    with opened(tmp_path, live=True, steps=100) as metrics:
        for step in range(50):
            metrics.report(row(step))
    assert len(capfd.readouterr().err.splitlines()) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_line_is_written_over(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with opened(tmp_path, live=True, steps=1) as metrics:
        metrics.report(row(0))
    assert terminal.getvalue().startswith("\r\x1b[Kstep 1/1  loss 4.5000")
    assert terminal.getvalue().endswith("\r\x1b[K")  # nothing half-written stays on the screen


# --- time ------------------------------------------------------------------------------------------------------------


class Device:
    """A GPU's clock, and events on it that know no other."""

    now_ms = 0.0

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            assert enable_timing  # without it CUDA refuses elapsed_time
            self.at: float | None = None
            self.waited = False

        def record(self) -> None:
            self.at = Device.now_ms

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, end: Device.Event) -> float:
            assert self.at is not None
            assert end.at is not None
            return end.at - self.at


def test_a_step_of_a_gpu_lasts_as_long_as_the_gpu_works(monkeypatch):
    """The host has queued the step and is back in no time."""
    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    Device.now_ms = 100.0
    began = Mark(CUDA)
    Device.now_ms = 1350.0
    ended = Mark(CUDA)
    ended.wait()
    assert ended._event.waited
    assert ended.since(began) == 1.25


def test_a_step_of_the_cpu_is_timed_by_its_clock(monkeypatch):
    times = iter([10.0, 12.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    began, ended = Mark(CPU), Mark(CPU)
    ended.wait()
    assert ended.since(began) == 2.5
