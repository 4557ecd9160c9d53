"""A corpus of a few thousand tokens that covers the loader's edge cases."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from quern.train.bench.corpus import Shard, write_data_run
from quern.train.parity.matrix import VOCAB_SIZE

__all__ = ["LONG", "SOURCES", "Document", "documents", "held_out", "sources_of", "write_corpus"]

SOURCES = {"a": 0.5, "b": 0.3, "c": 0.2}
"""Their weights; the least one is read more than once."""
LONG = "d"
"""The one source of windows that none of these has."""
EOT = VOCAB_SIZE - 1
_RANKS = b"AA== 0\n"


@dataclass(frozen=True)
class Document:
    """``tokens`` include the EOT; a purged document is nothing but EOT."""

    tokens: tuple[int, ...]
    purged: bool = False


def documents() -> dict[str, list[list[Document]]]:
    """Of every shard of every source: from a token to twice a window, some purged, EOT inside too, an empty shard."""
    rng = random.Random(5)
    lengths = {
        "a": [[rng.choice((1, 2, 3, 9, 17, 18, 40)) for _ in range(count)] for count in (9, 0, 14)],
        "b": [[rng.randint(1, 40) for _ in range(12)], [rng.randint(1, 6) for _ in range(20)]],
        "c": [[30, 1, 5, 17, 2, 24]],
        LONG: [[700, 90, 1, 330], [260, 40, 520, 3, 150, 610]],
    }

    def document(length: int) -> Document:
        if rng.random() < 0.15:
            return Document((EOT,) * length, purged=True)
        return Document((*(rng.randrange(VOCAB_SIZE) for _ in range(length - 1)), EOT))

    return {name: [[document(length) for length in shard] for shard in shards] for name, shards in lengths.items()}


def held_out() -> list[Document]:
    """Of the first source, and four times over of :data:`LONG`: one window of FP8's lengths, and of others five or
    more, of which some have few targets."""
    return [
        Document((EOT,) * 37, purged=True) if length == 37 else Document((*range(length - 1), EOT))
        for length in (1, 40, 3, 37, 17, 42)
    ]


def sources_of(seq_len: int) -> dict[str, float]:
    """Those that have a window of so many tokens and one more, and their weights."""
    tokens = {name: sum(len(doc.tokens) for shard in shards for doc in shard) for name, shards in documents().items()}
    return {name: weight for name, weight in SOURCES.items() if tokens[name] > seq_len} or {LONG: 1.0}


def write_corpus(folder: str) -> list[str]:
    """A data run with these documents; returns the path of each source."""
    sources = {name: map(_shard, shards) for name, shards in documents().items()}
    first = next(iter(SOURCES))
    sources |= {f"{first}.val": map(_shard, [held_out()]), f"{LONG}.val": map(_shard, [held_out() * 4])}
    return write_data_run(folder, sources, vocab_size=VOCAB_SIZE, run_id="r1", ranks=_RANKS)[: len(documents())]


def _shard(documents: list[Document]) -> Shard:
    return Shard(
        np.array([len(document.tokens) for document in documents], np.int64),
        np.array([token for document in documents for token in document.tokens], np.uint16),
        np.array([document.purged for document in documents], np.bool_),
    )
