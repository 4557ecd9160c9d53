"""When FSDP2 asks for weights: a gather must be under way while the block before it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh

BLOCKS = 4


class Gathers(TorchDispatchMode):
    """Notes when a gather or a scatter is asked for; what computes notes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func.overloadpacket.__name__:
            self.order.append("gather")
        if func.namespace == "c10d" and "reduce_scatter" in func.overloadpacket.__name__:
            self.order.append("scatter")
        return func(*args, **(kwargs or {}))

    def noted(self, forward: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """``forward`` of a module inside of a block, whose gradients come once FSDP2's own hooks are through."""

        def computes(x: Tensor) -> Tensor:
            self.order.append(f"forward {name}")
            out = forward(x)
            if out.requires_grad:
                out.register_hook(lambda _: self.order.append(f"backward {name}"))
            return out

        return computes


def order_of_a_step(activation: str) -> list[str]:
    shape = ModelConfig(num_layers=BLOCKS, dim=16, num_heads=2, num_kv_heads=2, ffn_dim=32).shape(vocab_size=50)
    layout = Layout(torch.float32, activation_checkpointing=activation, micro_batch=1, seq_len=8)
    parallel = parallelize(Transformer(shape), build_mesh(MeshPlan(dp_shard=2), "cpu"), layout)
    initialise(parallel.model, seed=1)
    watch = Gathers()
    for name, block in parallel.model.blocks.items():
        block.ffn.w2.forward = watch.noted(block.ffn.w2.forward, name)  # type: ignore[union-attr]
    tokens_BL = torch.arange(8)[None]
    inputs = [Inputs(tokens_BL, tokens_BL, None, None)]
    parallel.run.forward_backward(inputs, lambda loss: loss)
    watch.order.clear()  # FSDP2 begins in the first step
    with watch:
        parallel.run.forward_backward(inputs, lambda loss: loss)
    return watch.order


@pytest.mark.slow
def test_backward_gathers_one_block_ahead(run_ranks: Any) -> None:
    """Forward: each block's gather is queued behind the kernels of the block before it, which a device is far from
    having computed then. Backward: the host waits in the engine, so the next gather is asked for before a block
    computes. The embedding is gathered once, before all, and so are norm and head, behind the last block. The sum
    of the head's gradient is under way before any block's backward, and after the last there are left the first block's
    and the embedding's."""
    forward = ["gather"] + [event for block in range(BLOCKS) for event in ("gather", f"forward {block}")] + ["gather"]
    # with the head the last block's own gather, and with each block the one before it; there is none before the first
    backward = ["gather", "scatter"]
    for block in reversed(range(BLOCKS)):
        backward += [*(["gather"] if block else []), f"backward {block}", "scatter"]
    assert run_ranks(order_of_a_step, 2, "none") == [[*forward, *backward, "scatter"]] * 2


@pytest.mark.slow
def test_recomputation_gathers_no_more(run_ranks: Any) -> None:
    plain, again = (run_ranks(order_of_a_step, 2, how)[0] for how in ("none", "full"))
    assert again.count("gather") == plain.count("gather") == 2 + 2 * BLOCKS
    assert [event for event in again if not event.startswith("forward")] == [
        event for event in plain if not event.startswith("forward")
    ]
