"""Writes a branch as a run of MLflow, at ``MLFLOW_TRACKING_URI``; a branch of another is its child run."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quern.config import canonical_json
from quern.train.trackers.backend import Opening, Point

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

__all__ = ["MlflowRun"]

_METRICS, _PARAMS = 1000, 100
"""Most that one request may have (the REST API's limits, as those below)."""
_KEY, _VALUE = 250, 6000
"""[characters] Longest key, longest value."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED", "left": "KILLED"}


class MlflowRun:
    """A run in an experiment. See :class:`quern.train.trackers.backend.Backend`."""

    def __init__(self, opening: Opening) -> None:
        self._client = MlflowClient()
        config = {_name(key): value for key, value in _flat("", opening.config)}
        if opening.id is not None:
            self.id = opening.id
            self._client.update_run(self.id, status="RUNNING")
            known = self._client.get_run(self.id).data.params
            changed = {f"changed.{key}": value for key, value in config.items() if known.get(key) != value}
            self._batches([], [RunTag(_name(key), value) for key, value in changed.items()])
            return
        tags = {"quern.group": opening.group, **{f"quern.tag.{_name(tag)}": "true" for tag in opening.tags}}
        if opening.parent is not None:
            tags |= {"mlflow.parentRunId": opening.parent.id, "quern.parent": opening.parent.id}
            tags["quern.parent_step"] = str(opening.parent.step)
        run = self._client.create_run(self._experiment(opening.project), tags=tags, run_name=opening.name)
        self.id = run.info.run_id
        described = [RunTag(_name(f"quern.{key}"), value) for key, value in _flat("", opening.described)]
        self._batches([Param(key, value) for key, value in config.items()], described)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _batches(self, params: Sequence[Param], tags: Sequence[RunTag]) -> None:
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self.id, params=params[at : at + _PARAMS])
        for at in range(0, len(tags), _PARAMS):
            self._client.log_batch(self.id, tags=tags[at : at + _PARAMS])

    def log(self, points: Sequence[Point]) -> None:
        """See the protocol."""
        metrics = [
            Metric(_name(name), value, point.time_ms, point.step)
            for point in points
            for name, value in point.numbers.items()
        ]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self.id, metrics=metrics[at : at + _METRICS])

    def close(self, how: str) -> None:
        """See the protocol."""
        self._client.set_terminated(self.id, status=_STATUS[how], end_time=int(time.time() * 1000))


def _name(name: str) -> str:
    """In the characters that MLflow takes; a name that had others, or is too long, ends in a digest of itself."""
    plain = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    if posixpath.normpath(plain) != plain or plain.startswith(("/", ".")):  # names are paths in its file store
        plain = re.sub(r"[./]", "_", plain)
    if plain == name and len(name) <= _KEY and name:
        return name
    return f"{plain[: _KEY - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    """``section.key`` and what stands there, as text; an entry of a list has its place for a key."""
    inner: Iterable[tuple[object, Any]]
    if isinstance(value, Mapping) and value:
        inner = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping) for entry in value):
        inner = enumerate(value)
    else:
        return [(name, (value if isinstance(value, str) else canonical_json(value))[:_VALUE])]
    return [found for key, below in inner for found in _flat(f"{name}.{key}" if name else str(key), below)]
