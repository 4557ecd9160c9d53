"""Compares a step with one that only multiplies at the best speed, and suggests improvements. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quern.train.profiling.account import Account
from quern.train.profiling.classes import DATA, ELEMENTWISE, GEMM, HOST, IDLE, LOSS, OPTIMIZER
from quern.train.profiling.products import Shape

__all__ = ["Limits", "Loss", "Setting", "losses"]

_COLLECTIVES = {
    "all-gather": "a larger micro_batch hides more of it; parallel.reshard_after_forward=false gathers a block once a "
    "micro-batch, not twice; parallel.dp_replicate keeps gathers among fewer ranks",
    "reduce-scatter": "a larger micro_batch hides more of it; parallel.dp_replicate keeps sums among fewer ranks",
    "all-reduce": "a larger global_batch makes it rarer; ranks that wait for a slower one wait here",
    "all-to-all": "ranks of cp exchange tokens for heads, which nothing hides: a smaller parallel.cp",
    "ring of cp": "more tokens a rank hide more of it: a larger seq_len or a smaller parallel.cp",
    "send and receive": "stages wait for each other: more micro-batches, another parallel.schedule, or "
    "parallel.stage_layers where stages are unequal",
    "broadcast": "look in the trace for who sends so much",
    "copies between devices": "larger sizes hide more of them behind the products that need them",
    "waiting": "the trace does not show the collective that was waited for",
}


@dataclass(frozen=True)
class Limits:
    """The best speeds measured on the machine. Empty: nothing was measured."""

    shapes: dict[Shape, float] = field(default_factory=dict)
    """FLOP/s of each shape alone."""
    best: float | None = None
    """FLOP/s of the fastest product in the compute dtype."""
    copy: float | None = None
    """Bytes a second, read and written."""


@dataclass(frozen=True)
class Setting:
    """What is known of the run. None: the trace alone is there."""

    compiled: bool | None = None
    checkpointing: str | None = None
    repeated: float = 0.0
    """Share of the products' FLOPs, over all ranks, that the model does not need."""


@dataclass(frozen=True)
class Loss:
    """Time that a step could save."""

    what: str
    seconds: float
    """Of a step."""
    share: float
    """Of a step."""
    remedy: str


def losses(account: Account, limits: Limits, setting: Setting) -> list[Loss]:
    """All of a rank's losses, largest first. Of what overlaps, as a slow product that is also computed twice, each is
    told by itself."""
    steps = len(account.steps)
    found = [
        Loss(what, ns / steps / 1e9, ns / account.total_ns, remedy)
        for part in (_communication(account), _products(account, limits), _rest(account, setting))
        for what, ns, remedy in part
        if ns > 0
    ]
    return sorted(found, key=lambda loss: -loss.seconds)


def _communication(account: Account) -> Iterator[tuple[str, float, str]]:
    for kind in account.collectives:
        hidden = 1 - kind.exposed_ns / kind.total_ns if kind.total_ns else 0.0
        yield f"exposed {kind.kind} ({hidden:.0%} of it is hidden)", kind.exposed_ns, _COLLECTIVES[kind.kind]


def _products(account: Account, limits: Limits) -> Iterator[tuple[str, float, str]]:
    """Below the speed that each has alone; and below the best, since it is no better alone."""
    if limits.best is None:
        return
    slow, small = [], []
    for product in account.products:
        if product.shape is not None and (speed := limits.shapes.get(product.shape)) is not None:
            least = product.flops / speed * 1e9
            slow.append((product.ns - least, f"GEMM {product.shape} at {least / product.ns:.0%} of its own ceiling"))
            most = f"GEMM {product.shape}, whose own ceiling is {speed / limits.best:.0%} of the best product"
            small.append((least - product.flops / limits.best * 1e9, most))
    beside = "kernels that run beside it" if account.device == "cuda" else "operands out of cache, busy cores"
    for found, remedy in (
        (slow, f"what it has not when alone: {beside}, a throttled clock"),
        (small, "a larger micro_batch, less tp, sizes that are multiples of 128"),
    ):
        if lost := [each for each in found if each[0] > 0]:
            others = f", and {len(lost) - 1} other shapes" if len(lost) > 1 else ""
            yield max(lost)[1] + others, sum(ns for ns, _ in lost), remedy


def _rest(account: Account, setting: Setting) -> Iterator[tuple[str, float, str]]:
    classes = account.classes
    fuse = "compile.enabled=true fuses much of it" if not setting.compiled else "it is compiled already; see the list"
    yield "element-wise operations, norms, casts and copies", classes[ELEMENTWISE], fuse
    yield "the loss without its products", classes[LOSS], "a smaller vocabulary, or another loss_chunk"
    remedy = "a larger global_batch updates more rarely; parallel.dp_shard spreads it over ranks"
    yield "optimizer, clipping and the guard", classes[OPTIMIZER], remedy
    remedy = "see data_wait_s in metrics.jsonl; a faster disk, or fewer ranks a CPU"
    yield "waiting for data and transfers", classes[DATA], remedy
    if account.device == "cuda":
        what, longer = "the device waits for the host", "kernels"
    else:
        what, longer = "Python, views and autograd between operations", "operations"
    remedy = f"a larger micro_batch{'' if setting.compiled else ' and compile.enabled=true'}: fewer, longer {longer}"
    yield what, classes[HOST], remedy
    yield "nothing at work on host or device", classes[IDLE], "another process may have had the CPU"
    if setting.checkpointing not in (None, "none") and setting.repeated > 0:
        what = f"products computed again ({setting.repeated:.0%} of all; the attention and the rest of it come on top)"
        remedy = f"activation_checkpointing is {setting.checkpointing}: a milder one, if memory allows"
        yield what, classes[GEMM] * setting.repeated, remedy
