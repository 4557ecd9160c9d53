"""A model with experts, sharded by FSDP2, replicated, and cut into stages, against one process of plain autograd in
float64. The oracle shares the network alone: all logits, ``F.cross_entropy``, one micro-batch after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from quern.model.config import ModelConfig, ModelShape
from quern.model.init import local_slice
from quern.model.loss import IGNORE
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh

ROWS, SEQ_LEN, VOCAB, RATE, STEPS = 2, 12, 50, 0.3, 2


@dataclass(frozen=True)
class Case:
    plan: MeshPlan
    activation: str = "none"
    schedule: str | None = None
    reshard: bool = True


CASES = [Case(MeshPlan(dp_shard=2), "selective"), Case(MeshPlan(pp=2), schedule="1f1b")]
MORE = [
    Case(MeshPlan(dp_shard=2), reshard=False),
    Case(MeshPlan(dp_replicate=2), "full"),
    Case(MeshPlan(pp=2), "selective", "1f1b"),
    Case(MeshPlan(pp=2), schedule="zbv_zero_bubble"),
]


def shape_of() -> ModelShape:
    """Five experts: nothing that two ranks divide. A dense layer first."""
    experts = {"num_experts": 5, "top_k": 2, "ffn_dim": 9, "first_dense": 1, "shared_ffn_dim": 7, "shared_gate": True,
               "normalize": True}  # fmt: skip
    sizes = {"num_layers": 4, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24, "vocab_multiple": 8}
    return ModelConfig(**sizes, qk_norm="whole", moe=experts).shape(VOCAB)


def whole_model() -> Transformer:
    model = Transformer(shape_of(), loss_chunk=7).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in name))
    return model


def micro_batches(step: int, rank: int) -> list[Inputs]:
    found = []
    for number in range(4):
        generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
        tokens, targets = (torch.randint(VOCAB, (ROWS, SEQ_LEN), generator=generator) for _ in range(2))
        targets[torch.rand(ROWS, SEQ_LEN, generator=generator) >= 0.2 * (1 + number)] = IGNORE
        found.append(Inputs(tokens, targets, None, None))
    return found


def plain(ranks: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    model, found = whole_model(), []
    for step in range(STEPS):
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for inputs in (one for rank in range(ranks) for one in micro_batches(step, rank)):
            logits = model(inputs.tokens_BL).flatten(0, 1)
            loss = F.cross_entropy(logits, inputs.targets_BL.flatten(), ignore_index=IGNORE, reduction="sum")
            (loss / 37).backward()
            total += loss.detach()
        found.append((total, {name: value.grad.clone() for name, value in model.named_parameters()}))
        with torch.no_grad():
            for value in model.parameters():
                value -= RATE * value.grad
    return found


def train(cases: list[Case]) -> list[list[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    return [_train(case) for case in cases]


def _train(case: Case) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    mesh = build_mesh(case.plan, "cpu")
    with torch.device("meta"):
        model = Transformer(shape_of(), compute_dtype=torch.float64, loss_chunk=7).double()
    layout = Layout(
        compute_dtype=torch.float64, plan=case.plan, reshard_after_forward=case.reshard,
        activation_checkpointing=case.activation, schedule=case.schedule or "1f1b", micro_batch=ROWS, seq_len=SEQ_LEN,
    )  # fmt: skip
    parallel = parallelize(model, mesh, layout)
    exact = dict(whole_model().named_parameters())
    with torch.no_grad():
        for name, value in parallel.model.named_parameters():
            (value.to_local() if isinstance(value, DTensor) else value).copy_(exact[name][local_slice(value)])
    found = []
    for step in range(STEPS):
        for value in parallel.model.parameters():
            value.grad = None
        sums = parallel.run.forward_backward(micro_batches(step, mesh.dp_rank), lambda objective: objective / 37)
        parallel.gradients.finish()
        dist.all_reduce(sums)
        gradients = {name: value.grad for name, value in parallel.model.named_parameters()}
        whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
        found.append((sums[0], {name: grad.clone() for name, grad in whole.items()}))
        with torch.no_grad():
            for value in parallel.model.parameters():
                value -= RATE * value.grad
    return found


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, marks=pytest.mark.slow), pytest.param(MORE, marks=pytest.mark.long)], ids=len
)
def test_two_ranks_are_one_process(kept_ranks: Any, cases: list[Case]) -> None:
    by_rank = kept_ranks(train, 2, cases)
    for number, case in enumerate(cases):
        expected = plain(case.plan.dp_size)
        assert expected[0][0] != expected[1][0]
        names = {name for found in by_rank for name in found[number][0][1]}
        assert names == expected[0][1].keys(), case
        for found in by_rank:
            for step, ((loss, gradients), (total, exact)) in enumerate(zip(found[number], expected, strict=True)):
                assert (loss - total).abs() <= 1e-11 * total, case
                for name, own in gradients.items():
                    scale = exact[name].abs().max()
                    assert scale > 0
                    assert (own - exact[name]).abs().max() <= 1e-10 * scale, (case, step, name)
