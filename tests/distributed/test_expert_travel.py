"""How rows travel to experts: in FP8 as by hand, and while something else is computed, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.moe.experts import Experts
from quern.parallel.experts.all_to_all import AsyncAllToAll
from quern.parallel.experts.exchange import Exchange, Places
from support.oracles.float8_oracle import E4M3, quantised

TOKENS, DIM, EXPERTS, TOP_K, WIDTH = 9, 200, 4, 2, 6
"""A row of two blocks, of which the second is not full."""


class Sent(TorchDispatchMode):
    """Sizes and types of what is sent, and what is computed between, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "all_to_all_single":
            self.messages.append((tuple(args[0].shape), args[0].dtype))
        if name in ("all_to_all_single", "wait_tensor", "tanh", "tanh_backward"):
            self.order.append(name)
        return func(*args, **(kwargs or {}))


def layer(dtype: torch.dtype) -> tuple[Experts, Tensor, Tensor, Tensor, Tensor]:
    """Weights, tokens, choices, weights of these, and the gradient of the output, of this rank; the first are the same
    on all."""
    experts = Experts(EXPERTS, DIM, WIDTH).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    x_TD, grad_TD = (torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    x_TD[0] = 0
    sent_TK = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    wide = torch.promote_types(dtype, torch.float32)
    weights_TK = torch.rand(TOKENS, TOP_K, generator=generator, dtype=wide)
    return experts, x_TD.requires_grad_(), sent_TK, weights_TK.requires_grad_(), grad_TD


def by_hand(experts: Experts, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor) -> Tensor:
    rounded = torch.from_numpy(quantised(x_TD.detach().numpy(), 1, 128, E4M3))
    x_TD = x_TD + (rounded - x_TD).detach()
    rows = []
    for token, chosen in enumerate(sent_TK.tolist()):
        given = [
            experts.w2[e] @ (torch.nn.functional.silu(experts.w1[e] @ x_TD[token]) * (experts.w3[e] @ x_TD[token]))
            for e in chosen
        ]
        rows.append(sum((weights_TK[token, k] * y for k, y in enumerate(given)), torch.zeros(DIM, dtype=x_TD.dtype)))
    return torch.stack(rows)


def gradients(x_TD: Tensor, weights_TK: Tensor, experts: Experts) -> dict[str, Tensor]:
    """By name, of all ranks' tokens; they are forgotten."""
    named = {"x": x_TD, "weights": weights_TK, **dict(experts.named_parameters())}
    found = {}
    for name, tensor in named.items():
        assert tensor.grad is not None
        found[name] = tensor.grad
        if name.startswith("w") and name != "weights":
            dist.all_reduce(found[name])
        tensor.grad = None
    return found


def exchanged(capacity: bool) -> dict[str, Tensor]:
    """In float64 through FP8: what is found and what it should be, gradients too, and what was sent."""
    experts, x_TD, sent_TK, weights_TK, grad_TD = layer(torch.float64)
    name, ranks = dist.distributed_c10d._get_default_group().group_name, dist.get_world_size()
    held = EXPERTS // ranks
    own = [w[dist.get_rank() * held :][:held] for w in (experts.w1, experts.w2, experts.w3)]
    if capacity:
        dealt: Any = Places(name, ranks, held, (1, 1), lambda x, ends: experts.swiglu(x, ends, *own), True)
    else:

        def here(x: Tensor, sent: Tensor, by: Tensor, assigned: int | None) -> Tensor:
            return experts.multiply(x, sent, by, *own, assigned=assigned)

        dealt = Exchange(name, ranks, held, here, True)
    with Sent() as seen:
        y_TD = dealt(x_TD, sent_TK, weights_TK)
        y_TD.backward(grad_TD)
    found = {"y": y_TD.detach(), **gradients(x_TD, weights_TK, experts)}
    y_TD = by_hand(experts, x_TD, sent_TK, weights_TK)
    y_TD.backward(grad_TD)
    expected = {"y": y_TD.detach(), **gradients(x_TD, weights_TK, experts)}
    return {
        **{f"found {name}": value for name, value in found.items()},
        **{f"expected {name}": value for name, value in expected.items()},
        "bytes": torch.tensor([size[1] for size, dtype in seen.messages if dtype == torch.uint8]),
    }  # fmt: skip


@pytest.mark.parametrize("capacity", [False, True])
def test_tokens_travel_in_float8(kept_ranks: Any, capacity: bool) -> None:
    """256 values of a byte and two scales; all else goes in the dtype of activations. The gradient passes the rounding
    by."""
    for found in kept_ranks(exchanged, 2, capacity):
        assert found["bytes"].tolist() == [256 + 2 * 8]
        for name in ("y", "x", "weights", "w1", "w2", "w3"):
            own, expected = found[f"found {name}"], found[f"expected {name}"]
            assert (own - expected).abs().max() <= 1e-12 * expected.abs().max(), name
        assert found["expected x"].abs().max() > 0


def order() -> list[str]:
    x_TD = torch.arange(8.0).view(4, 2).requires_grad_()
    way = AsyncAllToAll([2, 2], [2, 2], dist.distributed_c10d._get_default_group().group_name)
    with Sent() as seen:
        link = way.start(x_TD)
        beside = torch.tanh(x_TD)
        (way.end(link) * 3 + beside).sum().backward()
    torch.testing.assert_close(x_TD.grad, 3 + (1 - torch.tanh(x_TD.detach()) ** 2))
    return seen.order


def test_what_is_computed_meanwhile_is_differentiated_meanwhile(kept_ranks: Any) -> None:
    for found in kept_ranks(order, 2):
        there, back = (
            ["all_to_all_single", "tanh", "wait_tensor"],
            ["all_to_all_single", "tanh_backward", "wait_tensor"],
        )
        assert found == there + back


@pytest.mark.parametrize("float8", [False, True])
def test_rows_of_nothing_travel(kept_ranks: Any, float8: bool) -> None:
    for rank, found in enumerate(kept_ranks(to_the_first, 2, float8)):
        assert found == [4, 2] if rank == 0 else [0, 2]


def to_the_first(float8: bool) -> list[int]:
    x_ND = torch.ones(2, 2, requires_grad=True)
    first, name = dist.get_rank() == 0, dist.distributed_c10d._get_default_group().group_name
    back = AsyncAllToAll([2, 2] if first else [0, 0], [2, 0], name, float8=float8)
    way = AsyncAllToAll([2, 0], [2, 2] if first else [0, 0], name, float8=float8)
    y_MD = way.whole(x_ND)
    torch.testing.assert_close(back.whole(y_MD.detach()), x_ND.detach())  # from a rank that has none
    (y_MD * (1 + torch.arange(len(y_MD)))[:, None]).sum().backward()
    assert x_ND.grad is not None
    np.testing.assert_array_equal(x_ND.grad[:, 0], [1, 2] if first else [3, 4])
    return list(y_MD.shape)
