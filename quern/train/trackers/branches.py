"""Remembers what of a run a tracker has, and decides which of the tracker's runs a start of the trainer goes on with.

A tracker's run is one branch: its steps only ever grow. A start that resumes goes on in the run that the one before it
wrote, and steps that are done again are not sent again. A rollback and a fork open a run of their own, which names its
parent and the step. So does a resume under another recipe that does steps again: their losses are others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quern import storage
from quern.config import digest
from quern.errors import InputError
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES

__all__ = ["FOLDER", "Branch", "Parent", "State", "branch_at", "parent_of_fork", "recipe_of", "state_path"]

FOLDER = "trackers"
"""Of a run's directory."""

#: What changes no loss, or only its last bits.
_NOT_THE_RECIPE = {
    "run_dir", "device", "comm", "process", "checkpoint", "resume", "data_skip", "validation", "metrics", "profile",
    "forensics", "verify_shards", "parallel", "micro_batch", "attention", "flash_attention", "compile", "loss_chunk",
    "activation_checkpointing", "activation_checkpointing_layers", "activation_memory_budget", "weights_cast",
    "deterministic", "on_event", "preflight", "preflight_timeout_s",
}  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """One run of a tracker."""

    id: str
    step: int
    """Its first."""
    attempt: int
    """The start of the trainer that opened it."""
    parent: str | None
    """The id of the run from whose step ``step`` it goes on."""


@dataclass(frozen=True)
class Parent:
    """Where a branch left another: the tracker's run (of a fork whose trunk was not tracked: the run in quern), and the
    step."""

    id: str
    step: int


@dataclass(frozen=True)
class State:
    """What a tracker has of a run; ``RUN/trackers/<name>.json``."""

    group: str
    bytes: int = 0
    """Of metrics.jsonl."""
    entries: int = 0
    """Of ledger.jsonl, lines."""
    attempt: int = -1
    place: float = -1.0
    """Of the last line of metrics that was sent to the present branch."""
    points: int = 0
    """That were sent to it."""
    recipe: str = ""
    ended: str = ""
    """How its run in the tracker was ended; empty: it has not been."""
    branches: tuple[Branch, ...] = ()

    def write(self, path: str) -> None:
        """Replace the file as a whole."""
        storage.publish_bytes(path, (json.dumps(asdict(self)) + "\n").encode())

    @classmethod
    def read(cls, path: str) -> State | None:
        """What :meth:`write` wrote; None where there is none.

        Raises:
            InputError: it is something else; file, field and value are named.
        """
        if not os.path.lexists(path):
            return None
        found = storage.read_json(path)
        if not isinstance(found, dict) or not isinstance(found.get("branches"), list):
            raise InputError(f"{path}: branches: expected a list; remove the file to send the run anew")
        try:
            return _checked(cls, {**found, "branches": tuple(_checked(Branch, own) for own in found["branches"])})
        except ValueError as error:
            raise InputError(f"{path}: {error}; remove the file to send the run anew") from None


_TYPES: dict[str, type | tuple[type, ...]] = {
    "id": str, "step": int, "attempt": int, "parent": (str, type(None)), "group": str, "bytes": int, "entries": int,
    "points": int, "place": (int, float), "recipe": str, "ended": str, "branches": tuple,
}  # fmt: skip


def _checked(kind: Any, found: Any) -> Any:
    fields = kind.__dataclass_fields__
    if not isinstance(found, dict) or found.keys() != fields.keys():
        raise ValueError(f"expected {', '.join(fields)}, got {found!r:.80}")
    for name, value in found.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"{name}: has another type than expected, got {value!r:.40}")
        if isinstance(value, int) and value < -1:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    return kind(**found)


def state_path(run_dir: str, name: str) -> str:
    """The file of the state of tracker ``name``."""
    return os.path.join(run_dir, FOLDER, f"{name}.json")


def recipe_of(config: TrainConfig) -> str:
    """A digest of what in a config decides the losses."""
    return digest({k: v for k, v in config.model_dump(mode="json").items() if k not in _NOT_THE_RECIPE})


def branch_at(
    state: State, entries: Sequence[Mapping[str, Any]], attempt: int, *, recipe: str | None, again: bool
) -> tuple[State, Parent | None] | None:
    """The state with which start ``attempt`` opens a branch, and its parent; None: it goes on in the newest one.

    ``entries``: the ledger's. ``recipe``: of that start, None = not known any more; ``again``: whether it does steps
    that the newest branch has.
    """
    moves = [entry for entry in entries if entry["kind"] in MOVES]
    opened = replace(state, attempt=attempt, points=0, recipe=recipe or state.recipe)
    if attempt >= len(moves):  # the ledger has been taken away; lines of metrics alone say of no branch
        return None if state.branches else (opened, None)
    if not state.branches:
        step = moves[attempt]["step"]
        return replace(opened, place=float(step if attempt else -1)), None
    backs = [entry["step"] for entry in moves[state.attempt + 1 : attempt + 1] if entry["kind"] == "rollback"]
    other = recipe is not None and again and recipe != state.recipe
    if not backs and not other:
        return None
    step = min([*backs, moves[attempt]["step"]])
    return replace(opened, place=float(step)), Parent(_owner(state.branches, step), step)


def _owner(branches: Sequence[Branch], step: int) -> str:
    """The branch that did the step before ``step``, from the newest one back."""
    own = branches[-1]
    by_id = {branch.id: branch for branch in branches}
    while own.step >= step and own.parent in by_id:
        own = by_id[own.parent]
    return own.id


def parent_of_fork(name: str, entries: Sequence[Mapping[str, Any]]) -> tuple[Parent, str | None] | None:
    """Of a run that is a fork: its parent, and the group of the trunk's runs in tracker ``name``; None: it is none."""
    at = max((place for place, entry in enumerate(entries) if entry["kind"] == "fork"), default=None)
    if at is None:
        return None
    line, attempt = entries[at], sum(entry["kind"] in MOVES for entry in entries[:at]) - 1
    try:
        trunk = State.read(state_path(line["path"], name))
    except InputError:
        trunk = None
    known = [] if trunk is None else [branch for branch in trunk.branches if branch.attempt <= attempt]
    if trunk is None or not known:
        return Parent(line["run"], line["step"]), None
    return Parent(_owner(known, line["step"]), line["step"]), trunk.group
