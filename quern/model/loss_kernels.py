"""The chunked loss's softmax as two compiled kernels, one of which reads the logits and one overwrites them.

Shapes: C tokens of a chunk, V rows of the output projection held here. Of V the first ``rows`` are no padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Split", "gradient", "statistics"]


class Split(Protocol):
    """This rank's rows of the output projection, and the collectives with the ranks that hold the others."""

    @property
    def first_row(self) -> int:
        """Number of the first row held here, in the whole padded vocabulary."""

    def max_(self, values: Tensor) -> Tensor:
        """The greatest of every rank's ``values``, element by element, in place. Collective."""

    def sum_(self, values: Tensor) -> Tensor:
        """The sum of every rank's ``values``, in place, the same bits on each. Collective."""


def statistics(
    compiler: str, logits_CV: Tensor, target_C: Tensor, rows: int, sums: Split | None
) -> tuple[Tensor, Tensor]:
    """Each token's log Z, and its target's logit minus that; of a ``target_C`` of -1 (held elsewhere, or none) the
    logit counts as zero on this rank. With ``sums`` over ranks, and then the same on each."""
    max_C, total_C, logit_C = _compiled(_read, compiler)(logits_CV, target_C, rows)
    if sums is not None:
        most_C = sums.max_(max_C.clone())
        shifted_C = (logit_C - most_C).where(target_C >= 0, 0)
        total_C, shifted_C = sums.sum_(torch.stack((total_C * (max_C - most_C).exp(), shifted_C)))
        max_C = most_C
    else:
        shifted_C = logit_C - max_C
    log_total_C = total_C.log()
    return max_C + log_total_C, shifted_C - log_total_C


def gradient(
    compiler: str, logits_CV: Tensor, target_C: Tensor, log_z_C: Tensor, factor_C: Tensor, counted_C: Tensor, rows: int
) -> Tensor:
    """``factor · softmax``, minus one at the target, and 0 where the token does not count or the row is padding;
    overwrites the logits."""
    _compiled(_write, compiler)(logits_CV, target_C, log_z_C, factor_C.where(counted_C, 0), rows)
    return logits_CV


@functools.cache
def _compiled(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    # not fullgraph: with that the ninth shape in a process would be an error, and so it is computed uncompiled
    return torch.compile(function, backend=compiler, dynamic=False)


def _read(logits_CV: Tensor, target_C: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    wide_CV = _wide(logits_CV, rows)
    max_C1 = wide_CV.amax(1, keepdim=True)
    if not rows:  # -inf, and its difference to itself is no number
        max_C1 = max_C1.clamp(min=torch.finfo(wide_CV.dtype).min)
    total_C1 = (wide_CV - max_C1).exp().sum(1, keepdim=True)  # in this form inductor does both in one reading on CUDA
    logit_C = wide_CV.gather(1, target_C.clamp(min=0)[:, None])[:, 0].where(target_C >= 0, 0)
    return max_C1[:, 0], total_C1[:, 0], logit_C


def _write(logits_CV: Tensor, target_C: Tensor, log_z_C: Tensor, factor_C: Tensor, rows: int) -> None:
    p_CV = (_wide(logits_CV, rows) - log_z_C[:, None]).exp() * factor_C[:, None]
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    logits_CV.copy_(p_CV - (column_V == target_C[:, None]).to(p_CV.dtype))


def _wide(logits_CV: Tensor, rows: int) -> Tensor:
    wide_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if rows == logits_CV.shape[1]:
        return wide_CV
    column_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    return wide_CV.masked_fill(column_V >= rows, -torch.inf)
