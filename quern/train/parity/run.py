"""Runs one case from config to last checkpoint on its ranks, and returns what each rank holds then."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import quern
from quern.parallel.clip import local_part
from quern.train.checkpoint.format.slices import StoredTensors, boxes
from quern.train.config import TrainConfig
from quern.train.parity.corpus import sources_of
from quern.train.parity.layouts import Layout
from quern.train.parity.matrix import STEPS, Case, Computation
from quern.train.parity.sizes import EXPERTS
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer

__all__ = [
    "LR",
    "MAX_NORM",
    "SEED",
    "WARMUP",
    "WEIGHT_DECAY",
    "Outcome",
    "Table",
    "case_config",
    "train",
    "train_alone",
]

SEED = 11
LR, WARMUP, MAX_NORM, WEIGHT_DECAY = 4e-3, 2, 0.05, 0.1
"""Every step is clipped, and warm-up ends in the run."""
POISONED = "blocks.0.attention.wq.weight"

Table = dict[str, torch.Tensor]
"""By global name; padding included."""


@dataclass
class Outcome:
    """The tensors of one rank after a run; or, assembled, the whole tensors."""

    package: str = ""
    """Which quern has run."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl; rank 0's."""
    kinds: tuple[str, ...] = ()
    """Of the ledger's entries; rank 0's."""
    gradients: list[Table] = field(default_factory=list)
    """Of every step, before clipping."""
    weights: Table = field(default_factory=dict)
    first_moments: Table = field(default_factory=dict)
    second_moments: Table = field(default_factory=dict)
    updates: Table = field(default_factory=dict)
    """AdamW's step counts."""
    written: dict[str, Table] = field(default_factory=dict)
    """``held-out figure``: the last validation's loss and targets; ``stored value``: the last checkpoint's tensors by
    their names there. Rank 0's."""
    routers: Table = field(default_factory=dict)
    """Biases of experts by name, and by layer what the routers of a model chose in the last step; the same on every
    rank."""
    digest: str = ""
    """Of all tensors: replicas must hold the same bits. A replica but the first sends nothing else."""

    @property
    def tables(self) -> dict[str, Table]:
        """The tensors by their kind."""
        gradients = {f"gradient step {step}": table for step, table in enumerate(self.gradients)}
        moments = {"first moment": self.first_moments, "second moment": self.second_moments}
        return {**gradients, "weight": self.weights, **moments, "updates": self.updates}


def config_of(
    computation: Computation, data: str, run_dir: str, device: str, parallel: dict[str, Any], **how: Any
) -> TrainConfig:
    return TrainConfig.model_validate({
        "run_dir": run_dir,
        "data": [{"path": f"{data}/tokens/{n}", "weight": w, "max_epochs": 1000}
                 for n, w in sources_of(computation.seq_len).items()],
        "document_mask": computation.mask,
        "phases": computation.phases(),
        "model": dict(computation.model) | ({"moe": EXPERTS[computation.experts][0]} if computation.experts else {}),
        "experts": EXPERTS[computation.experts][1] if computation.experts else {},
        "seq_len": computation.seq_len,
        "global_batch": computation.global_batch,
        "steps": STEPS,
        "seed": SEED,
        "precision": "fp64",
        "device": device,
        "loss_chunk": 23,
        "z_loss": computation.z_loss,
        "optimizer": {"lr": LR, "clip": MAX_NORM, "weight_decay": WEIGHT_DECAY},
        "schedule": {"kind": "cosine", "warmup": WARMUP},
        "parallel": parallel,
        "metrics": {"tensorboard": False, "live": False},
        **how,
    })  # fmt: skip


