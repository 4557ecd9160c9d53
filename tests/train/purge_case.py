"""Purged corpora for trainers, and what a trainer must make of them, from the old files alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import run_case as case

from quern.config import load_config
from quern.train.config import TrainConfig
from quern.train.loader import IGNORE, Loader, StepBatch


def _load(name: str) -> Any:
    path = Path(__file__).parents[1] / "lineage" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"lineage_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"lineage_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STREAMS, LENGTH, EOT = ["web", "text"], 32, 999

runs, versions = _load("runs"), _load("versions")

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


def rewrite(run: Path, doc_ids: Collection[bytes]) -> int:
    """Purge documents: the shards that hold them are written without them, as a new version and identity."""
    root = run / "tokens"
    record = json.loads((root / "VERSION.json").read_text())
    version = record["version"] + 1
    for stream, listed in record["sources"].items():
        manifest = json.loads((root / listed["manifest"]).read_text())
        touched = False
        for number, (info, entry) in enumerate(zip(manifest["shards"], listed["shards"], strict=True)):
            spans = pq.read_table(root / stream / info["spans"])
            rows = spans.to_pylist()
            if not any(row["doc_id"] in doc_ids for row in rows):
                continue
            touched = True
            tokens = np.fromfile(root / stream / info["bin"], manifest["dtype"])
            kept = [row for row in rows if row["doc_id"] not in doc_ids]
            parts = [tokens[row["start"] : row["start"] + row["length"]] for row in kept]
            info |= {
                name: f"shard_{number:05d}.v{version}.{end}"
                for name, end in (("bin", "bin"), ("spans", "spans.parquet"))
            }
            np.concatenate(parts).tofile(root / stream / info["bin"])
            start = 0
            for row in kept:
                row["start"], start = start, start + row["length"]
            pq.write_table(pa.Table.from_pylist(kept, spans.schema), root / stream / info["spans"])
            info |= {"tokens": start, "documents": len(kept)}
            info |= {
                "sha256": versions.sha256(root / stream / info["bin"]),
                "spans_sha256": versions.sha256(root / stream / info["spans"]),
            }
            entry |= {name: info[name] for name in ("sha256", "spans_sha256", "tokens", "documents")}
            entry |= {name: f"{stream}/{info[name]}" for name in ("bin", "spans")}
        if touched:
            listed["since"] = version
            listed["tokens"] = sum(entry["tokens"] for entry in listed["shards"])
            listed["documents"] = sum(entry["documents"] for entry in listed["shards"])
            listed["manifest"] = f"{stream}/manifest.v{version}.json"
            (root / listed["manifest"]).write_text(json.dumps(manifest))
            listed["sha256"] = versions.sha256(root / listed["manifest"])
    versions.write_changes(run, version, {doc_id: "purged" for doc_id in doc_ids})
    record |= {"version": version, "parent": version - 1, "kind": "rewrite"}
    (root / "VERSION.json").write_text(json.dumps(record))
    return version


def purged_copy(run: Path, to: Path, doc_ids: Collection[bytes], mode: str = "mask") -> Path:
    """A copy of a data run at the version that a purge of ``doc_ids`` leaves."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("lineage", "consumers.jsonl"))
    {"mask": versions.mask, "rewrite": rewrite}[mode](to, doc_ids)
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
    late = {step: sorted(doc_id for doc_id, own in first.items() if own == step) for step in range(case.STEPS)}
    made.chosen = [*late[5][:2], *late[8][:1]]
    made.last_clean = min(first[doc_id] for doc_id in made.chosen) // 2 * 2
    assert len(made.chosen) == 3
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
    row = row_of(report, folder)
    command = row["resume"]["arguments"]
    assert shlex.split(row["resume"]["command"]) == command
    assert command[:2] == ["quern", "train"]
    return case.live(load_config(command[2], TrainConfig, command[3:]))
