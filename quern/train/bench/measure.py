"""Measures one row on its ranks: the trainer's own steps over an existing data run, without saves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from quern.model.init import STD
from quern.model.transformer import Transformer
from quern.parallel.clip import local_part
from quern.parallel.planning.mesh import plan_mesh
from quern.train.bench.figures import figures
from quern.train.bench.machine import describe_machine
from quern.train.config import TrainConfig
from quern.train.processes.agree import Agreement
from quern.train.processes.machine import collecting
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.setup import open_trainer
from quern.train.step.metrics import memory_gib, peak_flops

__all__ = ["draw_on_device", "measure"]


def measure(config: TrainConfig, warm_up: int) -> dict[str, Any]:
    """The figures of all steps of ``config`` but the first ``warm_up``; complete on rank 0. Collective over the ranks
    of the environment.

    Step times are of the device's clock on CUDA (:class:`quern.train.step.metrics.Mark`). Memory is of the whole run,
    warm-up and compilation included: what has to fit.

    Raises:
        QuernError: as :func:`quern.train.setup.open_trainer`.
    """
    began = time.perf_counter()
    with open_ranks(config.device) as ranks:
        with open_trainer(config, ranks, draw_on_device) as trainer:
            before_s = 0.0
            trainer.start_loop()
            opened_s = time.perf_counter() - began
            with collecting(config.process.gc_interval) as collect:  # as a run does
                for step in trainer.steps():
                    before_s = trainer.feed.waited_s if step == warm_up else before_s
                    trainer.train_step(step)
                    collect(step)
            trainer.drain_metrics()
            waited_s = (trainer.feed.waited_s - before_s) / (config.steps - warm_up)
            shape = trainer.state.facts.shape
        together = Agreement(ranks.rank, ranks.world)
        shares = together.gather((memory_gib(ranks.device), _reserved_gib(ranks), waited_s))
        machine = describe_machine(ranks)
        if not ranks.first:
            return {}
        rows = [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
        measured = [row for row in rows if row["kind"] == "step"][warm_up:]
        plan = plan_mesh(config.parallel, ranks.world)
        found = figures(
            shape, [row["step_time_s"] for row in measured],
            tokens=config.global_batch * config.seq_len, seq_len=config.seq_len, world=ranks.world,
            peak=peak_flops(ranks.device, config.precision, config.metrics.peak_tflops),
        )  # fmt: skip
        memory, reserved, waits = zip(*shares, strict=True)
        return {
            **found,
            "layers": shape.num_layers, "parameters": shape.num_parameters, "vocab_size": shape.vocab_size,
            "layout": plan.sizes(), "layout_text": str(plan),
            "accumulate": config.global_batch // plan.dp_size // config.micro_batch,
            "memory_gib": max(memory), "memory_rank": memory.index(max(memory)),
            "reserved_gib": None if None in reserved else max(reserved),
            "data_wait_s": max(waits), "data_wait_share": max(waits) / found["step_time_s"],
            "opened_s": opened_s, "first_step_s": rows[0]["step_time_s"],
            "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"],
            "not_finite": sum(row["non_finite"] for row in measured),
            "machine": machine,
        }  # fmt: skip


@torch.no_grad()
def draw_on_device(model: Transformer, seed: int) -> None:
    """Matrices from one normal distribution, norms 1, by the device's own generator: no run's weights, but as large,
    and in no time. Every rank draws its own part from the same seed, so that replicas are equal; the two copies of an
    embedding that is tied across a pipeline are not."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        local = local_part(parameter)
        if parameter.ndim > 1:
            local.normal_(0, STD, generator=generator)
        else:
            local.fill_(1.0)
    for buffer in model.buffers():
        buffer.zero_()


def _reserved_gib(ranks: Ranks) -> float | None:
    """What the allocator has taken from the GPU at most."""
    return torch.cuda.max_memory_reserved(ranks.device) / 2**30 if ranks.device.type == "cuda" else None
