"""Tokenizes a run's documents: selects, encodes, plans and writes shards, and publishes the version.

Every piece of work is committed with the fingerprint of what it was made from; a run that was killed at any moment
goes on from its commits to the same bytes. ``VERSION.json`` is written last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quern import storage
from quern.config import digest
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.execution.commits import commit_path, find_commit, publish_commit
from quern.data_pipeline.execution.engine import Engine
from quern.errors import InputError, QuernError
from quern.tokenize.corpus_version import listed_files
from quern.tokenize.encoding import Encoding, TokenizeConfig, load_encoding
from quern.tokenize.shard_format import ENCODING_FILE, VERSION_FILE, ShardInfo, write_manifests
from quern.tokenize.writing.choose import JOIN_DOCUMENTS, choose, group_partitions
from quern.tokenize.writing.merge import SHARD_FORMAT, SLICE_TOKENS, ShardTask, write_shard
from quern.tokenize.writing.plan import GATHER_DOCUMENTS, bucket_ranges, find_cuts, gather
from quern.tokenize.writing.sorted_runs import (
    PIECE_FORMAT,
    RUN_TOKENS,
    PieceTask,
    run_checksums,
    tokenize_partition,
    unharmed,
)
from quern.tokenize.writing.train_encoding import SAMPLE_BYTES, TRAINING_FORMAT, train_on_documents

__all__ = ["TokensReport", "run"]

_VERSION = ("shards", "all", "version")
"""How the whole is committed."""
_OURS = re.compile(r"(shard_\d+\.(bin|spans\.parquet)|manifest\.json)")


@dataclass(frozen=True)
class StreamCounts:
    """What a stream of shards holds; ``tokens`` include one EOT a document."""

    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True)
class TokensReport:
    """Counts of what a run wrote."""

    encoding: str
    vocab_size: int
    dtype: str
    eot_id: int
    sources: Mapping[str, Mapping[str, StreamCounts]]
    """Source → ``train`` and ``val`` → counts."""


@dataclass(frozen=True)
class _Job:
    """What every phase needs."""

    run_dir: str
    partitions: tuple[tuple[str, str], ...]
    pages: tuple[dict[str, Any], ...]
    """The commit of each partition's pages."""
    config: TokenizeConfig
    seed: int
    engine: Engine
    scratch: str

    @property
    def tokens(self) -> str:
        return storage.join(self.run_dir, "tokens")


def run(
    run_dir: str,
    partitions: Sequence[tuple[str, str]],
    config: TokenizeConfig,
    seed: int,
    engine: Engine,
    scratch: str,
) -> TokensReport:
    """Write ``RUN/tokens`` from the documents of ``partitions``, pairs of (source, partition).

    The pages and the duplicates of the run are committed before. ``scratch`` is a folder of this call's own that the
    next call finds again after a crash; it is gone when the run returns. A run or a source without a single document
    is a corpus of no shards.

    Raises:
        InputError: the encoding cannot be had, or the corpus has a later version already.
        QuernError: two documents have the same doc_id, or a table of the earlier phases is missing.
    """
    names = tuple(sorted(set(partitions)))
    pages = tuple(_pages_entry(run_dir, source, partition) for source, partition in names)
    job = _Job(run_dir, names, pages, config, seed, engine, scratch)
    encoding = None if config.trains else load_encoding(config.encoding, config.ranks)
    inputs, settings = _fingerprints(job, encoding)
    version = _standing_version(job)
    done = find_commit(run_dir, *_VERSION, inputs=inputs, config=settings)
    if version is not None and done is not None and _whole(job, done["outputs"]):
        storage.remove_tree(scratch)
        return _report(version)
    if version is not None and done is None:
        # Remove the old list first: it must not be taken for that of the new tokens.
        storage.remove_tree(storage.join(job.tokens, VERSION_FILE))

    chosen = _choose(job)
    encoding = _place_encoding(job, encoding, chosen)
    pieces = _encode(job, chosen, encoding)
    streams = {}
    for source in sorted({source for source, _ in names}):
        for stream in (source, f"{source}.val") if config.validation > 0 else (source,):
            streams[stream] = _write_stream(job, stream, pieces, encoding.dtype)
    version = _publish(job, streams, encoding, inputs, settings)
    storage.remove_tree(scratch)
    return _report(version)


