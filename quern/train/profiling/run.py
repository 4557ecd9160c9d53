"""Runs the real trainer briefly under ``torch.profiler``: same data and layout, a separate folder, no saves."""

from __future__ import annotations

import functools
import gc
import glob
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from quern import __version__, storage
from quern.errors import InputError
from quern.train.config import (
    CheckpointConfig,
    MetricsConfig,
    ProfileConfig,
    ResumeConfig,
    TrainConfig,
    ValidationConfig,
)
from quern.train.processes import launch
from quern.train.processes.agree import Agreement
from quern.train.processes.machine import collecting
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.profiling.account import Account, account
from quern.train.profiling.classes import MARK_DATA, MARK_UPDATE
from quern.train.profiling.limits import measure
from quern.train.profiling.losses import Setting
from quern.train.profiling.products import Shape
from quern.train.profiling.result import describe_ranks, slowest
from quern.train.setup import open_trainer
from quern.train.step.precision import precision_of
from quern.train.step.profile import recording
from quern.train.step.trace import STEP, read_trace
from quern.train.trainer import Trainer

__all__ = ["RESULT_FILE", "alone", "check_steps", "profile"]

RESULT_FILE = "profile.json"

#: Products are measured alone that take at least this share of a step.
_WORTH = 0.005
_MOST = 16


@dataclass(frozen=True)
class _Traced:
    """What a rank knows of its traced steps besides the trace."""

    path: str
    untraced_s: float | None
    """A step without the profiler."""
    tokens: int
    """A step's, of all ranks."""
    flops: float
    """The model's own a step, with the causal half of attention; recomputation not counted."""
    product_flops: float
    """Of them those of products with weights."""


def alone(config: TrainConfig, run_dir: str) -> TrainConfig:
    """The config of the same run as a fresh one in a separate folder, without saves and repeated checks."""
    return config.model_copy(
        update={
            "run_dir": run_dir,
            "init_from": None,
            "checkpoint": CheckpointConfig(interval=0, mode="sync"),
            "resume": ResumeConfig(),
            "data_skip": 0,
            "validation": ValidationConfig(interval=0),
            "metrics": MetricsConfig(tensorboard=False, live=False, peak_tflops=config.metrics.peak_tflops),
            "profile": ProfileConfig(),
            "verify_shards": False,
        }
    )


def check_steps(config: TrainConfig, steps: int, warm_up: int) -> None:
    """Raise :class:`InputError` if the run is shorter than its profile."""
    needed = warm_up + 1 + steps
    if config.steps < needed:
        raise InputError(
            f"steps: expected at least {needed}, for --warm-up {warm_up}, --steps {steps} and one in between, "
            f"got {config.steps}"
        )


def profile(config: TrainConfig, out: str, *, steps: int, warm_up: int) -> dict[str, Any]:
    """Trace ``steps`` steps after ``warm_up`` untraced ones and one in between; ``out`` gets ``trace_rank*.json`` and
    :data:`RESULT_FILE`. Returns the profile. Collective.

    Raises:
        InputError: the config cannot be trained, or has too few steps.
    """
    check_steps(config, steps, warm_up)
    with launch.leaving(), open_ranks(config.device) as ranks:
        together = Agreement(ranks.rank, ranks.world)
        with _folder(out, ranks, together) as folder:
            traced = _trace(alone(config, folder), ranks, out, steps, warm_up)
        _free(ranks.device)
        accounts = together.gather_on_rank0(together.all_or_raise(lambda: account(read_trace(traced.path))))
        return together.broadcast_from_rank0(lambda: _conclude(config, accounts, traced, ranks, out))


@contextmanager
def _folder(out: str, ranks: Ranks, together: Agreement) -> Iterator[str]:
    """A run folder that is there while the trainer is, for all ranks; traces of an earlier profile are removed."""

    def prepared() -> str:
        os.makedirs(out, exist_ok=True)
        earlier = glob.glob(os.path.join(glob.escape(out), "trace_rank*.json"))
        if earlier and not os.path.isfile(os.path.join(out, RESULT_FILE)):
            raise InputError(f"--out: {out}: holds traces of something else ({earlier[0]}); give another folder")
        for path in earlier:
            os.unlink(path)
        return opened.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=out, ignore_cleanup_errors=True))

    with ExitStack() as opened:
        yield together.broadcast_from_rank0(prepared)
        ranks.barrier()


