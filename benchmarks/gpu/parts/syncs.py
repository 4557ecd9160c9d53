"""Whether the host waits for the GPU in a training step: torch says where (``torch.cuda.set_sync_debug_mode``)."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from runner import ROOT

from parts import SkipError
from parts.common import gpu
from parts.training import trainer_of

#: Steps that may wait: they fill caches, compile, and find out sizes.
FREE = 3


def waits(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Places of the checkout at which the host has waited in the steps after the first; one line without a place where
    it never has."""
    cuda = gpu(spec).type == "cuda"
    with tempfile.TemporaryDirectory() as folder, trainer_of(spec, folder) as trainer:
        for step in range(FREE):
            trainer.train_step(step)
        with watched(cuda) as places:
            for step in range(FREE, spec["steps"]):
                trainer.train_step(step)
    if not cuda:
        raise SkipError("needs CUDA: the steps ran, and a CPU has nothing to wait for")
    steps = spec["steps"] - FREE
    if not places:
        return [{"steps": steps, "waits": 0, "at": None, "passes": True}]
    return [{"steps": steps, "waits": count, "at": place, "passes": False} for place, count in places.most_common()]


@contextmanager
def watched(cuda: bool) -> Iterator[Counter[str]]:
    """How often the host has waited, by the innermost places of the checkout that led there."""
    places: Counter[str] = Counter()

    def hear(message: Any, *_args: Any, **_kwargs: Any) -> None:
        if "called a synchronizing" in str(message):  # not what torch says of the mode itself
            places[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if cuda:
                torch.cuda.set_sync_debug_mode("default")


def place() -> str:
    own = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT / "quern"))]
    said = [f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno}" for frame in own[-2:]]
    return " > ".join(said) or "outside of quern"