def case_config(case: Case, data: str, run_dir: str, device: str = "cpu") -> TrainConfig:
    """``data`` is a folder of :func:`quern.train.parity.corpus.write_corpus`."""
    layout = case.on
    parallel: dict[str, Any] = {
        "dp_replicate": layout.replicate, "dp_shard": layout.shard, "tp": layout.tp, "pp": layout.pp,
        "reshard_after_forward": layout.reshard, "zero": layout.zero, "tp_pieces": case.pieces,
        "cp": layout.cp, "cp_method": layout.method, "ulysses": layout.heads,
        "ep": layout.ep, "ep_node": layout.node,
    }  # fmt: skip
    if case.schedule is not None:
        parallel["schedule"] = case.schedule
    return config_of(
        case.computation, data, run_dir, device, parallel,
        micro_batch=case.micro_batch, activation_checkpointing=case.activation,
        float8={"recipe": case.float8, "all_gather": case.gather},
    )  # fmt: skip


def train(case: Case, data: str, run_dir: str, device: str = "cpu") -> Outcome:
    """Train one case."""
    return _train(case_config(case, data, run_dir, device), case.on, case.skip)


def train_alone(computation: Computation, data: str, run_dir: str, device: str = "cpu") -> Outcome:
    """Train the reference: one process without a mesh, the whole batch at once where that changes nothing."""
    config = config_of(
        computation, data, run_dir, device, {},
        micro_batch=computation.micro_batch or computation.global_batch, float8={"recipe": computation.float8},
    )  # fmt: skip
    return _train(config, Layout(grouped=False), computation.skip)


def _train(config: TrainConfig, layout: Layout, skip: int | None) -> Outcome:
    outcome = Outcome(str(quern.__file__))

    def look(trainer: Trainer, step: int) -> None:
        named = dict(trainer.model.named_parameters())
        outcome.gradients.append({name: _local(value.grad) for name, value in named.items()})
        if step == skip and layout.coordinates(trainer.ranks.rank)[2:] == (0, 0) and POISONED in named:
            grad = named[POISONED].grad  # the first element of the whole tensor, on every rank that holds it
            assert grad is not None
            local_part(grad)[0, 0] = torch.nan

    with open_ranks(config.device) as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = look
        trainer.fit()
        for name, value in trainer.model.named_parameters():
            slots = trainer.optimizer.state[value]
            outcome.weights[name] = _local(value)
            outcome.first_moments[name] = _local(slots["exp_avg"])
            outcome.second_moments[name] = _local(slots["exp_avg_sq"])
            outcome.updates[name] = _local(slots["step"])
        outcome.routers = {name: value.clone() for name, value in trainer.model.named_buffers()}
        if (loads := trainer.parallel.loads) is not None:
            outcome.routers |= {
                f"choices {layer}": row.clone() for layer, row in zip(loads.layers, loads.noted, strict=True)
            }
    outcome.digest = _digest(outcome)
    if ranks.first:
        rows = _lines(Path(config.run_dir, "metrics.jsonl"))
        outcome.rows = [row for row in rows if row["kind"] == "step"]
        held_out = next(row for row in rows if row["kind"] == "validation")
        outcome.written["held-out figure"] = {
            name: torch.tensor(held_out[name], dtype=torch.float64) for name in ("loss", "tokens")
        }
        stored = StoredTensors(str(next(Path(config.run_dir, "checkpoints").glob("step_*"))))
        sizes = {name: told.size for name, told in stored.tensors.items() if not name.startswith("extra.")}
        outcome.written["stored value"] = {n: stored.read(n, next(boxes(s, s.numel()))) for n, s in sizes.items()}
        outcome.kinds = tuple(entry["kind"] for entry in _lines(Path(config.run_dir, "ledger.jsonl")))
    first = layout.coordinates(ranks.rank)[1] == 0
    return outcome if first else Outcome(outcome.package, routers=outcome.routers, digest=outcome.digest)


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's piece; pieces are put together by :mod:`.compare`, not by what a tensor says of itself."""
    assert tensor is not None
    return local_part(tensor.detach()).cpu().clone()


def _digest(outcome: Outcome) -> str:
    found = hashlib.sha256()
    for what, table in outcome.tables.items():
        for name, tensor in table.items():
            found.update(f"{what} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
