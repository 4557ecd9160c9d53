"""A training run small enough for a test, stopped and taken up again as a test wishes, and all it leaves behind."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.train import corpora as CORPORA

STEPS = 9
MODEL = {"num_layers": 1, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": True, "vocab_multiple": 64}

Merged = dict[str, Any]


class KilledError(Exception):
    """What ends a run as a power cut would: nothing of the trainer's own ending takes place."""


def write_corpus(folder: Path, sources: Mapping[str, int] | None = None, seed: int = 1, **options: Any) -> list[str]:
    """A data run; ``sources``: documents a shard, of two shards. Returns the paths."""
    rng = random.Random(seed)
    made = {
        name: CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(size)] for _ in range(2)], purged=0.05)
        for name, size in (sources or {"web": 60, "code": 25}).items()
    }
    return CORPORA.write_run(folder, made, **options)


def settings(run_dir: Path | str, paths: list[str], **changes: Any) -> TrainConfig:
    """A config; ``changes`` are merged into it, mapping by mapping."""
    base: Merged = {
        "run_dir": str(run_dir),
        "data": [{"path": p, "weight": w, "max_epochs": 100} for p, w in zip(paths, (3, 1), strict=False)],
        "model": MODEL, "seq_len": 32, "global_batch": 8, "micro_batch": 4, "steps": STEPS, "seed": 5,
        "precision": "fp32", "device": "cpu", "optimizer": {"lr": 0.01}, "schedule": {"warmup": 3},
        "process": {"gc_interval": 0},
        "guard": {"window": 8, "min_history": 4}, "checkpoint": {"interval": 0, "keep_last": 20, "mode": "sync"},
        "validation": {"interval": 0, "windows": 3}, "metrics": {"tensorboard": False, "live": False},
    }  # fmt: skip
    return TrainConfig.model_validate_json(json.dumps(_merge(base, changes)))


def _merge(base: Merged, changes: Mapping[str, Any]) -> Merged:
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def nan_at_5(data_step: int) -> float:
    """For the ``factor`` of :func:`live`."""
    return float("nan") if data_step == 5 else 1.0


@dataclass
class Left:
    """What one life of a trainer leaves in memory: on this rank."""

    start: Any = None
    complete: bool = False
    stopped_by: str | None = None
    samples: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """By data step that the loop took: (place in the global batch, source, epoch, window) of this rank's share."""
    tokens: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """By data step and place in the global batch, the inputs."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights, moments, counters, the guard's history, the loss scale; whole, not sharded."""


def live(
    config: TrainConfig,
    *,
    kill_at: int | None = None,
    stop_at: int | None = None,
    factor: Callable[[int], float] = lambda data_step: 1.0,
) -> Left:
    """One life: to the end, or killed in step ``kill_at``, or asked to stop (SIGTERM) in step ``stop_at``.

    ``factor(data_step)``: by what that step's gradients are multiplied (NaN: a step to skip).
    """
    left = Left()

    def look(trainer: Trainer, step: int) -> None:
        if step == kill_at:
            raise KilledError
        if step == stop_at:
            signal.raise_signal(signal.SIGTERM)
        if (scale := factor(trainer.data_step(step))) != 1:
            for parameter in trainer.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scale)

    with open_ranks(config.device) as ranks, open_trainer(config, ranks) as trainer:
        left.start = trainer.start
        _record(trainer, left)
        trainer.on_gradients = look
        try:
            trainer.fit()
        except KilledError:
            return left
        left.complete, left.stopped_by = trainer.complete, trainer.stopped_by
        left.state = state_of(trainer)
    return left


def taken_by(lives: Iterable[Left]) -> dict[int, list[tuple[int, int, int, int]]]:
    """The samples of every data step that one of these lives took."""
    return {step: samples for life in lives for step, samples in life.samples.items()}


