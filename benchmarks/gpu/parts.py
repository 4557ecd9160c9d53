"""The measurements of ``precision.py`` that need no trainer: ceilings, FP8 products, and parts of a step alone.

    python benchmarks/gpu/parts.py NAME SPEC      # ceilings, products or parts; JSON; prints JSON

It is started by ``precision.py``, each NAME in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn

from quern.model.attention import Documents, attend
from quern.model.config import ModelConfig, ModelShape
from quern.model.float8 import linear
from quern.model.float8.product import available, emulated
from quern.model.float8.quantise import Quantised, blocks_1x128, rowwise, tensorwise
from quern.model.float8.recipe import Recipe, Scaling
from quern.model.loss import chunked_cross_entropy
from quern.model.transformer import Block
from quern.train.config import OptimizerConfig
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling
from quern.train.step.optimizer import build_optimizer, step

SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
#: Norm of the difference over the norm of the result, at most. Kernel and emulation multiply the same FP8 numbers and
#: both round the result to BF16, by half of 2⁻⁸ at most, so that they differ by little more where a sum falls on
#: another side; a forward's sums may lose bits in the tensor cores besides (DeepSeek-V3, section 3.3.2: near 2 % at the
#: worst single number of 4,096 summands).
KERNEL_BOUND = {"forward": 1e-2, "grad_input": 5e-3, "grad_weight": 5e-3}
#: Beside float64's product of the numbers before the casts. E4M3 rounds a number by 2⁻⁴ at most, some 2.6 % in the
#: mean square over a binade, and there are two factors; E5M2 rounds by twice as much.
EXACT_BOUND = {"e4m3": 5e-2, "e5m2": 8e-2}


def shape_of(spec: dict[str, Any]) -> ModelShape:
    return ModelConfig.model_validate(spec["model"]).shape(spec["vocab_size"])


def sizes(shape: ModelShape, tokens: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of the products of a block, by matrix; those of weights' gradients at the end."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "wq, wo": (tokens, query, shape.dim),
        "wk, wv": (tokens, key, shape.dim),
        "w1, w3": (tokens, shape.ffn_dim, shape.dim),
        "w2": (tokens, shape.dim, shape.ffn_dim),
        "dW of w1, w3": (shape.ffn_dim, shape.dim, tokens),
    }


def ceilings(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Bytes and FLOPs a second of one thing at a time."""
    rows = []
    for name, (m, n, k) in sizes(shape_of(spec), spec["tokens"]).items():
        row: dict[str, Any] = {"matrix": name, "m": m, "n": n, "k": k}
        row["bf16"] = gemm_ceiling(m, n, k, torch.bfloat16, device)
        row |= {scaling: float8_ceiling(m, n, k, Recipe(scaling), device) for scaling in SCALINGS}
        rows.append(row)
    best = max(gemm_ceiling(spec["square"], spec["square"], spec["square"], torch.bfloat16, device),
               *(row["bf16"] for row in rows))  # fmt: skip
    return {"copy": copy_ceiling(device, size=spec["copy_bytes"]), "best": best, "products": rows}


