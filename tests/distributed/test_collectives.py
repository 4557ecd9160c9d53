"""Products beside collectives: what a backward pass in two computes, and what inductor sees of a compiled block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.planning.schedules import why_no_split_backward
from quern.parallel.tensors import collectives
from quern.parallel.tensors.split import split_tensors
from support.distributed.storages import LiveStorages
from support.distributed.tensor_case import LENGTH, TOLERANCE, Case, batch_of, build, local, ratio, whole_model


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
    part = whole_model(case, layers=3, loss_chunk=5).slice_layers(layers)
    split_tensors(part, mesh.tp, pieces=case.pieces)
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
    return {"worst": worst, "work": work, "collectives": [watch.collectives for watch in (forth, once, first, second)]}


@pytest.mark.slow
@pytest.mark.skipif(why_no_split_backward() is not None, reason="this torch cannot split a backward pass")
def test_a_backward_pass_in_two_computes_every_product_once(run_ranks: Any) -> None:
    kinds = (True,) if collectives.JOINED else (False, True)  # torch that needs it can do no other
    cases = [Case(joined=joined, kv_heads=4 if joined else 1, qk_norm=True) for joined in kinds]
    cases.append(Case(joined=collectives.JOINED, pieces=3))
    for by_case in run_ranks(middle_and_end, 2, cases):
        for case, outcome in zip(cases, by_case, strict=True):
            for number, found in enumerate(outcome):
                work = found["work"]
                assert found["worst"] <= TOLERANCE
                assert work["inputs"] + work["weights"] == work["once"]
                if number == 0:  # the loss computes its gradients in forward
                    assert work["inputs"] == work["weights"] == work["forward"]
                    forth, once, first, second = found["collectives"]
                    cut = 2 * case.pieces
                    assert forth == {"all_gather_into_tensor": cut, "reduce_scatter_tensor": cut}
                    assert once == {"all_gather_into_tensor": cut + 2, "reduce_scatter_tensor": 2}
                    assert first == {"all_gather_into_tensor": cut, "reduce_scatter_tensor": 2}
                    assert second == {"all_gather_into_tensor": 4}


def middle_and_end(cases: list[Case]) -> list[list[dict[str, Any]]]:
    """The middle one has neither embedding nor head: of three layers, the second."""
    return [[in_two_passes(case, range(1, 2)), in_two_passes(case, range(1, 3))] for case in cases]


def kept_and_repeated(rows: int, pieces: int) -> dict[str, tuple[int, int, int]]:
    """By kind of recomputation: what a forward leaves behind, and the products and the sums over ranks of backward."""
    found = {}
    for kind in ("none", "selective", "full"):
        case = Case(rows=rows, activation=kind, pieces=pieces)
        model, _ = build(case)
        tokens_BL, targets_BL, _ = batch_of(case)
        with LiveStorages() as kept:
            loss, _ = model(tokens_BL, targets_BL)
        size = kept.bytes()
        with Products() as backward:
            loss.backward()
        found[kind] = size, backward.work, backward.collectives["reduce_scatter_tensor"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "pieces"), [(1, 1), (2, 1), pytest.param(2, 3, marks=pytest.mark.long)])
def test_selective_recomputation_keeps_no_parts_of_sums_and_repeats_no_product(
    run_ranks: Any, rows: int, pieces: int
) -> None:
    # columns of a block on one of two ranks: q, k, v, attention, w1, w3, and half of the stream after each sum
    kept = (24 + 12 + 12 + 24 + 22 + 22 + 10 + 10) * rows * LENGTH * 8 * 2
    for found in run_ranks(kept_and_repeated, 2, rows, pieces):
        (none, work, sums), (selective, again, sums_again), (full, _, _) = found.values()
        assert 0.9 * kept < selective - full < 1.1 * kept  # two parts of sums would be 1.3
        assert selective < none
        assert (again, sums_again) == (work, sums)


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
    model.loss_compiler = None  # its graphs are no block's
    tokens_BL, targets_BL, _ = batch_of(case)
    model(tokens_BL, targets_BL)[0].backward()
    return found


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2])
def test_inductor_knows_the_products_beside_collectives(run_ranks: Any, rows: int) -> None:
    """No kernel of it has run: that takes CUDA. Backward's gathers of ``x_BlD`` and its sums of several products have
    no form that the pass could fuse; they overlap by the order in which they are written."""
    for found in run_ranks(graphs_of, 2, rows, False):
        assert found == {"forward": (2, 2, 2, 2, 2, 2), "backward": (4, 2, 4, 2, 2, 0)}
