"""How long a save holds up training that goes on beside it, with the state of a large model on the device."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint_stall import Ours, state_of

from parts.common import gpu
from quern.train.checkpoint.format.state import view_tensors


def stall(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Saves in ``mode``. A step is products for a while, then a change of every weight; a save begins after one, and
    its copy is waited for before the next one's change. ``stall s``: by how much the steps until the save is published
    took longer than as many without a save."""
    device = gpu(spec)
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        with device:
            state = state_of(spec["gb"], folder)
        size = sum(tensor.nbytes for tensor in view_tensors(state).tensors.values()) / 1e9
        steps = Steps(device, list(state.model.parameters()), spec["step_s"])
        saver = Ours(f"{folder}/run", spec["mode"], state)
        try:
            found = [measure(steps, saver) for _ in range(spec["saves"] + 1)]
        finally:
            saver.close()
    warm, rest = found[0], found[1:]
    middle = {name: statistics.median(one[name] for one in rest) for name in warm}
    return [{
        "mode": spec["mode"], "GB": size, "step s": steps.seconds, "first stall s": warm["stall s"], **middle,
        "stall s/GB": middle["stall s"] / size,
    }]  # fmt: skip


class Steps:
    """Products for ``seconds`` or so, and then a change of every weight."""

    def __init__(self, device: torch.device, parameters: list[torch.nn.Parameter], seconds: float) -> None:
        self.device, self.parameters = device, parameters
        size = 4096 if device.type == "cuda" else 256
        self.left, self.right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        self.products = 8
        self.compute()
        one = self.timed(self.compute) / self.products
        self.products = max(1, round(seconds / one))
        self.seconds = statistics.median(self.timed(self.step) for _ in range(5))

    def compute(self) -> None:
        for _ in range(self.products):
            self.left @ self.right

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_add_(self.parameters, 1e-3)

    def step(self) -> None:
        self.compute()
        self.update()

    def timed(self, call: Any) -> float:
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # copies of a save go on beside it


def measure(steps: Steps, saver: Any) -> dict[str, float]:
    steps.step()
    steps.wait()
    began = time.perf_counter()
    saver.begin()
    returned = time.perf_counter()
    count, held, ended = 0, returned - began, False
    while not ended:
        took = time.perf_counter()
        steps.compute()
        saver.copied()
        steps.update()
        steps.wait()
        ended = saver.ended()
        held += time.perf_counter() - took - steps.seconds
        count += 1
    published = time.perf_counter() - began
    shutil.rmtree(Path(saver.manager.root, f"step_{saver.step:08d}"))
    return {"begin s": returned - began, "stall s": held, "published s": published, "steps beside": count}
