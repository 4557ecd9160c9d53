"""Reads how far a run is from its files alone: running, killed or ended; on a disk or an object store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quern import storage
from quern.data_pipeline.monitoring.damage import Damage
from quern.data_pipeline.monitoring.heartbeat import STATUS_FILE, process_lives
from quern.data_pipeline.monitoring.phase import format_duration
from quern.errors import InputError, QuernError
from quern.words import counted

__all__ = ["describe", "read_status"]

#: Beats that may be missing before a driver on another machine is taken for gone.
MISSED_BEATS = 4
#: Folders of commits in the order in which their phases run.
_PHASES = ("pages", "duplicates", "tokens", "shards")


def read_status(run_dir: str) -> dict[str, Any]:
    """The status of the run as plain data.

    ``status`` is ``running`` (at work), ``stopped`` (not complete, and no driver lives) or ``complete``. While a
    driver lives, and when it has said that all is done, its own counters are taken; else the commits are counted.

    Raises:
        InputError: no run is there.
    """
    if not storage.exists(storage.join(run_dir, "run.json")):
        raise InputError(f"{run_dir}: expected a data run: it has no run.json")
    record = storage.read_json(storage.join(run_dir, "run.json"))
    if not isinstance(record, dict) or "status" not in record:
        raise InputError(f"{storage.join(run_dir, 'run.json')}: is not of a data run")
    with _as_written(run_dir):
        return _status(run_dir, record, _said(run_dir))


@contextmanager
def _as_written(run_dir: str) -> Iterator[None]:
    """What only the driver writes is read without a look at every field: here it is said when one is not its own."""
    try:
        yield
    except QuernError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        path = storage.join(run_dir, STATUS_FILE)
        raise InputError(f"{path}: is not as a driver writes it ({type(error).__name__}: {error})") from None


def _status(run_dir: str, record: dict[str, Any], said: dict[str, Any] | None) -> dict[str, Any]:
    complete = record["status"] == "complete"
    driver = _driver(said, complete)
    trusted = said is not None and (driver["lives"] or (complete and said.get("state") == "complete"))
    counted = (_from_driver(said) if trusted and said is not None else None) or _from_commits(run_dir)
    phase = dict(said["phase"]) if said is not None and driver["lives"] and said.get("phase") else None
    if phase is not None:
        phase["left"] = max(0, phase["partitions"] - phase["done"])
        if phase.get("eta_s") is not None:
            phase["eta_s"] = max(0.0, phase["eta_s"] - driver["heard_s_ago"])
    return {
        "status": "complete" if complete else "running" if driver["lives"] else "stopped",
        "counts": record.get("counts", {}),
        "phases": _rows(run_dir, counted["pages"]),
        "phase": phase,
        "quarantined": counted["quarantined"],
        "damage": counted["damage"],
        "workers": said.get("workers") if said is not None and driver["lives"] else None,
        "driver": driver,
        "errors": said.get("errors", {"num": 0, "last": []}) if said is not None else {"num": 0, "last": []},
        "error": said.get("error") if said is not None and not complete else None,
    }


def _said(run_dir: str) -> dict[str, Any] | None:
    path = storage.join(run_dir, STATUS_FILE)
    try:
        said = storage.read_json(path) if storage.exists(path) else None
    except InputError:
        return None  # it is a look, not a proof
    about = said.get("driver") if isinstance(said, dict) else None
    figures = [about.get(key) for key in ("beat", "interval_s", "pid")] if isinstance(about, dict) else [None]
    return said if all(isinstance(figure, int | float) for figure in figures) else None


def _driver(said: dict[str, Any] | None, complete: bool) -> dict[str, Any]:
    """Who drives or drove last, whether it lives, and seconds since it was heard of."""
    if said is None:
        return {"lives": False, "host": None, "pid": None, "heard_s_ago": None, "state": "never heard of"}
    about = said["driver"]
    age = max(0.0, time.time() - about["beat"])
    state, lives = said.get("state"), False
    if state == "at work" and not complete:
        seen = process_lives(about)
        lives = seen if seen is not None else age < MISSED_BEATS * about["interval_s"]
        state = "at work" if lives else "killed" if seen is not None else "silent"
    return {
        "lives": lives,
        "state": "complete" if complete else state,
        "host": about.get("host"),
        "pid": about.get("pid"),
        "started": about.get("started"),
        "heard_s_ago": round(age, 1),
    }


def _from_driver(said: dict[str, Any]) -> dict[str, Any] | None:
    """Its counters; None while it has not come to the pages: what is committed it has not counted yet."""
    phases = [*said.get("past", []), *([said["phase"]] if said.get("phase") else [])]
    pages: dict[str, Any] | None = next((phase for phase in phases if phase["name"] == "pages"), None)
    return None if pages is None else _counted(pages)


def _from_commits(run_dir: str) -> dict[str, Any]:
    paths = storage.list_files(storage.join(run_dir, "commits", "pages"))
    total: Counter[str] = Counter()
    damage = Damage()
    for entry in storage.each(_read_commit, paths, run_dir):
        counts = entry.get("counts", {})
        total.update({name: counts.get(name, 0) for name in ("pages", "kept")})
        total["quarantined"] += counts.get("by_stage", {}).get("quarantine", 0)
        damage.add(counts, entry.get("source", ""))
    return _counted({**total, "damage": damage.num})


def _counted(pages: Mapping[str, Any]) -> dict[str, Any]:
    """What the status says of the pages phase."""
    found = {name: pages.get(name, 0) for name in ("pages", "kept", "quarantined", "damage")}
    return {"pages": {name: found.pop(name) for name in ("pages", "kept")}, **found}


def _read_commit(path: str) -> dict[str, Any]:
    """A commit; nothing when it was withdrawn between the listing and this."""
    try:
        return dict(storage.read_json(path))
    except InputError:
        if storage.exists(path):
            raise
        return {}


def _rows(run_dir: str, pages: dict[str, int]) -> dict[str, dict[str, int]]:
    """Phase → commits, pages, kept."""
    folder = storage.join(run_dir, "commits")
    num: Counter[str] = Counter()
    for path in storage.list_files(folder):
        if path.endswith("/shards/all/version.json"):
            continue  # it says that all of them are there
        num[path.split("/commits/")[-1].split("/")[0]] += 1
    return {name: {"commits": count, **(pages if name == "pages" else {"pages": 0, "kept": 0})}
            for name, count in sorted(num.items(), key=_place)}  # fmt: skip


def _place(row: tuple[str, int]) -> tuple[int, str]:
    """By which phases are in the order in which they run, others behind them by name."""
    return (_PHASES.index(row[0]) if row[0] in _PHASES else len(_PHASES), row[0])


def describe(run_dir: str, status: dict[str, Any]) -> Iterator[str]:
    """The status as lines of text.

    Raises:
        InputError: what the driver has said is damaged.
    """
    with _as_written(run_dir):
        yield from _lines(run_dir, status)


def _lines(run_dir: str, status: dict[str, Any]) -> Iterator[str]:
    driver, phase = status["driver"], status["phase"]
    yield f"{run_dir}: {status['status']}"
    if driver["host"] is not None:
        said = f"{driver['state']}, heard of {format_duration(driver['heard_s_ago'])} ago"
        yield f"  driver      {driver['host']} pid {driver['pid']}, {said}"
    elif status["status"] != "complete":
        yield "  driver      has written no heartbeat yet"
    if phase is not None:
        left = f"{phase['done']:,}/{phase['partitions']:,} partitions ({phase['share']:.0%}), {phase['left']:,} left"
        rate = f", {counted(phase['pages'], 'page')} ({phase['pages_per_s'] or 0:,.0f}/s)" if phase["pages"] else ""
        took = f"{format_duration(phase['elapsed_s'])} gone, ETA {format_duration(phase['eta_s'])}"
        yield f"  now         {phase['name']}: {left}{rate}, {took}"
    if status["workers"] is not None:
        workers = status["workers"]
        yield f"  workers     {workers['busy']} busy, {workers['up']} up, {workers['wanted']} wanted"
    for name, row in status["phases"].items():
        pages = f", {counted(row['pages'], 'page')}, {row['kept']:,} kept" if row["pages"] else ""
        yield f"  {name:<11} {row['commits']:,} committed{pages}"
    if status["quarantined"] or status["damage"]:
        damage = counted(status["damage"], "damaged place")
        yield f"  trouble     {counted(status['quarantined'], 'page')} quarantined, {damage}"
    if status["errors"]["num"]:
        yield f"  errors      {status['errors']['num']:,}, the last: {status['errors']['last'][-1]}"
    if status["error"]:
        yield f"  failed      {status['error']}"
    elif status["status"] == "stopped" and driver["state"] not in ("silent", "never heard of"):
        yield "  to go on    give the same command again"
