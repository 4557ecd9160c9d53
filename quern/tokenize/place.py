"""Keyed hashes that determine a document's place in its source, and whether it is held out.

Both are keyed hashes of identity, so neighbours are unrelated and nothing depends on workers, on partitions or on the
order of the input. A hash is blake2b-64, little-endian, of ``seed \\0 purpose \\0 identity``: the seed in decimal, the
identity as raw bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import numpy as np

__all__ = ["NUM_BUCKETS", "PLACE", "bucket_of", "doc_ids", "keyed_hashes", "place_key", "validation_limit"]

#: One document of an ordered run: key, the two halves of doc_id as numbers (most significant byte first, so that they
#: compare like the bytes), tokens with EOT. No field is stored big-endian: ``np.concatenate`` would swap it silently.
PLACE = np.dtype([("key", "<u8"), ("high", "<u8"), ("low", "<u8"), ("length", "<i8")])

#: Key ranges of equal width, by the top bits of the key: the grain of sums and partial reads.
NUM_BUCKETS = 1024
_SHIFT = np.uint64(64 - NUM_BUCKETS.bit_length() + 1)


def keyed_hashes(seed: int, purpose: str, identities: Iterable[bytes]) -> np.ndarray:
    """uint64[n]: the keyed hash of each identity."""
    base = hashlib.blake2b(f"{seed}\0{purpose}\0".encode(), digest_size=8)

    def digest(identity: bytes) -> bytes:
        state = base.copy()
        state.update(identity)
        return state.digest()

    return np.frombuffer(b"".join(map(digest, identities)), "<u8")


def place_key(seed: int, doc_id: bytes) -> int:
    """The document's place in its source: documents stand by (place key, doc_id)."""
    return int(keyed_hashes(seed, "place", (doc_id,))[0])


def validation_limit(share: float) -> int:
    """A cluster is held out iff its "validation" hash is below this: the smallest integer ≥ share · 2**64."""
    return math.ceil(share * 2.0**64)


def bucket_of(keys: np.ndarray) -> np.ndarray:
    """int64[n] in [0, :data:`NUM_BUCKETS`): the key range of each uint64 key."""
    return (keys >> _SHIFT).astype(np.int64)


def doc_ids(places: np.ndarray) -> np.ndarray:
    """S16[n]: the doc_ids of :data:`PLACE` records. NumPy strips trailing NULs from single items; use ``tobytes``."""
    halves = np.empty((len(places), 2), ">u8")
    halves[:, 0], halves[:, 1] = places["high"], places["low"]
    return halves.reshape(-1).view("S16")
