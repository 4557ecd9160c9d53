"""Runs the check: each node alone, then an exchange of readings, then pairs and rings of those that answered."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quern import storage
from quern.data_pipeline.execution.engine import on_each_machine
from quern.doctor.child import Child, ChildError
from quern.doctor.fleet import judge
from quern.doctor.meeting import Meeting
from quern.doctor.place import Place
from quern.doctor.readings import Finding, Link, Problem, Reading, dumped, loaded
from quern.doctor.rounds import planned_rounds
from quern.errors import InputError, one_line
from quern.train.config import TrainConfig
from quern.train.processes.address import reached_by
from quern.words import is_plain_name

__all__ = ["Options", "Result", "check", "check_cluster", "options_of"]

_ALONE, _LINK = 0.75, 0.5
"""Shares of the time-out for what a rank does by itself, so that it can tell that it hung before it is given up."""


@dataclass(frozen=True)
class Options:
    """What is checked, and for how long others are waited for."""

    share: str | None = None
    """A folder that all ranks see; in it they have a folder of their own while they check."""
    id: str | None = None
    timeout_s: float = 120.0
    repeats: int = 9
    rounds: int = 8
    device: str = "auto"
    disks: tuple[str, ...] = ()
    store: str | None = None
    ray: str | None = None
    needs: Mapping[str, Any] = field(default_factory=dict)
    torch: bool = True
    """False for machines of data runs: no device, no torch."""


@dataclass(frozen=True)
class Result:
    """What was read and found. Only the rank that ``tells`` has the readings of all."""

    world: int
    tells: bool
    readings: list[Reading]
    links: list[Link]
    findings: list[Finding]
    waits: list[dict[str, Any]]


def options_of(config: TrainConfig, options: Options) -> Options:
    """``options`` with what a training config needs: its folders, its store, compilers and kernels."""
    bf16 = "bf16" in (config.optimizer.moments, config.optimizer.gradients)
    compiled = "compile.enabled" if config.compile.enabled and config.compile.backend == "inductor" else ""
    local = config.checkpoint.local
    disks = [config.run_dir, *([local.partition("{")[0]] if local else []), *options.disks]
    needs = {
        "compile": compiled or ("optimizer in bf16" if bf16 else ""), "float8": config.float8.recipe,
        "precision": config.precision, "flash": config.flash_attention,
    }  # fmt: skip
    return replace(
        options, share=options.share or config.run_dir, disks=tuple(dict.fromkeys(disks)), needs=needs,
        store=options.store or config.checkpoint.store,
        device=config.device if options.device == "auto" else options.device,
    )  # fmt: skip


def check(place: Place, options: Options) -> Result:
    """Check this rank's machine, and with others of its start the fleet. Collective, but for ranks that hang.

    Raises:
        InputError: several ranks and no shared folder, or files of another check are in it.
        QuernError: the others went on without this rank.
    """
    folder = ""
    if place.world > 1:
        if options.share is None:
            raise InputError("--share: expected a folder or store that all ranks see, as there are several")
        if options.id is not None and not is_plain_name(options.id):
            raise InputError(f"--id: expected a name that can be a folder's, got {options.id!r}")
        base = os.path.abspath(options.share) if storage.is_local(options.share) else options.share
        folder = storage.join(base, f"doctor-{options.id or place.start}")
    child = Child()
    try:
        if place.world == 1:
            reading = _read_alone(child, place, options)
            return Result(1, True, [reading], [], judge([reading]), [])
        return _together(Meeting(folder, place.rank, place.world, options.timeout_s), child, place, options, folder)
    finally:
        child.close()


def check_cluster(address: str, options: Options) -> Result:
    """Check every machine of a Ray cluster for data runs: cores, memory, disks and object store, without torch.

    Raises:
        QuernError: no cluster answers at ``address``.
    """
    asked = replace(options, torch=False)
    told = on_each_machine(address, _read_there, (asked,), options.timeout_s)
    readings, silent, failed = [], {}, []
    for rank, (node, value) in enumerate(told):
        if value is None:
            silent[rank] = node
        elif isinstance(value, Exception):
            failed.append(Reading(rank, node, problems=[Problem("failed", one_line(value))]))
        else:
            readings.append(loaded(Reading, {**value, "rank": rank, "node": node}, node))
    return Result(len(told), True, [*readings, *failed], [], judge([*readings, *failed], (), silent), [])


def _read_there(options: Options) -> dict[str, Any]:
    child = Child()
    try:
        return dumped(_read_alone(child, Place(0, 1, 0, 1, "", "127.0.0.1", ""), options))
    finally:
        child.close()


def _together(meeting: Meeting, child: Child, place: Place, options: Options, folder: str) -> Result:
    meeting.begin({"node": place.node, "local_rank": place.local_rank, "address": place.address})
    own = _read_alone(child, place, options)
    if any(problem.code == "hung" for problem in own.problems):
        meeting.step_out()
    answered = meeting.meet("alone", dumped(own))
    places: dict[int, tuple[str, int]] = {}
    addresses: list[str] = []
    for rank in range(place.world):
        where = _said(meeting.hellos.get(rank), rank, addresses)
        places[rank] = where if where not in places.values() else (f"{where[0]} (rank {rank})", where[1])
    place = replace(place, address=reached_by(place.address, addresses))
    names = []
    for number, (kind, groups) in enumerate(planned_rounds({r: places[r] for r in answered}, options.rounds)):
        names.append(f"round-{number}")
        _measure(meeting, child, place, options, names[-1], kind, groups, folder)
    first = meeting.present[0]
    waits = [asdict(wait) for wait in meeting.waits]
    if place.rank != first:
        told = meeting.await_published("verdict", first)
        meeting.leave(last=False)
        found = [loaded(Finding, one, f"{folder}/verdict.json") for one in told] if isinstance(told, list) else []
        return Result(place.world, False, [], [], found, waits)
    readings = [loaded(Reading, value, path) for path, value in meeting.values("alone", answered)]
    links = [
        loaded(Link, value, path)
        for name in names
        for path, value in meeting.values(name, answered)
        if value is not None
    ]
    silent = {rank: places[rank][0] for rank in meeting.missing}
    found = judge(readings, links, silent)
    meeting.publish("verdict", [asdict(one) for one in found])
    meeting.leave(last=True)
    return Result(place.world, True, readings, links, found, waits)


def _said(hello: Any, rank: int, addresses: list[str]) -> tuple[str, int]:
    """Node and local rank; its address goes to the others."""
    match hello:
        case {"node": str(node), "local_rank": int(local_rank), "address": str(address)}:
            addresses.append(address)
            return node, local_rank
    return f"the node of rank {rank}", 0


def _measure(
    meeting: Meeting, child: Child, place: Place, options: Options, name: str, kind: str, groups: list[tuple[int, ...]],
    folder: str,
) -> None:  # fmt: skip
    """One round: this rank's link, if it has one whose ends are still there, and what became of it to all. Who has
    waited long for a link steps out: otherwise one bad end would let its partners wait in every round."""
    active = meeting.active()
    own = next(([rank for rank in group if rank in active] for group in groups if place.rank in group), [])
    value = None
    if len(own) > 1 and place.rank in own:
        limit, began = _LINK * options.timeout_s, time.monotonic()
        task = {
            "what": "link", "kind": kind, "ranks": own, "rank": place.rank, "device": options.device,
            "local_rank": place.local_rank, "address": place.address, "repeats": options.repeats,
            "meet": f"{folder}/{name}.at.{own[0]}.json", "timeout_s": limit,
        }  # fmt: skip
        try:
            value = {"kind": kind, "ranks": own, **child.ask(task, limit)}
            if "ring" in kind and place.rank != own[0]:
                value = None  # the first tells for all
        except ChildError as error:
            child.close()  # what is left of a connection that failed may fail the next one
            value = {"kind": kind, "ranks": own, "problem": str(error)}
            if time.monotonic() - began > limit / 2:
                meeting.step_out()
    meeting.meet(name, value)


def _read_alone(child: Child, place: Place, options: Options) -> Reading:
    """Everything that needs no other rank."""
    end = time.monotonic() + _ALONE * options.timeout_s
    found: dict[str, Any] = {"problems": []}
    tasks: list[dict[str, Any]] = []
    common = {"device": options.device, "repeats": options.repeats, "needs": dict(options.needs)}
    if place.local_rank == 0:
        disks = options.disks or (tempfile.gettempdir(),)
        tasks.append({**common, "what": "node", "disks": disks, "store": options.store, "ray": options.ray,
                      "torch": options.torch})  # fmt: skip
    if options.torch:
        tasks.append({**common, "what": "device", "local_rank": place.local_rank, "all": place.local_world == 1})
    for task in tasks:
        try:
            told = child.ask(task, max(1.0, end - time.monotonic()))
        except ChildError as error:
            told = error.partial
            problem = {"code": "hung" if error.hung else "failed", "text": f"{task['what']}: {error}"}
            found["problems"].append(problem)
        for name, value in told.items():
            if isinstance(value, dict):
                found.setdefault(name, {}).update(value)
            else:
                found[name] = [*found.get(name, []), *value]
    found["devices"] = [one for one in found.get("devices", []) if one]  # one that hung at once has said nothing
    where = f"rank {place.rank}"
    return loaded(Reading, {**found, "rank": place.rank, "node": place.node, "local_rank": place.local_rank}, where)
