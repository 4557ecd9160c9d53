"""Lists every layout that a model may be trained in on a number of GPUs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.context import Context
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, divisors
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.step import Step

__all__ = ["Choice", "Wish", "candidates", "legal", "step_of"]


class _Dtype(NamedTuple):
    """Of activations, as far as checks look at it."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16: Any = _Dtype("bfloat16", 2)

#: What is tried of each, largest first where the first that fits is best.
MICRO_BATCHES = (1, 2, 4, 8)
POLICIES = ("none", "selective", "full")


@dataclass(frozen=True)
class Wish:
    """What is to be trained, and on how many GPUs."""

    shape: ModelShape
    gpus: int
    node: int
    """GPUs that NVLink joins."""
    seq_len: int
    global_batch: int
    """Sequences of a step."""
    float8: Recipe | None = None
    compiled: bool = True
    moments_bf16: bool = False
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`Choice` that are given: others are not tried."""


@dataclass(frozen=True)
class Choice:
    """One layout, in the config's terms."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int | None = None
    """Of FSDP2 without a pipeline; None = 3 there, and 1 in a pipeline, which keeps weights and gradients whole."""
    schedule: str | None = None
    stages_per_rank: int | None = None
    micro_batch: int = 1
    checkpointing: str = "none"
    host_state: bool = False

    @property
    def plan(self) -> MeshPlan:
        return MeshPlan(self.dp_replicate, self.dp_shard, self.tp, self.pp, self.cp, self.ep)

    def layout(self, wish: Wish) -> Layout:
        keeps = self.pp > 1 or self.zero in (1, 2)
        return Layout(
            BF16, self.plan, reshard_after_forward=not keeps, zero=self.zero,
            activation_checkpointing=self.checkpointing, compile_backend="inductor" if wish.compiled else None,
            float8=wish.float8, host_state=self.host_state, schedule=self.schedule,
            stages_per_rank=self.stages_per_rank, context=Context("ulysses", self.cp, self.cp),
            micro_batch=self.micro_batch, seq_len=wish.seq_len,
        )  # fmt: skip

    def sections(self, wish: Wish) -> dict[str, Any]:
        """The keys of a training config that say the same."""
        sizes = {
            "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp, "pp": self.pp, "cp": self.cp,
            "ep": self.ep, "zero": self.zero, "schedule": self.schedule, "stages_per_rank": self.stages_per_rank,
        }  # fmt: skip
        usual = {"zero": None, "schedule": None, "stages_per_rank": None}
        parallel = {name: value for name, value in sizes.items() if value != usual.get(name, 1)}
        found: dict[str, Any] = {
            "seq_len": wish.seq_len, "global_batch": wish.global_batch, "micro_batch": self.micro_batch,
            "precision": "bf16", "activation_checkpointing": self.checkpointing, "parallel": parallel,
            "compile": {"enabled": wish.compiled},
        }  # fmt: skip
        if wish.float8 is not None:
            found["float8"] = {"recipe": wish.float8.scaling}
        optimizer = {"moments": "bf16"} if wish.moments_bf16 else {}
        optimizer |= {"state": "host"} if self.host_state else {}
        return found | ({"optimizer": optimizer} if optimizer else {})


def step_of(choice: Choice, wish: Wish) -> Step:
    """An optimizer step in that layout."""
    micro_batches = wish.global_batch // (choice.plan.dp_size * choice.micro_batch)
    return Step(wish.shape, choice.layout(wish), micro_batches, 2, 4)


def candidates(wish: Wish) -> Iterator[Choice]:
    """Every legal one. With ``host_state`` only where it is asked for."""
    for choice in _all(wish):
        batch = choice.plan.dp_size * choice.micro_batch
        if wish.global_batch % batch == wish.seq_len % (choice.cp * choice.tp) == 0 and legal(
            wish, choice.layout(wish)
        ):
            yield choice


def legal(wish: Wish, layout: Layout) -> bool:
    """Whether a run takes it, apart from the sizes of batch and sequence."""
    try:
        check_layout(wish.shape, layout, Task({"global_batch": wish.global_batch}, cuda=True, local_ranks=wish.node))
    except InputError:
        return False
    return True


def _all(wish: Wish) -> Iterator[Choice]:
    shape, fixed = wish.shape, wish.fixed

    def tried(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return [fixed[name]] if name in fixed else values

    experts = 1 if shape.moe is None else shape.moe.num_experts
    for tp in tried("tp", [size for size in divisors(shape.num_heads) if size <= wish.node]):
        for pp in tried("pp", [size for size in divisors(wish.gpus) if size <= min(shape.num_layers, 64)]):
            for cp in tried("cp", [size for size in divisors(shape.num_heads) if wish.seq_len // size >= 4096] or [1]):
                if wish.gpus % (tp * pp * cp):
                    continue
                dp = wish.gpus // (tp * pp * cp)
                for shard in tried("dp_shard", _shards(dp, max(wish.node // (tp * cp), 1))):
                    if dp % shard or dp // shard not in tried("dp_replicate", [dp // shard]):
                        continue
                    base = Choice(tp, pp, cp, dp_replicate=dp // shard, dp_shard=shard)
                    for ep in (size for size in tried("ep", divisors(experts)) if shard * cp % size == 0):
                        yield from _ways(replace(base, ep=ep), tried, wish.compiled)


def _shards(dp: int, within: int) -> list[int]:
    """Over how many of ``dp`` ranks weights are dealt out; of more than 16 all, those of a node, of eight, or none."""
    return divisors(dp) if dp <= 16 else sorted({size for size in (1, within, 8 * within, dp) if dp % size == 0})


def _ways(base: Choice, tried: Any, compiled: bool) -> Iterator[Choice]:
    by_fsdp = base.plan.by_fsdp
    schedules: list[tuple[str | None, int | None]] = [(None, None)]
    if base.pp > 1:
        schedules = [("1f1b", None), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4)]
        if not compiled:  # whose backwards cannot be split
            schedules.append(("zbv_zero_bubble", None))
    for zero in [1, 2, None] if by_fsdp and base.plan.shards > 1 and base.pp == 1 else [None]:
        if zero not in tried("zero", [zero]):
            continue
        for schedule, stages in schedules:
            if schedule not in tried("schedule", [schedule]) or stages not in tried("stages_per_rank", [stages]):
                continue
            for micro_batch in tried("micro_batch", MICRO_BATCHES):
                for policy in tried("checkpointing", POLICIES):
                    if policy != "none" and schedule is not None and SCHEDULES[schedule].splits_backward:
                        continue
                    yield replace(
                        base, zero=zero, schedule=schedule, stages_per_rank=stages, micro_batch=micro_batch,
                        checkpointing=policy, host_state=tried("host_state", [False])[0],
                    )  # fmt: skip
