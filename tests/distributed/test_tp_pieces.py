"""Collectives of tensor parallelism in pieces: the order of starts, products and waits, and the same bits in FP8.

That models train with them as one process does is in ``test_tensor_parallel.py``, how many messages they are in
``test_traffic.py``.
"""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.float8.delayed import Delayed
from quern.model.float8.linear import products
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.tensors.collectives import Ranks, gather_multiply, multiply_scatter
from support.distributed.tensor_case import Case, build

PRODUCTS = ("mm", "addmm", "_scaled_mm_v2")


class Order(TorchDispatchMode):
    """Starts, products and waits in turn: G gather, S scatter, M product, and W with the number of what is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._started: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            self.said.append("G" if name.startswith("all") else "S")
            self._started.append(found.data_ptr())
        if name == "wait_tensor":
            self.said.append(f"W{self._started.index(args[0].data_ptr())}")
        if name in PRODUCTS:
            self.said.append("M")
        return found


def tensors(ranks: Ranks, dtype: torch.dtype, batch: int) -> tuple[Tensor, list[Tensor]]:
    """This rank's tokens of a stream of 128, two weights that gather them and one that scatters."""
    generator = torch.Generator().manual_seed(3)
    x_BLD = torch.randn(batch, 64, 128, dtype=dtype, generator=generator)
    weights = [
        torch.randn(size, dtype=dtype, generator=generator) / 16 for size in ((256, 128), (256, 128), (128, 256))
    ]
    return x_BLD.chunk(2, 1)[ranks.rank].clone().requires_grad_(), [weight.requires_grad_() for weight in weights]


def over_two() -> Ranks:
    mesh = build_mesh(MeshPlan(tp=2), "cpu")
    assert mesh.tp is not None
    return Ranks.of(mesh.tp)


def orders(pieces: int, recipe: Recipe | None) -> list[str]:
    """Of a gather with its products and of products with their scatter: forward, then backward."""
    ranks = over_two()
    x_BlD, (w1, w3, w2) = tensors(ranks, torch.bfloat16, 2)
    found = []
    with Order() as order:
        gate_BLF, up_BLF = gather_multiply(x_BlD, (w1, w3), ranks, (recipe, recipe), pieces)
    found.append(order)
    with Order() as order:
        y_BlD = multiply_scatter(up_BLF.detach().requires_grad_(), w2, ranks, recipe, pieces)
    found.append(order)
    with Order() as order:
        y_BlD.sum().backward()
    found.append(order)
    with Order() as order:
        (gate_BLF.sum() + up_BLF.sum()).backward()
    found.append(order)
    return [" ".join(order.said) for order in found]


@pytest.mark.parametrize("recipe", [None, Recipe("rowwise")])
def test_while_a_piece_travels_the_one_before_is_multiplied(kept_ranks: Any, recipe: Recipe | None) -> None:
    """And none is awaited before the product that overlaps with it. What backward gathers for the weights alone goes
    in one, and overlaps with the product of the input's gradient."""
    expected = [
        "G G G G W0 M M W1 M M W2 M M W3 M M",
        "M S M S M S M S W0 W1 W2 W3",
        "G G G G W0 M W1 M W2 M W3 M M",
        "G M M S W0 M M W1",
    ]
    assert kept_ranks(orders, 2, 4, recipe) == [expected] * 2
    whole = ["G W0 M M", "M S W0", "G W0 M M", "G M M S W0 M M W1"]
    assert kept_ranks(orders, 2, 1, recipe) == [whole] * 2


def recipe_of(name: str) -> Recipe:
    if name != "delayed":
        return Recipe(name)  # type: ignore[arg-type]
    known_3 = torch.tensor([3.0, 0.25, 1.5])  # some of what comes is larger
    return Delayed("tensorwise", "e5m2", delayed=True, known_3=known_3, seen_3=torch.zeros(3))


def results(name: str, dtype: torch.dtype, pieces: int) -> list[Tensor]:
    """Outputs and gradients of a gathered pair of products and a scattered one, and what delayed scaling has seen."""
    ranks = over_two()
    x_BlD, weights = tensors(ranks, dtype, 2)
    by = [recipe_of(name) for _ in weights]
    gate_BLF, up_BLF = gather_multiply(x_BlD, weights[:2], ranks, by[:2], pieces)
    y_BlD = multiply_scatter(gate_BLF * up_BLF, weights[2], ranks, by[2], pieces)
    generator = torch.Generator().manual_seed(ranks.rank)
    y_BlD.backward(torch.randn(y_BlD.shape, generator=generator).to(dtype))
    gradients = [tensor.grad for tensor in (x_BlD, *weights)]
    assert all(gradient is not None for gradient in gradients)
    seen = [recipe.seen_3 for recipe in by if isinstance(recipe, Delayed)]
    return [value.detach() for value in (gate_BLF, up_BLF, y_BlD, *gradients, *seen) if value is not None]


