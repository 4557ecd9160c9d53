"""Trains the runs of a swarm, a process each, and gathers their held-out losses. Imports no torch."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing

from quern import storage
from quern.config import digest
from quern.errors import InputError, QuernError
from quern.mixtures.laws.tables import LOSS, SHARE
from quern.safe_path import module
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.history.metrics_file import read_metrics
from quern.train.processes import launch
from quern.train.swarm.plan import Member, Swarm, write_configs

__all__ = ["losses", "run_swarm"]

_Child = tuple[Member, int, launch.Worker, int]
"""A run, its place among those at once, its process, and the bytes that its log had before."""
_LAST = 5
"""Lines that are told of a run that failed."""


def run_swarm(swarm: Swarm, say: Callable[[str], None]) -> str:
    """Train every run that has not been measured, write ``runs.csv``, and return its path. A run that was interrupted
    goes on from its checkpoint, so that the table is the same, byte by byte, however often the swarm was killed.

    Raises:
        QuernError: runs failed, of which the last lines are told; the others are kept. Or another process trains here.
        InputError: a launcher has started this process, or the swarm was begun with other settings.
    """
    if "RANK" in os.environ:
        raise InputError("quern mix ablate: expected without a launcher: it starts a process for every run")
    os.makedirs(swarm.config.run_dir, exist_ok=True)
    with closing(FolderLock(swarm.config.run_dir)):
        write_configs(swarm)
        failed = _train(swarm, say)
        if failed:
            told = "\n".join(failed[member.name] for member in swarm.members if member.name in failed)
            raise QuernError(
                f"{len(failed)} of {len(swarm.members)} runs failed; the others are kept, and the same command tries "
                f"these again\n{told}"
            )
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        sources, names = [SHARE + source.name for source in swarm.sources], sorted(swarm.weights)
        writer.writerow(["run", "seed", "config", *sources, *(LOSS + name for name in names)])
        for member in swarm.members:
            config, found = digest(member.config.model_dump(mode="json", exclude={"run_dir"})), losses(member) or {}
            writer.writerow([member.name, member.config.seed, config, *member.shares, *(found[own] for own in names)])
        path = storage.join(swarm.config.run_dir, "runs.csv")
        storage.publish_bytes(path, file.getvalue().encode())
        return path


def losses(member: Member) -> Mapping[str, float] | None:
    """The held-out losses of a run after its last step, by source and set, in nats a token; None before."""
    told = [own for own in read_metrics(member.config.run_dir).validations if own.step == member.config.steps]
    return dict(sorted(told[-1].sources.items())) if told else None


def _train(swarm: Swarm, say: Callable[[str], None]) -> dict[str, str]:
    """Start what is not measured, ``at_once`` at a time; what was wrong, by the name of a run."""
    waiting = [member for member in swarm.members if losses(member) is None]
    failed = {member.name: told for member in swarm.members if (told := _not_finite(swarm, member))}
    for told in failed.values():
        say(told)
    done, children = len(swarm.members) - len(waiting) - len(failed), list[_Child]()
    free = list(range(swarm.config.at_once))
    pipe, ours = os.pipe()  # children end with this process, however it ends
    try:
        while waiting or children:
            while waiting and free:
                member, slot = waiting.pop(0), free.pop(0)
                children.append((member, slot, *_start(swarm, member, slot, pipe)))
            for child in [child for child in children if child[2].poll() is not None]:
                children.remove(child)
                member, slot, worker, begun = child
                free.append(slot)
                if told := _not_finite(swarm, member) or _why(swarm, member, worker.returncode, begun):
                    failed[member.name] = told
                    say(told.splitlines()[0])
                else:
                    done += 1
                    say(f"run {member.name}: {done} of {len(swarm.members)} measured")
            time.sleep(0.05)
    finally:
        workers = [worker for _, _, worker, _ in children]
        launch.end(workers, signal.SIGTERM, 3 * launch.GRACE_S)  # what still runs saves a checkpoint
        launch.kill(workers)
        os.close(pipe)
        os.close(ours)
    return failed


def _start(swarm: Swarm, member: Member, slot: int, pipe: int) -> tuple[launch.Worker, int]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // swarm.config.at_once))
    environment = {**os.environ, launch.PIPE: str(pipe), "OMP_NUM_THREADS": threads}
    if gpus := swarm.config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    os.makedirs(os.path.dirname(_log(swarm, member)), exist_ok=True)
    with open(_log(swarm, member), "ab") as log:
        begun = log.tell()
        worker = subprocess.Popen(
            module("quern.train", swarm.config_path(member)), env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True, pass_fds=[pipe],
        )  # fmt: skip
        return worker, begun


def _log(swarm: Swarm, member: Member) -> str:
    return storage.join(swarm.config.run_dir, "logs", f"{member.name}.log")


def _not_finite(swarm: Swarm, member: Member) -> str | None:
    """What to say of a run that has ended without a finite loss of a source."""
    missing = [name for name in swarm.weights if name not in (losses(member) or swarm.weights)]
    if not missing:
        return None
    told = f"run {member.name} has no finite held-out loss of {', '.join(missing)} after its last step"
    return f"{told} ({member.config.run_dir}); remove this folder to train it again"


def _why(swarm: Swarm, member: Member, code: int, begun: int) -> str | None:
    """What to say of a run that has failed, with its last lines."""
    if code == 0 and losses(member) is not None:
        return None
    with open(_log(swarm, member), "rb") as file:
        file.seek(begun)
        lines = [line.decode(errors="replace").rstrip() for line in file if line.strip()][-_LAST:]
    how = launch.how_ended(code) if code else f"has no held-out loss after step {member.config.steps:,}"
    return "\n  ".join([f"run {member.name} {how} ({_log(swarm, member)})", *lines])
