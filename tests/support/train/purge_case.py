"""Purged corpora for trainers, and what a trainer must make of them, from the old files alone."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from quern.config import load_config
from quern.lineage.purge.apply import transaction as request
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import select
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import IGNORE, Loader, StepBatch
from quern.train.config import TrainConfig
from support.train import run_case as case

STREAMS, LENGTH, EOT = ["web", "text"], 32, 999

Spans = dict[str, list[tuple[bytes, int, int]]]
"""Stream → (doc_id, start in the stream, stop)."""


def spans_of(run: Path) -> Spans:
    """Every document of the corpus version that stands, by what its files say."""
    record = json.loads((run / "tokens" / "VERSION.json").read_text())
    found: Spans = {}
    for stream, listed in record["sources"].items():
        origin, rows = 0, []
        for shard in listed["shards"]:
            for row in pq.read_table(run / "tokens" / shard["spans"]).to_pylist():
                rows.append((row["doc_id"], origin + row["start"], origin + row["start"] + row["length"]))
            origin += shard["tokens"]
        found[stream] = rows
    return found


def first_reads(spans: Spans, streams: list[str], samples: Mapping[int, list[Any]], seq_len: int) -> dict[bytes, int]:
    """doc_id → the first data step whose windows hold a token of it, as ``samples`` (:class:`run_case.Left`) tells."""
    found: dict[bytes, int] = {}
    for data_step in sorted(samples):
        for _, source, _, window in samples[data_step]:
            first, last = window * seq_len, (window + 1) * seq_len
            for doc_id, start, stop in spans[streams[source]]:
                if start <= last and stop > first:
                    found.setdefault(doc_id, data_step)
    return found


def deletion_set(run: Path, doc_ids: Collection[bytes]) -> pa.Table:
    """All that goes with the documents."""
    return find_deletion_set(str(run), select(str(run), {"doc": [doc_id.hex() for doc_id in doc_ids]}))


def with_tokens(run: Path, doc_ids: Collection[bytes]) -> list[bytes]:
    """What a purge of the documents would take out of the tokens; sorted."""
    rows = set(deletion_set(run, doc_ids)["doc_id"].to_pylist())
    record = json.loads((run / "tokens" / "VERSION.json").read_text())
    files = [shard["spans"] for listed in record["sources"].values() for shard in listed["shards"]]
    spans = [row for name in files for row in pq.read_table(run / "tokens" / name).to_pylist()]
    return sorted(row["doc_id"] for row in spans if row["doc_id"] in rows and not row["purged"])


def purge(run: Path, doc_ids: Collection[bytes], mode: str = "mask") -> dict[str, Any]:
    """Purge documents, which must be all that goes out of the tokens: the real purge, as the command line calls it."""
    given = {"doc": [doc_id.hex() for doc_id in doc_ids]}
    told = request.Request(str(run), mode, lambda path: deletion_set(run, doc_ids), given)
    report = request.purge(told)
    changes = pq.read_table(run / "tokens" / f"changes.v{report['version']['after']}.parquet")
    assert changes["doc_id"].to_pylist() == sorted(doc_ids)
    return report


def copy(run: Path, to: Path) -> Path:
    """A data run as it stands, that nobody has read yet."""
    return Path(shutil.copytree(run, to, ignore=shutil.ignore_patterns("lineage", "consumers.jsonl")))


def purged_copy(run: Path, to: Path, doc_ids: Collection[bytes], mode: str = "mask") -> Path:
    """A copy of a data run at the version that a purge of ``doc_ids`` leaves."""
    copy(run, to)
    purge(to, doc_ids, mode)
    return to


@contextmanager
def oracle(spans: Spans, doc_ids: Collection[bytes], eot: int) -> Iterator[None]:
    """Trainers in here read the old version, and every token of ``doc_ids`` is made EOT, and no target, on its way.

    ``spans``: of the old version.
    """
    own_take = Loader.take
    gone: dict[str, set[int]] = {
        stream: {place for doc_id, start, stop in rows if doc_id in doc_ids for place in range(start, stop)}
        for stream, rows in spans.items()
    }

    def take(self: Loader, data_step: int) -> StepBatch:
        batch = own_take(self, data_step)
        assert self._world == 1  # the count below is over this rank's rows
        lost = 0
        names = [Path(reader.path).name for reader in self._corpus.readers]
        for micro in batch.micro_batches:
            tokens, targets = micro.tokens_BL, micro.targets_BL
            for row in range(len(tokens)):
                own = self._source_map[int(micro.sources[row])]
                assert own is not None
                first = int(micro.windows[row]) * tokens.shape[1]
                for place in range(tokens.shape[1]):
                    if first + place in gone[names[own]]:
                        tokens[row, place] = eot
                    if first + place + 1 in gone[names[own]] and targets[row, place] != IGNORE:
                        targets[row, place], lost = IGNORE, lost + 1
        return dataclasses.replace(batch, valid_tokens=batch.valid_tokens - lost)

    with mock.patch.object(Loader, "take", take):
        yield


@dataclasses.dataclass
class Trained:
    """A run of nine steps with a checkpoint after every second, and documents that it first reads in
    step 5 or later."""

    data: Path
    run: Path
    left: Any
    changes: dict[str, Any]
    chosen: list[bytes]
    last_clean: int

    def config(self, run: Path, data: Path, **changes: Any) -> TrainConfig:
        paths = [str(data / "tokens" / name) for name in STREAMS]
        return case.settings(run, paths, **{"checkpoint": {"interval": 2}, **self.changes, **changes})

    @property
    def spans(self) -> Spans:
        return spans_of(self.data)


def train(data: Path, run: Path, changes: dict[str, Any]) -> Trained:
    """Train over the data run ``data``, and choose."""
    made = Trained(data, run, None, changes, [], 0)
    made.left = case.live(made.config(run, data))
    first = first_reads(made.spans, STREAMS, made.left.samples, LENGTH)
    chosen: set[bytes] = set()
    for step, count in ((5, 2), (8, 1)):
        late = [doc_id for doc_id in sorted(first) if first[doc_id] == step]
        families = (with_tokens(data, [doc_id]) for doc_id in late)
        fitting = (own for own in families if own and all(first.get(doc_id, step) >= step for doc_id in own))
        chosen.update(*itertools.islice(fitting, count))
    made.chosen = sorted(chosen)
    made.last_clean = min(first[doc_id] for doc_id in made.chosen if doc_id in first) // 2 * 2
    assert max(first[doc_id] for doc_id in made.chosen if doc_id in first) == 8
    assert made.last_clean == 4
    return made


def go_on(trained: Trained, folder: Path, data: Path, step: int | None, **changes: Any) -> case.Left:
    """A copy of the run in ``folder`` goes back to the checkpoint of ``step``, over ``data``."""
    if step is not None:
        shutil.copytree(trained.run, folder)
        changes["resume"] = {"step": step}
    return case.live(trained.config(folder, data, **changes))


def same(one: Path, left: case.Left, other: Path, right: case.Left) -> None:
    assert left.complete
    assert right.complete
    assert left.samples == right.samples
    assert left.tokens == right.tokens
    assert case.rows(one) == case.rows(other)
    assert case.differences(left.state, right.state) == []


def row_of(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    (row,) = [row for row in report["train_runs"] if row["path"] == str(folder)]
    return row


def follow(report: dict[str, Any], folder: Path) -> case.Left:
    """Do what the command of the report's one training run says."""
    return obey(row_of(report, folder))


