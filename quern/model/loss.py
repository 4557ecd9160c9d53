"""Cross-entropy computed from the last hidden state in chunks, without the matrix of all logits.

Shapes: N tokens, D model, V rows of the output projection (padded vocabulary), C tokens of a chunk.

The logits of ``chunk`` tokens exist at a time. Their gradient is known as soon as they are, so both products of the
backward pass are formed then and there: three matrix products in all, where recomputing the logits would take four.

The vocabulary may be dealt to ranks (:class:`Split`): each then forms the logits of its own rows, and the softmax is
put together from one maximum and two sums a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quern.model import loss_kernels
from quern.model.float8.accumulate import add_product
from quern.model.float8.linear import Kept
from quern.model.loss_kernels import Split

__all__ = ["IGNORE", "Split", "by_token", "chunked_cross_entropy"]

IGNORE = -100
"""A target that does not count."""


def chunked_cross_entropy(
    h_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    vocab_size: int,
    chunk: int,
    z_loss: float = 0.0,
    split: Split | None = None,
    compiler: str | None = None,
    kept: Kept | None = None,
    weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of -log softmax(h Wᵀ)[target] + ``z_loss`` · log²Z, and each token's first term.

    Z is the softmax's denominator; its square keeps logits from drifting (Chowdhery et al. 2022, PaLM, section 5:
    10⁻⁴). ``targets_N`` holds ids below ``vocab_size`` or :data:`IGNORE`. Rows of ``weight_VD`` from ``vocab_size`` on
    are padding: they take no probability and get a gradient of exactly zero. The products are computed in the dtype of
    ``h_ND``, to which the weight is cast; softmax, sums and the weight's gradient in at least float32.

    With a ``split``, ``weight_VD`` is this rank's rows, ``h_ND`` and ``targets_N`` are the same on its ranks, and so is
    what is returned; the gradient of ``h_ND`` is this rank's share of a sum over them. Collective.

    With a ``compiler``, a backend of ``torch.compile``, all that is computed between the products is two kernels: one
    reads a chunk's logits, the other overwrites them with their gradient, in the dtype in which the product gave them.

    ``kept``: the weight in the dtype of ``h_ND``, which then is not cast, and what the weight's gradient is added to in
    place of being returned, if it has a total. ``weights_N``: by what each token's part in the sum is multiplied, None
    = 1; no gradient goes to them.

    Returns ``(loss_sum, nll_N)``: a scalar with gradient, and detached values, 0 where the target is ignored. Only the
    gradients that are asked for are computed; double backward is an error.
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected an integer ≥ 1, got {chunk}")
    grad = torch.is_grad_enabled()
    wanted = (grad and h_ND.requires_grad, grad and weight_VD.requires_grad)
    softmax = _Softmax(vocab_size, z_loss, any(wanted), split, compiler)
    loss_sum, nll_N = _ChunkedCrossEntropy.apply(h_ND, weight_VD, targets_N, softmax, chunk, wanted, kept, weights_N)
    return loss_sum, nll_N


def by_token(weights_B: Tensor | None, targets_BL: Tensor) -> Tensor | None:
    """[B · L]: the weight of each token's row; None where rows have none."""
    return None if weights_B is None else weights_B.repeat_interleave(targets_BL.shape[1])


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        softmax: _Softmax,
        chunk: int,
        wanted: tuple[bool, bool],
        kept: Kept | None,
        weights_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(h_ND.dtype, torch.float32)
        w_VD = weight_VD.to(h_ND.dtype) if kept is None else kept.factor
        nll_N = torch.empty(h_ND.shape[0], dtype=compute, device=h_ND.device)
        log_z_N = torch.empty_like(nll_N)
        dh_ND = torch.empty_like(h_ND) if wanted[0] else None
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, compute)) if wanted[1] else None
        for start in range(0, h_ND.shape[0], chunk):
            part = slice(start, start + chunk)
            nll_N[part], log_z_N[part], p_CV = softmax(h_ND[part] @ w_VD.T, targets_N[part])
            if p_CV is None:
                continue
            if weights_N is not None:
                p_CV *= weights_N[part, None].to(p_CV.dtype)
            g_CV = p_CV.to(h_ND.dtype)
            if dh_ND is not None:
                torch.mm(g_CV, w_VD, out=dh_ND[part])
            if dw_VD is not None:
                add_product(dw_VD, g_CV, h_ND[part])
            del p_CV, g_CV  # else they are there while the next chunk's are computed
        ctx.save_for_backward(dh_ND, dw_VD)  # not attributes: activation checkpointing must be able to drop them
        ctx.weight_dtype, ctx.total_VD = weight_VD.dtype, None if kept is None else kept.total_OK
        ctx.mark_non_differentiable(nll_N)
        parts = [nll_N, log_z_N.square()] if softmax.z_loss else [nll_N]
        if weights_N is not None:
            parts = [part_N * weights_N.to(compute) for part_N in parts]
        sums = [part_N.sum() for part_N in parts]
        return sums[0] + softmax.z_loss * sums[1] if softmax.z_loss else sums[0], nll_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dh_ND, dw_VD = ctx.saved_tensors
        dh_ND = None if dh_ND is None else dh_ND * d_loss.to(dh_ND.dtype)
        if dw_VD is not None and ctx.total_VD is not None:
            ctx.total_VD.addcmul_(dw_VD, d_loss)
        dw_VD = None if dw_VD is None or ctx.total_VD is not None else (dw_VD * d_loss).to(ctx.weight_dtype)
        return dh_ND, dw_VD, None, None, None, None, None, None