def _record(trainer: Trainer, left: Left) -> None:
    """Note what the loader gave for the steps that the loop took; it reads ahead of the loop."""
    given: dict[int, list[tuple[int, int, int, int]]] = {}
    inputs: dict[int, dict[int, list[int]]] = {}
    loader, feed = trainer.feed._loader, trainer.feed
    make, take = loader.take, feed.take

    def made(data_step: int) -> Any:
        batch = make(data_step)
        given[data_step] = sorted(
            (int(place), int(source), int(epoch), int(window))
            for micro in batch.micro_batches
            for place, source, epoch, window in zip(
                micro.indices, micro.sources, micro.epochs, micro.windows, strict=True
            )
        )
        inputs[data_step] = {
            int(place): row.tolist()
            for micro in batch.micro_batches
            for place, row in zip(micro.indices, micro.tokens_BL, strict=True)
        }
        return batch

    def taken(data_step: int) -> Any:
        batch = take(data_step)
        left.samples[data_step] = given[data_step]
        left.tokens[data_step] = inputs[data_step]
        return batch

    loader.take, feed.take = made, taken  # type: ignore[method-assign]


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Collective on a sharded layout."""
    state = {f"guard.{name}": value.clone() for name, value in trainer.guard.state_dict().items()}
    state |= {f"loss_scale.{name}": value.clone() for name, value in trainer.loss_scale.state_dict().items()}
    for name, parameter in trainer.parallel.weights.named_parameters():
        state[f"model.{name}"] = _whole(parameter)
        for slot, value in trainer.optimizer.state[parameter].items():
            state[f"{slot}.{name}"] = _whole(value)
    buffers = dict(trainer.parallel.weights.named_buffers())
    return state | {f"model.{name}": value.clone() for name, value in buffers.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def ledger(run_dir: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "ledger.jsonl").read_text().splitlines()]


def told(run_dir: Path | str, *kinds: str) -> list[int]:
    """Of which steps the ledger's lines of these kinds are."""
    return [entry["step"] for entry in ledger(run_dir) if entry["kind"] in kinds]


def timeless(run_dir: Path | str) -> list[dict[str, Any]]:
    """The ledger without times."""
    return [{name: value for name, value in entry.items() if name != "time"} for entry in ledger(run_dir)]


def steps_of(run_dir: Path | str) -> list[int]:
    """After which steps there are checkpoints."""
    return [checkpoint.step for checkpoint in list_checkpoints(str(run_dir))]


def folders(run_dir: Path | str) -> list[str]:
    """Those of checkpoints, also of saves in work, whose names begin with a dot."""
    return sorted(path.name for path in Path(run_dir, "checkpoints").iterdir() if path.is_dir())


FACTS = ("data_step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "skipped", "non_finite", "loss_spike")


def rows(run_dir: Path | str) -> dict[int, dict[str, Any]]:
    """By step, what the last attempt that took it says of it, without times; held-out losses by ``-step``."""
    found: dict[int, dict[str, Any]] = {}
    for line in Path(run_dir, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "validation":
            found[-row["step"]] = {name: row[name] for name in ("loss", "tokens", "sources")}
        else:
            found[row["step"]] = {name: row[name] for name in FACTS}
            found[row["step"]] |= {name: row.get(name) for name in ("loss_scale", "experts")}
    return found


def differences(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not the same bits."""
    names = sorted(state.keys() | other.keys())
    return [n for n in names if n not in state or n not in other or not _same_bits(state[n], other[n])]


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return tensor.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))


def worst_ratio(state: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Largest ``max |a - b| / max |b|`` of all tensors; infinite if the names differ."""
    if state.keys() != other.keys():
        return float("inf")
    ratios = []
    for name, tensor in state.items():
        scale = other[name].double().abs().max().item()
        gap = (tensor.double() - other[name].double()).abs().max().item()
        ratios.append(gap / scale if scale else (0.0 if gap == 0 else float("inf")))
    return max(ratios)
