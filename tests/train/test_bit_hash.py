"""The hash of a tensor's bits: its formula in Python's integers, and changes that are not to be missed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quern.train.supervision import bit_hash
from quern.train.supervision.bit_hash import BitHash

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory."""
    return tensor.detach().view(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element, 0 the lowest of its mantissa; in place."""
    bytes_of(tensor)[element * tensor.element_size() + bit // 8] ^= np.uint8(1 << bit % 8)


def random_tensor(dtype: torch.dtype, *size: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 2, size, generator=drawn).to(dtype)
    return torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype)


def by_hand(tensor: torch.Tensor, own: BitHash, words: int) -> list[int]:
    """Pieces of ``words`` words, in Python's integers."""
    raw = bytes_of(tensor.contiguous()).tobytes()
    raw += bytes(-len(raw) % 8)
    values = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    sums = [0, 0]
    for begin in range(0, len(values), words):
        for k in (0, 1):
            piece = 0
            for i, x in enumerate(values[begin : begin + words]):
                z = int(own._first_W[i]) * x % 2**64
                piece += int(own._second_2W[k, i]) * (z ^ z >> 32)
            sums[k] = (sums[k] * bit_hash._NEXT + piece) % 2**64
    return [total - 2**64 if total >= 2**63 else total for total in sums]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bit_hash, "_WORDS", 4)
    own = BitHash(CPU)
    for size in ((0,), (), (1,), (3,), (4, 5), (7, 9)):
        tensor = random_tensor(dtype, *size)
        assert own(tensor).tolist() == by_hand(tensor, own, 4)
    whole = random_tensor(dtype, 9, 6)
    for part in (whole[1:], whole.flatten()[1:], whole.flatten()[3:], whole[:, 2], whole.T):  # any place in memory
        assert own(part).tolist() == by_hand(part, own, 4)


def test_its_constants_are_odd_and_the_same_on_every_rank() -> None:
    one, other = BitHash(CPU), BitHash(CPU)
    for constants in (one._first_W, one._second_2W):
        assert bool((constants % 2 == 1).all())
        assert len(constants.unique()) == constants.numel()
    assert torch.equal(one._first_W, other._first_W)
    assert torch.equal(one._second_2W, other._second_2W)
    assert bit_hash._NEXT % 2 == 1


def test_a_tensor_of_several_pieces_is_seen_to_its_end() -> None:
    own, rng = BitHash(CPU), random.Random(1)
    tensor = random_tensor(torch.bfloat16, 4 * (bit_hash._WORDS + 5) + 3)
    before = own(tensor)
    for element in (0, 4 * bit_hash._WORDS - 1, 4 * bit_hash._WORDS, len(tensor) - 1, rng.randrange(len(tensor))):
        flip(tensor, element, rng.randrange(16))
        after = own(tensor)
        assert (after != before).all(), element
        before = after


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_every_bit_of_an_element_changes_both_hashes(dtype: torch.dtype) -> None:
    own, tensor = BitHash(CPU), random_tensor(dtype, 13)
    before = own(tensor)
    for element in range(13):
        for bit in range(8 * tensor.element_size()):
            flip(tensor, element, bit)
            assert bool((own(tensor) != before).all()), (element, bit)
            flip(tensor, element, bit)
    assert torch.equal(own(tensor), before)


@pytest.mark.parametrize("fill", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_changes_that_could_cancel_are_seen(dtype: torch.dtype, fill: float | None) -> None:
    """The same bit in two elements, an exchange, all signs, a block that is zeroed, moved or negated."""
    own, rng = BitHash(CPU), random.Random(2)
    tensor = random_tensor(dtype, 4096) if fill is None else torch.full((4096,), fill, dtype=dtype)
    bits, before = 8 * tensor.element_size(), own(tensor)

    def differs(other: torch.Tensor) -> bool:
        return not torch.equal(own(other), before)

    for bit in range(bits):
        for _ in range(4):
            other = tensor.clone()
            for element in rng.sample(range(4096), 2):
                flip(other, element, bit)
            assert differs(other), bit
    every = tensor.clone()
    for element in range(4096):
        flip(every, element, bits - 1)
    assert differs(every)
    assert differs(tensor + 1)
    if fill is None:
        exchanged = tensor.clone()
        exchanged[[7, 1031]] = tensor[[1031, 7]]
        assert differs(exchanged)
        assert differs(tensor.roll(64))
        assert differs(tensor.view(64, 64).T.contiguous())
        assert differs(torch.cat((tensor[:1024], torch.zeros(1024, dtype=dtype), tensor[2048:])))
