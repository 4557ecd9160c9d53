"""Purges that are killed with SIGKILL at one change of a file: a program that makes each in a process of its own.

``python -m support.purge.kill_case CASE.json``, a mapping: ``source`` (a run, with what stands beside it), ``out`` (a
folder, or an address of a store, for one copy a kill), ``mode``, ``duplicates``, ``domain``, ``where`` (kill
``everywhere``, at every change, or at one in every one of the ``phases``, or of ``some``; or so many ``kills`` ``at any
time``). Prints the changes of a purge that nobody killed (in ``out/whole``), and where each other one was killed.

The parent never opens a thread or a connection; every copy, and its purge, is of a process that it forks.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from quern import storage
from quern.lineage.purge.apply import transaction
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted

Change = tuple[str, str]
"""What is done, to which file."""


class Killer:
    """Counts the changes of files that go through ``quern.storage``, and ends the process at one of them: ``before`` it
    is done (what it would publish is written, but has no name yet) or ``after``."""

    def __init__(self, at: int | None, when: str) -> None:
        self.at, self.when = at, when
        self.changes: list[Change] = []
        self.lock = threading.Lock()
        self._publish, self._guarded = storage.publish, storage.guarded
        storage.publish = self.publish  # type: ignore[assignment]
        for name in ("remove", "remove_tree", "create_bytes"):
            setattr(storage, name, partial(self.change, name, getattr(storage, name)))

    def next(self, what: str, path: str) -> int:
        with self.lock:
            self.changes.append((what, path))
            return len(self.changes) - 1

    def kill(self, number: int, when: str) -> None:
        if number == self.at and when == self.when:
            os.kill(os.getpid(), signal.SIGKILL)

    def change(self, what: str, function: Callable[..., None], path: str, *more: Any) -> None:
        if what != "create_bytes" and not storage.exists(path):
            return
        number = self.next(what, path)
        self.kill(number, "before")
        function(path, *more)
        self.kill(number, "after")

    @contextmanager
    def publish(self, path: str) -> Iterator[IO[bytes]]:
        number = self.next("publish", path)
        with self._guarded(lambda: self.kill(number, "before")), self._publish(path) as file:
            yield file
        self.kill(number, "after")


def place(case: dict[str, Any], name: str) -> str:
    """A copy of the run and of what stands beside it; the copied run."""
    out = storage.join(case["out"], name)
    if storage.is_local(out):
        shutil.copytree(Path(case["source"]).parent, out)
    else:
        base = Path(case["source"]).parent
        for path in sorted(base.rglob("*")):
            if path.is_file() and path.name != ".lock":
                storage.publish_bytes(storage.join(out, str(path.relative_to(base))), path.read_bytes())
    run = storage.join(out, Path(case["source"]).name)
    if storage.is_local(run):
        line = {"time": "", "train_run": f"{out}/train", "order": "", "identities": []}
        Path(run, "consumers.jsonl").write_text(json.dumps(line) + "\n")
    return run


def purge(case: dict[str, Any], run: str) -> None:
    def deletion_set(path: str) -> Any:
        return find_deletion_set(path, Wanted(domains=(case["domain"],)), case["duplicates"])

    transaction.purge(
        transaction.Request(
            run, case["mode"], deletion_set, {"domain": [case["domain"]]}, duplicates=case["duplicates"],
            workers=case.get("workers", 1),
            purge_list=f"{run}.purge-list",
        )
    )  # fmt: skip


def forked(function: Callable[[], Any], told: Path) -> tuple[int, Any]:
    """What the function gives in a process of its own, and how that ended."""
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            told.write_text(json.dumps(function()))
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return status, json.loads(told.read_text()) if told.exists() else None


def whole(case: dict[str, Any]) -> tuple[list[Change], float]:
    run = place(case, "whole")
    killer = Killer(None, "")
    begun = time.monotonic()
    purge(case, run)
    return killer.changes, time.monotonic() - begun


def killed(case: dict[str, Any], name: str, at: int, when: str) -> None:
    run = place(case, name)
    Killer(at, when)
    purge(case, run)


def killed_after(case: dict[str, Any], name: str, seconds: float) -> None:
    run = place(case, name)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    purge(case, run)


#: A change in every phase, and when to kill there.
PHASES = (
    (r"publish .*\.purge/intent\.json", "before"),
    (r"publish .*/tokens/.*\.bin", "before"),
    (r"publish .*/manifest\.v2\.json", "after"),
    (r"publish .*/VERSION\.json", "before"),
    (r"publish .*/VERSION\.json", "after"),
    (r"publish .*purge-list/.*", "before"),
    (r"publish .*/documents/.*", "after"),
    (r"publish .*/commits/.*", "before"),
    (r"create_bytes .*/audit/.*", "before"),
    (r"remove .*/tokens/.*\.bin", "after"),
    (r"remove .*/intent\.json", "before"),
    (r"remove .*/intent\.json", "after"),
)


def points(changes: list[Change], where: str) -> Iterator[tuple[int, str]]:
    if where != "everywhere":
        for pattern, when in PHASES if where == "phases" else PHASES[::3]:
            found = (n for n, change in enumerate(changes) if re.fullmatch(pattern, " ".join(change)))
            yield next(found), when
        return
    for number in range(len(changes)):
        yield number, "before"
        yield number, "after"


def main(path: str) -> None:
    case = json.loads(Path(path).read_text())
    told = Path(f"{path}.told")
    status, found = forked(lambda: whole(case), told)
    assert status == 0, status
    changes, seconds = found
    done = []

    def note(name: str, at: Any, status: int) -> None:
        done.append([name, at, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL])

    if case["where"] == "at any time":
        draw = random.Random(str(case["mode"]))
        for number in range(case["kills"]):
            delay, name = draw.uniform(0, 1.2 * seconds), f"random-{number}"
            note(name, delay, forked(partial(killed_after, case, name, delay), told)[0])
    else:
        for number, when in points(changes, case["where"]):
            name = f"{number:03d}-{when}"
            note(name, changes[number], forked(partial(killed, case, name, number, when), told)[0])
    print(json.dumps({"changes": changes, "killed": done}))


if __name__ == "__main__":
    main(sys.argv[1])
