"""Generates data runs of random documents for the benchmark."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quern.tokenize.shard_format import ShardInfo, ShardWriter, first_version, version_entry

__all__ = ["Shard", "random_shards", "write_data_run", "write_random"]

SHARDS = 4
"""Of a source of random documents."""


@dataclass(frozen=True)
class Shard:
    """Consecutive documents."""

    lengths_N: NDArray[np.int64]
    tokens_T: NDArray[np.unsignedinteger]
    purged_N: NDArray[np.bool_] | None = None


def write_data_run(
    run_dir: str | Path,
    sources: Mapping[str, Iterable[Shard]],
    *,
    vocab_size: int,
    run_id: str,
    ranks: bytes = b"",
) -> list[str]:
    """A complete data run of these documents; returns the path of each source. The last id is the EOT.

    ``ranks``: the encoding's file; nobody can encode with an empty one.
    """
    tokens = Path(run_dir, "tokens")
    tokens.mkdir(parents=True)
    sha256 = hashlib.sha256(ranks).hexdigest()
    dtype = _dtype(vocab_size)
    told = {"vocab_size": vocab_size, "dtype": dtype, "eot_id": vocab_size - 1}
    entries = {}
    for name, shards in sources.items():
        (tokens / name).mkdir()
        infos = [_write_shard(tokens / name, number, shard, dtype) for number, shard in enumerate(shards)]
        manifest = json.dumps({
            "source": name, "encoding": "own", "ranks_sha256": sha256, **told, "seed": 1,
            "shards": [asdict(info) for info in infos],
        }).encode()  # fmt: skip
        (tokens / name / "manifest.json").write_bytes(manifest)
        entries[name] = version_entry(name, "manifest.json", hashlib.sha256(manifest).hexdigest(), infos)
    encoding = {"name": "own", "ranks": "encoding.tiktoken", "sha256": sha256, **told}
    version = first_version(encoding, entries)
    Path(run_dir, "run.json").write_text(json.dumps({"id": run_id, "status": "complete"}))
    (tokens / "encoding.tiktoken").write_bytes(ranks)
    (tokens / "VERSION.json").write_text(json.dumps(version))
    return [str(tokens / name) for name in sources]


def write_random(
    run_dir: str | Path, tokens: int, mean_document: float, vocab_size: int, sources: int = 1
) -> list[str]:
    """A data run of at least ``tokens`` tokens of :func:`random_shards`, in equal sources. The same arguments, the same
    bytes."""
    rng, share = np.random.default_rng(1), -(-tokens // sources)
    shards = {f"source{number}": random_shards(rng, share, mean_document, vocab_size) for number in range(sources)}
    return write_data_run(run_dir, shards, vocab_size=vocab_size, run_id="random")


def random_shards(rng: np.random.Generator, tokens: int, mean_document: float, vocab_size: int) -> Iterator[Shard]:
    """At least ``tokens`` tokens in :data:`SHARDS` shards: every id as likely as any other, documents of log-normal
    length (σ = 1, as web pages have, roughly) and of ``mean_document`` tokens in the mean, their EOT included."""
    own = -(-tokens // SHARDS)
    for _ in range(SHARDS):
        parts, missing = [], own
        while missing > 0:
            drawn = rng.lognormal(np.log(mean_document) - 0.5, 1.0, int(missing / mean_document) + 10)
            parts.append(np.maximum(1, drawn).astype(np.int64))
            missing -= int(parts[-1].sum())
        lengths_N = np.concatenate(parts)
        lengths_N = lengths_N[: int(np.searchsorted(np.cumsum(lengths_N), own)) + 1]
        tokens_T = rng.integers(0, vocab_size, lengths_N.sum(), _dtype(vocab_size))
        tokens_T[np.cumsum(lengths_N) - 1] = vocab_size - 1
        yield Shard(lengths_N, tokens_T)


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _write_shard(folder: Path, number: int, shard: Shard, dtype: str) -> ShardInfo:
    with ShardWriter(str(folder), number, dtype) as writer:
        if len(shard.lengths_N):
            names = (f"{folder.name}.{number}.{place}".encode() for place in range(len(shard.lengths_N)))
            ids = b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in names)
            writer.add(ids, shard.lengths_N, shard.tokens_T.astype(dtype, copy=False), shard.purged_N)
        return writer.finish(first_key=0, last_key=2**64 - 1)
