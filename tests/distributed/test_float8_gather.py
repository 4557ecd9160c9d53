"""Weights that FSDP2 gathers in FP8: the bits are those of weights gathered in the dtype of activations."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.config import ModelConfig
from quern.model.float8.quantise import E4M3
from quern.model.float8.recipe import Recipe
from quern.model.float8.weight import Float8Weight
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel import float8_gather
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh


@dataclass(frozen=True)
class Case:
    """Three ranks deal out 128 or 256 rows as 43, 43, 42 or 86, 86, 84: through the middle of blocks."""

    recipe: Recipe
    plan: MeshPlan
    reshard: bool = True
    activation: str = "none"
    compile: str | None = None
    kv_heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    outlier: float = 1.0


def build(case: Case, gather: bool) -> Parallel:
    shape = ModelConfig(
        num_layers=2, dim=128, num_heads=2, num_kv_heads=case.kv_heads, head_dim=128, ffn_dim=256, vocab_multiple=8
    ).shape(vocab_size=61)
    with torch.device("meta"):
        model = Transformer(shape, compute_dtype=case.dtype)
    layout = Layout(
        compute_dtype=case.dtype, reshard_after_forward=case.reshard, activation_checkpointing=case.activation,
        compile_backend=case.compile, float8=case.recipe, float8_all_gather=gather,
    )  # fmt: skip
    parallel = parallelize(model, build_mesh(case.plan, "cpu"), layout)
    initialise(parallel.model, seed=3)
    for name, parameter in parallel.model.named_parameters():  # some blocks far larger than others
        if case.outlier != 1 and name.endswith(("wq.weight", "w2.weight")):
            local(parameter)[-1:] *= case.outlier
    return parallel


def local(tensor: Any) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def trained(case: Case, gather: bool, steps: int = 2) -> list[Tensor]:
    """Of every step its loss and gradients; at last the weights. Updated by hand between."""
    parallel = build(case, gather)
    model, found = parallel.model, []
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() // case.plan.tp)
    for _ in range(steps):
        if parallel.float8_gather is not None:
            parallel.float8_gather.update()
        tokens_BL, targets_BL = torch.randint(61, (2, 2, 32), generator=generator)
        loss, _ = model(tokens_BL, targets_BL)
        loss.backward()
        found += [loss.detach(), *(local(parameter.grad).clone() for parameter in model.parameters())]
        for parameter in model.parameters():
            local(parameter).sub_(local(parameter.grad), alpha=0.01)
            parameter.grad = None
    return [*found, *(local(parameter).clone() for parameter in model.parameters())]


def differing(cases: list[Case]) -> list[list[int]]:
    """Of each case the places of tensors that are not the same bits with and without."""
    found, arrived, receive = [], [], float8_gather._Rows.receive

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        arrived.append(self)
        return receive(self, *args, **kwargs)

    float8_gather._Rows.receive = counted  # type: ignore[method-assign]
    for case in cases:
        pairs = zip(trained(case, False), trained(case, True), strict=True)
        found.append([place for place, (one, other) in enumerate(pairs) if not torch.equal(one, other)])
        assert len(arrived) >= 4 * (5 if case.kv_heads < case.plan.tp else 7), "of two layers in two steps"
        arrived.clear()
    return found


@pytest.mark.long
def test_the_same_bits_with_shards_that_cut_blocks(kept_ranks: Any) -> None:
    three = Case(Recipe("blockwise"), MeshPlan(dp_shard=3), outlier=100.0)
    cases = [
        three,
        Case(Recipe("tensorwise", "e5m2"), MeshPlan(dp_shard=3), reshard=False, activation="full"),
        Case(Recipe("tensorwise"), MeshPlan(dp_shard=3), activation="selective", dtype=torch.float64, outlier=100.0),
        Case(Recipe("blockwise"), MeshPlan(dp_shard=3), compile="aot_eager"),
    ]
    for found in kept_ranks(differing, 3, cases):
        assert found == [[]] * len(cases)


@pytest.mark.long
def test_the_same_bits_beside_tensor_parallelism_and_replicas(kept_ranks: Any) -> None:
    both = MeshPlan(dp_shard=2, tp=2)
    cases = [
        Case(Recipe("blockwise"), both, activation="selective", outlier=100.0),
        Case(Recipe("tensorwise"), both, kv_heads=1, outlier=100.0),  # two ranks share the head, which travels whole
        Case(Recipe("tensorwise"), MeshPlan(dp_replicate=2, dp_shard=2)),
        Case(Recipe("blockwise"), both, compile="aot_eager"),
    ]
    for found in kept_ranks(differing, 4, cases):
        assert found == [[]] * len(cases)


def quantised_by_graphs(case: Case) -> int:
    """How often a compiled graph has given FP8 in a forward pass: a block's own gives none."""
    runs = 0

    def counting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal runs
            out = graph.forward(*args)
            runs += any(value.dtype == E4M3 for value in out)
            return out

        return run

    torch._dynamo.register_backend(counting, "counting")  # type: ignore[attr-defined]
    parallel = build(case, gather=True)
    assert parallel.float8_gather is not None
    parallel.float8_gather.update()
    with torch.no_grad():
        parallel.model(torch.zeros(2, 32, dtype=torch.long))
    return runs


