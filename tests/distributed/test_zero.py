"""``parallel.zero``: what a rank holds at each point of a step, byte by byte, and in which order gradients are summed.

Bytes are counted twice: in the tensors that FSDP2 and the optimizer own, by component, and of all memory that any
operator gave and that is alive. The order of sums is told by bits: one process holds the weights in BF16, as FSDP2
gathers them, and adds up the gradients of ranks and micro-batches by hand.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.held import Held, held
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh, plan_mesh
from quern.parallel.planning.traffic import Step
from quern.torch_versions import fsdp_groups
from quern.train.config import OptimizerConfig, ParallelConfig
from quern.train.step.optimizer import build_optimizer, step
from quern.train.summary import layout_of

MICRO_BATCH, SEQ_LEN, TARGETS = 2, 8, 100


@dataclass(frozen=True)
class Case:
    parallel: tuple[tuple[str, Any], ...]
    """The section of the config."""
    micro_batches: int = 3
    half: str = ""
    """Which of moments and gradients are in BF16."""
    dtype: torch.dtype = torch.bfloat16
    float8: Recipe | None = None
    tied: bool = False
    layers: int = 2
    experts: int | None = None
    """Of the second layer, where it has some."""

    @property
    def plan(self) -> MeshPlan:
        given = dict(self.parallel)
        config = ParallelConfig(**given)
        return plan_mesh(config, config.dp_replicate * given["dp_shard"] * config.tp * config.pp)

    @property
    def shape(self) -> ModelShape:
        """Nothing divides by a number of ranks that does not have to."""
        sizes: dict[str, Any] = {"dim": 30, "num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "ffn_dim": 62}
        if self.plan.tp == 1:
            sizes["ffn_dim"] = 61
        if self.float8 is not None:
            sizes = {"dim": 128, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "ffn_dim": 256}
        if self.experts is not None:
            sizes["moe"] = {
                "num_experts": self.experts,
                "top_k": 2,
                "ffn_dim": 11,
                "shared_ffn_dim": 9,
                "first_dense": 1,
            }
        sizes |= {"num_layers": self.layers, "tied_embeddings": self.tied}
        return ModelConfig(**sizes, vocab_multiple=2 if self.plan.tp > 1 else 1, qk_norm=True).shape(vocab_size=127)

    @property
    def layout(self) -> Layout:
        return layout_of(
            ParallelConfig(**dict(self.parallel)), self.plan, self.dtype, bf16_gradients="gradients" in self.half,
            float8=self.float8, float8_all_gather=self.float8 is not None, micro_batch=MICRO_BATCH, seq_len=SEQ_LEN,
        )  # fmt: skip

    @property
    def step(self) -> Step:
        return Step(self.shape, self.layout, self.micro_batches, self.dtype.itemsize, max(self.dtype.itemsize, 4))

    @property
    def moment_bytes(self) -> int:
        return 2 if "moments" in self.half else self.step.reduce_bytes

    def meta(self) -> Transformer:
        torch.set_default_dtype(torch.promote_types(self.dtype, torch.float32))
        try:
            with torch.device("meta"):
                return Transformer(self.shape, compute_dtype=self.dtype, loss_chunk=5)
        finally:
            torch.set_default_dtype(torch.float32)


def case(zero: int | None, shard: int = 2, **changes: Any) -> Case:
    fields = {name: changes.pop(name) for name in Case.__dataclass_fields__ if name in changes}
    return Case(tuple({"dp_shard": shard, "zero": zero, **changes}.items()), **fields)


def inputs_of(rank: int, number: int) -> Inputs:
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens_BL, targets_BL = torch.randint(127, (2, MICRO_BATCH, SEQ_LEN), generator=generator).unbind()
    return Inputs(tokens_BL, targets_BL, None, None)


# --- bytes ------------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """All memory that operators give while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta:  # its part comes too
                self._storages.append(weakref.ref(value.untyped_storage()))
        return out

    @property
    def bytes(self) -> int:
        found = {storage._cdata: storage.nbytes() for own in self._storages if (storage := own()) is not None}
        return sum(found.values())

    def settled(self) -> int:
        """The bytes, once none were given back for a while: threads of the process group hold what they sent until a
        little after it has arrived."""
        least, since = self.bytes, time.monotonic()
        while time.monotonic() - since < 0.01:
            time.sleep(0.001)
            if (now := self.bytes) < least:
                least, since = now, time.monotonic()
        return least


