"""The chunked loss against cross-entropy on all logits, in float64, and its peak memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quern.model.loss import IGNORE, chunked_cross_entropy

N, D, V, PADDED = 23, 6, 13, 16


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(N, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, D, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[[0, 7, 8, 22]] = IGNORE
    return h, weight, targets


def loss(h: Tensor, weight: Tensor, targets: Tensor, chunk: int = 5) -> tuple[Tensor, Tensor]:
    return chunked_cross_entropy(h, weight, targets, vocab_size=V, chunk=chunk)


def plain(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(h @ weight[:V].T, targets, ignore_index=IGNORE, reduction="none")


@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 1000])
def test_equals_cross_entropy_on_all_logits(chunk):
    h, weight, targets = case()
    loss_sum, nll = loss(h, weight, targets, chunk)
    expected = plain(h, weight, targets)
    torch.testing.assert_close(nll, expected.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(loss_sum, expected.sum(), rtol=0, atol=1e-12)
    ours = torch.autograd.grad(loss_sum, (h, weight))
    theirs = torch.autograd.grad(expected.sum(), (h, weight))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    assert not nll.requires_grad
    assert torch.equal(nll[targets == IGNORE], torch.zeros(4, dtype=torch.float64))


def test_gradcheck():
    h, weight, targets = case()
    assert torch.autograd.gradcheck(lambda *inputs: loss(*inputs, targets)[0].sin(), (h, weight))


def test_upstream_gradient_scales():
    h, weight, targets = case()
    ours = torch.autograd.grad(loss(h, weight, targets)[0] / 7 * 1024, (h, weight))
    theirs = torch.autograd.grad(plain(h, weight, targets).sum() / 7 * 1024, (h, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-11)


def test_padded_rows_get_a_gradient_of_exactly_zero_and_no_probability():
    h, weight, targets = case()
    with torch.no_grad():
        weight[V:] = 100.0
    loss_sum, _ = loss(h, weight, targets)
    torch.testing.assert_close(loss_sum, plain(h, weight, targets).sum())
    loss_sum.backward()
    assert torch.count_nonzero(weight.grad[V:]) == 0
    assert torch.count_nonzero(weight.grad[:V]) == V * D


def test_ignored_tokens_have_no_gradient_and_all_may_be_ignored():
    h, weight, targets = case()
    loss(h, weight, targets)[0].backward()
    assert torch.count_nonzero(h.grad[targets == IGNORE]) == 0
    h, weight, targets = case()
    loss_sum, nll = loss(h, weight, torch.full_like(targets, IGNORE))
    loss_sum.backward()
    assert loss_sum == 0
    assert torch.count_nonzero(nll) == torch.count_nonzero(h.grad) == torch.count_nonzero(weight.grad) == 0


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_asked_for_are_computed(frozen):
    inputs = list(case())
    theirs = torch.autograd.grad(plain(*inputs).sum(), inputs[1 - frozen])
    inputs[frozen] = inputs[frozen].detach()
    with Watch() as seen:
        loss_sum, _ = loss(*inputs)
    assert seen.products == 2 * 5  # five chunks: logits, and one gradient
    torch.testing.assert_close(torch.autograd.grad(loss_sum, inputs[1 - frozen]), theirs, rtol=0, atol=1e-13)


def test_without_grad_only_the_logits_are_computed():
    h, weight, targets = case()
    with torch.no_grad(), Watch() as seen:
        loss_sum, nll = loss(h, weight, targets)
    assert seen.products == 5
    assert not loss_sum.requires_grad
    torch.testing.assert_close(nll, plain(h, weight, targets).detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    h, weight, targets = case()
    value = checkpoint(lambda *inputs: loss(*inputs, targets)[0], h, weight, use_reentrant=reentrant)
    ours = torch.autograd.grad(value, (h, weight)) if not reentrant else (value.backward(), (h.grad, weight.grad))[1]
    torch.testing.assert_close(ours, torch.autograd.grad(plain(h, weight, targets).sum(), (h, weight)))


def test_a_tied_weight_used_twice():
    _, weight, targets = case()
    tokens = torch.arange(N) % V
    ours = torch.autograd.grad(loss(F.embedding(tokens, weight), weight, targets)[0], weight)
    theirs = torch.autograd.grad(plain(F.embedding(tokens, weight), weight, targets).sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_backward_may_run_twice():
    h, weight, targets = case()
    loss_sum, _ = loss(h, weight, targets)
    first = torch.autograd.grad(loss_sum, (h, weight), retain_graph=True)
    second = torch.autograd.grad(loss_sum * 2, (h, weight))
    torch.testing.assert_close(second, tuple(2 * g for g in first), rtol=0, atol=0)


def test_large_logits_do_not_overflow():
    h, weight, targets = case(torch.float32)
    loss_sum, _ = loss(h * 1e4, weight, targets)
    torch.testing.assert_close(loss_sum.double(), plain(h.double() * 1e4, weight.double(), targets).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_accumulates_the_weight_gradient_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(4096, D, generator=generator).to(dtype)
    weight = torch.randn(PADDED, D, generator=generator).to(dtype).float().requires_grad_()
    targets = torch.randint(V, (4096,), generator=generator)
    loss_sum, nll = loss(h, weight, targets, 16)
    assert nll.dtype == loss_sum.dtype == torch.float32
    (ours,) = torch.autograd.grad(loss_sum, weight)
    exact_weight = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(plain(h.double(), exact_weight, targets).sum(), exact_weight)
    # 256 chunks summed in bf16 or fp16 would lose whole units of sums near 300: about 256 · eps / 4 of the largest
    error = (ours - exact).abs().max() / exact.abs().max()
    assert error < 2 * torch.finfo(dtype).eps + 1e-5
    assert ours.dtype == torch.float32


class Watch(TorchDispatchMode):
    """Counts matrix products and remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


def test_the_matrix_of_all_logits_never_exists():
    num_tokens, dim, vocab, chunk = 512, 4, 96, 64
    h = torch.randn(num_tokens, dim, requires_grad=True)
    weight = torch.randn(vocab, dim, requires_grad=True)
    targets = torch.randint(vocab, (num_tokens,))
    with Watch() as seen:
        chunked_cross_entropy(h, weight, targets, vocab_size=vocab, chunk=chunk)[0].backward()
    assert seen.largest == chunk * vocab
    assert seen.products == 3 * num_tokens // chunk
    with Watch() as seen:  # the recorder itself sees the large one
        plain(h, weight, targets.clamp(max=V - 1)).sum().backward()
    assert seen.largest >= num_tokens * V


def test_a_chunk_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk: expected an integer ≥ 1, got 0"):
        loss(*case(), 0)
