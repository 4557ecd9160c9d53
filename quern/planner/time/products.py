"""How long kernels of one block and of the loss take on a GPU, micro-batch by micro-batch. Imports no torch.

A product of [m, k] and [k, n] takes

    max(2 · ⌈m⌉ · ⌈n⌉ · k / (peak · efficiency), bytes / (memory bandwidth · efficiency)) + kernel_s

where ⌈ ⌉ rounds up to a tile of :data:`TILE` rows or columns. ``kernel_s`` is what a kernel takes beside: with it the
share of the peak that a product reaches saturates as t / (t + kernel_s), t being the time of the product alone, so
small products reach less. Everything else is counted by the bytes that it reads and writes.

Attention computes the half of its matrix that causality leaves, forward two products, backward five (Dao 2023:
FlashAttention-2); documents in a row would leave less, and are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quern.parallel.planning.experts import expert_rows
from quern.parallel.planning.float8 import fitting, local_sizes
from quern.parallel.planning.step import Step
from quern.planner.hardware import Hardware

__all__ = ["TILE", "Phases", "attention", "block", "embedding", "loss", "moved", "product", "total"]

TILE = 128
"""Rows or columns of what one multiprocessor computes of a product at a time."""

PLAIN = 1 / 15
"""Of the BF16 peak what float32 products reach that matrix units do not compute: 67 of 989 TFLOP/s (H100 data
sheet)."""

Seconds = dict[str, float]
"""By part of a step."""


@dataclass
class Phases:
    """Seconds of a micro-batch by part: forward, backward for inputs and for weights, and what is computed again."""

    forward: Seconds = field(default_factory=dict)
    inputs: Seconds = field(default_factory=dict)
    weights: Seconds = field(default_factory=dict)
    again: Seconds = field(default_factory=dict)

    def add(self, other: Phases, times: float = 1) -> None:
        """In place."""
        for mine, its in zip(vars(self).values(), vars(other).values(), strict=True):
            for part, seconds in its.items():
                mine[part] = mine.get(part, 0.0) + times * seconds


def total(seconds: Mapping[str, float]) -> float:
    """Of all parts."""
    return sum(seconds.values())


def product(hardware: Hardware, m: float, n: int, k: int, *, float8: bool = False, count: int = 1) -> float:
    """Seconds of ``count`` products in one kernel, of [m, k] and [k, n] each, by the law above."""
    if float8 and hardware.float8_flops is not None:
        rate, size = hardware.float8_flops * hardware.efficiency.float8, 1
    else:
        rate, size = hardware.flops * hardware.efficiency.products, 2
    rows, columns = -(-m // TILE) * TILE, -(-n // TILE) * TILE
    return max(
        count * 2 * rows * columns * k / rate,
        moved(hardware, count * ((m + n) * k * size + 2 * m * n), 0),
    ) + hardware.kernel_s  # fmt: skip


def moved(hardware: Hardware, size: float, kernels: int = 1) -> float:
    """Seconds in which so many bytes are read and written."""
    return size / (hardware.memory_bytes_per_s * hardware.efficiency.memory) + kernels * hardware.kernel_s


def attention(step: Step, hardware: Hardware) -> float:
    """Seconds of a block's forward."""
    shape = step.shape
    heads = shape.num_heads // step.plan.tp
    flops = 2 * step.tokens * step.layout.seq_len * heads * shape.head_dim  # two products, half of each
    return flops / (hardware.flops * hardware.efficiency.attention) + hardware.kernel_s


def block(step: Step, hardware: Hardware, layer: int) -> Phases:
    """Of one layer; ``again`` with the policy of checkpointing that the layout has.

    ``full`` computes the forward again but for its last product, which nothing needs; ``selective`` what products and
    attention did not give. What a compiler computes again to stay within ``activation_memory_budget`` is not known.
    """
    forward: Seconds = {"products": 0.0, "attention": attention(step, hardware)}
    inputs: Seconds = {"products": 0.0, "attention": 2.5 * forward["attention"]}
    weights: Seconds = {"products": 0.0}
    last = 0.0
    for place, seconds in _linears(step, hardware, layer):
        for phase, own in zip((forward, inputs, weights), seconds, strict=True):
            for part, value in own.items():
                phase[part] = phase.get(part, 0.0) + value
        if place in ("ffn.w2", "ffn.shared.w2"):
            last = seconds[0]["products"]
    size, kernels = _elementwise(step, layer)
    forward["element-wise"] = moved(hardware, size, kernels)
    inputs["element-wise"] = moved(hardware, 2 * size, kernels if step.layout.compile_backend else 2 * kernels)
    again: Seconds = {}
    if step.layout.activation_checkpointing == "full":
        again = {"recomputation": total(forward) - last}
    elif step.layout.activation_checkpointing == "selective":
        again = {"recomputation": forward["element-wise"] + forward.get("casts", 0.0)}
    return Phases(forward, inputs, weights, again)


