"""Writes a branch as a run of Weights & Biases, MLflow or Trackio; its library is imported with the first."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from quern.config import canonical_json
from quern.train.trackers.branches import FOLDER, Parent

__all__ = ["BACKENDS", "Backend", "Opening", "Point"]


class Point(NamedTuple):
    """Numbers at a step. ``number``: how many points of the branch are before it; ``time_ms``: since 1970."""

    number: int
    step: int
    numbers: Mapping[str, float]
    time_ms: int


@dataclass(frozen=True)
class Opening:
    """The run to open: ``id`` of one to go on with, None = a new one, which has ``name`` and may have a ``parent``.
    ``config``: of the start, as in config.yaml. ``described``: ``run.json``."""

    run_dir: str
    id: str | None
    project: str
    name: str
    group: str
    tags: Sequence[str]
    config: Mapping[str, Any]
    described: Mapping[str, Any]
    parent: Parent | None

    def whole_config(self) -> dict[str, Any]:
        """Config, ``run.json`` and parent, for a tracker that has one mapping for all."""
        parent = {} if self.parent is None else {"parent": {"run": self.parent.id, "step": self.parent.step}}
        return {**self.config, "quern": dict(self.described), **parent}


class Backend(Protocol):
    """A tracker's run that is open. Every call may raise whatever the tracker's library does."""

    id: str

    def log(self, points: Sequence[Point]) -> None:
        """Add points whose steps do not decrease."""

    def close(self, how: str) -> None:
        """``how``: ``finished``, ``stopped`` by a signal, ``failed``, ``killed``, or ``left`` for another branch."""


class _Wandb:
    """A run in a project; with ``WANDB_MODE=offline`` below ``RUN/trackers/wandb`` alone. W&B drops a row whose number
    was there before the run was resumed, so rows have numbers of their own; ``step`` is on the x-axis.

    Metrics, config and what ``run.json`` says are all that is sent: no code, git state, console, packages, host or
    use of the machine.
    """

    def __init__(self, opening: Opening) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # read when it is imported
        import wandb

        self.id = opening.id or uuid.uuid4().hex
        quiet = wandb.Settings(
            console="off", silent=True, save_code=False, disable_code=True, disable_git=True, host="",
            disable_job_creation=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
            x_save_requirements=False,
        )  # fmt: skip
        self._run = wandb.init(
            project=opening.project, id=self.id, name=opening.name if opening.id is None else None, tags=opening.tags,
            group=opening.group, dir=os.path.join(os.path.abspath(opening.run_dir), FOLDER), resume="allow",
            settings=quiet,
        )  # fmt: skip
        self._run.config.update(opening.whole_config(), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            given = {**point.numbers, "step": point.step, "_timestamp": point.time_ms / 1000}
            self._run.log(given, step=point.number)

    def close(self, how: str) -> None:
        self._run.finish(exit_code=1 if how in ("failed", "killed") else 0)


class _Trackio:
    """A run in a project, known by its name: in ``TRACKIO_DIR``, or on the server of ``TRACKIO_SERVER_URL``."""

    def __init__(self, opening: Opening) -> None:
        import trackio

        self.id = opening.id or f"{opening.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=opening.project, name=self.id, group=opening.group, embed=False, auto_log_gpu=False,
            auto_log_cpu=False, resume="never" if opening.id is None else "must",
            config={**opening.whole_config(), "tags": [*opening.tags]},
        )  # fmt: skip

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.numbers), step=point.step)

    def close(self, how: str) -> None:
        self._run.finish()


#: Limits of MLflow's REST API: entries of one request; characters of a key, and of a value.
_METRICS, _OTHERS, _KEY, _VALUE = 1000, 100, 250, 6000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "killed": "KILLED", "left": "KILLED"}


class _Mlflow:
    """A run in an experiment, at ``MLFLOW_TRACKING_URI``; a branch of another is its child run."""

    def __init__(self, opening: Opening) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read when it is imported
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities, self._client = entities, MlflowClient()
        params, tags = _texts(opening.config), _texts(opening.described, "quern")
        if opening.id is None:
            found = self._client.get_experiment_by_name(opening.project)
            place = found.experiment_id if found is not None else self._client.create_experiment(opening.project)
            tags |= {"quern.group": opening.group, **{f"quern.tag.{tag}": "true" for tag in opening.tags}}
            if (parent := opening.parent) is not None:
                tags |= {"mlflow.parentRunId": parent.id, "quern.parent_step": str(parent.step)}
            first = {_name(key): value for key, value in tags.items()}
            self.id = self._client.create_run(place, run_name=opening.name, tags=first).info.run_id
            try:
                self._send("params", [entities.Param(key, value) for key, value in params.items()])
            except BaseException:
                self._client.delete_run(self.id)  # the next try makes another
                raise
            return
        else:
            self.id = opening.id
            self._client.update_run(self.id, status="RUNNING")
            known = self._client.get_run(self.id).data.params
            tags |= {f"changed.{key}": value for key, value in params.items() if known.get(key) != value}
        self._send("tags", [entities.RunTag(_name(key), value) for key, value in tags.items()])

    def _send(self, kind: str, items: Sequence[Any]) -> None:
        most = _METRICS if kind == "metrics" else _OTHERS
        for at in range(0, len(items), most):
            self._client.log_batch(self.id, **{kind: items[at : at + most]})

    def log(self, points: Sequence[Point]) -> None:
        metric = self._entities.Metric
        rows = ((name, value, own) for own in points for name, value in own.numbers.items())
        self._send("metrics", [metric(_name(name), value, own.time_ms, own.step) for name, value, own in rows])

    def close(self, how: str) -> None:
        self._client.set_terminated(self.id, status=_STATUS[how], end_time=int(time.time() * 1000))


def _texts(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """What stands at each key, as text that MLflow takes."""
    found = _flat(values, above)
    return {_name(key): (value if isinstance(value, str) else canonical_json(value))[:_VALUE] for key, value in found}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """``section.key`` and what stands there; an entry of a list of mappings has its place for a key."""
    if isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, below in value.items():
        yield from _flat(below, f"{name}.{key}" if name else str(key))


def _name(name: str) -> str:
    """In the characters that MLflow takes; a name that had others, or is too long, ends in a digest of itself."""
    plain = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    if posixpath.normpath(plain) != plain or plain.startswith(("/", ".")):  # names are paths in its file store
        plain = re.sub(r"[./]", "_", plain)
    if plain == name and len(name) <= _KEY and name:
        return name
    return f"{plain[: _KEY - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


BACKENDS: Mapping[str, Callable[[Opening], Backend]] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}
"""What opens a run, by the tracker's name."""
