"""The reduce side of tokenization: merges one shard from its part of every sorted run.

A shard's documents are contiguous in each run, so a run is read in a few contiguous ranges. Memory is bounded by
:data:`SLICE_TOKENS`, whatever the size of a shard.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.config import digest
from quern.data_pipeline.dedup.exchange import read_records
from quern.data_pipeline.execution.commits import find_commit, publish_commit
from quern.errors import QuernError
from quern.tokenize.place import PLACE, bucket_of, doc_ids
from quern.tokenize.shard_format import ShardWriter, shard_name
from quern.tokenize.writing.plan import Cut
from quern.tokenize.writing.sorted_runs import read_places, unharmed

__all__ = ["SHARD_FORMAT", "SLICE_TOKENS", "ShardTask", "write_shard"]

#: Raised whenever the code would write other files from the same runs.
SHARD_FORMAT = 1

#: Tokens of a shard put in order at once (uint32: 512 MB).
SLICE_TOKENS = 1 << 27

#: Tokens joined for one write.
_WRITE_TOKENS = 1 << 20


@dataclass(frozen=True)
class ShardTask:
    """The description of one shard to write."""

    run_dir: str
    stream: str
    """``<source>`` or ``<source>.val``."""
    number: int
    cut: Cut
    dtype: str
    runs_file: str
    """JSON list of the stream's runs."""
    inputs: str
    """Digest of the runs' contents."""
    slice_tokens: int
    """Tokens to put in order at once."""


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Write the shard and its spans below ``tokens/<stream>`` and commit them; return the manifest entry.

    What is committed and still there unharmed is not written again.
    """
    name = shard_name(task.number)
    config = digest([SHARD_FORMAT, task.dtype])
    cut = task.cut
    bounds = [[cut.after[0], cut.after[1].hex()] if cut.after else None, [cut.last[0], cut.last[1].hex()]]
    inputs = digest([task.inputs, bounds])
    commit = (task.run_dir, "shards", task.stream, name)
    entry = find_commit(*commit, inputs=inputs, config=config)
    if entry is not None and unharmed(task.run_dir, entry["outputs"]):
        return dict(entry["counts"])
    runs = storage.read_json(task.runs_file)
    places, run_of, token_of = _collect(runs, cut)
    if len(places) != cut.documents or int(places["length"].sum()) != cut.tokens:
        raise QuernError(
            f"{task.stream}/{name}: its runs hold {len(places)} documents, expected {cut.documents}; "
            "files in the scratch folder changed during the run"
        )
    folder = storage.join(task.run_dir, "tokens", task.stream)
    with ShardWriter(folder, task.number, task.dtype) as writer:
        ends = np.cumsum(places["length"])
        start = 0
        while start < len(places):
            before = int(ends[start - 1]) if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + task.slice_tokens, "right")))
            piece = slice(start, end)
            _write_slice(writer, runs, np.dtype(task.dtype), places[piece], run_of[piece], token_of[piece])
            start = end
        info = writer.finish(first_key=int(places["key"][0]), last_key=int(places["key"][-1]))
    files = {info.bin: info.sha256, info.spans: info.spans_sha256}
    outputs = {f"tokens/{task.stream}/{file}": sha256 for file, sha256 in files.items()}
    publish_commit(*commit, inputs=inputs, config=config, outputs=outputs, counts=asdict(info))
    return asdict(info)


def _collect(runs: list[str], cut: Cut) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shard's PLACE records in order, the run of each, and where its tokens start in that run."""
    first = bucket_of(np.array([cut.after[0] if cut.after else 0], np.uint64))[0]
    end = bucket_of(np.array([cut.last[0]], np.uint64))[0] + 1
    all_places, all_runs, all_tokens = [np.empty(0, PLACE)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, run in enumerate(runs):
        places, tokens_before = read_places(run, int(first), int(end))
        starts = tokens_before + np.cumsum(places["length"]) - places["length"]
        inside = slice(_count_up_to(places, cut.after), _count_up_to(places, cut.last))
        all_places.append(places[inside])
        all_runs.append(np.full(len(places[inside]), number, np.int64))
        all_tokens.append(starts[inside])
    places = np.concatenate(all_places)
    order = np.lexsort((places["low"], places["high"], places["key"]))
    return places[order], np.concatenate(all_runs)[order], np.concatenate(all_tokens)[order]


def _count_up_to(places: np.ndarray, bound: tuple[int, bytes] | None) -> int:
    """How many of the ordered records stand at or before ``bound``."""
    if bound is None:
        return 0
    key, doc_id = bound
    low, high = (int(np.searchsorted(places["key"], np.uint64(key), side)) for side in ("left", "right"))
    ids = doc_ids(places[low:high]).tobytes()
    return low + sum(ids[i : i + 16] <= doc_id for i in range(0, len(ids), 16))


def _write_slice(
    writer: ShardWriter,
    runs: list[str],
    dtype: np.dtype[Any],
    places: np.ndarray,
    run_of: np.ndarray,
    token_of: np.ndarray,
) -> None:
    """Read the documents' stretch of each run and write them in order."""
    stored = dtype.newbyteorder("<")
    stretches: dict[int, tuple[int, np.ndarray]] = {}
    for number in np.unique(run_of).tolist():
        mine = run_of == number
        start = int(token_of[mine].min())
        end = int((token_of[mine] + places["length"][mine]).max())
        stretches[number] = start, read_records(f"{runs[number]}.bin", stored, start, end)
    ids = doc_ids(places).tobytes()
    waiting: list[np.ndarray] = []
    waiting_tokens = waiting_from = 0
    lengths = places["length"]
    for row, (number, token, length) in enumerate(
        zip(run_of.tolist(), token_of.tolist(), lengths.tolist(), strict=True)
    ):
        origin, tokens = stretches[number]
        waiting.append(tokens[token - origin : token - origin + length])
        waiting_tokens += length
        if waiting_tokens >= _WRITE_TOKENS or row == len(places) - 1:
            writer.add(
                ids[waiting_from * 16 : (row + 1) * 16], lengths[waiting_from : row + 1], np.concatenate(waiting)
            )
            waiting, waiting_tokens, waiting_from = [], 0, row + 1
