"""Runs the stages of duplicate removal in sequence, and commits each one.

A stage's commit is a file in the scratch folder, written when all its tasks are done: a call repeated after a crash
resumes after the last one. An exchange is removed as soon as all stages that read it are committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.exchange import Exchange
from quern.data_pipeline.dedup.work import Done
from quern.data_pipeline.execution.engine import Engine

__all__ = ["DedupStage", "Stages"]


@dataclass(frozen=True)
class DedupStage:
    """The results of one stage."""

    numbers: list[list[int]]
    """What each task gave back."""
    exchanges: dict[str, Exchange]

    def __getitem__(self, exchange: str) -> Exchange:
        return self.exchanges[exchange]


class Stages:
    """Runs stages, each at most once per scratch folder.

    ``key`` says what the folder is for: what an earlier call with another key left there is removed. Without a key
    nothing is used again.
    """

    def __init__(self, engine: Engine, scratch: str, key: str | None) -> None:
        self._engine, self._scratch = engine, scratch
        self.number = 0
        self._key = key
        path = storage.join(scratch, "stages", "key.json")
        if key is None or not storage.exists(path) or storage.read_json(path) != key:
            storage.remove_tree(scratch)
            if key is not None:
                storage.write_json(path, key)

    def run(
        self, function: Callable[..., Done], tasks: Sequence[tuple[Any, ...]], label: str, *used: Exchange
    ) -> DedupStage:
        """Run ``function`` over ``tasks`` unless committed already; then the exchanges ``used`` may be removed."""
        self.number += 1
        name = f"{self.number:03d}-{label.replace(' ', '-')}.json"
        path = storage.join(self._scratch, "stages", name)
        if self._key is not None and storage.exists(path):
            stored = storage.read_json(path)
            kept = stored["exchanges"].items()
            exchanges = {
                name: self._exchange(name, own["files"], np.array(own["counts"], np.int64)) for name, own in kept
            }
            stage = DedupStage(stored["numbers"], exchanges)
        else:
            stage = self._collect(function, tasks, label)
            if self._key is not None:
                storage.write_json(path, _dump(stage), indent=None)
        for exchange in used:
            storage.remove_tree(exchange.folder)
        return stage

    def _collect(self, function: Callable[..., Done], tasks: Sequence[tuple[Any, ...]], label: str) -> DedupStage:
        numbers: list[list[int]] = [[] for _ in tasks]
        files: dict[str, list[int]] = {}
        counts: dict[str, np.ndarray] = {}
        for index, done in self._engine.map(function, tasks, label=f"duplicates: {label}"):
            numbers[index] = list(done.numbers)
            for name, written in done.written.items():
                files.setdefault(name, [0] * len(tasks))[index] = written.files
                counts[name] = counts[name] + written.counts if name in counts else written.counts
        return DedupStage(numbers, {name: self._exchange(name, files[name], counts[name]) for name in files})

    def _exchange(self, name: str, files: Sequence[int], counts: np.ndarray) -> Exchange:
        return Exchange(storage.join(self._scratch, name), tuple(files), counts)


def _dump(stage: DedupStage) -> dict[str, Any]:
    exchanges = {
        name: {"files": list(exchange.files), "counts": exchange.counts.tolist()}
        for name, exchange in stage.exchanges.items()
    }
    return {"numbers": stage.numbers, "exchanges": exchanges}
