"""Cross-entropy straight from the last hidden state, without the matrix of all logits.

Shapes: N tokens, D model, V rows of the output projection (padded vocabulary), C tokens of a chunk.

The logits of ``chunk`` tokens exist at a time. Their gradient is known as soon as they are, so both products of the
backward pass are formed then and there: three matrix products in all, where recomputing the logits would take four.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["IGNORE", "chunked_cross_entropy"]

IGNORE = -100
"""A target that does not count."""


def chunked_cross_entropy(
    h_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, vocab_size: int, chunk: int
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of -log softmax(h Wᵀ)[target], and each token's share.

    ``targets_N`` holds ids below ``vocab_size`` or :data:`IGNORE`. Rows of ``weight_VD`` from ``vocab_size`` on are
    padding: they take no probability and get a gradient of exactly zero. The products are computed in the dtype of
    ``h_ND``, to which the weight is cast; softmax, sums and the weight's gradient in at least float32.

    Returns ``(loss_sum, nll_N)``: a scalar with gradient, and detached values, 0 where the target is ignored. Only the
    gradients that are asked for are computed; double backward is an error.
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected an integer ≥ 1, got {chunk}")
    grad = torch.is_grad_enabled()
    wanted = (grad and h_ND.requires_grad, grad and weight_VD.requires_grad)
    loss_sum, nll_N = _ChunkedCrossEntropy.apply(h_ND, weight_VD, targets_N, vocab_size, chunk, wanted)
    return loss_sum, nll_N


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        vocab_size: int,
        chunk: int,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(h_ND.dtype, torch.float32)
        w_VD = weight_VD.to(h_ND.dtype)
        nll_N = torch.empty(h_ND.shape[0], dtype=compute, device=h_ND.device)
        dh_ND = torch.empty_like(h_ND) if wanted[0] else None
        dw_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, compute)) if wanted[1] else None
        for start in range(0, h_ND.shape[0], chunk):
            part = slice(start, start + chunk)
            nll_N[part], p_CV = _softmax(h_ND[part] @ w_VD.T, targets_N[part], vocab_size, any(wanted))
            if p_CV is None:
                continue
            g_CV = p_CV.to(h_ND.dtype)
            if dh_ND is not None:
                torch.mm(g_CV, w_VD, out=dh_ND[part])
            if dw_VD is not None and dw_VD.dtype == g_CV.dtype:
                torch.addmm(dw_VD, g_CV.T, h_ND[part], out=dw_VD)  # not addmm_, which torch's FLOP counter overlooks
            elif dw_VD is not None:
                dw_VD += g_CV.T @ h_ND[part]
        ctx.save_for_backward(dh_ND, dw_VD)  # not attributes: activation checkpointing must be able to drop them
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(nll_N)
        return nll_N.sum(), nll_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dh_ND, dw_VD = ctx.saved_tensors
        return (
            None if dh_ND is None else dh_ND * d_loss.to(dh_ND.dtype),
            None if dw_VD is None else (dw_VD * d_loss).to(ctx.weight_dtype),
            None, None, None, None,
        )  # fmt: skip


def _softmax(logits_CV: Tensor, targets_C: Tensor, vocab_size: int, grad: bool) -> tuple[Tensor, Tensor | None]:
    """Each token's loss and, if wanted, the gradient of their sum by the logits; works in place where it can."""
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if vocab_size < logits_CV.shape[1]:
        logits_CV[:, vocab_size:] = -torch.inf
    counted_C = targets_C != IGNORE
    target_C1 = targets_C.where(counted_C, 0)[:, None]
    logits_CV -= logits_CV.amax(dim=1, keepdim=True)
    shifted_C = logits_CV.gather(1, target_C1)[:, 0]
    p_CV = logits_CV.exp_()
    total_C = p_CV.sum(dim=1)
    nll_C = (total_C.log() - shifted_C).where(counted_C, 0)
    if not grad:
        return nll_C, None
    p_CV /= total_C.where(counted_C, torch.inf)[:, None]  # an ignored token's gradient is zero
    p_CV.scatter_add_(1, target_C1, -counted_C[:, None].to(p_CV.dtype))
    return nll_C, p_CV