def compared(names: list[str], dtype: torch.dtype) -> dict[str, list[bool]]:
    """By recipe: which results are the same bits in 1 and in 4 pieces, and in 1 and in 8."""
    found = {}
    for name in names:
        whole = results(name, dtype, 1)
        found[name] = [
            torch.equal(a, b) for pieces in (4, 8) for a, b in zip(whole, results(name, dtype, pieces), strict=True)
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pieces_in_fp8_give_the_same_bits(kept_ranks: Any, dtype: torch.dtype) -> None:
    """Scales belong to rows or are known; two ranks' sums have one order."""
    for found in kept_ranks(compared, 2, ["rowwise", "blockwise", "delayed"], dtype):
        assert [len(same) for same in found.values()] == [14, 14, 20]
        assert all(all(same) for same in found.values()), found


def by_hand() -> list[float]:
    """How far two pieces of ``tensorwise`` are from products of each with its own scale."""
    ranks, recipe = over_two(), Recipe("tensorwise")
    x_BlD, (w1, _, _) = tensors(ranks, torch.float64, 1)
    with torch.no_grad():
        (found_BLO,) = gather_multiply(x_BlD, (w1,), ranks, (recipe,), 2)
    generator = torch.Generator().manual_seed(3)
    x_LD = torch.randn(1, 64, 128, dtype=torch.float64, generator=generator)[0]
    rows = torch.arange(64).view(2, 2, 16)  # rank, piece, token
    off = []
    for piece in range(2):
        mine = rows[:, piece].flatten()
        off.append(float((found_BLO[0, mine] - products(recipe).forward(x_LD[mine], w1)).abs().max()))
    off.append(float((found_BLO[0] - products(recipe).forward(x_LD, w1)).abs().max()))
    return off


def test_a_dynamic_scale_is_a_pieces_own(kept_ranks: Any) -> None:
    for first, second, whole in kept_ranks(by_hand, 2):
        assert first == second == 0
        assert whole > 0


def refused() -> list[str]:
    ranks = over_two()
    x_BlD, (w1, _, w2) = tensors(ranks, torch.float64, 1)
    found = []
    for call in (
        lambda: gather_multiply(x_BlD, (w1,), ranks, None, 5),
        lambda: multiply_scatter(torch.randn(1, 64, 256, dtype=torch.float64), w2, ranks, None, 5),
    ):
        with Order() as order, pytest.raises(RuntimeError):
            call()
        found += order.said
    return found


def test_a_length_that_pieces_do_not_divide_sends_nothing(kept_ranks: Any) -> None:
    assert kept_ranks(refused, 2) == [[], []]


# ---- compiled ----

LETTERS = {
    "all_gather_into_tensor": "G", "reduce_scatter_tensor": "S", "wait_tensor": "W", "extern_kernels.mm": "M",
    "extern_kernels.addmm": "M", "extern_kernels._scaled_mm": "M",
}  # fmt: skip


def letters(code: str) -> str:
    """Starts, products and waits of one graph that inductor has written."""
    calls = re.compile(r"^\s+(?:\w+ = )?(?:torch\.ops\._c10d_functional\.(\w+)\.default|(extern_kernels\.\w+))\(")
    found = (calls.match(line) for line in code.split("def call(")[1].splitlines())
    return "".join(LETTERS[call[1] or call[2]] for call in found if call is not None)


def inductor_orders(recipe: Recipe | None) -> list[str]:
    """Of a feed-forward's forward and backward graph on the first of two ranks, as inductor writes them: what it
    writes is not compiled, and no graph is run."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.utils import get_code

    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.cpp.simdlen = 1  # or it compiles a program to see what the processor can do
    build(Case(tp=1, pieces=2, compile="inductor"))  # and with it whatever is set for the process
    ranks, found = Ranks(dist.group.WORLD.group_name, 2, 0), []
    x_BlD, (w1, w3, w2) = tensors(ranks, torch.bfloat16, 2)

    def look(module: Any, inputs: Any, **options: Any) -> Any:
        with mock.patch.object(torch._dynamo, "reset"):  # which it does first, and may not while it compiles
            codes = get_code(compile_fx_inner, copy.deepcopy(module), inputs, **options)
        found.extend(letters(code) for code in codes if "def call(" in code)
        values = [None if node is None else node.meta["val"] for node in module.graph.output_node().args[0]]
        return make_boxed_func(
            lambda *_: [None if value is None else torch.zeros(value.shape, dtype=value.dtype) for value in values]
        )

    def feed_forward(x_BlD: Tensor) -> Tensor:
        gate_BLF, up_BLF = gather_multiply(x_BlD, (w1, w3), ranks, (recipe, recipe), 2)
        return multiply_scatter(F.silu(gate_BLF) * up_BLF, w2, ranks, recipe, 2)

    block = torch.compile(feed_forward, backend=lambda module, inputs: compile_fx(module, inputs, inner_compile=look))
    block(x_BlD).sum().backward()
    return found


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, Recipe("rowwise")])
def test_inductor_keeps_the_order(run_ranks: Any, recipe: Recipe | None) -> None:
    """Its own puts the first wait of a scatter before the second product. What forward has gathered is kept."""
    assert run_ranks(inductor_orders, 1, recipe) == [["GGWMMWMMMSMSWW", "GGWMWMMMMSMMW"]]
