"""The map side of tokenization: encodes one partition into sorted runs, documents in place order.

A run is two files: ``.bin``, the tokens of its documents one after the other, and ``.places``, an index with a header
of prefix sums a key range, so that any key range of the run is one contiguous read of each file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.config import digest
from quern.data_pipeline.execution.commits import find_commit, publish_commit
from quern.tokenize.encoding import Encoding
from quern.tokenize.place import NUM_BUCKETS, PLACE, bucket_of, place_key
from quern.tokenize.writing.choose import TRAIN, VALIDATION, chosen_documents

__all__ = [
    "PIECE_FORMAT",
    "RUN_TOKENS",
    "PieceTask",
    "prefix_sums",
    "read_places",
    "run_checksums",
    "tokenize_partition",
    "unharmed",
]

#: Raised whenever the code would make other tokens from the same input and config.
PIECE_FORMAT = 1

#: Tokens held in memory before they are written as a run (uint32: 256 MB, twice while they are put in order).
RUN_TOKENS = 1 << 26

_HEADER = np.dtype("<i8")
_HEADER_BYTES = 2 * (NUM_BUCKETS + 1) * _HEADER.itemsize


@dataclass(frozen=True)
class PieceTask:
    """One partition to tokenize."""

    run_dir: str
    source: str
    partition: str
    encoding: Encoding
    seed: int
    scratch: str
    inputs: str
    """Fingerprint of the partition's tables and of the choice among its documents."""
    run_tokens: int
    """A run is written when so many tokens are held."""

    @property
    def piece(self) -> tuple[str, str, str, str]:
        """Where it is committed."""
        return self.run_dir, "tokens", self.source, self.partition

    @property
    def config(self) -> str:
        """Digest of everything else that decides the runs' bytes."""
        return digest([PIECE_FORMAT, self.encoding.name, self.encoding.ranks_sha256, self.seed, self.run_tokens])


def tokenize_partition(task: PieceTask) -> dict[str, Any]:
    """Write the partition's runs below ``scratch/runs/<stream>`` and commit them; return the commit object.

    The streams are ``<source>`` and ``<source>.val``. What is committed and still there unharmed is not done again.
    """
    entry = find_commit(*task.piece, inputs=task.inputs, config=task.config)
    if entry is not None and unharmed(task.scratch, entry["outputs"]):
        return entry
    writers = {TRAIN: _RunWriter(task, task.source), VALIDATION: _RunWriter(task, f"{task.source}.val")}
    characters = 0
    for doc_id, text, choice in chosen_documents(task.run_dir, task.source, task.partition, task.scratch):
        characters += len(text)
        writers[choice].add(doc_id, text)
    streams = {}
    outputs: dict[str, str] = {}
    for writer in writers.values():
        writer.flush()
        streams[writer.stream] = {"documents": writer.documents, "tokens": writer.tokens, "runs": writer.runs}
        outputs |= writer.outputs
    counts = {"characters": characters, "streams": streams}
    return publish_commit(*task.piece, inputs=task.inputs, config=task.config, outputs=outputs, counts=counts)


def run_checksums(run: str, outputs: Mapping[str, str]) -> list[str]:
    """The SHA-256 of the run's files in the outputs of its commit."""
    return [outputs[f"{run}{end}"] for end in (".bin", ".places")]


def unharmed(folder: str, outputs: Mapping[str, str]) -> bool:
    """Whether every output of a commit (path below ``folder`` → SHA-256) exists unchanged."""
    paths = {storage.join(folder, name): sha256 for name, sha256 in outputs.items()}
    return all(storage.exists(path) and storage.sha256(path) == sha256 for path, sha256 in paths.items())


class _RunWriter:
    """Collects the documents of one stream and writes a run whenever enough tokens are held."""

    def __init__(self, task: PieceTask, stream: str) -> None:
        self.task, self.stream = task, stream
        self.held: list[tuple[int, bytes, np.ndarray]] = []
        self.held_tokens = 0
        self.documents = self.tokens = 0
        self.runs: list[str] = []
        self.outputs: dict[str, str] = {}
        """Path below the scratch folder → SHA-256."""

    def add(self, doc_id: bytes, text: str) -> None:
        encoding = self.task.encoding
        ids = np.append(encoding.encode(text), np.asarray(encoding.eot_id, encoding.dtype))
        self.held.append((place_key(self.task.seed, doc_id), doc_id, ids))
        self.held_tokens += len(ids)
        if self.held_tokens >= self.task.run_tokens:
            self.flush()

    def flush(self) -> None:
        if not self.held:
            return
        self.held.sort(key=lambda document: document[:2])
        places = np.zeros(len(self.held), PLACE)
        places["key"] = np.array([key for key, _, _ in self.held], np.uint64)
        halves = np.frombuffer(b"".join(doc_id for _, doc_id, _ in self.held), ">u8").reshape(-1, 2)
        places["high"], places["low"] = halves[:, 0], halves[:, 1]
        places["length"] = [len(ids) for _, _, ids in self.held]
        name = f"runs/{self.stream}/{self.task.partition}/{len(self.runs):05d}"
        dtype = np.dtype(self.task.encoding.dtype).newbyteorder("<")
        self._publish(f"{name}.bin", [ids.astype(dtype, copy=False) for _, _, ids in self.held])
        self._publish(f"{name}.places", [prefix_sums(places), places])
        self.runs.append(name)
        self.documents += len(places)
        self.tokens += self.held_tokens
        self.held, self.held_tokens = [], 0

    def _publish(self, name: str, arrays: Sequence[np.ndarray]) -> None:
        path = storage.join(self.task.scratch, name)
        with storage.publish(path) as file:
            for array in arrays:
                file.write(array.tobytes())
        self.outputs[name] = storage.sha256(path)


def prefix_sums(places: np.ndarray, first_bucket: int = 0, end_bucket: int = NUM_BUCKETS) -> np.ndarray:
    """int64[2, buckets + 1]: documents, and tokens, before each of the key ranges [first, end), which hold all
    ``places``, and at last their numbers."""
    edges = np.searchsorted(bucket_of(places["key"]), np.arange(first_bucket, end_bucket + 1))
    return np.array([edges, np.concatenate([[0], np.cumsum(places["length"])])[edges]], _HEADER)


def read_places(run: str, first_bucket: int, end_bucket: int) -> tuple[np.ndarray, int]:
    """PLACE records of a run in the key ranges [first, end), and the number of the run's tokens before them."""
    with storage.open_read(f"{run}.places") as file:
        sums = np.frombuffer(file.read(_HEADER_BYTES), _HEADER).reshape(2, NUM_BUCKETS + 1)
        start, end = int(sums[0, first_bucket]), int(sums[0, end_bucket])
        file.seek(_HEADER_BYTES + start * PLACE.itemsize)
        places = np.frombuffer(file.read((end - start) * PLACE.itemsize), PLACE)
    return places, int(sums[1, first_bucket])
