"""The chunked loss against cross-entropy on all logits, in float64, and its peak memory."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quern.model import loss_kernels
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


@pytest.mark.slow
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


def factors(targets: Tensor) -> Tensor:
    """A weight for each token; some are 0."""
    return torch.arange(len(targets), dtype=torch.float64) % 4 / 3


def objective(
    h: Tensor, weight: Tensor, targets: Tensor, z_loss: float, by: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The whole objective and each token's cross-entropy, from the definition of the softmax, token by token."""
    terms, squares = [], []
    for h_D, target in zip(h, targets.tolist(), strict=True):
        logits = [(h_D * row_D).sum() for row_D in weight[:V]]
        top = max(value.item() for value in logits)
        log_z = top + torch.stack([(value - top).exp() for value in logits]).sum().log()
        counted = target != IGNORE
        terms.append(log_z - logits[target] if counted else torch.zeros((), dtype=h.dtype))
        squares.append(log_z**2 if counted else torch.zeros((), dtype=h.dtype))
    by = torch.ones(len(h), dtype=h.dtype) if by is None else by
    return (by * torch.stack(terms)).sum() + z_loss * (by * torch.stack(squares)).sum(), torch.stack(terms)


@pytest.mark.parametrize(("z_loss", "weighted"), [(0.3, False), (0.3, True), (0.0, True)])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_z_loss_adds_the_square_of_the_logarithm_of_the_denominator(chunk, z_loss, weighted):
    """And weights of tokens hold for both parts, not for the losses that are told."""
    h, weight, targets = case()
    by = factors(targets) if weighted else None
    ours, nll = chunked_cross_entropy(h, weight, targets, vocab_size=V, chunk=chunk, z_loss=z_loss, weights_N=by)
    expected, expected_nll = objective(h, weight, targets, z_loss, by)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(nll, expected_nll.detach(), rtol=0, atol=1e-13)
    ours, theirs = (torch.autograd.grad(value, (h, weight)) for value in (ours, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@dataclass
class Board:
    """What the threads of one split tell each other."""

    ranks: int
    values: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=20)


@dataclass
class Part:
    """A rank's share of the vocabulary, each rank a thread."""

    rank: int
    first_row: int
    board: Board

    def max_(self, values: Tensor) -> Tensor:
        return values.copy_(self._all(values).amax(0))

    def sum_(self, values: Tensor) -> Tensor:
        return values.copy_(self._all(values).sum(0))

    def _all(self, values: Tensor) -> Tensor:
        self.board.values[self.rank] = values.clone()
        self.board.barrier.wait()
        every = torch.stack([self.board.values[rank] for rank in range(self.board.ranks)])
        self.board.barrier.wait()
        return every


def split_loss(h: Tensor, weight: Tensor, targets: Tensor, ranks: int, **options):
    """Every rank's (loss_sum, nll_N, gradients of h and of its rows)."""
    board, found, rows = Board(ranks), {}, weight.shape[0] // ranks

    def work(rank: int) -> None:
        own_h = h.detach().clone().requires_grad_()
        own = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        split = Part(rank, rank * rows, board)
        loss_sum, nll = chunked_cross_entropy(own_h, own, targets, vocab_size=V, split=split, **options)
        found[rank] = (loss_sum.detach(), nll, *torch.autograd.grad(loss_sum, (own_h, own)))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "chunk", "z_loss"), list(itertools.product((2, 4, 8), (5, 1000), (0.0, 0.3))))