@pytest.mark.long
def test_what_is_sent_is_quantised_by_a_graph_where_blocks_are_compiled(kept_ranks: Any) -> None:
    """Seven weights of two layers, each read and written once."""
    case = Case(Recipe("tensorwise"), MeshPlan(dp_shard=2), compile="counting")
    assert kept_ranks(quantised_by_graphs, 2, case) == [14, 14]


class Gathered(TorchDispatchMode):
    """Bytes of what is gathered, whole."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "_allgather_base_":
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def looked_at(case: Case) -> dict[str, Any]:
    """What a gathered weight is while a block runs, and what is left of it in what others look at."""
    found: dict[str, Any] = {}
    for gather in (False, True):
        parallel = build(case, gather)
        if parallel.float8_gather is not None:
            parallel.float8_gather.update()
        block = parallel.model.blocks["0"]
        linear = block.ffn.w1

        def look(*_: Any, linear: Any = linear) -> None:
            found["type"], found["dtype"] = type(linear.weight), linear.weight.dtype
            found["held"] = getattr(linear.weight, "data_OK", linear.weight).dtype

        hook = block.ffn.register_forward_pre_hook(look)
        with Gathered() as watch:
            parallel.model(torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))
        hook.remove()
        found[f"bytes {gather}"] = watch.bytes
    sharded = linear.weight
    found["sharded"] = type(local(sharded)), sharded.dtype
    found["copied"] = type(copy.copy(local(sharded))), hasattr(local(sharded).clone(), "fsdp_pre_all_gather")
    return found


@pytest.mark.slow
def test_half_the_bytes_travel_and_the_masters_stay_plain(kept_ranks: Any) -> None:
    for found in kept_ranks(looked_at, 2, Case(Recipe("tensorwise"), MeshPlan(dp_shard=2))):
        assert issubclass(found["type"], Float8Weight)
        assert (found["dtype"], found["held"]) == (torch.bfloat16, E4M3)
        assert found["sharded"] == (torch.Tensor, torch.float32)
        assert found["copied"] == (torch.Tensor, False)
        block = 4 * 128 * 256 + 3 * 128 * 256  # of two
        norms, ends = 5 * 128, 2 * 64 * 128
        assert found["bytes False"] == 2 * (2 * block + norms + ends)
        assert found["bytes True"] == 2 * block + 2 * (norms + ends)


def scales_of(case: Case) -> list[float]:
    """The loss before and after the scales of new weights are there."""
    parallel = build(case, True)
    tokens_BL = torch.zeros(1, 16, dtype=torch.int64)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(parallel.model(tokens_BL, tokens_BL)[0].item())
        assert parallel.float8_gather is not None
        parallel.float8_gather.update()
    return losses


def test_weights_without_scales_give_no_number(kept_ranks: Any) -> None:
    for before, after in kept_ranks(scales_of, 2, Case(Recipe("blockwise"), MeshPlan(dp_shard=2))):
        assert before != before
        assert after == after


def spoilt(case: Case) -> tuple[float, bool]:
    """The loss where one rank holds a weight that is not a number, its sign bit set; whether a scale is none here."""
    parallel = build(case, True)
    if torch.distributed.get_rank() == 1:
        local(parallel.model.blocks["1"].ffn.w2.weight)[0, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    assert parallel.float8_gather is not None
    parallel.float8_gather.update()
    tokens_BL = torch.zeros(1, 16, dtype=torch.int64)
    with torch.no_grad():
        loss = parallel.model(tokens_BL, tokens_BL)[0].item()
    return loss, bool(parallel.float8_gather._scale.isnan().any())


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise"])
def test_a_weight_that_is_no_number_is_seen_by_every_rank(kept_ranks: Any, scaling: Any) -> None:
    for loss, is_none in kept_ranks(spoilt, 2, Case(Recipe(scaling), MeshPlan(dp_shard=2))):
        assert loss != loss
        assert is_none


def test_what_fsdp2_asks_a_local_tensor_for_is_what_it_is_given() -> None:
    import inspect

    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    source = "".join(inspect.getsource(_fsdp_param.FSDPParam).split())
    assert 'hasattr(self._sharded_local_tensor,"fsdp_pre_all_gather")' in source
    assert "fsdp_post_all_gather(" in source
    assert "_init_extensions()" in inspect.getsource(_fsdp_param_group.FSDPParamGroup.lazy_init)
