"""Opens the token shards that a run trains on, checks that they fit together, and verifies every byte."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from quern import storage
from quern.config import digest
from quern.data_pipeline.execution.run_directory import read_id
from quern.errors import InputError
from quern.tokenize.corpus_version import read_version
from quern.tokenize.selection.chosen import Chosen, overlap
from quern.tokenize.selection.where import choose
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader

__all__ = ["AssumedCorpus", "Corpus", "NoWindowError", "check_apart", "exclusive", "share_files"]

#: What VERSION.json says of the encoding, and the same field of a source's manifest.
_ENCODING_FIELDS = {
    "name": "encoding",
    "sha256": "ranks_sha256",
    "vocab_size": "vocab_size",
    "dtype": "dtype",
    "eot_id": "eot_id",
}


@contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock file ``path`` among the processes of a node; the kernel releases it when the process ends.

    It saves work that is done once for all; nothing relies on it. A file system without locks has none.
    """
    with ExitStack() as stack:
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            lock = stack.enter_context(open(path, "w", opener=storage.open_own))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def share_files(sizes: Mapping[str, int], rank: int, world: int) -> list[str]:
    """The files for ``rank`` of ``world`` ranks, balanced by size: the largest first, to the least loaded rank."""
    loads = [0] * world
    mine = []
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        least = loads.index(min(loads))
        loads[least] += sizes[path]
        if least == rank:
            mine.append(path)
    return mine


class NoWindowError(InputError):
    """A source has not as many tokens as a window."""