def test_a_split_vocabulary_gives_the_same(ranks, chunk, z_loss):
    # with 8 ranks of 2 rows the last holds padding alone, the one before it a row and a padded one
    h, weight, targets = case()
    by = factors(targets) if z_loss else None
    expected, expected_nll = objective(h, weight, targets, z_loss, by)
    dh, dw = torch.autograd.grad(expected, (h, weight))
    found = split_loss(h, weight, targets, ranks, chunk=chunk, z_loss=z_loss, weights_N=by)
    for loss_sum, nll, _, _ in found:
        assert torch.equal(loss_sum, found[0][0])
        torch.testing.assert_close(loss_sum, expected.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(nll, expected_nll.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(sum(part[2] for part in found), dh, rtol=0, atol=1e-12)
    whole = torch.cat([part[3] for part in found])
    torch.testing.assert_close(whole, dw, rtol=0, atol=1e-12)
    assert not whole[V:].any()


def test_a_split_vocabulary_where_all_is_ignored():
    h, weight, targets = case()
    for loss_sum, nll, dh, dw in split_loss(h, weight, torch.full_like(targets, IGNORE), 8, chunk=5, z_loss=0.3):
        assert not any(value.any() for value in (loss_sum, nll, dh, dw))


def test_a_split_vocabulary_with_large_logits():
    h, weight, targets = case(torch.float32)
    found = split_loss(h * 1e4, weight, targets, 8, chunk=5)
    assert all(torch.isfinite(value).all() for part in found for value in part)
    expected = plain(h.double() * 1e4, weight.double(), targets).sum()
    torch.testing.assert_close(found[0][0].double(), expected.detach(), rtol=1e-6, atol=0)  # 23 float32 terms


@pytest.mark.parametrize(
    ("compiler", "weighted"),
    [("aot_eager", False), ("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.long)],
)
def test_the_compiled_loss_is_that_of_all_logits(compiler: str, weighted: bool) -> None:
    """Inductor's kernels hold no second matrix of a chunk's logits."""
    z_loss = 1e-2
    h, weight, targets = case()
    by = factors(targets) if weighted else torch.ones(len(targets), dtype=torch.float64)
    options: Any = {"z_loss": z_loss, "compiler": compiler, "weights_N": by if weighted else None}
    with torch.no_grad():
        weight[V:] = 100.0  # padding
        h[7] *= 1e3  # an ignored token whose exponentials overflow
    (loss_sum, nll), kernels = run_and_get_code(
        lambda: chunked_cross_entropy(h, weight, targets, vocab_size=V, chunk=9, **options)
    )
    assert (len(kernels) >= 2) == (compiler == "inductor")
    assert not any(f"empty_strided_cpu((9, {PADDED})" in kernel for kernel in kernels)
    expected = plain(h, weight, targets)
    log_z = (h @ weight[:V].T).logsumexp(1)[targets != IGNORE]
    objective = (by * expected).sum() + z_loss * (by[targets != IGNORE] * log_z.square()).sum()
    torch.testing.assert_close(nll, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(loss_sum, objective, rtol=1e-13, atol=0)
    ours = torch.autograd.grad(loss_sum / 7, (h, weight))
    theirs = torch.autograd.grad(objective / 7, (h, weight))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert torch.count_nonzero(ours[1][V:]) == torch.count_nonzero(ours[0][targets == IGNORE]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
def test_the_compiled_loss_rounds_as_the_plain_one_does(dtype: torch.dtype) -> None:
    """Both see logits rounded by the product, and round their gradient once."""
    found = []
    for compiler in (None, "aot_eager"):
        h, weight, targets = case(dtype)
        loss_sum, nll = chunked_cross_entropy(h, weight, targets, vocab_size=V, chunk=9, compiler=compiler)
        found.append((nll, *torch.autograd.grad(loss_sum / 7, (h, weight))))
    for plain_one, compiled in zip(*found, strict=True):
        assert compiled.dtype == plain_one.dtype
        torch.testing.assert_close(compiled, plain_one, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_a_rank_of_padding_alone_adds_nothing_to_the_compiled_loss() -> None:
    """13 of 16 rows are the vocabulary: the last of four ranks has one of them, the last of eight ranks none."""
    h, weight, targets = case()
    for rows in (4, 2):
        parts = [weight[first : first + rows] for first in range(0, PADDED, rows)]
        logits = [(h @ part.T).detach() for part in parts]
        kept = []
        for number, part in enumerate(logits):
            first = number * rows
            here = max(min(V - first, rows), 0)
            target = (targets - first).where((targets >= first) & (targets < first + here), -1)
            kept.append(loss_kernels._compiled(loss_kernels._read, "aot_eager")(part, target, here))
        max_N, total_N, logit_N = (torch.stack(parts) for parts in zip(*kept, strict=True))
        log_z_N = (total_N.log() + max_N).logsumexp(0)
        expected = (h @ weight[:V].T).logsumexp(1)
        torch.testing.assert_close(log_z_N, expected.detach(), rtol=1e-13, atol=0)
        counted = targets != IGNORE
        expected = plain(h, weight, targets).detach()
        torch.testing.assert_close((log_z_N - logit_N.sum(0)).where(counted, 0), expected, rtol=0, atol=1e-12)
