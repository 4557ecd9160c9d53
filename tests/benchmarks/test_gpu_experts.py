"""The pieces of a layer with experts that are timed are the layer's, and all of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from parts import experts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SPEC: dict[str, Any] = {
    "model": {"preset": "debug", "dim": 32, "moe": {"num_experts": 4, "top_k": 2, "ffn_dim": 16}},
    "vocab_size": 500, "device": "cpu", "dtype": "float32", "tokens": 24,
}  # fmt: skip


def test_the_loop_gives_what_grouped_products_give() -> None:
    sides = experts.calls(SPEC)
    grouped, loop = sides["layer"](), sides["loop"]()
    assert isinstance(grouped, tuple)
    assert isinstance(loop, tuple)
    assert len(grouped) == 5
    torch.testing.assert_close(grouped, loop)
    with patch.object(experts.products.F, "grouped_mm", side_effect=RuntimeError("grouped")):
        sides["loop"]()
        with pytest.raises(RuntimeError, match="grouped"):
            sides["layer"]()


class Counter(TorchDispatchMode):
    """FLOPs of products; torch's own counter cannot look into ``autograd.grad`` of a module's weights."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        if func.namespace == "quern":  # products by expert: rows of two widths, of which one is in the result
            rows, width = args[0].shape
            self.total += 2 * rows * width * (out if out.dim() == 2 else args[1]).shape[1]
        return out


def test_a_token_costs_what_the_dense_layer_costs() -> None:
    sides = experts.calls(SPEC)
    flops = {}
    for name in ("layer", "router", "products", "dense"):
        with Counter() as counter:
            sides[name]()
        flops[name] = counter.total
    assert flops["products"] == flops["dense"] == 3 * 2 * 3 * 24 * 2 * 32 * 16
    assert flops["router"] == 3 * 2 * 24 * 32 * 4
    assert flops["layer"] == flops["products"] + flops["router"]


def test_shares_are_of_the_layer() -> None:
    rows = {row["what"]: row for row in experts.pieces(SPEC)}
    assert set(rows) == {"layer", "loop", "router", "products", "dense", "rest"}
    assert rows["router"]["ms"] + rows["products"]["ms"] + rows["rest"]["ms"] == pytest.approx(rows["layer"]["ms"])
    assert rows["layer"]["% of the layer"] == 100
