"""Split tensors and sequences against one process of plain autograd in float64.

The oracle shares nothing with the layouts but the network and its first weights: the whole batch at once, all logits,
``F.cross_entropy``. Which part of a tensor a rank holds is written down here once more, by hand.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._functorch.partitioners
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.model.attention import Documents
from quern.model.config import ModelConfig, ModelShape
from quern.model.init import initialise
from quern.model.loss import IGNORE
from quern.model.transformer import Transformer
from quern.parallel import collectives
from quern.parallel.apply import Layout, parallelize
from quern.parallel.data import accumulation
from quern.parallel.mesh import MeshPlan, build_mesh
from quern.parallel.tensor import split_tensors

SEED, LENGTH, VOCAB = 7, 12, 125
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    tp: int = 2
    shard: int = 1
    replicate: int = 1
    kv_heads: int = 4
    tied: bool = False
    qk_norm: bool = False
    mask: bool = False
    activation: str = "none"
    chunk: int = 4096
    z_loss: float = 0.0
    compile: Any = None
    rows: int = 2
    """Sequences of a rank's micro-batch."""
    accumulate: int = 1
    meta: bool = True
    joined: bool = False

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.dp * self.tp

    @property
    def batch(self) -> int:
        return self.dp * self.rows * self.accumulate


def shape_of(case: Case, layers: int = 2) -> ModelShape:
    """The vocabulary is padded from 125 to 136: 68 or 34 rows a rank, so that rows 125 … 135 are the last one's."""
    return ModelConfig(
        num_layers=layers, dim=20, num_heads=8, num_kv_heads=case.kv_heads, head_dim=6, ffn_dim=44, vocab_multiple=8,
        tied_embeddings=case.tied, qk_norm=case.qk_norm,
    ).shape(vocab_size=VOCAB)  # fmt: skip


def batch_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents' numbers; few targets in the first rows, in the second of more than one none."""
    generator = torch.Generator().manual_seed(case.batch)
    size = (case.batch, LENGTH)
    tokens_BL, targets_BL = (torch.randint(VOCAB, size, generator=generator) for _ in range(2))
    share_B1 = torch.linspace(0.2, 1.0, case.batch, dtype=torch.float64)[:, None]
    targets_BL[torch.rand(size, dtype=torch.float64, generator=generator) > share_B1] = IGNORE
    if case.batch > 1:
        targets_BL[1] = IGNORE
    ids_BL = (torch.rand(size, generator=generator) < 0.2).cumsum(1)
    return tokens_BL, targets_BL, ids_BL


def documents_of(case: Case, ids_BL: Tensor) -> tuple[Tensor | None, Documents | None]:
    """Positions within documents, and the documents."""
    if not case.mask:
        return None, None
    place_BL = torch.arange(LENGTH).expand_as(ids_BL)
    first_BL = torch.ones_like(ids_BL, dtype=torch.bool)
    first_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
    starts = first_BL.flatten().nonzero()[:, 0]
    lengths = torch.cat((starts, torch.tensor([ids_BL.numel()]))).int()
    positions_BL = place_BL - place_BL.where(first_BL, 0).cummax(1).values
    return positions_BL, Documents(ids_BL, lengths, LENGTH)


@dataclass
class Outcome:
    loss: Tensor
    nll_BL: Tensor
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logits_BLV: Tensor | None = None


def whole_model(case: Case, layers: int = 2, **options: Any) -> Transformer:
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(shape_of(case, layers), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    initialise(model, SEED)
    return model


def oracle(case: Case) -> Outcome:
    model = whole_model(case)
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    positions_BL, documents = documents_of(case, ids_BL)
    logits_BLV = model(tokens_BL, None, positions_BL, documents)
    counted_BL = targets_BL != IGNORE
    nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), targets_BL, ignore_index=IGNORE, reduction="none")
    loss = (nll_BL + case.z_loss * logits_BLV.logsumexp(-1).square()).where(counted_BL, 0).sum() / counted_BL.sum()
    loss.backward()
    named = dict(model.named_parameters())
    return Outcome(
        loss.detach(), nll_BL.detach(), {name: value.detach() for name, value in named.items()},
        {name: value.grad for name, value in named.items() if value.grad is not None}, logits_BLV.detach(),
    )  # fmt: skip


