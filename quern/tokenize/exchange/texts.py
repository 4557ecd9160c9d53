"""The text hash of documents that are known by their tokens alone."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from quern.tokenize.encoding import Encoding
from quern.tokenize.exchange.columns import I64

__all__ = ["Vocabulary"]

_PIECE = 1 << 20


class Vocabulary:
    """The bytes of every id of an encoding; ``known``: bool[vocab_size], whether an id has any."""

    def __init__(self, encoding: Encoding) -> None:
        tokens: list[bytes | None] = []
        for number in range(encoding.vocab_size):
            try:
                tokens.append(encoding.core.decode_single_token_bytes(number))
            except KeyError:  # an encoding may leave ids out
                tokens.append(None)
        self.known = np.array([token is not None for token in tokens])
        self._bytes = pa.array(tokens, pa.large_binary())

    def text_hashes(self, tokens: np.ndarray, lengths: I64) -> list[bytes]:
        """blake2b-128 of each document's text as UTF-8, its EOT left out; bytes that are no UTF-8 count as U+FFFD.

        ``tokens``: all of them, one document after the other; ``lengths``: of each, EOT included.
        """
        ends = np.cumsum(lengths)
        return [
            self._text_hash(tokens[end - length : end - 1])
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]

    def _text_hash(self, tokens: np.ndarray) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for data in self._pieces(tokens):
            state.update(decoder.decode(data).encode())
        state.update(decoder.decode(b"", final=True).encode())
        return state.digest()

    def _pieces(self, tokens: np.ndarray) -> Iterator[memoryview]:
        for first in range(0, len(tokens), _PIECE):
            found = self._bytes.take(pa.array(tokens[first : first + _PIECE].astype(np.int64)))
            edges = np.frombuffer(found.buffers()[1], np.int64)[found.offset : found.offset + len(found) + 1]
            yield memoryview(found.buffers()[2])[int(edges[0]) : int(edges[-1])]
