"""Runs with a bit that flips on one rank while a micro-batch is computed; imports no oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from quern.errors import GoBackError
from quern.model.transformer import RMSNorm
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.train import run_case

QUIET = {"guard": {"loss_z": 1e9, "grad_norm_z": 1e9}, "forensics": {"window": 0}}


@dataclass(frozen=True)
class Fault:
    """A bit of what a module gives (``activation``), of its output's gradient (``backward``) or of its weight's
    gradient (``gradient``)."""

    rank: int
    module: str
    kind: str
    element: int
    bit: int
    step: int
    """The first that has it."""
    call: int | None
    """Which forward of the module in that step; None = all, in all later steps too."""


class Injector:
    """Flips bits of what a module computes, as its fault says; ``flipped``: how often it has."""

    def __init__(self, module: nn.Module, fault: Fault | None = None) -> None:
        self.fault, self.step, self.call, self.flipped = fault, -1, 0, 0
        module.forward = self._around(module, module.forward)  # type: ignore[method-assign]

    def begin(self, step: int) -> None:
        self.step, self.call = step, 0

    def flip(self, tensor: torch.Tensor) -> torch.Tensor:
        fault = self.fault
        assert fault is not None
        spoiled = tensor.detach().clone(memory_format=torch.contiguous_format)
        width = 8 * spoiled.element_size()
        raw = spoiled.view(-1).view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
        bit = fault.bit % width
        raw[fault.element % len(raw)] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
        self.flipped += 1
        return spoiled

    def _around(self, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, *rest: Any) -> Any:
            fault = self.fault
            if fault is None:
                return plain(x, *rest)
            now = self.step >= fault.step and (fault.call is None or (self.step, self.call) == (fault.step, fault.call))
            self.call += 1
            if not now:
                return plain(x, *rest)
            if fault.kind == "activation":
                return _Flipped.apply(plain(x, *rest), self, True)
            if fault.kind == "backward":
                return _Flipped.apply(plain(x, *rest), self, False)
            weight: Any = _Flipped.apply(module.weight, self, False)
            if isinstance(module, RMSNorm):
                return F.rms_norm(x.to(weight.dtype), weight.shape, weight, module.eps).to(x.dtype)
            return F.linear(x, weight.to(x.dtype))

        return forward


class _Flipped(torch.autograd.Function):
    """Flips in forward, or in what backward passes on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, injector: Injector, now: bool) -> torch.Tensor:
        ctx.injector, ctx.now = injector, now
        return injector.flip(x) if now else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient if ctx.now else ctx.injector.flip(gradient), None, None


def settings(run: str, paths: list[str], changes: dict[str, Any]) -> TrainConfig:
    return run_case.settings(run, paths, **{**QUIET, **changes})


def life(run: str, paths: list[str], changes: dict[str, Any], fault: Fault | None = None) -> dict[str, Any]:
    """What a run to its end, or to what it finds, leaves on this rank."""
    config = settings(run, paths, changes)
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        injectors = []
        if fault is not None and fault.rank == rank:
            injectors.append(Injector(trainer.model.get_submodule(fault.module), fault))
        step = trainer.train_step

        def told(number: int) -> None:
            for own in injectors:
                own.begin(number)
            step(number)

        trainer.train_step = told  # type: ignore[method-assign]
        drawn = torch.get_rng_state()
        left: dict[str, Any] = {"error": "", "state": {}}
        try:
            trainer.fit()
            left["state"] = run_case.state_of(trainer) | _extra(trainer)
        except GoBackError as error:
            left["error"] = str(error)
        assert torch.equal(drawn, torch.get_rng_state())
        seen = [vars(own) for own in trainer.recomputation.found]
        return left | {
            "found": seen,
            "flipped": sum(own.flipped for own in injectors),
            "since": trainer.recomputation.since,
        }


def _extra(trainer: Trainer) -> dict[str, torch.Tensor]:
    amaxes = trainer.parallel.amaxes
    return {} if amaxes is None else {"float8.history": amaxes.history.clone()}