def build(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Transformer, Any]:
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    with torch.device("meta" if case.meta else "cpu"):
        model = Transformer(shape_of(case), compute_dtype=dtype, loss_chunk=case.chunk, z_loss=case.z_loss)
    torch.set_default_dtype(torch.float32)
    if not case.meta:
        initialise(model, SEED)
    mesh = build_mesh(MeshPlan(dp_replicate=case.replicate, dp_shard=case.shard, tp=case.tp), "cpu")
    layout = Layout(compute_dtype=dtype, activation_checkpointing=case.activation, compile_backend=case.compile)
    found = parallelize(model, mesh, layout).model
    if case.meta:
        initialise(found, SEED)
    return found, mesh


def part_of(case: Case, dp_rank: int) -> list[slice]:
    """The rows of a data-parallel rank's micro-batches."""
    first = dp_rank * case.rows * case.accumulate
    return [slice(first + n * case.rows, first + (n + 1) * case.rows) for n in range(case.accumulate)]


def train(case: Case, dtype: torch.dtype = torch.float64, logits: bool = True) -> Outcome:
    """One forward and backward of this rank; its parts of weights and gradients."""
    collectives.JOINED = case.joined
    torch._dynamo.reset()
    if case.activation == "full":
        # With compile on a CPU, torch 2.13 lays the random state of a recomputed attention (which draws nothing) among
        # a block's saved tensors behind the device mesh of its weights, and then takes one for the other
        # (_functorch/partitioners.py: functionalize_rng_ops); on CUDA it saves none.
        torch._functorch.partitioners.has_recomputable_rng_ops = lambda _: False
    model, mesh = build(case, dtype)
    weights = {name: local(value) for name, value in model.named_parameters()}
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    total = (targets_BL != IGNORE).sum()
    losses, nlls, found = [], [], []
    for number, rows in enumerate(part_of(case, mesh.dp_rank)):
        positions_BL, documents = documents_of(case, ids_BL[rows])
        with accumulation(model, number == case.accumulate - 1):
            loss_sum, nll_BL = model(tokens_BL[rows], targets_BL[rows], positions_BL, documents)
            (loss_sum / total).backward()
        losses.append(loss_sum.detach() / total)
        nlls.append(nll_BL)
    gradients = {name: local(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    for rows in part_of(case, mesh.dp_rank) if logits else []:  # afterwards: FSDP2 then leaves weights gathered
        positions_BL, documents = documents_of(case, ids_BL[rows])
        with torch.no_grad():
            found.append(model(tokens_BL[rows], None, positions_BL, documents))
    return Outcome(
        torch.stack(losses).sum(), torch.cat(nlls), weights, gradients, torch.cat(found) if logits else None
    )  # fmt: skip


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def split_dim(case: Case, name: str) -> int | None:
    """The dimension that tensor parallelism splits."""
    kind = name.split(".")[-2]
    if kind in ("wq", "w1", "w3", "embed", "head") or (kind in ("wk", "wv") and case.kv_heads >= case.tp):
        return 0
    return 1 if kind in ("wo", "w2") else None


def assembled(case: Case, name: str, by_rank: list[Tensor], summed: bool) -> Tensor:
    """A whole tensor. Ranks differ fastest in tp, then in dp_shard, which splits rows of what tp has left."""
    size = case.shard * case.tp
    for rank, part in enumerate(by_rank):
        assert torch.equal(part, by_rank[rank % size]), f"{case}: {name} differs between replicas"
    parts = [torch.cat(by_rank[t : size : case.tp]) for t in range(case.tp)]
    dim = split_dim(case, name)
    if dim is not None:
        return torch.cat(parts, dim)
    if summed:
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts), f"{case}: {name} differs over tp"
    return parts[0]


def ratio(expected: Tensor, found: Tensor, name: str) -> float:
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape), name
    difference, scale = (expected - found).abs().max().item(), expected.abs().max().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and difference == difference else math.inf


