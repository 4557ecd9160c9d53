"""What DeepEP is handed and gives, with kernels of the test that move rows by gloo."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.model.moe.experts import Experts
from quern.parallel.experts.deepep import DeepEP, open_buffer
from quern.parallel.experts.exchange import Exchange
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan

TOKENS, DIM, EXPERTS, TOP_K, WIDTH = 7, 5, 6, 2, 4


@dataclass
class Handle:
    origins: list[tuple[int, int]]
    """Rank and token of each row that came."""
    num_recv_tokens_per_expert_list: list[int]


class Event:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def current_stream_wait(self) -> None:
        self.told.append("wait")


class Kernels:
    """As DeepEP's README describes ``ElasticBuffer``: rows by rank and token, experts numbered from this rank's on."""

    def __init__(self, group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int) -> None:
        assert (hidden, num_topk) == (DIM, TOP_K)
        self.group, self.most, self.told = group, num_max_tokens_per_rank, list[str]()

    def everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, value, group=self.group)
        return found

    def dispatch(self, x: Tensor, **how: Any) -> tuple[Any, ...]:
        self.told.append("dispatch")
        assert how.pop("async_with_compute_stream")
        handle = how.pop("handle", None)
        rows = self.everywhere(x)
        if handle is not None:
            return torch.stack([rows[rank][token] for rank, token in handle.origins]), None, None, handle, self.event()
        assert how.pop("num_max_tokens_per_rank") == self.most >= len(x)
        each = how.pop("num_experts") // dist.get_world_size(self.group)
        chosen, weights = self.everywhere(how.pop("topk_idx")), self.everywhere(how.pop("topk_weights"))
        assert not how
        first = dist.get_rank(self.group) * each
        origins, local = [], []
        for rank, own in enumerate(chosen):
            for token, experts in enumerate(own.tolist()):
                mine = [expert - first if first <= expert < first + each else -1 for expert in experts]
                if any(expert >= 0 for expert in mine):
                    origins.append((rank, token))
                    local.append(mine)
        numbers = torch.tensor(local).view(-1, TOP_K)
        by = torch.stack([weights[rank][token] for rank, token in origins]) * (numbers >= 0)
        counts = [int((numbers == expert).sum()) for expert in range(each)]
        x = torch.stack([rows[rank][token] for rank, token in origins])
        return x, numbers, by, Handle(origins, counts), self.event()

    def combine(self, y: Tensor, handle: Handle, topk_weights: Tensor | None = None, **how: Any) -> tuple[Any, ...]:
        self.told.append("combine")
        assert how == {"async_with_compute_stream": True}
        total, by = torch.zeros(TOKENS, DIM, dtype=y.dtype), torch.zeros(TOKENS, TOP_K, dtype=y.dtype)
        for origins, rows, weights in self.everywhere((handle.origins, y, topk_weights)):
            for number, (rank, token) in enumerate(origins):
                if rank == dist.get_rank(self.group):
                    total[token] += rows[number]
                    if weights is not None:
                        by[token] += weights[number]
        return total, None if topk_weights is None else by, self.event()

    def event(self) -> Event:
        return Event(self.told)


def both_ways() -> list[tuple[dict[str, Tensor], list[str]]]:
    world = dist.distributed_c10d._get_default_group()
    generator = torch.Generator().manual_seed(1)
    held = EXPERTS // dist.get_world_size()
    found = []
    for kernels in (True, False):
        experts = Experts(held, DIM, WIDTH).double()
        generator.manual_seed(5 + dist.get_rank())
        with torch.no_grad():
            for weight in experts.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        x_TD, grad_TD = (torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
        sent_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        sent_TK[2, 1] = EXPERTS
        weights_TK = torch.rand(TOKENS, TOP_K, generator=generator, dtype=torch.float64).requires_grad_()
        x_TD.requires_grad_()

        def here(x: Tensor, sent: Tensor, by: Tensor, assigned: int | None, experts: Experts = experts) -> Tensor:
            return experts.multiply(x, sent, by, *experts.parameters(), assigned=assigned)

        told: list[str] = []
        dealt: Any = Exchange(world.group_name, dist.get_world_size(), held, here)
        if kernels:
            with mock.patch.dict(sys.modules, deep_ep=types.SimpleNamespace(ElasticBuffer=Kernels)):
                buffer = open_buffer(world, TOKENS, DIM, TOP_K)
            told = buffer.kernels.told
            dealt = DeepEP(buffer, dist.get_world_size(), held, here)
        y_TD = dealt(x_TD, sent_TK, weights_TK, meanwhile=lambda told=told: told.append("meanwhile"))
        y_TD.backward(grad_TD)
        tensors = {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad}
        found.append((tensors | {name: w.grad for name, w in experts.named_parameters()}, told))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_tokens_by_kernels_of_another_library(kept_ranks: Any, ranks: int) -> None:
    for (kernels, told), (plain, _) in kept_ranks(both_ways, ranks):
        for name, expected in plain.items():
            torch.testing.assert_close(kernels[name], expected, rtol=1e-12, atol=1e-12)
        assert told == ["dispatch", "meanwhile", "wait", "combine", "wait", "dispatch", "wait", "combine", "wait"]


@pytest.mark.parametrize(
    ("changes", "task", "there", "said"),
    [
        ({}, Task({}), True, "expected torch, as they run on CUDA"),
        ({}, Task({}, cuda=True), False, "expected the package deep_ep to be installed"),
        ({"compute_dtype": torch.float32}, Task({}, cuda=True), True, "expected precision bf16 with it"),
        ({"ep_float8": True}, Task({}, cuda=True), True, "expected ep_float8=false with it"),
    ],
)
def test_kernels_that_are_not_there_are_refused(changes: dict[str, Any], task: Task, there: bool, said: str) -> None:
    shape = ModelConfig(preset="olmoe-1b-7b").shape(1000)
    layout = Layout(torch.bfloat16, MeshPlan(dp_shard=2, ep=2), ep_backend="deepep", seq_len=16)
    with (
        mock.patch("quern.parallel.planning.checks.find_spec", return_value=there or None),
        pytest.raises(InputError, match=said),
    ):
        check_layout(shape, replace(layout, **changes), task)