def own_bytes(tensors: list[Tensor | None]) -> int:
    """Of the parts that this rank has."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum(part.nbytes for part in parts)


def storage_bytes(tensors: list[Tensor | None]) -> int:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}.values())


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """What FSDP2 and the optimizer own now."""
    groups = {id(g): g for m in model.modules() if isinstance(m, FSDPModule) for g in fsdp_groups(m)}
    owned = [own for group in groups.values() for own in group.fsdp_params]
    whole = [getattr(own, "_unsharded_param", None) for own in owned]
    return Held(
        own_bytes([own.sharded_param for own in owned]),
        own_bytes([slot for slots in optimizer.state.values() for name, slot in slots.items() if name != "step"]),
        own_bytes([own.sharded_param.grad for own in owned])
        + own_bytes([group._partial_reduce_output for group in groups.values()]),  # of HSDP, before its last sum
        storage_bytes([tensor for own in owned for tensor in own.all_gather_outputs])
        + storage_bytes([getattr(own, "_sharded_post_forward_param_data", None) for own in owned]),
        own_bytes([own.unsharded_accumulated_grad for own in owned])
        + own_bytes([None if parameter is None else parameter.grad for parameter in whole]),
    )


@dataclass
class Seen:
    forward: list[Held]
    """After each forward."""
    between: list[Held]
    """Before each forward but the first."""
    after: Held
    """Of the last backward."""
    alive: tuple[int, int]
    """Of all memory, what came since before the step: before the last forward, and after the last backward."""
    pieces: dict[str, Tensor]
    """Gradients of the step, and weights and moments after two updates."""


def look(parallel: Parallel, own: Case, rank: int) -> Seen:
    optimizer = build_optimizer(parallel.model, OptimizerConfig(
        moments="bf16" if "moments" in own.half else "fp32", gradients="bf16" if "gradients" in own.half else "fp32",
    ))  # fmt: skip
    inputs = [inputs_of(rank, number) for number in range(own.micro_batches)]
    forward: list[Held] = []
    between: list[Held] = []
    alive: list[int] = []
    pieces: dict[str, Tensor] = {}

    def weigh(loss_sum: Tensor) -> Tensor:
        forward.append(counted(parallel.model, optimizer))
        return loss_sum / TARGETS

    def before(*_: Any) -> None:
        between.append(counted(parallel.model, optimizer))
        alive.append(all_memory.settled() if number else 0)  # a first step is not judged

    for number in range(2):  # moments are there after the first
        for measured in (forward, between, alive):
            measured.clear()
        with Alive() as all_memory:
            hook = parallel.model.register_forward_pre_hook(before, prepend=True)
            if parallel.float8_gather is not None:
                parallel.float8_gather.update()
            parallel.run.forward_backward(inputs, weigh)
            hook.remove()
            after = counted(parallel.model, optimizer)
            alive.append(all_memory.settled())
        parallel.gradients.finish()
        if not number:
            pieces = {name: part_of(p.grad) for name, p in parallel.model.named_parameters() if p.grad is not None}
        step(optimizer, 1e-2)
        optimizer.zero_grad()
    for name, parameter in parallel.model.named_parameters():
        slots = optimizer.state[parameter]
        pieces |= {f"weight {name}": part_of(parameter)} | {f"{slot} {name}": part_of(slots[slot]) for slot in slots}
    return Seen(forward, between[1:], after, (alive[-2], alive[-1]), pieces)


def part_of(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def looks(cases: list[Case]) -> list[Seen]:
    found = []
    for own in cases:
        mesh = build_mesh(own.plan, "cpu")
        parallel = parallelize(own.meta(), mesh, own.layout)
        initialise(parallel.model, seed=7)
        found.append(look(parallel, own, mesh.dp_rank))
    return found


def judge(own: Case, rank: int, seen: Seen) -> None:
    """By component against the formulas; on a first rank, which has no padding, against all memory."""
    told = held(own.step, own.moment_bytes, rank)
    kept, once = own.layout.reshard_after_forward is False, dict(own.parallel)["zero"] == 1 and own.micro_batches > 1
    padded = held(own.step, own.moment_bytes, 0 if own.plan.dp_replicate > 1 else rank)  # what HSDP is yet to sum
    shares = 0 if once else padded.gradients
    resting = replace(told, gathered=told.gathered if kept else 0, gradients=shares)
    after = replace(told, gathered=0, whole_gradients=0)
    where = f"{own}: rank {rank}"
    first = replace(told, gradients=0, whole_gradients=0)
    assert seen.forward == [first] + [replace(told, gradients=shares)] * (own.micro_batches - 1), where
    assert seen.between == [resting] * (own.micro_batches - 1), where
    assert seen.after == after, where
    assert (told.whole_gradients > 0) == once, where
    if rank:
        return
    rows, ranks = own.shape.padded_vocab_size // own.plan.tp, own.plan.dp_shard
    last = -(-rows // ranks) * ranks * own.shape.dim  # the embedding is scattered last, and FSDP2 keeps it for a while
    sent = 0 if once else last * own.step.gradient_bytes
    for total, state, more in [(seen.alive[0], resting, sent)] * (own.micro_batches > 1) + [(seen.alive[1], after, 0)]:
        rest = total - sum(vars(state).values()) - more
        assert 0 <= rest < 2000, f"{where}: {rest} bytes of something else"


def summed(own: Case, once: bool) -> dict[str, Tensor]:
    """Gradients of two ranks' micro-batches, in the order of one scatter (``once``) or of one each."""
    model = own.meta().to_empty(device="cpu")
    initialise(model, seed=7)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    wide = torch.bfloat16 if "gradients" in own.half else torch.float32
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    for rank in range(2):
        for number in range(own.micro_batches):
            model.zero_grad(set_to_none=True)
            batch = inputs_of(rank, number)
            loss_sum, _ = model(batch.tokens_BL, batch.targets_BL, None, documents=None)
            (loss_sum / TARGETS).backward()
            found[rank, number] = {name: p.grad.to(wide) for name, p in model.named_parameters() if p.grad is not None}

    def total(keys: list[list[tuple[int, int]]], name: str) -> Tensor:
        return reduce(torch.add, [reduce(torch.add, [found[key][name] for key in inner]) for inner in keys])

    numbers = range(own.micro_batches)
    keys = [[(r, n) for n in numbers] for r in (0, 1)] if once else [[(r, n) for r in (0, 1)] for n in numbers]
    return {name: total(keys, name) for name in found[0, 0]}


