"""Writes metrics, one line per step: JSONL, TensorBoard, and a live line with the time left."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import torch

from quern import storage
from quern.errors import QuernError
from quern.model.config import ModelShape
from quern.train.config import MetricsConfig
from quern.train.history.ledger import nulled
from quern.train.trackers.board import FOLDER, Board

__all__ = ["Mark", "Metrics", "Utilisation", "memory_gib", "peak_flops"]

log = logging.getLogger(__name__)

#: Dense peaks in TFLOP/s by the first part that the device's name has: BF16/FP16 tensor cores, and FP32 outside them.
#: NVIDIA data sheets (A100 2021, H100 2023, H200 2024, B200 2024), without sparsity.
_PEAKS = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 80.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 67.0),  # GH200 too
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.4, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
)


def peak_flops(device: torch.device, precision: str, given_tflops: float | None) -> float | None:
    """Dense peak of one device in FLOP/s: as configured, else by the device's name, else None (never guessed)."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda" or precision == "fp64":
        return None
    name = torch.cuda.get_device_name(device)
    for part, half, single in _PEAKS:
        if part in name:
            return (single if precision == "fp32" else half) * 1e12
    return None


class Utilisation:
    """Model FLOPs utilisation in both conventions; recomputation is never counted.

    ``mfu_full`` counts the whole attention matrix (PaLM, appendix B; torchtitan, OLMo-core), ``mfu_causal`` the half
    that causal attention uses (Megatron-Bridge). Document masks lower neither.
    """

    def __init__(self, shape: ModelShape, seq_len: int, world: int, peak: float | None) -> None:
        self.full = shape.flops_per_token(seq_len, causal=False)
        self.causal = shape.flops_per_token(seq_len, causal=True)
        self.peak = peak
        self._world = world

    def of(self, tokens_per_s: float) -> dict[str, float | None]:
        """Both figures for ``tokens_per_s`` of the whole run; None where the peak is not known."""
        if self.peak is None:
            return {"mfu_full": None, "mfu_causal": None}
        share = tokens_per_s / (self._world * self.peak)
        return {"mfu_full": share * self.full, "mfu_causal": share * self.causal}

    def describe(self) -> dict[str, Any]:
        """How the figures are computed."""
        return {
            "formula": "tokens/s · FLOPs/token / (devices · peak); FLOPs/token = 6 N + 12 · layers · heads · head_dim "
            "· seq_len (full) or half of the second term (causal), N the parameters of blocks and output projection",
            "flops_per_token_full": self.full,
            "flops_per_token_causal": self.causal,
            "peak_flops_per_device": self.peak,
            "devices": self._world,
        }


class Mark:
    """This moment: on CUDA the one at which the device gets here, since the host runs ahead of it by up to a step, and
    a step that it only queues would seem to take no time."""

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has reached this mark."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        """Seconds between two marks that have passed."""
        if self._event is not None and earlier._event is not None:
            return float(earlier._event.elapsed_time(self._event)) / 1e3
        return self._host - earlier._host


def memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


class Metrics:
    """Writes the metrics of each step, on rank 0 only. Every other rank has none of these."""

    def __init__(
        self, run_dir: str, config: MetricsConfig, steps: int, *, board: str | None = None, first: int = 0
    ) -> None:
        """``board``: where TensorBoard's files go, None = the run's; ``first``: the step from which the run goes on."""
        self._path, self._folder = os.path.join(run_dir, "metrics.jsonl"), board or os.path.join(run_dir, FOLDER)
        try:
            self._file = open(self._path, "ab", 0, opener=storage.open_own)  # noqa: SIM115  (closed by close)
        except OSError as error:
            raise QuernError(f"{self._path}: cannot be written ({error.strerror})") from None
        self._board = Board(self._folder, first) if config.tensorboard else None
        self._told: set[str] = set()
        """Of which it has been said that they cannot be written."""
        self._live = config.live
        self._steps = steps
        self._began = time.monotonic()
        self._first: int | None = None
        self._shown = 0.0

    def report(self, row: Mapping[str, Any]) -> None:
        """One step; ``row`` is plain data with ``step`` and ``loss``."""
        row, step = {"kind": "step", **nulled(row)}, int(row["step"])
        self._first = step if self._first is None else self._first
        self._write(row)
        self._draw(row)
        self._show(row, step)

    def validation(self, step: int, losses: Mapping[str, Any]) -> None:
        """Held-out loss after ``step`` completed steps: ``loss``, and by source."""
        losses = nulled(losses)
        row = {"kind": "validation", "step": step, **losses}
        self._write(row)
        self._draw(row)
        if self._live:
            self._clear()
            loss = f"{losses['loss']:.4f}" if losses["loss"] is not None else "not finite"
            _tell(f"step {step:,}  held-out loss {loss} over {losses['tokens']:,} tokens\n")

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        with self._tried(self._folder):
            if self._board is not None:
                self._board.close()
        self._clear()

    def _write(self, row: Mapping[str, Any]) -> None:
        timed = {**row, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line, size = json.dumps(timed, allow_nan=False).encode() + b"\n", os.fstat(self._file.fileno()).st_size
        with self._tried(self._path):
            try:
                written = 0
                while written < len(line):
                    written += self._file.write(line[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), size)  # half a line would damage the next one
                raise

    def _draw(self, row: Mapping[str, Any]) -> None:
        """Put a line's numbers on the board; after an error it takes no more."""
        if self._board is None or self._folder in self._told:
            return
        with self._tried(self._folder):
            self._board.draw(row)

    @contextmanager
    def _tried(self, path: str) -> Iterator[None]:
        """What the system refuses is said once, and ends no run: checkpoints and ledger say what can go on."""
        try:
            with storage.needs_room(path):
                yield
        except OSError as error:
            if path not in self._told:
                why = str(error) if isinstance(error, storage.FullError) else f"{path}: {error.strerror or error}"
                log.warning("metrics are missing from here on: %s", why)
            self._told.add(path)

    def _show(self, row: Mapping[str, Any], step: int) -> None:
        now, last = time.monotonic(), step + 1 == self._steps
        terminal = sys.stderr.isatty()
        if not self._live or (now - self._shown < (0.2 if terminal else 10) and not last):
            return
        self._shown = now
        done = step + 1 - (self._first or 0)
        left = (now - self._began) / done * (self._steps - step - 1)
        norm = f"{row['grad_norm']:.3f}" if row["grad_norm"] is not None else "not finite"
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else "not finite"
        loss = loss if row.get("valid_tokens", 1) else "none (no target)"
        mfu = f"  MFU {100 * row['mfu_full']:.1f} %" if row.get("mfu_full") else ""
        text = (
            f"step {step + 1:,}/{self._steps:,}  loss {loss}  norm {norm}  lr {row['lr']:.2e}  "
            f"{row['tokens_per_s']:,.0f} tokens/s{mfu}  {timedelta(seconds=round(left))} to go"
        )
        _tell("\r\x1b[K" + text if terminal else text + "\n")

    def _clear(self) -> None:
        if self._live and sys.stderr.isatty():
            _tell("\r\x1b[K")


def _tell(text: str) -> None:
    with suppress(OSError):  # the terminal may have been closed, and the run is to be saved all the same
        print(text, end="", file=sys.stderr, flush=True)