def _trace(config: TrainConfig, ranks: Ranks, out: str, steps: int, warm_up: int) -> _Traced:
    path, wait = os.path.join(out, f"trace_rank{ranks.rank}.json"), torch.get_device_module(ranks.device).synchronize
    with open_trainer(config, ranks) as trainer, collecting(config.process.gc_interval) as collect:  # as a run does
        _annotate(trainer)
        trainer.start_loop()
        began: list[float] = []
        for step in range(warm_up):
            trainer.train_step(step)
            collect(step)
            began.append(time.perf_counter())
        wait()
        untraced = (time.perf_counter() - began[0]) / (warm_up - 1) if warm_up > 1 else None
        with recording() as profiler:
            trainer.train_step(warm_up)  # what the profiler does at first is in none of the steps
            collect(warm_up)
            for step in range(warm_up + 1, warm_up + 1 + steps):
                with record_function(f"{STEP}{step}"):
                    trainer.train_step(step)
                    collect(step)
            wait()
        trainer.drain_metrics()
        profiler.export_chrome_trace(path)
        sequences = trainer.start.mixture.order.global_batch_at(trainer.data_step(warm_up + 1))
        tokens = sequences * config.seq_len
        shape = trainer.state.facts.shape
        head = 6 * shape.padded_vocab_size * shape.dim
        products = shape.flops_per_token(0, causal=True, head=False) + head
        return _Traced(path, untraced, tokens, trainer.utilisation.causal * tokens, products * tokens)


def _annotate(trainer: Trainer) -> None:
    """Names in the trace for what its operations alone do not tell."""
    trainer.feed.take = _named(trainer.feed.take, MARK_DATA)  # type: ignore[method-assign]
    trainer.clip = _named(trainer.clip, MARK_UPDATE)  # type: ignore[method-assign]
    trainer.update = _named(trainer.update, MARK_UPDATE)  # type: ignore[method-assign]
    trainer.guard.judge = _named(trainer.guard.judge, MARK_UPDATE)  # type: ignore[method-assign]


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return annotated


def _conclude(config: TrainConfig, accounts: list[Account], traced: _Traced, ranks: Ranks, out: str) -> dict[str, Any]:
    limits = measure(_shapes(accounts), precision_of(config.precision).compute, ranks.device)
    step_s = statistics.mean(accounts[0].steps) / 1e9
    executed = sum(p.flops for each in accounts for p in each.products) / len(accounts[0].steps)
    repeated = max(0.0, 1 - traced.product_flops / executed) if executed else 0.0
    setting = Setting(config.compile.enabled, config.activation_checkpointing, repeated)
    speed = traced.flops / ranks.world / (traced.untraced_s or step_s)
    cuda = ranks.device.type == "cuda"
    result = {
        "world": ranks.world,
        "machine": torch.cuda.get_device_name(ranks.device) if cuda else "CPU",
        "threads": torch.get_num_threads(),
        "versions": {"quern": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "precision": config.precision,
        "step_s": step_s,
        "untraced_step_s": traced.untraced_s,
        "tokens_per_s": traced.tokens / (traced.untraced_s or step_s),
        "model_tflops_per_rank": speed / 1e12,
        "of_best": None if limits.best is None else speed / limits.best,
        "product_flops": {"executed": executed, "model": traced.product_flops},
        **describe_ranks(accounts, limits, setting),
    }
    storage.write_json(os.path.join(out, RESULT_FILE), result)
    return result


def _shapes(accounts: list[Account]) -> list[Shape]:
    """Those worth measuring, of rank 0 and the slowest."""
    found: dict[Shape, None] = {}
    for each in (accounts[0], slowest(accounts)):
        found |= {p.shape: None for p in each.products[:_MOST] if p.shape and p.ns >= _WORTH * each.total_ns}
    return list(found)


def _free(device: torch.device) -> None:
    """Room for what is measured alone."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
