"""A corpus of a few hundred tokens with everything in it that a loader can stumble over."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quern.tokenize.shards import ShardInfo, ShardWriter, version_entry
from quern.train.parity.matrix import VOCAB_SIZE

__all__ = ["SOURCES", "Document", "documents", "write_corpus"]

SOURCES = {"a": 0.5, "b": 0.3, "c": 0.2}
"""Their weights; the least one is read more than once."""
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
    }

    def document(length: int) -> Document:
        if rng.random() < 0.15:
            return Document((EOT,) * length, purged=True)
        return Document((*(rng.randrange(VOCAB_SIZE) for _ in range(length - 1)), EOT))

    return {name: [[document(length) for length in shard] for shard in lengths[name]] for name in SOURCES}


def write_corpus(folder: str) -> list[str]:
    """A data run with these documents; returns the path of each source."""
    tokens = Path(folder, "tokens")
    tokens.mkdir(parents=True)
    sha256 = hashlib.sha256(_RANKS).hexdigest()
    told = {"vocab_size": VOCAB_SIZE, "dtype": "uint16", "eot_id": EOT}
    entries = {}
    for name, shards in documents().items():
        (tokens / name).mkdir()
        infos = [_write_shard(tokens / name, number, shard) for number, shard in enumerate(shards)]
        manifest = json.dumps({
            "source": name, "encoding": "own", "ranks_sha256": sha256, **told, "seed": 1,
            "shards": [info.to_dict() for info in infos],
        }).encode()  # fmt: skip
        (tokens / name / "manifest.json").write_bytes(manifest)
        entries[name] = version_entry(name, "manifest.json", hashlib.sha256(manifest).hexdigest(), infos)
    encoding = {"name": "own", "ranks": "encoding.tiktoken", "sha256": sha256, **told}
    version = {"version": 1, "parent": None, "kind": "initial", "encoding": encoding, "sources": entries}
    Path(folder, "run.json").write_text(json.dumps({"id": "r1", "status": "complete"}))
    (tokens / "encoding.tiktoken").write_bytes(_RANKS)
    (tokens / "VERSION.json").write_text(json.dumps(version))
    return [str(tokens / name) for name in SOURCES]


def _write_shard(folder: Path, number: int, shard: list[Document]) -> ShardInfo:
    with ShardWriter(str(folder), number, "uint16") as writer:
        if shard:
            names = (f"{folder.name}.{number}.{place}".encode() for place in range(len(shard)))
            writer.add(
                b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in names),
                np.array([len(document.tokens) for document in shard]),
                np.array([token for document in shard for token in document.tokens], "uint16"),
                np.array([document.purged for document in shard]),
            )
        return writer.finish(first_key=0, last_key=2**64 - 1)