def products(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Relative errors of each recipe's products by the kernel: beside the emulation, and beside float64."""
    shape = shape_of(spec)
    rows = []
    for scaling, gradients in product(SCALINGS, ("e4m3", "e5m2")):
        recipe = Recipe(scaling, gradients)
        kernel = available(recipe, device, torch.bfloat16)
        for outputs, inputs in ((shape.dim, shape.ffn_dim), (shape.num_kv_heads * shape.head_dim, shape.dim)):
            x_TK, weight_OK, dy_TO = factors(spec["tokens"], inputs, outputs, device)
            exact = three(linear.PLAIN, x_TK.double(), weight_OK.double(), dy_TO.double())
            found = three(linear.products(recipe), x_TK, weight_OK, dy_TO)
            with emulating():
                plain = three(linear.products(recipe), x_TK, weight_OK, dy_TO)
            for name in exact:
                of_gradient = "e4m3" if name == "forward" else gradients
                row = {
                    "recipe": scaling, "gradients": gradients, "product": name, "outputs": outputs, "inputs": inputs,
                    "kernel": kernel, "to_emulation": error(found[name], plain[name]),
                    "to_float64": error(found[name], exact[name]),
                    "bounds": [KERNEL_BOUND[name], EXACT_BOUND[of_gradient]],
                }  # fmt: skip
                row["passes"] = row["to_emulation"] <= row["bounds"][0] and row["to_float64"] <= row["bounds"][1]
                rows.append(row)
    return {"rows": rows}


def three(by: linear.Products, x_TK: Tensor, weight_OK: Tensor, dy_TO: Tensor) -> dict[str, Tensor]:
    return {
        "forward": by.forward(x_TK, weight_OK),
        "grad_input": by.grad_input(dy_TO, weight_OK),
        "grad_weight": by.grad_weight(dy_TO, x_TK),
    }


def factors(tokens: int, inputs: int, outputs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, weight, gradient: normal, in BF16, in the sizes that training has."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        return (scale * torch.randn(rows, columns, device=device, generator=generator)).bfloat16()

    return normal(tokens, inputs, 1.0), normal(outputs, inputs, 0.02), normal(tokens, outputs, 1e-4)


@contextmanager
def emulating() -> Iterator[None]:
    """The same code with no kernel."""

    def multiply(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        return emulated(a_MS, b_NS, dtype)

    with patch.object(linear, "multiply", multiply):
        yield


def error(found: Tensor, exact: Tensor) -> float:
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm())


def parts(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Seconds of attention, loss, optimizer and casts alone, and what they would take at a limit."""
    shape = shape_of(spec)
    rows = [*attention(shape, spec, device), loss(shape, spec, device), optimizer(shape, spec, device),
            *casts(shape, spec, device)]  # fmt: skip
    return {"rows": rows}


def attention(shape: ModelShape, spec: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Forward and backward, causal, and causal within documents; a product's backward is two, and QKᵀ again."""
    batch, length = spec["tokens"] // spec["seq_len"], spec["seq_len"]

    def heads(count: int) -> Tensor:
        return torch.randn(batch, length, count, shape.head_dim, device=device, dtype=torch.bfloat16).requires_grad_()

    q, k, v = heads(shape.num_heads), heads(shape.num_kv_heads), heads(shape.num_kv_heads)
    dy = torch.randn_like(q)

    def both(mask: Documents | None) -> None:
        torch.autograd.grad(attend(q, k, v, mask), (q, k, v), dy)

    def flops(squares: float) -> float:
        return 3.5 * 4 * batch * shape.num_heads * shape.head_dim * squares / 2

    yield {"part": "attention, causal (sdpa)", "seconds": seconds_of(lambda: both(None), device),
           "flops": flops(length**2)}  # fmt: skip
    if device.type == "cuda":
        size = spec["document"]
        lengths = [size] * (length // size) + [length % size] * (length % size > 0)
        starts = torch.tensor([0, *lengths * batch], device=device).cumsum(0).to(torch.int32)
        ids = torch.repeat_interleave(torch.tensor(lengths, device=device)).expand(batch, -1)
        documents = Documents(ids, starts, max(lengths))
        seconds = seconds_of(lambda: both(documents), device)
        squares = sum(part**2 for part in lengths)
        yield {"part": f"attention, documents of {size} (varlen)", "seconds": seconds, "flops": flops(squares)}


def loss(shape: ModelShape, spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Logits, softmax and both gradients: three products."""
    tokens, rows = spec["tokens"], shape.padded_vocab_size
    h = torch.randn(tokens, shape.dim, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(rows, shape.dim, device=device)).requires_grad_()
    targets = torch.randint(shape.vocab_size, (tokens,), device=device)

    def both() -> None:
        summed, _ = chunked_cross_entropy(h, weight, targets, vocab_size=shape.vocab_size, chunk=4096)
        torch.autograd.grad(summed / tokens, (h, weight))

    return {"part": "loss, forward and backward", "seconds": seconds_of(both, device),
            "flops": 6.0 * tokens * shape.dim * rows}  # fmt: skip


def optimizer(shape: ModelShape, spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A fused AdamW update: weights, gradients and two moments are read, all but gradients written, four bytes each."""
    with device:
        model = nn.ModuleList(Block(shape) for _ in range(spec["optimizer_layers"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    adamw, skip = build_optimizer(model, OptimizerConfig()), torch.zeros((), device=device)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"part": f"AdamW, {count / 1e6:,.0f} M parameters", "bytes": 28.0 * count,
            "seconds": seconds_of(lambda: step(adamw, 1e-4, skip), device)}  # fmt: skip


def casts(shape: ModelShape, spec: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Activations to FP8, compiled and alone: two bytes in, one out; a scale for all needs the numbers twice."""
    x_TK = torch.randn(spec["tokens"], shape.dim, device=device, dtype=torch.bfloat16)
    for how, reads in ((tensorwise, 2), (rowwise, 1), (blocks_1x128, 1)):
        compiled = torch.compile(how, backend=spec["backend"])
        yield {"part": f"cast to FP8, {how.__name__}", "seconds": seconds_of(lambda cast=compiled: cast(x_TK), device),
               "bytes": (2.0 * reads + 1) * x_TK.numel()}  # fmt: skip


def seconds_of(call: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """The median of calls in turn, by the device's clock."""
    for _ in range(3):
        call()
    began, times = time.perf_counter(), []
    while len(times) < 5 or (time.perf_counter() - began < seconds and len(times) < 200):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(name: str, text: str) -> None:
    spec = json.loads(text)
    known = {"ceilings": ceilings, "products": products, "parts": parts}
    print(json.dumps(known[name](spec, torch.device(spec["device"]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
