"""Hashes the bits of tensors, of any dtype, on their device and without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quern.parallel.clip import local_part

__all__ = ["BitHash"]

_WORDS = 1 << 18
"""Of a piece: what is in work at one time takes about 32 bytes a word."""
_NEXT = 0x5851F42D4C957F2D
"""Odd: by which the sum of the pieces before is multiplied."""


class BitHash:
    """Two 64-bit hashes of a tensor.

    A tensor's bits are read as words x of 64, filled up with zeros; a tensor is the sequence of its words x_i, and

        h = Σ_i b_i · mix(a_i · x_i)  mod 2^64,    mix(z) = z xor (the high half of z, moved to the low one)

    with odd numbers a_i and b_i that differ from place to place; the two hashes have other b_i. They are drawn once for
    2^18 words; further pieces have the same, and b_i times a power of an odd number.

    **Any change within one word changes both hashes for sure**, so any single bit: an odd number has an inverse mod
    2^64, and mix is its own inverse, so that b · mix(a · x) is another number for another x, and the other summands
    stay. Changes to several words, as an exchange of two or the same bit flipped in both, change h by a sum of numbers
    that depend on the places and on all bits of the words; that both sums are 0 is left to chance. mix is there for the
    highest bits: a multiple of 2^63 alone would be the same whatever odd number it is multiplied by, and two of them 0.
    """

    def __init__(self, device: torch.device) -> None:
        drawn = torch.Generator().manual_seed(0)  # on every rank the same
        odd_3W = torch.randint(-(2**63), 2**63 - 1, (3, _WORDS), generator=drawn) | 1
        self._first_W, self._second_2W = odd_3W[0].to(device), odd_3W[1:].to(device)

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        """[2], int64, of the tensor; of a DTensor, of this rank's part."""
        flat = local_part(tensor).contiguous().view(-1)
        per_word = 8 // flat.element_size()
        total_2 = torch.zeros(2, dtype=torch.int64, device=flat.device)
        for piece in flat.split(_WORDS * per_word) if flat.numel() else ():
            if piece.numel() % per_word or piece.storage_offset() % per_word:
                piece = pad(piece, (0, -piece.numel() % per_word))  # a copy
            words = piece.view(torch.int64)
            mixed = words * self._first_W[: words.numel()]
            halves = mixed.view(torch.int32).view(-1, 2)  # low, high: no shift keeps the sign out
            halves[:, 0].bitwise_xor_(halves[:, 1])
            total_2 = total_2 * _NEXT + (mixed * self._second_2W[:, : words.numel()]).sum(1)
        return total_2
