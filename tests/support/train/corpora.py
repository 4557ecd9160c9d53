"""Small data runs with real shards, and what a loader must make of them, token by token in plain Python."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.tokenize.shard_format import ShardInfo, ShardWriter, version_entry

VOCAB_SIZE, EOT = 300, 299
RANKS = b"AA== 0\n"


@dataclass(frozen=True)
class Doc:
    """``tokens`` include the EOT; a purged document is nothing but EOT."""

    tokens: tuple[int, ...]
    purged: bool = False


Shards = Sequence[Sequence[Doc]]


def make_shards(
    rng: random.Random, lengths: Sequence[Sequence[int]], purged: float = 0.0, vocab_size: int = VOCAB_SIZE
) -> list[list[Doc]]:
    """A document for each length of each shard; a share ``purged`` of them is purged. EOT occurs inside them too."""
    return [[make_doc(rng, length, rng.random() < purged, vocab_size) for length in shard] for shard in lengths]


def make_doc(rng: random.Random, length: int, purged: bool = False, vocab_size: int = VOCAB_SIZE) -> Doc:
    eot = vocab_size - 1
    return Doc((eot,) * length if purged else (*(rng.randrange(vocab_size) for _ in range(length - 1)), eot), purged)


def write_run(
    run_dir: Path,
    sources: Mapping[str, Shards],
    *,
    run_id: str = "r1",
    dtype: str = "uint16",
    vocab_size: int = VOCAB_SIZE,
    ranks: bytes = RANKS,
    encoding: str = "own",
    version: int = 1,
    since: Mapping[str, int] | None = None,
) -> list[str]:
    """A data run as the earlier phases leave it; returns the path of each source."""
    tokens = run_dir / "tokens"
    tokens.mkdir(parents=True)
    (run_dir / "run.json").write_text(json.dumps({"id": run_id, "status": "complete"}))
    (tokens / "encoding.tiktoken").write_bytes(ranks)
    ranks_sha256 = hashlib.sha256(ranks).hexdigest()
    told = {"vocab_size": vocab_size, "dtype": dtype, "eot_id": vocab_size - 1}
    entries = {}
    for name, shards in sources.items():
        folder = tokens / name
        folder.mkdir()
        infos = [_write_shard(folder, number, dtype, shard) for number, shard in enumerate(shards)]
        manifest = {"source": name, "encoding": encoding, "ranks_sha256": ranks_sha256, **told, "seed": 1}
        manifest["shards"] = [asdict(info) for info in infos]
        (folder / "manifest.json").write_text(json.dumps(manifest))
        sha256 = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
        entries[name] = version_entry(name, "manifest.json", sha256, infos)
        if since and name in since:
            entries[name]["since"] = since[name]
    own = {"name": encoding, "ranks": "encoding.tiktoken", "sha256": ranks_sha256, **told}
    body: dict[str, Any] = {"version": version, "parent": None, "kind": "initial", "encoding": own, "sources": entries}
    (tokens / "VERSION.json").write_text(json.dumps(body))
    return [str(tokens / name) for name in sources]


def _write_shard(folder: Path, number: int, dtype: str, shard: Sequence[Doc]) -> ShardInfo:
    with ShardWriter(str(folder), number, dtype) as writer:
        if shard:
            writer.add(
                b"".join(hashlib.md5(f"{folder.name}.{number}.{i}".encode()).digest() for i in range(len(shard))),
                np.array([len(doc.tokens) for doc in shard]),
                np.array([token for doc in shard for token in doc.tokens], dtype),
                np.array([doc.purged for doc in shard]),
            )
        return writer.finish(first_key=0, last_key=2**64 - 1)


@dataclass(frozen=True)
class Expected:
    """One window."""

    tokens: list[int]
    targets: list[int]
    positions: list[int]
    documents: list[int]
    cost: int
    """Σ over its documents of the square of their inputs."""


class Stream:
    """A source's stream, a list entry for each token."""

    def __init__(self, shards: Shards) -> None:
        self.tokens: list[int] = []
        self.document: list[int] = []
        self.purged: list[bool] = []
        for number, doc in enumerate(doc for shard in shards for doc in shard):
            for token in doc.tokens:
                self.tokens.append(token)
                self.document.append(number)
                self.purged.append(doc.purged)

    def window(self, index: int, seq_len: int, document_mask: bool) -> Expected:
        tokens, targets, positions, documents = [], [], [], []
        for place in range(index * seq_len, (index + 1) * seq_len):
            starts = place == index * seq_len
            if document_mask and not starts and self.document[place] != self.document[place - 1]:
                positions.append(0)
                documents.append(documents[-1] + 1)
            else:
                positions.append(0 if starts else positions[-1] + 1)
                documents.append(0 if starts else documents[-1])
            begins = document_mask and self.document[place + 1] != self.document[place]
            tokens.append(self.tokens[place])
            targets.append(-100 if begins or self.purged[place + 1] else self.tokens[place + 1])
        inputs = self.document[index * seq_len : (index + 1) * seq_len]
        return Expected(tokens, targets, positions, documents, sum(inputs.count(d) ** 2 for d in set(inputs)))