class Corpus:
    """The sources of a mixture, each a stream of tokens cut into windows of ``seq_len + 1`` at stride ``seq_len``.

    ``paths``: folders ``RUN/tokens/<source>``, on a local file system. ``wheres``: for each a condition that chooses
    documents (:mod:`quern.tokenize.selection.where`), which are laid end to end, or None for all of them; what they
    choose is looked for in ``folders``, and written to the first; a choice that is among the identities ``read`` stays
    what it was.

    Attributes: ``readers``, one a path; ``chosen``, of each the documents that its condition chose, or None;
    ``tokens``, how many each has; ``windows``, how many of them; ``ids``, the identity of each
    (:class:`~quern.tokenize.selection.chosen.Identity`); ``versions``, the corpus version each was opened at;
    ``encoding`` (name), ``ranks_path``, ``vocab_size``, ``eot_id``, the same for all; ``fingerprint``, a digest over
    what every manifest holds, and so over every token, and over what was chosen.

    Raises:
        InputError: a file is missing or is not what the corpus version says; two sources do not share one encoding, or
            share documents; a source has no window of this length; a condition is wrong.
    """

    def __init__(
        self,
        paths: Sequence[str],
        seq_len: int,
        wheres: Sequence[str | None] | None = None,
        folders: Sequence[str] = (),
        read: Iterable[str] = (),
    ) -> None:
        if not paths:
            raise InputError("data: expected at least one source, got none")
        if seq_len < 1:
            raise InputError(f"seq_len: expected an integer ≥ 1, got {seq_len}")
        self.seq_len = seq_len
        self.readers = tuple(map(_open, paths))
        for reader in self.readers:
            _check_encoding(reader)
        self._check_one_encoding()
        first = self.readers[0]
        self.encoding, self.ranks_path = first.encoding, first.ranks_path
        self.vocab_size, self.eot_id = first.vocab_size, first.eot_id
        for reader in self.readers:
            if not os.path.exists(reader.ranks_path):
                raise InputError(f"{reader.ranks_path}: is missing; the tokens of {reader.path} cannot be read back")
        self.wheres = tuple([None] * len(paths) if wheres is None else wheres)
        streams = tuple(map(_identity, self.readers))
        self.chosen = tuple(
            None if where is None else _choose(reader, stream, where, folders, read)
            for reader, stream, where in zip(self.readers, streams, self.wheres, strict=True)
        )
        self.ids = tuple(
            stream if chosen is None else chosen.identity for stream, chosen in zip(streams, self.chosen, strict=True)
        )
        self.tokens = tuple(
            reader.total_tokens if chosen is None else chosen.tokens
            for reader, chosen in zip(self.readers, self.chosen, strict=True)
        )
        self.windows = tuple(max(0, (tokens - 1) // seq_len) for tokens in self.tokens)
        for reader, tokens, windows, where in zip(self.readers, self.tokens, self.windows, self.wheres, strict=True):
            if windows == 0:
                chosen = "" if where is None else f" where {where}"
                raise NoWindowError(
                    f"{reader.path}: has {tokens} tokens{chosen}; seq_len {seq_len} needs {seq_len + 1} or more"
                )
        self.versions = tuple(reader.version for reader in self.readers)
        self._check_apart(streams)
        told = [reader.entry["sha256"] for reader in self.readers]
        self.fingerprint = digest(told + [own.identity for own in self.chosen if own is not None])

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger's line of a start tells of the data: of each source's identity its version and its path, and
        in ``wheres`` its condition, which is left out where no source has one."""
        wheres = {ident: where for ident, where in zip(self.ids, self.wheres, strict=True) if where is not None}
        return {
            "versions": dict(zip(self.ids, self.versions, strict=True)), "fingerprint": self.fingerprint,
            "paths": {ident: reader.path for ident, reader in zip(self.ids, self.readers, strict=True)},
            **({"wheres": wheres} if wheres else {}),
        }  # fmt: skip

    def _check_apart(self, streams: Sequence[str]) -> None:
        """No two sources share a document."""
        for index, stream in enumerate(streams):
            for before in range(index):
                if streams[before] != stream:
                    continue
                one, other, path = self.chosen[before], self.chosen[index], self.readers[index].path
                if one is None or other is None:
                    twin = self.readers[before].path
                    raise InputError(
                        f"{path}: is the same data as {twin} ({stream}); give it once, or each time with a where that "
                        f"chooses other documents"
                    )
                check_apart(path, (self.wheres[index], other), (self.wheres[before], one))

    def _check_one_encoding(self) -> None:
        first = self.readers[0].version_encoding
        for reader in self.readers:
            for field in _ENCODING_FIELDS:
                if field != "dtype" and reader.version_encoding[field] != first[field]:
                    raise InputError(
                        f"{_version_path(reader)}: encoding.{field} is {reader.version_encoding[field]!r} for source "
                        f"{reader.source!r}, expected {first[field]!r} as in {_version_path(self.readers[0])}"
                    )

    def verify(self, rank: int = 0, world: int = 1, cache_path: str | None = None) -> list[str]:
        """Compare the SHA-256 of this rank's share of shards, spans and ranks files, and every source's manifest.
        Returns the paths of those that were read.

        ``cache_path``: a JSON file of what was verified before, by path, size, times and inode; a file in it is not
        read again. All ranks may share it.

        Raises:
            InputError: a file is missing or damaged, or the corpus version has changed since it was opened.
        """
        for reader in self.readers:
            _check_unchanged(reader)
        expected = self._files()
        sizes = {path: size for path, (_, size) in expected.items()}
        known, verified = _read_cache(cache_path), {}
        for path in share_files(sizes, rank, world):
            sha256 = expected[path][0]
            found = [*_stamp(path), sha256]
            if known.get(path) != found:
                if storage.sha256(path) != sha256:
                    raise InputError(f"{path}: is damaged: its SHA-256 is not the expected {sha256}")
                verified[path] = found
        if cache_path is not None and verified:
            with exclusive(f"{cache_path}.lock"):
                storage.write_json(cache_path, {**_read_cache(cache_path), **verified})
        return list(verified)

    def _files(self) -> dict[str, tuple[str, int]]:
        """Path → (SHA-256, bytes) of every file that holds data; a file that several sources share is in it once."""
        files: dict[str, tuple[str, int]] = {}
        for reader in self.readers:
            found = [(reader.ranks_path, reader.version_encoding["sha256"])]
            for shard in reader.shards:
                found += [(os.path.join(reader.path, shard.bin), shard.sha256)]
                found += [(os.path.join(reader.path, shard.spans), shard.spans_sha256)]
            for path, sha256 in found:
                files[path] = (sha256, _stamp(path)[0])
        return files


class AssumedCorpus:
    """What a plan asks of a :class:`Corpus` that is not there, by the same attributes: ``tokens_each`` of each path, of
    ``vocab_size`` ids. Identities are such that no data has; versions are 0, which is no corpus version."""

    def __init__(self, paths: Sequence[str], seq_len: int, tokens_each: int, vocab_size: int) -> None:
        self.vocab_size, self.fingerprint = vocab_size, None
        self.ids = tuple(f"assumed/{path}" for path in paths)
        self.tokens = (tokens_each,) * len(paths)
        self.windows = (max(0, tokens_each - 1) // seq_len,) * len(paths)
        self.versions = (0,) * len(paths)


def _open(path: str) -> ShardReader:
    if storage.is_local(path):
        version_path = os.path.join(os.path.dirname(os.path.abspath(storage.split(path)[1])), VERSION_FILE)
        if not os.path.exists(version_path):
            raise InputError(f"{version_path}: no such file; expected {path!r} to be a folder RUN/tokens/<source>")
    return ShardReader(path)


def _version_path(reader: ShardReader) -> str:
    return os.path.join(reader.root, VERSION_FILE)


def _check_unchanged(reader: ShardReader) -> None:
    """VERSION.json and the manifest are those of the version that the reader was opened at."""
    path, version = _version_path(reader), read_version(reader.root)
    if version["version"] != reader.version or reader.source not in version["sources"]:
        raise InputError(
            f"{path}: version: expected {reader.version} with source {reader.source!r}, as when it was opened, "
            f"got {version['version']}; open the corpus again"
        )
    if (version["sources"][reader.source], version["encoding"]) != (reader.entry, reader.version_encoding):
        raise InputError(f"{path}: {reader.source!r} has changed since the corpus was opened")
    manifest = os.path.join(reader.root, reader.entry["manifest"])
    if not os.path.exists(manifest) or storage.sha256(manifest) != reader.entry["sha256"]:
        raise InputError(f"{manifest}: missing or changed; its SHA-256 is not the one in {VERSION_FILE}")


def _check_encoding(reader: ShardReader) -> None:
    """The manifest agrees with the version, and every id fits the file's integers."""
    path, told = os.path.join(reader.root, reader.entry["manifest"]), reader.version_encoding
    for field, own in _ENCODING_FIELDS.items():
        if field not in told:
            raise InputError(f"{_version_path(reader)}: encoding.{field}: is missing")
        if reader.manifest.get(own) != told[field]:
            raise InputError(
                f"{path}: {own}: expected {told[field]!r} as in {VERSION_FILE}, got {reader.manifest.get(own)!r}"
            )
    most = int(np.iinfo(reader.dtype).max) + 1
    if not 1 <= reader.vocab_size <= most:
        raise InputError(
            f"{path}: vocab_size: expected 1 to {most}, which {reader.dtype} holds, got {reader.vocab_size}"
        )
    if not 0 <= reader.eot_id < reader.vocab_size:
        raise InputError(f"{path}: eot_id: expected 0 to {reader.vocab_size - 1}, got {reader.eot_id}")


def _identity(reader: ShardReader) -> str:
    return f"{read_id(os.path.dirname(reader.root))}/{reader.source}/{reader.entry.get('since', 1)}"


def check_apart(path: str, one: tuple[str | None, Chosen], other: tuple[str | None, Chosen]) -> None:
    """Refuse two conditions on a source that choose the same document."""
    if (place := overlap(one[1], other[1])) is not None:
        raise InputError(
            f"{path}: where: {one[0]!r:.200} and {other[0]!r:.200} both choose the document at token {place:,}; "
            f"expected conditions of which a document fulfils one at most"
        )


def _choose(reader: ShardReader, stream: str, where: str, folders: Sequence[str], read: Iterable[str]) -> Chosen:
    """What a condition chooses: of a node's processes the first asks, the others read what it wrote."""
    with exclusive(os.path.join(folders[0], ".lock")):
        return choose(reader, stream, where, folders[0], folders[1:], read)


def _stamp(path: str) -> list[int]:
    """[bytes, modified (ns), changed (ns), inode]: whether a file is still the one that was verified.

    The time of change catches a file that was written to and given its old time of modification again.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise InputError(f"{path}: is missing") from None
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_cache(path: str | None) -> dict[str, list[Any]]:
    """What was verified before; a cache that is missing or no such file says nothing."""
    if path is None or not storage.exists(path):
        return {}
    try:
        cache = storage.read_json(path)
    except InputError:
        return {}
    return cache if isinstance(cache, dict) else {}
