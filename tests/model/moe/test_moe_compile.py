"""A deep model with experts, compiled block by block, has one graph for all of its sparse blocks."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.experts.loads import ExpertLoads
from quern.parallel.planning.balancing import Balancing

LAYERS = 10
"""More than torch makes graphs of one function."""


@pytest.mark.long
def test_every_layer_has_the_same_graph() -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn_dim": 16, "bias": True}
    shape = ModelConfig(num_layers=LAYERS, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=32, moe=moe).shape(64)
    model = Transformer(shape)
    initialise(model, 0)
    loads = ExpertLoads(shape, Balancing(balance_loss=0.01, bias_rate=0.001), 16, torch.device("cpu"))
    loads.watch(model, 16)
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    noted = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            for block in model.blocks.children():
                block.compile(backend="aot_eager")
        loads.begin(2, torch.ones(()))
        model(tokens, tokens)[0].backward()
        noted.append(loads.noted.clone())
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(*noted)
    assert (noted[1][:, :4].sum(dim=1) == 2 * 16 * 2).all()
