"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1.

Shapes: B batch, L sequence, N heads (of queries or of keys), H head dim, P positions of the table, R = H/2 pairs.

Pair r of a head is (x[r], x[r + H/2]), the "half split" layout of transformers, so that exported weights need no
permutation. Positions times frequencies are formed in float64 and rounded once: at position 100,000 a float32 product
is already off by 4e-3 rad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from quern.model.config import ModelShape, RopeScaling

__all__ = ["Rotation", "inverse_frequencies", "rotate", "rotation"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosine and sine of every angle of a forward pass, shared by all blocks.

    One object and not two tensors, because FSDP2 casts the floating-point tensors among a block's arguments to bf16.
    """

    cos_BL1R: Tensor
    sin_BL1R: Tensor


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a position for each of the ``head_dim / 2`` pairs, float64 [R].

    With ``scaling``: wavelengths above ``original_max_position / low_freq_factor`` grow by ``factor``, those below
    ``original_max_position / high_freq_factor`` stay, and between them the two are blended (Llama 3.1).
    """
    frequency_R = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequency_R
    turns_R = scaling.original_max_position * frequency_R / (2 * math.pi)
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_R = kept_R.clamp(0, 1)
    return kept_R * frequency_R + (1 - kept_R) * frequency_R / scaling.factor


def rotation(
    shape: ModelShape, length: int, *, dtype: torch.dtype, device: torch.device, positions_BL: Tensor | None = None
) -> Rotation:
    """The rotation of tokens at ``positions_BL`` (each below ``length``), or at 0 … ``length`` - 1 of every row.

    ``dtype`` is that of the activations; cosine and sine are at least float32.
    """
    cos_PR, sin_PR = _table(shape, length, torch.promote_types(dtype, torch.float32), device)
    if positions_BL is None:
        return Rotation(cos_PR[None, :, None], sin_PR[None, :, None])
    return Rotation(cos_PR[positions_BL][:, :, None], sin_PR[positions_BL][:, :, None])


def rotate(x_BLNH: Tensor, by: Rotation) -> Tensor:
    """Every pair turned by its angle; computed in the dtype of ``by``, returned in that of ``x_BLNH``."""
    first_BLNR, second_BLNR = x_BLNH.to(by.cos_BL1R.dtype).chunk(2, dim=-1)
    turned = (
        first_BLNR * by.cos_BL1R - second_BLNR * by.sin_BL1R,
        second_BLNR * by.cos_BL1R + first_BLNR * by.sin_BL1R,
    )
    return torch.cat(turned, dim=-1).to(x_BLNH.dtype)


# Outside of the module: a buffer would be lost by meta → to_empty, cast by mixed precision and saved in checkpoints.
_TABLES: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
_MAX_TABLES = 16


def _table(shape: ModelShape, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [P, R] of positions 0 … length - 1, made once a (device, dtype, length)."""
    key = (shape.head_dim, shape.rope_theta, shape.rope_scaling, length, dtype, device)
    # Under a dispatch mode tensors may be fake: such a table must not be kept, nor a kept one be mixed with fakes.
    watched = _get_current_dispatch_mode() is not None
    if not watched and key in _TABLES:
        return _TABLES[key]
    with torch.inference_mode(False), torch.no_grad():  # a table made while sampling must do for training too
        frequency_R = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        angle_PR = torch.outer(torch.arange(length, dtype=torch.float64), frequency_R)
        table = angle_PR.cos().to(device, dtype), angle_PR.sin().to(device, dtype)
    if not watched:
        while len(_TABLES) >= _MAX_TABLES:
            del _TABLES[next(iter(_TABLES))]
        _TABLES[key] = table
    return table
