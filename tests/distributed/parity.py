"""Cases of the whole trainer, and a run of each on the ranks of a gloo group; imports no oracle.

A case is a layout (how many ranks, what they share), how a step is computed on it (recomputation, micro-batches), and
what is computed (document masks, tied embeddings, sizes). Only the latter changes the result.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quern
from quern.parallel.data import unwrapped
from quern.train.config import TrainConfig
from quern.train.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer

STEPS, SEQ_LEN, SEED, VOCAB_SIZE = 3, 17, 11, 127
LR, WARMUP, MAX_NORM, WEIGHT_DECAY = 4e-3, 2, 0.05, 0.1
SOURCES = {"a": 0.5, "b": 0.3, "c": 0.2}
POISONED = "blocks.0.attention.wq.weight"


@dataclass(frozen=True)
class Layout:
    replicate: int = 1
    shard: int = 1
    reshard: bool | int = True
    grouped: bool = True
    """Whether there is a process group; without one the case runs in the test's own process."""

    @property
    def world(self) -> int:
        return self.replicate * self.shard


LAYOUTS = {
    "alone": Layout(grouped=False),
    "one": Layout(),
    "ddp2": Layout(replicate=2),
    "ddp3": Layout(replicate=3),
    "ddp4": Layout(replicate=4),
    "fsdp2": Layout(shard=2),
    "fsdp2keep": Layout(shard=2, reshard=False),
    "fsdp3": Layout(shard=3),
    "fsdp4": Layout(shard=4),
    "fsdp4keep": Layout(shard=4, reshard=False),
    "fsdp4by2": Layout(shard=4, reshard=2),
    "hsdp2x2": Layout(2, 2),
    "hsdp2x2keep": Layout(2, 2, reshard=False),
}

#: Nothing divides by the number of ranks that does not have to. ``slim`` leaves ranks without a row of some weights.
SIZES: dict[str, dict[str, Any]] = {
    "six": {"num_layers": 2, "dim": 30, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10, "ffn_dim": 61},
    "norm": {
        "num_layers": 2, "dim": 31, "num_heads": 6, "num_kv_heads": 2, "head_dim": 6, "ffn_dim": 45, "qk_norm": True,
    },
    "slim": {
        "num_layers": 1, "dim": 13, "num_heads": 5, "num_kv_heads": 1, "head_dim": 2, "ffn_dim": 7, "qk_norm": True,
    },
}  # fmt: skip

FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "activation": ("none", "full", "selective"),
    "accumulate": (1, 3),
    "mask": (True, False),
    "tied": (False, True),
    "sizes": tuple(SIZES),
}