def loss(step: Step, hardware: Hardware) -> Phases:
    """Of the last norm, head and loss, whose gradients are formed in forward: three products of each chunk of tokens
    with the head. A chunk's logits are written, read in float32 twice, and replaced by their gradient; the head's
    gradient is added to in float32. Without a compiler a float32 copy of logits is written and read besides."""
    shape, wide = step.shape, max(step.compute_bytes, 4)
    rows, dim = shape.padded_vocab_size // step.plan.tp, shape.dim
    chunk = min(step.loss_chunk, step.tokens)
    chunks = -(-step.tokens // chunk)
    products = (
        product(hardware, chunk, rows, dim) + product(hardware, chunk, dim, rows) + product(hardware, rows, dim, chunk)
    )
    compiled = step.layout.compile_backend is not None
    logits = chunk * rows * (4 * step.compute_bytes if compiled else 3 * step.compute_bytes + 4 * wide)
    summed = rows * dim * (2 * wide + step.compute_bytes)
    return Phases(
        {"products": chunks * products, "element-wise": chunks * moved(hardware, logits + summed, 3 if compiled else 8)}
    )


def embedding(step: Step, hardware: Hardware) -> Phases:
    """Rows of the table looked up, and their gradients added to it."""
    size = step.tokens * step.shape.dim
    return Phases(
        {"element-wise": moved(hardware, 2 * size * step.compute_bytes)}, {},
        {"element-wise": moved(hardware, size * (step.compute_bytes + 2 * max(step.compute_bytes, 4)))},
    )  # fmt: skip


def _linears(step: Step, hardware: Hardware, layer: int) -> Iterator[tuple[str, tuple[Seconds, Seconds, Seconds]]]:
    """(name, seconds forward, for inputs and for weights) of a block's products, casts to FP8 among them."""
    shape, tp, recipe = step.shape, step.plan.tp, step.layout.float8
    fits = fitting(shape, tp, recipe, layer) if recipe is not None else ()
    for name, (n, k) in local_sizes(shape, tp, layer).items():
        float8, m, count = name in fits, float(step.tokens), 1
        if name == "ffn.experts":
            assert shape.moe is not None
            count = shape.moe.num_experts // step.plan.ep
            m = expert_rows(step)["expected"] / count
        forward, inputs, weights = (
            product(hardware, *size, float8=float8, count=count) for size in ((m, n, k), (m, k, n), (n, k, int(m) or 1))
        )
        seconds: tuple[Seconds, Seconds, Seconds] = (
            {"products": forward}, {"products": inputs}, {"products": weights},
        )  # fmt: skip
        if float8:
            for phase, size in zip(seconds, _casts(step, m, n, k), strict=True):
                phase["casts"] = moved(hardware, count * size, 1)
        if name == "ffn.experts":  # gate, up and down
            seconds = tuple({part: 3 * value for part, value in phase.items()} for phase in seconds)  # type: ignore[assignment]
        yield name, seconds
    if shape.is_sparse(layer):
        assert shape.moe is not None
        own = step.tokens // tp
        router = 2 * own * shape.moe.num_experts * shape.dim / (hardware.flops * hardware.efficiency.products * PLAIN)
        yield "router", ({"products": router}, {"products": router}, {"products": router})


def _casts(step: Step, m: float, n: int, k: int) -> tuple[float, float, float]:
    """Bytes that are read and written to make a product's factors FP8, each in the two orders in which its three
    products read it, after the largest value of each was found: a kernel of its own but where it is known from before
    (delayed) or found in the tile that is cast (rowwise, blockwise). Of weights only where they are cast at each use.
    """
    recipe, size = step.layout.float8, step.compute_bytes
    assert recipe is not None
    largest = size if recipe.scaling == "tensorwise" and not recipe.delayed else 0
    once = step.layout.float8_all_gather or step.layout.keeps_weights(step.plan)
    weights = 2 * n * k if once else n * k * (size + 1 + largest)
    # compiled, the cast of activations is part of the kernel that gives them, as far as it writes
    read = 0 if step.layout.compile_backend is not None else size
    return m * k * (largest + read + 1) + weights, m * n * (largest + size + 2), m * k * 2


def _elementwise(step: Step, layer: int) -> tuple[float, int]:
    """Bytes of a block's forward outside of products, and how many kernels. A backward moves twice as much.

    Of each value of the residual stream, for each of two norms: eager, the sum is a kernel (two read, one written),
    then it is cast to float32, normed and cast back; compiled, one kernel reads the stream and what is added, and
    writes sum and norm. Rotation: eager ten values for one, compiled two; SwiGLU: five and three.
    """
    shape, tp, size = step.shape, step.plan.tp, step.compute_bytes
    compiled, wide = step.layout.compile_backend is not None, max(size, 4)
    of_norm = 4 * size if compiled else 5 * size + 4 * wide
    own, tokens = step.tokens // tp, step.tokens
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim // tp
    moved_bytes = 2.0 * own * shape.dim * of_norm + tokens * heads * size * (2 if compiled else 10)
    if shape.qk_norm:
        moved_bytes += tokens * heads * of_norm / 2
    kernels = 4 if compiled else 20
    width = shape.ffn_dim // tp
    of_width = (3 if compiled else 5) * size
    if shape.is_sparse(layer):
        moe = shape.moe
        assert moe is not None
        width = moe.shared_ffn_dim // tp
        rows = expert_rows(step)["expected"]
        # copied out for experts and back, weighted and summed; choices are sorted
        moved_bytes += rows * (shape.dim * 5 * size + moe.ffn_dim // tp * of_width)
        kernels += 12 if compiled else 30
    return moved_bytes + tokens * width * of_width, kernels
