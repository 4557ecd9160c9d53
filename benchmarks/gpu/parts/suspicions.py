"""What reading torch's sources lets suspect of a GPU, measured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parts.attention import cut, documents_of, gradients, heads
from parts.common import distance, gpu, seconds_of, shape_of, sized
from quern.model.attention import attend, attention_mask
from quern.model.float8.delayed import Amaxes
from quern.model.float8.recipe import Recipe
from quern.model.rope import rotation
from quern.model.transformer import Block, Linear
from quern.torch_versions import divide_exactly

#: Beside float64, of a product that is rounded to BF16 once: 2⁻⁹ of a number at most, 0.17 % in the mean square.
ROUNDED_ONCE = 2.5e-3
#: A compiled block keeps in float32 what eager mode rounds to BF16 between two operations. A number that
#: then falls on another side in FP8 moves what follows by more: 1.3 % on a CPU, with inductor.
AMAX_BOUND = 5e-2


def reduction(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Weights' gradients, sums over many tokens, with and without sums of parts in BF16
    (``allow_bf16_reduced_precision_reduction``, torch's default, which quern turns off)."""
    shape, device, found = shape_of(spec), gpu(spec), []
    generator = torch.Generator(device).manual_seed(1)
    for tokens in spec["tokens"]:
        for outputs, inputs in ((shape.ffn_dim, shape.dim), (shape.num_kv_heads * shape.head_dim, shape.dim)):
            dy = (1e-4 * torch.randn(tokens, outputs, device=device, generator=generator)).bfloat16()
            x = torch.randn(tokens, inputs, device=device, generator=generator).bfloat16()
            exact = dy.double().T @ x.double()
            for allowed in (False, True):
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
                error = distance(dy.T @ x, exact)
                speed = sized(seconds_of(lambda dy=dy, x=x: dy.T @ x, device), flops=2.0 * tokens * outputs * inputs)
                found.append({
                    "tokens": tokens, "outputs": outputs, "inputs": inputs, "sums in BF16": allowed,
                    "to float64": error, "bound": None if allowed else ROUNDED_ONCE, **speed,
                    "passes": None if allowed else error <= ROUNDED_ONCE,
                })  # fmt: skip
    return found


def amaxes(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Largest magnitudes of what FP8 casts see in a compiled block, beside the same block in eager mode; and how far
    its result and its weights' gradients are from each other."""
    shape, device, length = shape_of(spec), gpu(spec), spec["length"]
    divide_exactly()
    torch.manual_seed(0)
    with device:
        block = Block(shape, 0)
        names = [name for name, module in block.named_modules() if isinstance(module, Linear)]
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        x = torch.randn(2, length, shape.dim).bfloat16()
        dy = (1e-4 * torch.randn(2, length, shape.dim)).bfloat16()
    turn = rotation(shape, length, dtype=x.dtype, device=device)
    seen, results = [], []
    for compiled in (False, True):
        history = Amaxes(names, device)
        for name in names:
            block.get_submodule(name).recipe = history.of(name, Recipe("tensorwise", delayed=True))
        leaf = x.clone().requires_grad_()
        run = torch.compile(block, backend=spec["backend"]) if compiled else block
        out = run(leaf, turn)
        results.append([out.detach(), *torch.autograd.grad(out, [leaf, *block.parameters()], dy)])
        seen.append(history.current.double())
    apart = ((seen[1] - seen[0]).abs() / seen[0]).tolist()
    found: list[dict[str, Any]] = [
        {"what": f"amax of {kind}", "layer": name, "eager": seen[0][row][column].item(),
         "compiled": seen[1][row][column].item(), "relative": apart[row][column], "bound": AMAX_BOUND,
         "passes": apart[row][column] <= AMAX_BOUND}
        for row, name in enumerate(names) for column, kind in enumerate(("input", "weight", "gradient"))
    ]  # fmt: skip
    worst = max(distance(compiled, eager) for eager, compiled in zip(*results, strict=True))
    return [*found, {"what": "result and gradients, the worst", "relative": worst}]


def cudnn(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether gradients of SDPA with a dense mask are finite where seq_len % 128 is 64 (pytorch/pytorch#196678), in
    BF16; quern refuses such a config."""
    shape, device, found = shape_of(spec), gpu(spec), []
    for length in spec["lengths"]:
        mask = attention_mask("sdpa", documents_of(cut(2, length), device), device)
        inputs = heads(shape, 2, length, torch.bfloat16, device)
        for kernel in ("its own choice", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            try:
                with nullcontext() if kernel == "its own choice" else sdpa_kernel(getattr(SDPBackend, kernel)):
                    values = gradients(lambda q, k, v, mask=mask: attend(q, k, v, mask), *inputs)
            except RuntimeError as error:
                found.append({"length": length, "kernel": kernel, "finite": None, "says": str(error).splitlines()[0]})
                continue
            finite = all(bool(value.isfinite().all()) for value in values)
            found.append({"length": length, "kernel": kernel, "finite": finite, "says": None})
    return found