@dataclass(frozen=True)
class Case:
    layout: str
    activation: str = "none"
    accumulate: int = 1
    mask: bool = True
    tied: bool = False
    sizes: str = "six"
    skip: int | None = None
    """A step with one gradient that is not a number."""
    ramp: bool = False
    """Twice the batch from step 1 on, another recipe from step 2 on."""

    def __str__(self) -> str:
        parts = [self.layout, self.activation, f"x{self.accumulate}", "mask" if self.mask else "whole"]
        parts += ["tied" if self.tied else "untied", self.sizes]
        parts += ["ramp"] if self.ramp else []
        return "-".join(parts if self.skip is None else [*parts, f"skip{self.skip}"])

    @property
    def on(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def global_batch(self) -> int:
        """Of the first step. 3 ranks with 3 micro-batches need a multiple of 9."""
        return 18 if self.on.world == 3 else 12

    @property
    def computed(self) -> Case:
        """The same computation by itself: equal for all cases that must have equal results."""
        layout = "ddp3" if self.on.world == 3 else "alone"
        return Case(layout, mask=self.mask, tied=self.tied, sizes=self.sizes, skip=self.skip, ramp=self.ramp)

    def phases(self) -> list[dict[str, Any]]:
        if not self.ramp:
            return []
        return [
            {"first_step": 1, "global_batch": 2 * self.global_batch},
            {"first_step": 2, "weights": [0.2, 0.2, 0.6]},
        ]


def pairwise() -> list[Case]:
    """Every layout with every recomputation, and of all other pairs of factors each at least once; greedy."""
    left = set(pairs(itertools.product(*FACTORS.values())))
    rows = []
    for layout, activation in itertools.product(FACTORS["layout"], FACTORS["activation"]):
        rest = itertools.product(*list(FACTORS.values())[2:])
        row = max(((layout, activation, *values) for values in rest), key=lambda row: len(left & set(pairs([row]))))
        left -= set(pairs([row]))
        rows.append(row)
    while left:
        row = max(itertools.product(*FACTORS.values()), key=lambda row: len(left & set(pairs([row]))))
        left -= set(pairs([row]))
        rows.append(row)
    return [Case(*row) for row in rows]


def pairs(rows: Iterable[Sequence[Any]]) -> Iterable[tuple[int, Any, int, Any]]:
    """(factor, value, factor, value) of every two factors of every row."""
    for row in rows:
        for (i, a), (j, b) in itertools.combinations(enumerate(row), 2):
            yield i, a, j, b


def everything() -> list[Case]:
    """The full product but for the sizes, which take turns."""
    rows = itertools.product(*list(FACTORS.values())[:-1])
    return [Case(*row, sizes=list(SIZES)[number % len(SIZES)]) for number, row in enumerate(rows)]


def train_config(case: Case, data: str, run_dir: str) -> TrainConfig:
    layout = case.on
    return TrainConfig.model_validate({
        "run_dir": run_dir,
        "data": [{"path": f"{data}/tokens/{n}", "weight": w, "max_epochs": 1000} for n, w in SOURCES.items()],
        "document_mask": case.mask,
        "phases": case.phases(),
        "model": {**SIZES[case.sizes], "tied_embeddings": case.tied, "vocab_multiple": 8},
        "seq_len": SEQ_LEN,
        "global_batch": case.global_batch,
        "micro_batch": case.global_batch // layout.world // case.accumulate,
        "steps": STEPS,
        "seed": SEED,
        "precision": "fp64",
        "device": "cpu",
        "activation_checkpointing": case.activation,
        "loss_chunk": 23,
        "optimizer": {"lr": LR, "clip": MAX_NORM, "weight_decay": WEIGHT_DECAY},
        "schedule": {"kind": "cosine", "warmup": WARMUP},
        "parallel": {
            "dp_replicate": layout.replicate, "dp_shard": layout.shard, "reshard_after_forward": layout.reshard,
        },
        "metrics": {"tensorboard": False, "live": False},
    })  # fmt: skip


@dataclass
class Outcome:
    """What one rank holds after a case: its rows of every tensor, by global name, padding included."""

    package: str
    """Which quern has run."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl; rank 0's."""
    kinds: tuple[str, ...] = ()
    """Of the ledger's entries; rank 0's."""
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    first_moments: dict[str, torch.Tensor] = field(default_factory=dict)
    second_moments: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: dict[str, torch.Tensor] = field(default_factory=dict)
    digest: str = ""
    """Of all tensors: replicas must hold the same bits. A replica but the first sends nothing else."""

    def tables(self) -> list[dict[str, torch.Tensor]]:
        return [*self.gradients, self.weights, self.first_moments, self.second_moments, self.updates]


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's rows; they are put together by :func:`assembled`, not by the code under test."""
    assert tensor is not None
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def assembled(case: Case, by_rank: Sequence[Outcome]) -> Outcome:
    """Rank 0's outcome with whole tensors; ranks differ fastest in their shard."""
    shards = by_rank[: case.on.shard]

    def join(tables: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        parts = {name: [table[name] for table in tables] for name in tables[0]}
        return {name: torch.cat(part) if part[0].ndim else part[0] for name, part in parts.items()}

    first = shards[0]
    whole = [join(tables) for tables in zip(*(outcome.tables() for outcome in shards), strict=True)]
    return Outcome(first.package, first.rows, first.kinds, whole[:-4], *whole[-4:])


def train_all(cases: list[Case], data: str, folder: str) -> list[Outcome]:
    """Every case from the config to the last checkpoint; collective."""
    return [train(case, data, str(Path(folder, str(case)))) for case in cases]


def train(case: Case, data: str, run_dir: str) -> Outcome:
    outcome = Outcome(str(quern.__file__))

    def look(trainer: Trainer, step: int) -> None:
        named = dict(unwrapped(trainer.model).named_parameters())
        outcome.gradients.append({name: local(value.grad) for name, value in named.items()})
        if step == case.skip:
            poison(named[POISONED])

    with open_ranks("cpu") as ranks, open_trainer(train_config(case, data, run_dir), ranks) as trainer:
        trainer.on_gradients = look
        trainer.fit()
        for name, value in unwrapped(trainer.model).named_parameters():
            slots = trainer.optimizer.state[value]
            outcome.weights[name] = local(value)
            outcome.first_moments[name] = local(slots["exp_avg"])
            outcome.second_moments[name] = local(slots["exp_avg_sq"])
            outcome.updates[name] = local(slots["step"])
    outcome.digest = digest_of(outcome)
    if ranks.first:
        outcome.rows = [row for row in read_lines(Path(run_dir, "metrics.jsonl")) if row["kind"] == "step"]
        outcome.kinds = tuple(entry["kind"] for entry in read_lines(Path(run_dir, "ledger.jsonl")))
    return outcome if ranks.rank < case.on.shard else Outcome(outcome.package, digest=outcome.digest)


class FloatsOf(TorchDispatchMode):
    """Counts float64 tensors, and names every operator that sees or makes a floating tensor of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.float64, self.other = 0, set[tuple[str, str, tuple[int, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                if value.dtype == torch.float64:
                    self.float64 += 1
                else:
                    name = func.overloadpacket.__name__
                    if name == "_to_copy":
                        name += f" from {str(args[0].dtype).removeprefix('torch.')}"
                    self.other.add((name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        return out


def floats_of(cases: list[Case], data: str, folder: str) -> list[tuple[int, set[tuple[str, str, tuple[int, ...]]]]]:
    """Of every case's :meth:`Trainer.fit`; collective."""
    found = []
    for case in cases:
        config = train_config(case, data, str(Path(folder, str(case))))
        with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer, FloatsOf() as watch:
            trainer.fit()
        found.append((watch.float64, watch.other))
    return found


def poison(parameter: torch.nn.Parameter) -> None:
    """The whole gradient's first element becomes NaN, on the ranks that hold it."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        if grad.device_mesh.get_local_rank(grad.device_mesh.ndim - 1) == 0:  # rows are dealt over the last axis
            grad.to_local()[0, 0] = torch.nan
    else:
        grad[0, 0] = torch.nan


def digest_of(outcome: Outcome) -> str:
    found = hashlib.sha256()
    for number, table in enumerate(outcome.tables()):
        for name, tensor in table.items():
            found.update(f"{number} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
