"""The loss alone: time and bytes, eager and compiled, and its gradients beside float64's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parts.common import distance, gpu, seconds_of, shape_of, sized
from quern.model.config import ModelShape
from quern.model.loss import IGNORE, chunked_cross_entropy

#: Logits are rounded to BF16, by half of 2⁻⁸ at most, and their gradients again.
BOUNDS = {"loss": 1e-3, "grad of h": 2e-2, "grad of the weight": 2e-2}


def speed(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Logits, softmax and both gradients: three products. Bytes are the fewest that this way of computing moves."""
    shape, device = shape_of(spec), gpu(spec)
    h, weight, targets = inputs(shape, spec["tokens"], device)
    found = []
    for name, compiler in (("eager", None), ("compiled", spec["backend"])):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = seconds_of(lambda by=compiler: both(shape, spec["chunk"], h, weight, targets, by), device)
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else None
        flops = 6.0 * spec["tokens"] * shape.dim * shape.padded_vocab_size
        fewest = moved(shape, spec["tokens"], spec["chunk"])
        found.append({"what": name, "tokens": spec["tokens"], "ids": shape.vocab_size,
                      **sized(seconds, flops=flops, moved=fewest), "GB at least": fewest / 1e9,
                      "GiB beside": extra})  # fmt: skip
    return found


def right(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Sum and gradients beside torch's own cross-entropy in float64, of the same BF16 numbers; some targets do not
    count."""
    shape, device = shape_of(spec), gpu(spec)
    h, weight, targets = inputs(shape, spec["tokens"], device)
    targets[::7] = IGNORE
    rounded = h.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_()
    logits = (rounded[0] @ rounded[1].T)[:, : shape.vocab_size]
    summed = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    exact = [summed.detach(), *torch.autograd.grad(summed, rounded)]
    found = []
    for name, compiler in (("eager", None), ("compiled", spec["backend"])):
        ours, _ = chunked_cross_entropy(
            h, weight, targets, vocab_size=shape.vocab_size, chunk=spec["chunk"], compiler=compiler
        )
        for (what, bound), value, expected in zip(
            BOUNDS.items(), [ours.detach(), *torch.autograd.grad(ours, (h, weight))], exact, strict=True
        ):
            error = distance(value, expected)
            found.append({"what": f"{what}, {name}", "to float64": error, "bound": bound, "passes": error <= bound})
    return found


def both(
    shape: ModelShape, chunk: int, h: Tensor, weight: Tensor, targets: Tensor, compiler: str | None
) -> tuple[Tensor, ...]:
    summed, _ = chunked_cross_entropy(h, weight, targets, vocab_size=shape.vocab_size, chunk=chunk, compiler=compiler)
    return torch.autograd.grad(summed / len(targets), (h, weight))


def inputs(shape: ModelShape, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    h = normal(tokens, shape.dim).bfloat16().requires_grad_()
    weight = (0.02 * normal(shape.padded_vocab_size, shape.dim)).requires_grad_()
    return h, weight, torch.randint(shape.vocab_size, (tokens,), device=device, generator=generator)


def moved(shape: ModelShape, tokens: int, chunk: int) -> int:
    """Bytes of a BF16 ``h`` and a float32 weight, if every kernel reads and writes each of its numbers once.

    The logits, two bytes each: written by their product, read for the softmax's sums, read and overwritten by their
    gradient, read by both of its products. The weight: read and rounded to BF16, which each chunk reads twice. Its
    gradient: zeroed, read and written by every chunk, read and scaled. ``h`` is read twice, its gradient written, then
    read and scaled.
    """
    rows, chunks = shape.padded_vocab_size, -(-tokens // chunk)
    logits = 6 * 2 * tokens * rows
    weight = (4 + 2 + 2 * 2 * chunks) * rows * shape.dim
    gradient = (4 + 8 * chunks + 8) * rows * shape.dim
    return logits + weight + gradient + 5 * 2 * tokens * shape.dim
