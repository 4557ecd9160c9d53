"""Creates the data run of an import: shards, manifest, version and ``run.json``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from quern import __version__, storage
from quern.config import digest
from quern.tokenize.encoding import Encoding
from quern.tokenize.exchange.columns import I64
from quern.tokenize.shard_format import ENCODING_FILE, VERSION_FILE, ShardInfo, ShardWriter, write_manifests

__all__ = ["Shards", "write_run"]

_LAST_KEY = 2**64 - 1


class Shards:
    """Writes one shard after the other; a shard closes at the end of its file, and at the first document end at or
    above ``shard_tokens``."""

    def __init__(self, folder: str, dtype: str, shard_tokens: int) -> None:
        self._folder, self._dtype, self._most = folder, dtype, shard_tokens
        self._writer: ShardWriter | None = None
        self._tokens = 0
        self._infos: list[ShardInfo] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*raised)

    def add(self, doc_ids: bytes, lengths: I64, tokens: np.ndarray) -> None:
        """Append documents."""
        ends = np.cumsum(lengths)
        first = place = 0
        while first < len(lengths):
            if self._writer is None:
                self._writer = ShardWriter(self._folder, len(self._infos), self._dtype).__enter__()
                self._tokens = 0
            last = int(np.searchsorted(ends, place + self._most - self._tokens, "left")) + 1
            last = min(last, len(lengths))
            end = int(ends[last - 1])
            self._writer.add(doc_ids[16 * first : 16 * last], lengths[first:last], tokens[place:end])
            self._tokens += end - place
            first, place = last, end
            if self._tokens >= self._most:
                self.close()

    def close(self) -> None:
        """Close the shard that is open, if one is; at the end of a file, so that no shard has documents of two."""
        if self._writer is not None:
            # documents stand as in their files, not by place key: a look-up must try every shard
            self._infos.append(self._writer.finish(first_key=0, last_key=_LAST_KEY))
            self._writer = None

    @property
    def infos(self) -> tuple[ShardInfo, ...]:
        """The entries of all shards that are closed."""
        return tuple(self._infos)


def write_run(
    folder: str,
    encoding: Encoding,
    eot: int,
    infos: Mapping[str, Sequence[ShardInfo]],
    options: Mapping[str, Any],
    files: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Write the ranks, the manifests, the version and ``run.json`` of a run of the sources in ``infos``.

    ``options``: what decides the tokens; ``files``: what was read of each source, with relative_path, sha256 and
    sidecar.
    """
    tokens = os.path.join(folder, "tokens")
    storage.publish_bytes(os.path.join(tokens, ENCODING_FILE), encoding.ranks_file)
    shard_tokens = options["shard_tokens"]
    version = write_manifests(tokens, encoding, eot, infos, seed=0, shard_tokens=shard_tokens, validation=0.0)
    storage.write_json(os.path.join(tokens, VERSION_FILE), version)
    whose = [[source, len(own)] for source, own in files.items()]  # how many of the files, in turn, are of which
    named = {"sources": whose} if len(whose) > 1 else {"source": whose[0][0]}
    config = {**options, **named, "eot_id": eot, "ranks_sha256": encoding.ranks_sha256}
    every = [file for own in files.values() for file in own]
    inputs = digest([[own[name] for name in ("relative_path", "sha256", "sidecar")] for own in every])
    record = {
        "id": digest(["import", config, inputs]),
        "config": {"import": config},
        "config_hash": digest(config),
        "versions": {"quern": __version__},
        "counts": {"documents": sum(entry["documents"] for entry in version["sources"].values())},
        "inputs": inputs,
        "files": every,
        "status": "complete",
    }
    storage.write_json(os.path.join(folder, "run.json"), record)