def _pages_entry(run_dir: str, source: str, partition: str) -> dict[str, Any]:
    path = commit_path(run_dir, "pages", source, partition)
    if not storage.exists(path):
        raise QuernError(f"{path}: no such commit; the pages of this partition are not done")
    return dict(storage.read_json(path))


def _fingerprints(job: _Job, encoding: Encoding | None) -> tuple[dict[str, Any], str]:
    """Of everything the tokens are made from, and of every setting that decides their bytes."""
    tables = {}
    for name in (DECISIONS, CLUSTERS):
        path = storage.join(job.run_dir, name)
        if not storage.exists(path):
            raise QuernError(f"{path}: no such file; the duplicates of this run are not done")
        tables[name] = storage.sha256(path)
    pages = [[*name, entry["outputs"]] for name, entry in zip(job.partitions, job.pages, strict=True)]
    config = job.config
    own = [encoding.name, encoding.ranks_sha256] if encoding else [config.encoding, config.trained_vocab_size]
    formats = [PIECE_FORMAT, SHARD_FORMAT, TRAINING_FORMAT]
    settings = digest([formats, own, config.shard_tokens, config.validation, job.seed])
    return {"pages": digest(pages), "duplicates": tables}, settings


def _standing_version(job: _Job) -> dict[str, Any] | None:
    path = storage.join(job.tokens, VERSION_FILE)
    if not storage.exists(path):
        return None
    version = dict(storage.read_json(path))
    if version["version"] != 1:
        raise InputError(
            f"{path}: the corpus is at version {version['version']} ({version['kind']}); running it again would "
            "undo what was changed since version 1; give another run_dir"
        )
    return version


def _whole(job: _Job, outputs: Mapping[str, str]) -> bool:
    """Whether every published file still has its bytes."""
    tasks = [(job.run_dir, {name: sha256}) for name, sha256 in sorted(outputs.items())]
    return all([same for _, same in job.engine.map(unharmed, tasks, label="tokens: verify")])


def _choose(job: _Job) -> list[str]:
    """Mark the documents to tokenize; return a fingerprint of each partition's tables and marks."""
    groups = group_partitions([entry["counts"]["kept"] for entry in job.pages], JOIN_DOCUMENTS)
    tasks = [
        (job.run_dir, [job.partitions[i] for i in group], job.seed, job.config.validation, job.scratch)
        for group in groups
    ]
    fingerprints = [""] * len(job.partitions)
    for group, marks in job.engine.map(choose, tasks, label="tokens: choose"):
        for index, sha in zip(groups[group], marks, strict=True):
            fingerprints[index] = digest([job.pages[index]["outputs"], sha])
    return fingerprints


def _place_encoding(job: _Job, encoding: Encoding | None, fingerprints: Sequence[str]) -> Encoding:
    """The encoding, loaded from the run's own ``tokens/encoding.tiktoken``, which is trained first if need be."""
    name = f"tokens/{ENCODING_FILE}"
    path = storage.join(job.run_dir, name)
    if encoding is not None:
        if not unharmed(job.run_dir, {name: encoding.ranks_sha256}):
            storage.publish_bytes(path, encoding.ranks_file)
        return load_encoding(encoding.name, path)
    vocab_size = job.config.trained_vocab_size
    inputs, settings = digest(list(fingerprints)), digest([TRAINING_FORMAT, SAMPLE_BYTES, vocab_size, job.seed])
    piece = (job.run_dir, "shards", "all", "encoding")
    entry = find_commit(*piece, inputs=inputs, config=settings)
    if entry is None or not unharmed(job.run_dir, entry["outputs"]):
        ranks = train_on_documents(
            job.run_dir, job.partitions, vocab_size, job.seed, job.engine, job.scratch, sample_bytes=SAMPLE_BYTES
        )
        storage.publish_bytes(path, ranks)
        counts = {"ranks": ranks.count(b"\n")}
        outputs = {name: hashlib.sha256(ranks).hexdigest()}
        publish_commit(*piece, inputs=inputs, config=settings, outputs=outputs, counts=counts)
    return load_encoding(job.config.encoding, path)


