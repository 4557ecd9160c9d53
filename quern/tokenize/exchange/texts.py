"""Computes the text hash of documents of which only the tokens are known."""

from __future__ import annotations

import codecs
import hashlib

import numpy as np
import pyarrow as pa

from quern.data_pipeline.page.document import content_hash
from quern.tokenize.encoding import Encoding
from quern.tokenize.exchange.columns import I64

__all__ = ["Vocabulary"]

_PIECE = 1 << 20


class Vocabulary:
    """The bytes of every id of an encoding; ``known``: bool[vocab_size], whether an id has any."""

    def __init__(self, encoding: Encoding) -> None:
        tokens = encoding.token_bytes()
        self.known = np.array([token is not None for token in tokens])
        self._bytes = pa.array(tokens, pa.large_binary())

    def text_hashes(self, tokens: np.ndarray, lengths: I64) -> list[bytes]:
        """blake2b-128 of each document's text as UTF-8, its EOT left out; bytes that are no UTF-8 count as U+FFFD.

        ``tokens``: all of them, one document after the other; ``lengths``: of each, EOT included.
        """
        ends = np.cumsum(lengths)
        hashes: list[bytes] = []
        while len(hashes) < len(lengths):
            first = len(hashes)
            start = int(ends[first] - lengths[first])
            last = int(np.searchsorted(ends, start + _PIECE, "right"))
            if last == first:
                hashes.append(self._text_hash(tokens[start : ends[first] - 1]))
                continue
            data, edges = self._bytes_of(tokens[start : ends[last - 1]])
            froms, tos = edges[ends[first:last] - lengths[first:last] - start], edges[ends[first:last] - 1 - start]
            hashes += [
                content_hash(str(data[begin:end], "utf-8", "replace"))
                for begin, end in zip(froms.tolist(), tos.tolist(), strict=True)
            ]
        return hashes

    def _text_hash(self, tokens: np.ndarray) -> bytes:
        """Of one document's tokens, however many."""
        state = hashlib.blake2b(digest_size=16)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for first in range(0, len(tokens), _PIECE):
            data, _ = self._bytes_of(tokens[first : first + _PIECE])
            state.update(decoder.decode(data).encode())
        state.update(decoder.decode(b"", final=True).encode())
        return state.digest()

    def _bytes_of(self, tokens: np.ndarray) -> tuple[memoryview, I64]:
        """The bytes of some tokens, and where each token's begin in them (and at last where they end)."""
        found = self._bytes.take(pa.array(tokens.astype(np.int64)))
        _, offsets, data = found.buffers()
        edges = np.frombuffer(offsets, np.int64)[found.offset : found.offset + len(found) + 1]
        return memoryview(data or b""), edges