def obey(row: dict[str, Any]) -> case.Left:
    """Do what the command of a row of a report says."""
    command = row["resume"]["arguments"]
    assert shlex.split(row["resume"]["command"]) == command
    assert command[:2] == ["quern", "train"]
    return case.live(load_config(command[2], TrainConfig, command[3:]))


def corpus_of(data: Path) -> Corpus:
    return Corpus([str(data / "tokens" / name) for name in STREAMS], LENGTH)


def arrays_of(corpus: Corpus, order: Any, folder: Path, document_mask: bool, steps: int) -> dict[Any, Any]:
    """Everything the loader gives, by (data step, place in the global batch)."""
    loader = Loader(
        corpus, order, rank=0, world=1, micro_batch=2, document_mask=document_mask,
        boundaries=open_boundaries(corpus.readers, str(folder)),
    )  # fmt: skip
    found = {}
    for step in range(steps):
        for micro in loader.take(step).micro_batches:
            for row, place in enumerate(micro.indices.tolist()):
                found[step, place] = (
                    int(micro.sources[row]), int(micro.windows[row]), micro.tokens_BL[row].copy(),
                    micro.targets_BL[row].copy(), micro.positions_BL[row].copy(), micro.documents_BL[row].copy(),
                )  # fmt: skip
    return found
