"""Computes MinHash signatures, bit for bit those of datasketch 2's ``affine32`` scheme, as a stage of the chain."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.shingles import hash_words, shingle_hashes
from quern.data_pipeline.page.document import Page

__all__ = ["NUM_WORDS", "SCHEME", "Signature", "minhash", "permutations"]

#: ``datasketch.MinHash(num_perm=…, seed=…, hashvalues=signature, scheme=SCHEME)`` loads a stored signature. With a
#: ``hashfunc`` that gives the low 32 bits of a written-down shingle's hash it makes the same ones.
SCHEME = "affine32"

#: The measure by which the longer of two copies survives.
NUM_WORDS = "text.num_words"

#: Shingles permuted at once: num_perm × this many uint32 stay in the cache of a core, whatever the text's length.
_CHUNK = 1024


@lru_cache(maxsize=16)
def permutations(num_perm: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """``(a, b)``, each uint32[num_perm, 1] with odd ``a``: the permutations ``h → a·h + b mod 2^32`` of a seed.

    They are datasketch's own, drawn here as there, since it takes half a second to import.
    """
    draw = np.random.RandomState(seed)
    a = draw.randint(0, 1 << 31, num_perm, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = draw.randint(0, 1 << 32, num_perm, dtype=np.uint32)
    for array in (a, b):
        array.flags.writeable = False
    return a[:, None], b[:, None]


def minhash(shingles: np.ndarray, num_perm: int, seed: int) -> np.ndarray:
    """uint32[num_perm]: for each permutation the least permuted hash of the ``shingles`` (uint64, at least one).

    The hash that is permuted is MurmurHash3's ``fmix32`` of a shingle's low 32 bits, as in datasketch's ``affine32``.
    Memory is bounded for any number of shingles.
    """
    a, b = permutations(num_perm, seed)
    hashes = shingles.astype(np.uint32)
    hashes ^= hashes >> np.uint32(16)
    hashes *= np.uint32(0x85EBCA6B)
    hashes ^= hashes >> np.uint32(13)
    hashes *= np.uint32(0xC2B2AE35)
    hashes ^= hashes >> np.uint32(16)
    least = np.full(num_perm, 0xFFFFFFFF, dtype=np.uint32)
    buffer = np.empty((num_perm, min(_CHUNK, len(hashes))), dtype=np.uint32)
    for start in range(0, len(hashes), _CHUNK):
        chunk = hashes[start : start + _CHUNK]
        permuted = buffer[:, : len(chunk)]
        np.multiply(a, chunk, out=permuted)
        permuted += b
        np.minimum(least, permuted.min(axis=1), out=least)
    return least


class Signature:
    """Fills ``page.signature`` and ``page.shingles``, and measures the number of normalised words.

    A text with fewer words than a shingle has neither, and is compared by its exact hash only.
    """

    name = "signature"
    measures = (NUM_WORDS,)

    def __init__(self, config: DuplicatesConfig) -> None:
        self.config = config

    def __call__(self, page: Page) -> Page:
        words = hash_words(page.text or "")
        page.measures[NUM_WORDS] = float(len(words))
        page.signature = page.shingles = None
        if self.config.near:
            shingles = shingle_hashes(words, self.config.ngram)
            if len(shingles):
                page.shingles = shingles
                page.signature = minhash(shingles, self.config.num_perm, self.config.seed)
        return page
