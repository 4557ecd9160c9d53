"""Runs the check: each node alone, then an exchange of readings, then pairs and rings of those that answered."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quern import storage
from quern.config import validate
from quern.data_pipeline.execution.engine import on_each_machine
from quern.doctor.fleet import judge
from quern.doctor.meeting import Meeting, UncheckedError
from quern.doctor.place import Place
from quern.doctor.readings import Finding, Link, Reading
from quern.doctor.worker import Worker
from quern.errors import InputError, QuernError, one_line
from quern.train.config import TrainConfig
from quern.train.processes.address import reached_by
from quern.train.processes.links import planned_rounds
from quern.words import is_plain_name

__all__ = ["Options", "Result", "check", "check_cluster", "options_of"]

#: Shares of the time-out for what a rank does by itself, so that it can tell that it hung before it is given up.
_ALONE, _LINK = 0.75, 0.5


@dataclass(frozen=True)
class Options:
    """What is checked, and for how long others are waited for. In ``share``, which all ranks see, they have a folder of
    their own while they check. ``device`` is none for machines of data runs: no torch. ``config`` is of training, as
    JSON holds it, and ``compiler`` what of it needs one."""

    share: str | None = None
    id: str | None = None
    timeout_s: float = 120.0
    repeats: int = 9
    rounds: int = 8
    device: str = "auto"
    disks: tuple[str, ...] = ()
    store: str | None = None
    config: Mapping[str, Any] | None = None
    compiler: str = ""


@dataclass(frozen=True)
class Result:
    """What was read of the machines of ``world`` ranks, and found."""

    readings: list[Reading]
    links: list[Link]
    findings: list[Finding]
    world: int


def options_of(config: TrainConfig, options: Options) -> Options:
    """``options`` with what a training config needs: its folders, its store, compilers and kernels."""
    local = [config.checkpoint.local.partition("{")[0]] if config.checkpoint.local else []
    disks = [config.run_dir, *local, *options.disks]
    compiler = "optimizer in bf16" if "bf16" in (config.optimizer.moments, config.optimizer.gradients) else ""
    if config.compile.enabled and config.compile.backend == "inductor":
        compiler = "compile.enabled"
    return replace(
        options, share=options.share or config.run_dir, disks=tuple(dict.fromkeys(disks)), compiler=compiler,
        store=options.store or config.checkpoint.store, config=config.model_dump(mode="json"),
        device=config.device if options.device == "auto" else options.device,
    )  # fmt: skip


def check(place: Place, options: Options, show: Callable[[Result], None]) -> int:
    """Check this rank's machine, and with others of its start the fleet; how much was found, the same on all ranks.
    Collective, but for ranks that hang. ``show`` is called by the rank that has the readings of all, before the others
    can leave.

    Raises:
        InputError: several ranks and no shared folder, or a file in it is damaged.
        UncheckedError: the others went on without this rank, or nobody told what was found.
    """
    with Worker() as worker:
        if place.world == 1:
            readings = [validate(_read_alone(worker, place, options), Reading, place.node)]
            result = Result(readings, [], judge(readings), 1)
            show(result)
            return len(result.findings)
        if options.share is None:
            raise InputError("--share: expected a folder or store that all ranks see, as there are several")
        if options.id is not None and not is_plain_name(options.id):
            raise InputError(f"--id: expected a name that can be a folder's, got {options.id!r}")
        share = os.path.abspath(options.share) if storage.is_local(options.share) else options.share
        base = storage.join(share, f"doctor-{options.id or place.start}")
        meeting = Meeting(base, place.rank, place.world, options.timeout_s)
        meeting.begin(place.node)
        told = meeting.meet(_read_alone(worker, place, options), ("rank", "node", "local_rank", "address", "problems"))
        _measure_links(meeting, worker, place, options, _checked(meeting, told, Reading))
        mine = None
        if place.rank == meeting.present[0]:
            alone, *rounds = meeting.values()
            readings = _checked(meeting, alone, Reading)
            links = [link for one in rounds for link in _checked(meeting, one, Link)]
            result = Result(readings, links, judge(readings, links, meeting.missing), place.world)
            show(result)  # a launcher ends this rank when another has left with what was found
            mine = {"found": len(result.findings)}
        found = meeting.meet(mine, ["found"])
        meeting.leave()
        if not found:
            raise UncheckedError(
                f"rank {place.rank}: waited {options.timeout_s:g} s in vain for what the first rank found"
            )
        return sum(one["found"] for one in found.values())


def check_cluster(options: Options) -> Result:
    """Check every machine of the Ray cluster that ``RAY_ADDRESS`` names, or this machine's, for data runs: cores,
    memory, disks and store, without torch.

    Raises:
        QuernError: no cluster answers.
    """
    told = on_each_machine("auto", _read_there, (replace(options, device="none"),), options.timeout_s)
    readings = []
    for number, (node, value) in enumerate(told):
        if value is not None:
            value = value if isinstance(value, dict) else _problem(value)
            readings.append(validate({**value, "rank": number, "node": node}, Reading, node))
    silent = {number: node for number, (node, value) in enumerate(told) if value is None}
    return Result(readings, [], judge(readings, (), silent), len(told))


def _read_there(options: Options) -> dict[str, Any]:
    with Worker() as worker:
        return _read_alone(worker, Place(0, 1, 0, 1, ""), options)


def _read_alone(worker: Worker, place: Place, options: Options) -> dict[str, Any]:
    """A :class:`Reading` of everything that needs no other rank."""
    end = time.monotonic() + _ALONE * options.timeout_s
    found: dict[str, Any] = {"devices": {}, "problems": []}
    disks = options.disks or (tempfile.gettempdir(),)
    task = {**asdict(options), **place._asdict(), "disks": disks, "all": place.local_world == 1}
    for what in ["machine.measure"] * (place.local_rank == 0) + ["load.device"] * (options.device != "none"):
        try:
            worker.ask({**task, "what": what}, max(1.0, end - time.monotonic()), found)
        except (QuernError, TimeoutError) as error:
            found["problems"] += _problem(error)["problems"]
    found["devices"] = [{"name": name, **device} for name, device in found["devices"].items()]
    return found | {"rank": place.rank, "node": place.node, "local_rank": place.local_rank, "address": place.address}


def _problem(error: Exception) -> dict[str, Any]:
    code = "hung" if isinstance(error, TimeoutError) else "failed"
    return {"problems": [{"code": code, "text": one_line(error)}]}


def _measure_links(meeting: Meeting, worker: Worker, place: Place, options: Options, readings: list[Reading]) -> None:
    """All rounds. A rank that hung alone, or waited long for a link, measures no other one: else one bad end would let
    its partners wait in every round."""
    places: dict[int, tuple[str, int]] = {}
    for one in readings:
        where = one.node, one.local_rank
        places[one.rank] = where if where not in places.values() else (f"{one.node} (rank {one.rank})", one.local_rank)
    out = {one.rank for one in readings if any(problem.code == "hung" for problem in one.problems)}
    place = place._replace(address=reached_by(place.address, [one.address for one in readings]))
    for number, (kind, groups) in enumerate(planned_rounds(places, options.rounds)):
        own = next((group for group in groups if place.rank in group), ())
        active = [rank for rank in own if rank in meeting.present and rank not in out]
        meet = f"{meeting.folder}/link-{number}.{min(active, default=0)}.json"
        measured = place.rank in active and len(active) > 1
        value = _measure(worker, place, options, kind, active, meet) if measured else None
        out |= {rank for rank, told in meeting.meet(value, ["late"]).items() if told["late"]}


def _checked(meeting: Meeting, told: Mapping[int, Any], model: type[Any]) -> list[Any]:
    where = f"{meeting.folder}: rank"
    return [validate(value, model, f"{where} {rank}") for rank, value in told.items() if value is not None]


def _measure(
    worker: Worker, place: Place, options: Options, kind: str, ranks: list[int], meet: str
) -> dict[str, Any] | None:
    """A :class:`Link` of this rank; of a ring the first one tells for all."""
    limit, began = _LINK * options.timeout_s, time.monotonic()
    link: dict[str, Any] = {"kind": kind, "ranks": ranks}
    task = {**asdict(options), **place._asdict(), **link, "what": "load.link", "meet": meet, "timeout_s": limit}
    try:
        worker.ask(task, limit, link)
    except (QuernError, TimeoutError) as error:
        worker.close()  # what is left of a connection that failed may fail the next one
        return {**link, "problem": str(error), "late": time.monotonic() - began > limit / 2}
    return None if kind == "ring" and place.rank != ranks[0] else link
