"""Remembers what of a run a tracker has, and decides which of the tracker's runs a start of the trainer goes on with.

A tracker's run is one branch: its steps only ever grow. A start that resumes goes on in the run that the one before it
wrote, and steps that are done again are not sent again. A rollback and a fork open a run of their own, which names its
parent and the step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from quern import storage
from quern.config import Section, validate
from quern.errors import InputError
from quern.train.config.numbers import NonNegative
from quern.train.history.ledger import opening

__all__ = ["FOLDER", "Branch", "Parent", "State", "branch_at", "parent_of_fork", "state_path"]

FOLDER = "trackers"
"""Of a run's directory."""


class Parent(NamedTuple):
    """Where a branch left another: the tracker's run (of a fork whose trunk was not tracked: the run in quern), and the
    step."""

    id: str
    step: int


class Branch(Section):
    """One run of a tracker: its first step, the start of the trainer that opened it, and from whose run it goes on."""

    id: str
    step: NonNegative
    attempt: NonNegative
    parent: str | None


class State(Section):
    """What a tracker has of a run; ``RUN/trackers/<name>.json``: so many bytes of metrics.jsonl and ``entries`` of
    ledger.jsonl; of the present branch the ``place`` of the last line of metrics, so many ``points``, and how its run
    was ``ended``, if it was."""

    group: str = ""
    bytes: NonNegative = 0
    entries: NonNegative = 0
    attempt: int = -1
    place: float = 0.0
    points: NonNegative = 0
    ended: str = ""
    branches: tuple[Branch, ...] = ()

    def but(self, **changes: Any) -> State:
        """A copy with other values."""
        return self.model_copy(update=changes)

    @classmethod
    def read(cls, path: str) -> State:
        """What is in a file; that of no run where there is none.

        Raises:
            InputError: it is something else; file, field and value are named.
        """
        if not os.path.lexists(path):
            return cls()
        try:
            return validate(storage.read_json(path), cls, path)
        except InputError as error:
            raise InputError(f"{error}; remove the file to send the run anew") from None


def state_path(run_dir: str, name: str) -> str:
    """The file of the state of tracker ``name``."""
    return os.path.join(run_dir, FOLDER, f"{name}.json")


def branch_at(state: State, entries: Sequence[Mapping[str, Any]], attempt: int) -> tuple[int, Parent | None] | None:
    """The first step of the branch that start ``attempt`` opens, and its parent; None: it goes on in the newest one.

    ``entries``: the ledger's."""
    moves = opening(entries)
    begins = [entry["step"] for entry in moves[attempt : attempt + 1]]
    if not state.branches:
        return sum(begins), None
    backs = [entry["step"] for entry in moves[state.attempt + 1 : attempt + 1] if entry["kind"] == "rollback"]
    if not backs:
        return None
    step = min(backs + begins)
    return step, Parent(_owner(state.branches, step), step)


def _owner(branches: Sequence[Branch], step: int) -> str:
    """The branch that did the step before ``step``, from the newest one back."""
    own = branches[-1]
    by_id = {branch.id: branch for branch in branches}
    while own.step >= step and own.parent in by_id:
        own = by_id[own.parent]
    return own.id


def parent_of_fork(name: str, entries: Sequence[Mapping[str, Any]]) -> tuple[Parent | None, str]:
    """Of a run that is a fork: its parent, and the group of the trunk's runs in tracker ``name``, if there are any."""
    at = max((place for place, entry in enumerate(entries) if entry["kind"] == "fork"), default=None)
    if at is None:
        return None, ""
    line, attempt = entries[at], len(opening(entries[:at])) - 1
    trunk = State()
    with suppress(InputError):
        trunk = State.read(state_path(line["path"], name))
    known = [branch for branch in trunk.branches if branch.attempt <= attempt]
    if not known:
        return Parent(line["run"], line["step"]), ""
    return Parent(_owner(known, line["step"]), line["step"]), trunk.group
