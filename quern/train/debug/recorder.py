"""Has torch's flight recorder record every collective, and writes what it holds of a rank that failed to ``RUN/debug``.

NCCL's watchdog writes ``flight_nccl_rank_<N>`` by itself when a collective times out (unverified on GPU); gloo has no
watchdog, so that a rank writes ``flight_gloo_rank_<N>.json`` when it fails.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from quern.errors import named_line
from quern.filesystem import open_own
from quern.train.debug.dumps import BEFORE, debug_folder, parse_pickle, rank_of

__all__ = ["begin", "keep", "set_aside"]

#: For each setting the names that torch knows, the newest first, and what it is here.
_SETTINGS = (
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), "{folder}/flight_nccl_rank_"),
)


def begin(run_dir: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch reads when the first process group is opened, except what the user has set."""
    folder = debug_folder(run_dir)
    for names, value in _SETTINGS:
        if not any(name in environment for name in names):
            environment[names[0]] = value.format(folder=os.path.abspath(folder))


def set_aside(run_dir: str, rank: int, world: int, *, cuda: bool) -> None:
    """Move files of an earlier start to ``RUN/debug/before``, each by the rank of its number, or of its number modulo
    ``world``. Once a start is not refused any more, and holds the run."""
    folder = debug_folder(run_dir)
    with suppress(OSError):  # a rank trains without a place for its record
        if cuda:  # torch makes no folder
            os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            number = rank_of(name)
            if number is not None and number % world == rank:
                os.makedirs(os.path.join(folder, BEFORE), exist_ok=True)
                os.replace(os.path.join(folder, name), os.path.join(folder, BEFORE, name))


def keep(run_dir: str, rank: int, error: BaseException) -> None:
    """Write what the recorders of this process hold to the rank's files; nothing where they hold nothing, or where it
    cannot be written."""
    from torch._C import _distributed_c10d as c10d

    for backend, name in (("gloo", "_dump_fr_trace"), ("nccl", "_dump_nccl_trace")):
        if (dump := getattr(c10d, name, None)) is None:  # torch is built without this backend
            continue
        with suppress(Exception):  # the rank has another error to end with
            found = _settled(dump, patience_s=0.1 if backend == "gloo" else 0)
            if found.get("entries"):
                about = {"error": named_line(error), "host": socket.gethostname(), "time": time.time()}
                _write(run_dir, rank, backend, {**found, "pg_config": _groups(found), **about})


def _settled(dump: Callable[[], bytes], patience_s: float) -> dict[str, Any]:
    """What a recorder holds; gloo's threads mark a call as ended a moment after it has returned."""
    end = time.monotonic() + patience_s
    while True:
        found = parse_pickle(dump())  # torch's JSON lacks the Python frames
        if time.monotonic() >= end or all(entry["retired"] for entry in found.get("entries", ())):
            return found
        time.sleep(0.005)


def _write(run_dir: str, rank: int, backend: str, found: Mapping[str, Any]) -> None:
    folder = debug_folder(run_dir)
    os.makedirs(folder, exist_ok=True)
    file = os.path.join(folder, f"flight_{backend}_rank_{rank}.json")
    with open(file, "w", encoding="utf-8", opener=open_own) as stream:
        json.dump(found, stream)


def _groups(found: Mapping[str, Any]) -> dict[str, Any]:
    """``pg_config`` with the members of every group of this process: gloo's record names none."""
    from torch.distributed import distributed_c10d as c10d

    known = {name: group for name, group in found.get("pg_config", {}).items() if ast.literal_eval(group["ranks"])}
    described = {entry["process_group"][0]: entry["process_group"][1] for entry in found["entries"]}
    for group, name in c10d._world.pg_names.items():
        ranks = str(sorted(c10d._world.pg_group_ranks.get(group, ())))
        known.setdefault(name, {"name": name, "desc": described.get(name, ""), "ranks": ranks})
    return known
