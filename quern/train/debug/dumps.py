"""Reads the flight recorder's dumps in ``RUN/debug``, NCCL's pickles too, without running what a file says.

Imports no torch.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError, named_line

__all__ = [
    "BEFORE",
    "Call",
    "Dump",
    "debug_folder",
    "in_vain",
    "parse_pickle",
    "rank_of",
    "read_dump",
    "tracebacks_folder",
]

#: Subfolder with the files of an earlier start.
BEFORE = "before"
_NAME = re.compile(r"(?:flight_(?:\w*_)?rank_|memory_rank)(\d+)(?:\.json|\.pickle)?")

#: In errors of ranks that wait for another, which does not answer or is gone.
_IN_VAIN = re.compile(r"tim(ed|e)[ -]?out|connection (closed|reset|refused)", re.IGNORECASE)


@dataclass(frozen=True)
class Call:
    """A collective, or a send or receive, as one rank has called it."""

    backend: str
    group: str
    number: int
    """Counts the collectives of a group, from 1; of a send or receive those of its pair."""
    kind: str
    input_sizes: Sequence[Any]
    output_sizes: Sequence[Any]
    dtypes: Sequence[str]
    state: str
    """``completed``, ``started`` or ``scheduled``; ``retired`` of gloo's where a rank waited in vain, and this may be
    the call: the last of its group. gloo marks a call that failed as it marks one that ended well."""
    pairwise: bool
    frames: tuple[str, ...]
    """``file:line in function``, innermost first."""
    order: int


@dataclass(frozen=True)
class Dump:
    """The record of one rank and backend."""

    file: str
    rank: int
    error: str | None
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    """For each group its description, and its ranks."""
    calls: tuple[Call, ...]


class _Plain(pickle.Unpickler):
    """Lists, dicts, texts and numbers alone: a pickle that asks for any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a dump holds only lists, dicts and numbers")


def debug_folder(run_dir: str) -> str:
    """The folder in a run's folder in which ranks leave their dumps."""
    return os.path.join(run_dir, "debug")


def tracebacks_folder(run_dir: str) -> str:
    """The folder of a run's tracebacks and stacks."""
    return os.path.join(run_dir, "tracebacks")


def in_vain(error: str) -> bool:
    """Whether it is the error of a rank that waited for another."""
    return _IN_VAIN.search(error) is not None


def rank_of(name: str) -> int | None:
    """The rank whose file in the folder has this name; None if it is no file of a rank."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def parse_pickle(data: bytes) -> dict[str, Any]:
    """A dump in torch's form.

    Raises:
        ValueError: it is damaged, or no pickle of plain values.
    """
    try:
        value = _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(named_line(error)) from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, got {type(value).__name__}")
    return value


def read_dump(file: str) -> Dump:
    """Read one rank's dump, JSON or NCCL's pickle.

    Raises:
        InputError: naming the file, and what is wrong with it.
    """
    rank = rank_of(os.path.basename(file))
    try:
        with open(file, "rb") as stream:
            data = stream.read()
        found = json.loads(data) if data[:1] == b"{" else parse_pickle(data)
        groups = {
            name: (group["desc"], tuple(map(int, ast.literal_eval(group["ranks"]))))
            for name, group in found.get("pg_config", {}).items()
        }
        failed = found.get("error")
        entries = sorted(found["entries"], key=lambda entry: entry["record_id"])
        vain = failed is not None and in_vain(failed)
        newest = {str(entry["process_group"][0]): entry["record_id"] for entry in entries}
        calls = tuple(_call(entry, unsure=vain and entry["record_id"] in newest.values()) for entry in entries)
    except Exception as error:
        raise InputError(f"{file}: the flight recorder's dump is damaged: {named_line(error)}") from error
    return Dump(file, -1 if rank is None else rank, failed, groups, calls)


def _call(entry: Mapping[str, Any], *, unsure: bool) -> Call:
    backend, _, kind = str(entry["profiling_name"]).rpartition(":")
    state = str(entry["state"])
    pairwise = bool(entry.get("is_p2p", False))
    if backend == "gloo" and entry.get("retired"):  # it knows no other state than scheduled
        state = "retired" if unsure else "completed"
    return Call(
        backend=backend.partition(":")[0],
        group=str(entry["process_group"][0]),
        number=int(entry["p2p_seq_id"] if pairwise else entry["collective_seq_id"]),
        kind=kind,
        input_sizes=entry.get("input_sizes") or [],
        output_sizes=entry.get("output_sizes") or [],
        dtypes=entry.get("input_dtypes") or [],
        state=state,
        pairwise=pairwise,
        frames=tuple(f"{f['filename']}:{f['line']} in {f['name']}" for f in entry.get("frames") or ()),
        order=int(entry["record_id"]),
    )