@dataclass(frozen=True)
class _Softmax:
    vocab_size: int
    z_loss: float
    grad: bool
    split: Split | None
    compiler: str | None

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Each token's loss, its log Z and, if wanted, the gradient of the objective by the logits; all zero where the
        target is ignored. Works in place where it can.
        """
        if self.compiler is not None:
            return self._compiled(self.compiler, logits_CV, targets_C)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        first = 0 if self.split is None else self.split.first_row
        width = logits_CV.shape[1]
        if self.vocab_size < first + width:
            logits_CV[:, max(self.vocab_size - first, 0) :] = -torch.inf
        counted_C = targets_C != IGNORE
        here_C = counted_C & (targets_C >= first) & (targets_C < first + width)
        target_C1 = (targets_C - first).where(here_C, 0)[:, None]
        max_C1 = logits_CV.amax(dim=1, keepdim=True)
        if self.split is not None:
            self.split.max_(max_C1)
        logits_CV -= max_C1
        shifted_C = logits_CV.gather(1, target_C1)[:, 0].where(here_C, 0)
        p_CV = logits_CV.exp_()
        total_C = p_CV.sum(dim=1)
        if self.split is not None:
            total_C, shifted_C = self.split.sum_(torch.stack((total_C, shifted_C)))
        log_total_C = total_C.log()
        nll_C = (log_total_C - shifted_C).where(counted_C, 0)
        log_z_C = (log_total_C + max_C1[:, 0]).where(counted_C, 0)
        if not self.grad:
            return nll_C, log_z_C, None
        p_CV /= total_C.where(counted_C, torch.inf)[:, None]  # an ignored token's gradient is zero
        if self.z_loss:
            p_CV *= (1 + 2 * self.z_loss * log_z_C)[:, None]
        p_CV.scatter_add_(1, target_C1, -here_C[:, None].to(p_CV.dtype))
        return nll_C, log_z_C, p_CV

    def _compiled(self, compiler: str, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        first = 0 if self.split is None else self.split.first_row
        rows = max(min(self.vocab_size - first, logits_CV.shape[1]), 0)
        counted_C = targets_C != IGNORE
        target_C = (targets_C - first).where(counted_C & (targets_C >= first) & (targets_C < first + rows), -1)
        log_z_C, log_p_C = loss_kernels.statistics(compiler, logits_CV, target_C, rows, self.split)
        found = (-log_p_C).where(counted_C, 0), log_z_C.where(counted_C, 0)
        if not self.grad:
            return *found, None
        factor_C = 1 + 2 * self.z_loss * log_z_C
        g_CV = loss_kernels.gradient(compiler, logits_CV, target_C, log_z_C, factor_C, counted_C, rows)
        return *found, g_CV