def _encode(job: _Job, fingerprints: Sequence[str], encoding: Encoding) -> list[dict[str, Any]]:
    """Tokenize every partition; return their commits in the order of the partitions."""
    tasks = [
        (PieceTask(job.run_dir, source, partition, encoding, job.seed, job.scratch, inputs, RUN_TOKENS),)
        for (source, partition), inputs in zip(job.partitions, fingerprints, strict=True)
    ]
    entries = dict(job.engine.map(tokenize_partition, tasks, label="tokens: encode"))
    return [entries[index] for index in range(len(tasks))]


def _write_stream(job: _Job, stream: str, pieces: Sequence[Mapping[str, Any]], dtype: str) -> list[ShardInfo]:
    """Write every shard of a stream; return their manifest entries in order."""
    counts = [(piece["counts"]["streams"].get(stream), piece["outputs"]) for piece in pieces]
    mine = [(own, outputs) for own, outputs in counts if own is not None]
    runs = [run for own, _ in mine for run in own["runs"]]
    contents = sorted(sha for own, outputs in mine for run in own["runs"] for sha in run_checksums(run, outputs))
    folder = storage.join(job.scratch, "plan", stream)
    runs_file = storage.join(folder, "runs.json")
    storage.write_json(runs_file, [storage.join(job.scratch, run) for run in runs])
    ranges = bucket_ranges(sum(own["documents"] for own, _ in mine), GATHER_DOCUMENTS)
    tasks = [(runs_file, first, end, storage.join(folder, f"{first:04d}.places")) for first, end in ranges]
    parts = dict(job.engine.map(gather, tasks, label=f"tokens: order {stream}"))
    cuts = find_cuts([parts[index] for index in range(len(tasks))], job.config.shard_tokens)
    inputs = digest(contents)
    shards = [
        (ShardTask(job.run_dir, stream, number, cut, dtype, runs_file, inputs, SLICE_TOKENS),)
        for number, cut in enumerate(cuts)
    ]
    entries = dict(job.engine.map(write_shard, shards, label=f"tokens: write {stream}"))
    return [ShardInfo(**entries[number]) for number in range(len(shards))]


def _publish(
    job: _Job, streams: Mapping[str, Sequence[ShardInfo]], encoding: Encoding, inputs: Any, settings: str
) -> dict[str, Any]:
    """Write the manifests, then the version, then its commit; return the version."""
    version = write_manifests(
        job.tokens, encoding, encoding.eot_id, streams, seed=job.seed, shard_tokens=job.config.shard_tokens,
        validation=job.config.validation,
    )  # fmt: skip
    outputs = {f"tokens/{ENCODING_FILE}": encoding.ranks_sha256, **listed_files(version)}
    _remove_left_over(job.tokens, outputs)
    path = storage.join(job.tokens, VERSION_FILE)
    storage.write_json(path, version)
    outputs[f"tokens/{VERSION_FILE}"] = storage.sha256(path)
    counts = asdict(_report(version))
    publish_commit(job.run_dir, *_VERSION, inputs=inputs, config=settings, outputs=outputs, counts=counts)
    return version


def _remove_left_over(tokens: str, outputs: Mapping[str, str]) -> None:
    """Shards and manifests of an attempt with other inputs that this one did not overwrite."""
    for path in storage.list_files(tokens):
        folder, name = path.split("/")[-2:]
        if _OURS.fullmatch(name) and f"tokens/{folder}/{name}" not in outputs:
            storage.remove_tree(path)


def _report(version: Mapping[str, Any]) -> TokensReport:
    nothing = StreamCounts(0, 0, 0)
    counts = {
        stream: StreamCounts(entry["documents"], entry["tokens"], len(entry["shards"]))
        for stream, entry in version["sources"].items()
    }
    sources = {
        source: {"train": own, "val": counts.get(f"{source}.val", nothing)}
        for source, own in counts.items()
        if not source.endswith(".val")
    }
    encoding = version["encoding"]
    return TokensReport(encoding["name"], encoding["vocab_size"], encoding["dtype"], encoding["eot_id"], sources)