HALF = "gradients moments"
TWO = [case(1), case(2), case(3), case(1, half=HALF)]


@pytest.fixture(scope="module")
def two(kept_ranks: Any) -> dict[Case, list[Seen]]:
    return dict(zip(TWO, zip(*kept_ranks(looks, 2, TWO), strict=True), strict=True))


@pytest.mark.slow
def test_a_rank_holds_what_the_formulas_say(two: dict[Case, list[Seen]]) -> None:
    for own, by_rank in two.items():
        for rank, seen in enumerate(by_rank):
            judge(own, rank, seen)


@pytest.mark.slow
def test_2_and_3_give_the_same_bits_and_1_adds_micro_batches_first(two: dict[Case, list[Seen]]) -> None:
    """Of two ranks, so that a sum over them is one addition."""
    for second, third in zip(two[case(2)], two[case(3)], strict=True):
        assert second.pieces.keys() == third.pieces.keys()
        for name, piece in second.pieces.items():
            assert torch.equal(piece, third.pieces[name]), name
    for own, once in ((case(1), True), (case(2), False), (case(1, half=HALF), True)):
        for name, gradient in summed(own, once).items():
            assert torch.equal(torch.cat([seen.pieces[name] for seen in two[own]]), gradient), (own, name)
    first, other = summed(case(1, half=HALF), once=True), summed(case(1, half=HALF), once=False)
    assert any(not torch.equal(first[name], other[name]) for name in first)  # FP32 has bits enough for either