def check(case: Case, expected: Outcome, by_rank: list[Outcome]) -> float:
    """The worst ratio of a gradient; losses, logits and every token's are checked here, first weights to the bit."""
    for rank, outcome in enumerate(by_rank):
        twin = by_rank[rank - rank % case.tp]
        assert torch.equal(outcome.loss, twin.loss), f"{case}: the loss differs over tp"
        assert torch.equal(outcome.nll_BL, twin.nll_BL), f"{case}: a token's loss differs over tp"
    heads = by_rank[:: case.tp]
    ratios = {
        "loss": ratio(expected.loss, torch.stack([outcome.loss for outcome in heads]).sum(), "loss"),
        "nll": ratio(expected.nll_BL, torch.cat([outcome.nll_BL for outcome in heads]), "nll"),
    }
    for outcome in by_rank[: case.tp] if expected.logits_BLV is not None and by_rank[0].logits_BLV is not None else []:
        ratios["logits"] = ratio(expected.logits_BLV[: case.batch // case.dp], outcome.logits_BLV, "logits")
    assert all(outcome.gradients.keys() == expected.gradients.keys() for outcome in by_rank)
    for name, whole in expected.weights.items():
        found = assembled(case, name, [outcome.weights[name] for outcome in by_rank], summed=False)
        assert torch.equal(whole, found), f"{case}: first weights of {name}"
        found = assembled(case, name, [outcome.gradients[name] for outcome in by_rank], summed=True)
        ratios[name] = ratio(expected.gradients[name], found, name)
    worst = max(ratios, key=lambda name: ratios[name])
    print(f"{ratios[worst]:.1e} {worst}: {case}")
    assert ratios[worst] <= TOLERANCE, f"{case}: {ratios}"
    return ratios[worst]


def train_all(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


def compare(run_ranks: Any, cases: list[Case], timeout_s: float = 120) -> None:
    (world,) = {case.world for case in cases}
    by_rank = run_ranks(train_all, world, cases, timeout_s=timeout_s)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, oracle(case), list(outcomes))


def cases_of(tp: int, **fixed: Any) -> list[Case]:
    """Every value of every switch, and every pair of the ones that meet in a block."""
    kv_heads = (4, 1, 8) if tp == 2 else (4, 2, 1)
    cases = []
    for n, (kv, (tied, chunk, z_loss), activation) in enumerate(
        itertools.product(kv_heads, ((False, 4096, 0.0), (True, 5, 1e-2)), ("none", "full", "selective"))
    ):
        cases.append(
            Case(
                tp=tp,
                kv_heads=kv,
                tied=tied,
                chunk=chunk,
                z_loss=z_loss,
                activation=activation,
                qk_norm=n % 2 == 0,
                mask=n % 4 < 2,
                rows=1 if n % 3 == 0 else 2,
                meta=n % 5 != 0,
                joined=n % 7 == 0,
                **fixed,
            )
        )
    return cases


def test_two_ranks_compute_what_one_process_does(run_ranks: Any) -> None:
    compare(
        run_ranks,
        [
            Case(qk_norm=True, mask=True),
            Case(kv_heads=1, tied=True, chunk=5, z_loss=1e-2, activation="selective", rows=1),
            Case(kv_heads=1, tied=True, qk_norm=True, activation="full", joined=True, accumulate=2, meta=False),
        ],
    )


@pytest.mark.slow
def test_two_ranks_in_all_ways(run_ranks: Any) -> None:
    compare(run_ranks, cases_of(2))


@pytest.mark.slow
def test_four_ranks_in_all_ways(run_ranks: Any) -> None:
    compare(run_ranks, cases_of(4))


@pytest.mark.slow
def test_shards_of_split_tensors(run_ranks: Any) -> None:
    """136 / 2 rows of the vocabulary are 68, but 44 / 2 of the feed-forward's, 22, leave shares of 8, 8 and 6."""
    compare(run_ranks, cases_of(2, shard=2, accumulate=2))
    compare(run_ranks, [Case(shard=3, rows=1, kv_heads=1, qk_norm=True, accumulate=2)])


@pytest.mark.slow
def test_replicas_of_split_tensors(run_ranks: Any) -> None:
    compare(run_ranks, [Case(replicate=2, tied=True), Case(replicate=2, kv_heads=1, activation="selective")])
    compare(run_ranks, [Case(replicate=2, shard=2, kv_heads=kv, qk_norm=True, accumulate=2) for kv in (4, 1)])


@pytest.mark.slow
def test_compiled_blocks(run_ranks: Any) -> None:
    cases = [
        Case(compile="aot_eager", kv_heads=1, qk_norm=True, rows=1, joined=True),
        Case(compile="aot_eager", activation="full", accumulate=2),
        Case(compile="aot_eager", activation="selective", mask=True, qk_norm=True, rows=1),
    ]
    compare(run_ranks, cases, timeout_s=240)
    compare(run_ranks, [Case(compile="aot_eager", shard=2, activation="selective", mask=True)], timeout_s=240)


# ---- precision ----


class FloatsOf(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.other = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.seen += 1
                if value.dtype != torch.float64:
                    self.other.add(f"{func}: {value.dtype} {tuple(value.shape)}")
        return out


def floats_of(case: Case) -> tuple[int, set[str]]:
    model, _ = build(case)
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    positions_BL, documents = documents_of(case, ids_BL)
    with FloatsOf() as watch:
        model(tokens_BL, targets_BL, positions_BL, documents)[0].backward()
    return watch.seen, watch.other


def test_a_float64_step_holds_no_float32_tensor(run_ranks: Any) -> None:
    case = Case(kv_heads=1, qk_norm=True, mask=True, z_loss=1e-2, activation="selective")
    for seen, other in run_ranks(floats_of, 2, case):
        assert seen > 500
        assert not other


def in_bfloat16(case: Case) -> tuple[Outcome, set[torch.dtype]]:
    outcome = train(case, torch.bfloat16, logits=False)
    return outcome, {gradient.dtype for gradient in outcome.gradients.values()}


def test_bfloat16_keeps_gradients_in_the_dtype_of_weights(run_ranks: Any) -> None:
    case = Case(kv_heads=1, qk_norm=True)
    by_rank, expected = run_ranks(in_bfloat16, 2, case), oracle(case)
    outcomes = [outcome for outcome, _ in by_rank]
    assert all(dtypes == {torch.float32} for _, dtypes in by_rank)
    torch.testing.assert_close(outcomes[0].loss.double(), expected.loss, rtol=2e-3, atol=0)
    for name, gradient in expected.gradients.items():
        found = assembled(case, name, [outcome.gradients[name] for outcome in outcomes], summed=True).double()
        assert (found - gradient).norm() < 0.05 * gradient.norm(), name


# ---- stretches, and backward in two passes ----


class Products(TorchDispatchMode):
    """Multiply-adds of the matrix products, and collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.collectives = 0, dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = args[-2:]
            self.work += a.shape[0] * a.shape[1] * b.shape[1]
        name = packet.__name__
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self.collectives[name] = self.collectives.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def in_two_passes(case: Case, layers: range) -> dict[str, Any]:
    """Gradients of a stretch by one backward pass and by two, and the work of each."""
    collectives.JOINED = case.joined
    mesh = build_mesh(MeshPlan(tp=case.tp), "cpu")
    assert mesh.tp is not None
    part = whole_model(case, layers=3, loss_chunk=5).stretch(layers)
    split_tensors(part, mesh.tp)
    tokens_BL, targets_BL, _ = batch_of(case)
    generator = torch.Generator().manual_seed(mesh.rank("tp"))
    sizes = (case.batch, LENGTH // case.tp, 20)
    x_BlD, d_BlD = (torch.randn(sizes, dtype=torch.float64, generator=generator) for _ in range(2))
    x_BlD.requires_grad_()
    weights = [value for value in part.parameters() if value.requires_grad]

    def forward() -> tuple[Tensor, Tensor | None]:
        if part.norm is None:
            return part(tokens_BL, hidden_BLD=x_BlD), d_BlD
        return part(tokens_BL, targets_BL, hidden_BLD=x_BlD)[0], None

    with Products() as forth:
        out, d_out = forward()
    with Products() as once:
        expected = torch.autograd.grad(out, [x_BlD, *weights], d_out)
    out, d_out = forward()
    with Products() as first:
        (dx_BlD,), groups = stage_backward_input([out], None if d_out is None else [d_out], [x_BlD], iter(weights))
    with Products() as second:
        stage_backward_weight(iter(weights), groups)
    found = [dx_BlD, *(weight.grad for weight in weights)]
    names = ["x", *(name for name, _ in part.named_parameters())]
    assert all(a is not None for a in found)
    worst = max(ratio(local(a), local(b), name) for a, b, name in zip(expected, found, names, strict=True))
    work = {"forward": forth.work, "once": once.work, "inputs": first.work, "weights": second.work}
    return {"worst": worst, "work": work, "collectives": (forth.collectives, once.collectives, first.collectives)}


def test_a_backward_pass_in_two_computes_every_product_once(run_ranks: Any) -> None:
    cases = [Case(joined=joined, kv_heads=4 if joined else 1, qk_norm=True) for joined in (False, True)]
    for by_case in run_ranks(middle_and_end, 2, cases):
        for outcome in by_case:
            for number, found in enumerate(outcome):
                work = found["work"]
                assert found["worst"] <= TOLERANCE
                assert work["inputs"] + work["weights"] == work["once"]
                if number == 0:  # the loss computes its gradients in forward
                    assert work["inputs"] == work["weights"] == work["forward"]
                    forth, once, first = found["collectives"]
                    assert forth == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
                    assert once == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2}
                    assert first == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def middle_and_end(cases: list[Case]) -> list[list[dict[str, Any]]]:
    """The middle one has neither embedding nor head: of three layers, the second."""
    return [[in_two_passes(case, range(1, 2)), in_two_passes(case, range(1, 3))] for case in cases]


# ---- what inductor makes of it ----


def graphs_of(rows: int, joined: bool) -> dict[str, tuple[int, int, int, int, int]]:
    """Of a compiled block's forward and backward graph: gathers and scatters in all, those that inductor's pass for
    asynchronous TP takes for such, and the products that it then fuses with them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.fx_passes.micro_pipeline_tp import (
        find_all_gather_patterns,
        find_reduce_scatter_patterns,
        micro_pipeline_tp_pass,
    )
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.distributed._symmetric_memory import _test_mode

    collectives.JOINED = joined
    torch.distributed.is_nccl_available = lambda: True  # the pass asks; it is run on the graph and the graph is not run
    found = {}

    def look(direction: str) -> Any:
        def compiler(module: Any, _: Any) -> Any:
            copied = copy.deepcopy(module)
            view_to_reshape(copied)
            ops = torch.ops._c10d_functional
            gathers, scatters = (
                len(copied.graph.find_nodes(op="call_function", target=op.default))
                for op in (ops.all_gather_into_tensor, ops.reduce_scatter_tensor)
            )
            known = len(find_all_gather_patterns(copied.graph)), len(find_reduce_scatter_patterns(copied.graph))
            with _test_mode():
                micro_pipeline_tp_pass(copied.graph)
            fused = (
                len(copied.graph.find_nodes(op="call_function", target=op.default))
                for op in (torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)
            )
            found[direction] = (gathers, scatters, *known, *fused)
            return make_boxed_func(module.forward)

        return compiler

    case = Case(rows=rows, kv_heads=1, compile=aot_autograd(fw_compiler=look("forward"), bw_compiler=look("backward")))
    model, _ = build(case)
    tokens_BL, targets_BL, _ = batch_of(case)
    model(tokens_BL, targets_BL)[0].backward()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_inductor_knows_the_products_beside_collectives(run_ranks: Any, rows: int) -> None:
    """No kernel of it has run: that takes CUDA. Backward's gathers of ``x_BlD`` and its sums of several products have
    no form that the pass could fuse; they overlap by the order in which they are written."""
    for found in run_ranks(graphs_of, 2, rows, False):
        assert found == {"forward": (2, 2, 2, 2, 2, 2), "backward": (4, 2, 4, 2, 2, 0)}