@pytest.mark.long
def test_experts_on_many_ranks_are_held_as_the_formulas_say(kept_ranks: Any) -> None:
    """Each rank its own, or two of them a share, or copies; of six on either of two nothing is even."""
    for ranks, cases in {
        2: [case(zero, ep=2, experts=6) for zero in (1, 2, 3)],
        4: [case(zero, shard, ep=2, dp_replicate=4 // shard, experts=6) for zero in (1, 2, 3) for shard in (4, 2)],
    }.items():
        for own, by_rank in zip(cases, zip(*kept_ranks(looks, ranks, cases), strict=True), strict=True):
            for rank, seen in enumerate(by_rank):
                judge(own, rank, seen)


@pytest.mark.long
def test_larger_layouts_hold_what_the_formulas_say(kept_ranks: Any) -> None:
    cases = [case(zero, dp_replicate=2, dtype=torch.float64) for zero in (1, 2, 3)]
    cases += [case(zero, tp=2, tied=True) for zero in (1, 2, 3)]
    cases += [case(zero, 4, float8=Recipe("blockwise")) for zero in (1, 2, 3)]
    cases += [
        case(None, 4, reshard_after_forward=2, micro_batches=2),
        case(1, 4, micro_batches=1),
        case(3, 4, half=HALF),
    ]
    for own, by_rank in zip(cases, zip(*kept_ranks(looks, 4, cases), strict=True), strict=True):
        for rank, seen in enumerate(by_rank):
            judge(own, rank, seen)


def pipeline_looks(cases: list[Case]) -> list[tuple[Held, Held]]:
    """The most of each component before any forward of a step and after any unit's backward, and what there is after
    the step."""
    found = []
    for own in cases:
        mesh = build_mesh(own.plan, "cpu")
        parallel = parallelize(own.meta(), mesh, own.layout)
        initialise(parallel.model, seed=7)
        optimizer = build_optimizer(parallel.model, OptimizerConfig())
        stages: list[nn.Module] = [part.module for part in parallel.run._parts]  # type: ignore[attr-defined]
        model, seen = nn.ModuleList(stages), list[Held]()

        def before(*_: Any, model: Any = model, optimizer: Any = optimizer, seen: list[Held] = seen) -> None:
            seen.append(counted(model, optimizer))

        for stage in stages:
            stage.register_forward_pre_hook(before, prepend=True)
        for group in {id(g): g for m in model.modules() if isinstance(m, FSDPModule) for g in fsdp_groups(m)}.values():

            def ended(*_: Any, before: Any = before, goes_on: Any = group.post_backward) -> None:
                goes_on()
                before()

            group.post_backward = ended
        inputs = [inputs_of(mesh.dp_rank, number) for number in range(own.micro_batches)]
        for _ in range(2):
            seen.clear()
            parallel.run.forward_backward(inputs, lambda loss_sum: loss_sum / TARGETS)
            after = counted(model, optimizer)
            step(optimizer, 1e-2)
            optimizer.zero_grad()
        found.append(
            (Held(*(max(column) for column in zip(*(vars(own).values() for own in seen), strict=True))), after)
        )
    return found


@pytest.mark.long
def test_pipelines_hold_whole_gradients_and_the_weights_of_three_stages(kept_ranks: Any) -> None:
    usual = {"pp": 2, "micro_batches": 4}
    cases = [case(1, **usual), case(None, **usual, schedule="looped_bfs", stages_per_rank=4, layers=9)]
    cases += [case(1, **usual, tied=True, dtype=torch.float32), case(None, **usual, reshard_after_forward=True)]
    for own, by_rank in zip(cases, zip(*kept_ranks(pipeline_looks, 4, cases), strict=True), strict=True):
        for rank, (most, after) in enumerate(by_rank):
            told = held(own.step, own.moment_bytes, rank)
            assert after == replace(told, gathered=0, whole_gradients=0), f"{own}: rank {rank}"
            if own.layers > 2:  # a gather under way does not count yet, and each stage's gradients go when it is done
                assert 0.6 * told.gathered < most.gathered <= told.gathered, f"{own}: rank {rank}"
                assert most.whole_gradients < told.whole_gradients, f"{own}: rank {rank}"
                continue
            assert most.whole_gradients == told.whole_gradients > told.gradients, f"{own}: rank {rank}"
            if own.layout.reshard_after_forward is False:
                assert most.gathered == told.gathered, f"{own}: rank {rank}"
