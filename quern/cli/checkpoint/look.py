"""``quern checkpoint list``, ``verify`` and ``fetch``: list checkpoints of a run, its nodes and store, check or copy
them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quern.cli.output import JSON, columns, err_console, json_stdout, out_console, plain, reports_errors, say
from quern.errors import InputError, QuernError
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.file_locations import elsewhere
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Checkpoint,
    Manifest,
    check_files,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
)
from quern.train.checkpoint.store.collect import Collected, NotWholeError, collect
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.store.stored import is_url, open_source, open_store, store_of
from quern.train.history.branch import LEDGER_FILE, abandoned_in
from quern.train.history.health import good_steps
from quern.train.history.ledger import read_ledger
from quern.words import counted, size

if TYPE_CHECKING:  # torch is imported by the commands that need it: it takes seconds
    from quern.train.checkpoint.tools.reader import Verified

__all__ = ["fetch", "list_command", "verify"]

Row = dict[str, Any]


# ---- list


@reports_errors
def list_command(
    source: Annotated[str, typer.Argument(help="A training run, or a store: s3://bucket/run.", metavar="TRAIN_RUN")],
    store: Annotated[bool, typer.Option("--store", help="Also what the run's checkpoint.store has.")] = False,
    json: bool = JSON,
) -> None:
    """The checkpoints of a run. Valid: manifest whole, all files that are to be here are, in their sizes; verify
    compares checksums. Good: enough healthy steps followed. Abandoned: the run went back behind it. Tensors: in the
    run's folder, on its nodes' disks, or in the store alone. Exit code 1 when the store cannot be read."""
    run = None if is_url(source) else source
    if run is None:
        stored: _Stored | None = _look_into(open_store(source))
    elif not os.path.isdir(run):
        raise InputError(f"{run}: no such folder; expected a training run")
    elif not any(os.path.exists(path) for path in (checkpoints_folder(run), os.path.join(run, LEDGER_FILE))):
        raise InputError(f"{run}: expected a training run: it has neither checkpoints/ nor {LEDGER_FILE}")
    else:
        stored = _look_into(store_of(run)) if store else None
    good = set(_good_steps(run)) if run is not None else set()
    rows = {found.step: _row(run, found, stored) for found in (list_checkpoints(run) if run is not None else ())}
    for step, manifest in (stored.manifests if stored else {}).items():
        if step not in rows and stored is not None:
            rows[step] = _stored_row(run, step, stored.store.address(step), manifest)
    ordered = [rows[step] | {"good": step in good} for step in sorted(rows)]
    with json_stdout(json) as emit:
        about = {"store": stored.store.url, "store_error": stored.error} if stored else {}
        emit({"run": run, "checkpoints": ordered} | about)
        if not json:
            _print_rows(source, ordered, stored)
    if stored is not None and stored.error is not None:
        raise QuernError(stored.error)


@dataclass
class _Stored:
    """What a store has, as far as it could be read."""

    store: Store
    manifests: dict[int, Manifest | InputError] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    error: str | None = None

    def state(self, step: int, manifest: Manifest | None) -> str | None:
        """Of a checkpoint of the run: yes, no, ``begun``, ``damaged``, ``other``; None: not known."""
        theirs = self.manifests.get(step)
        if isinstance(theirs, InputError):
            return "damaged"
        if theirs is not None:
            same = manifest is None or theirs.to_bytes() == manifest.to_bytes()
            return "yes" if same else "other"
        if self.error is not None:
            return None
        return "begun" if step in self.begun else "no"


def _look_into(store: Store) -> _Stored:
    found = _Stored(store)
    try:
        found.begun = set(store.begun())
        for step in store.checkpoints():
            try:
                found.manifests[step] = store.manifest(step)
            except InputError as error:
                found.manifests[step] = error
    except StoreError as error:
        found.error = str(error)
    return found


def _good_steps(run: str) -> list[int]:
    path = os.path.join(run, LEDGER_FILE)
    try:
        return good_steps(read_ledger(path)) if os.path.isfile(path) else []
    except QuernError:  # which each checkpoint's row says
        return []


def _row(run: str | None, checkpoint: Checkpoint, stored: _Stored | None) -> Row:
    """Of a checkpoint in the run's folder."""
    row: Row = {"step": checkpoint.step, "path": checkpoint.path, "tensors": None}
    problems, manifest = [], None
    try:
        manifest = read_manifest(checkpoint.path)
        away = elsewhere(checkpoint.path)
        row["tensors"] = "nodes" if away else "run"
        looked = check_files(checkpoint.path, manifest, hashes=False, mine=lambda name: name not in away)
        problems += [str(problem) for problem in looked]
    except InputError as error:
        problems.append(str(error))
    if stored is not None:
        row["stored"] = stored.state(checkpoint.step, manifest)
    return row | _told(run, manifest, problems) | {"valid": not problems, "problems": problems}


def _stored_row(run: str | None, step: int, address: str, manifest: Manifest | InputError) -> Row:
    """Of a checkpoint that is in the store alone; no file but its manifest is looked at."""
    row: Row = {"step": step, "path": address, "tensors": "store", "stored": "yes"}
    if isinstance(manifest, InputError):
        told = _told(run, None, [])
        return row | told | {"stored": "damaged", "valid": False, "problems": [str(manifest)]}
    problems: list[str] = []
    return row | _told(run, manifest, problems) | {"valid": False if problems else None, "problems": problems}


def _told(run: str | None, manifest: Manifest | None, problems: list[str]) -> Row:
    """What a manifest says, and the run's ledger of it; a damaged ledger goes into ``problems``."""
    if manifest is None:
        return {"data_step": None, "tokens": None, "bytes": None, "optimizer": None, "abandoned": None}
    left = None
    try:
        left = abandoned_in(run, manifest) if run is not None else None
    except QuernError as error:  # the ledger has lost lines
        problems.append(str(error))
    return {
        "data_step": manifest.data_step,
        "tokens": manifest.tokens,
        "bytes": sum(record.size for record in manifest.files.values()),
        "optimizer": manifest.optimizer,
        "abandoned": left,
    }


def _print_rows(source: str, rows: list[Row], stored: _Stored | None) -> None:
    if not rows:
        if stored is None or stored.error is None:
            say(f"{source}: no checkpoints", err_console())
        return
    numbered = (">step", ">data step", ">tokens", ">size")
    table = columns(*numbered, "tensors", *(["stored"] if stored else []), "valid", "notes")
    for row in rows:
        numbers = [f"{row[key]:,}" if row[key] is not None else "" for key in ("step", "data_step", "tokens")]
        numbers.append(size(row["bytes"]) if row["bytes"] is not None else "")
        where = [row["tensors"] or "", *([row["stored"] or "?"] if stored else [])]
        valid = "" if row["valid"] is None else "yes" if row["valid"] else "no"
        table.add_row(*numbers, *where, valid, "abandoned" if row["abandoned"] else "good" if row["good"] else "")
    out_console().print(table)
    for row in rows:
        for problem in row["problems"]:
            say(problem, err_console())


# ---- verify


@reports_errors
def verify(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoints, training runs or stores (s3://bucket/run): all of theirs.",
            metavar="TRAIN_RUN_OR_CHECKPOINT…",
        ),
    ],
    json: bool = JSON,
) -> None:
    """Compare every file's SHA-256 with the manifest; exit code 1 when one differs, or cannot be seen from here. Files
    on nodes' disks are compared where this machine has those disks. A store's are fetched, one at a time."""
    rows = [row for source in sources for row in _verified(source)]
    with json_stdout(json) as emit:
        emit({"checkpoints": rows, "valid": all(row["valid"] for row in rows)})
        for row in rows if not json else ():
            say(f"{row['path']}: {row['status']}")
            for problem in [*row["problems"], *row["elsewhere"]]:
                say(f"  {problem}")
            for copy in row["spoilt_copies"]:
                say(f"  {copy} (another copy is whole)")
    messages = []
    for status, more in ((_DAMAGED, ""), (_ABSENT, " (quern checkpoint fetch brings files together)"), (_UNREAD, "")):
        count = sum(row["status"] == status for row in rows)
        messages += [f"{count} of {len(rows)} checkpoints {status}{more}"] if count else []
    if messages:
        raise QuernError("; ".join(messages))


_VALID, _DAMAGED, _ABSENT, _UNREAD = "valid", "damaged", "not all on this machine", "could not be read"


def _verified(source: str) -> Iterator[Row]:
    from quern.train.checkpoint.tools import reader

    if is_url(source):
        store, step = open_source(source)
        steps = store.checkpoints() if step is None else [step]
        if not steps:
            raise InputError(f"{source}: expected a store that has a checkpoint")
        for step in steps:
            try:
                yield _verdict(store.address(step), reader.inspect_stored(store, step))
            except StoreError as error:
                yield _row_of(store.address(step), _UNREAD, [str(error)])
        return
    for path in _checkpoints(source):
        try:
            yield _verdict(path, reader.inspect(path))
        except QuernError as error:
            yield _row_of(path, _DAMAGED, [str(error)])


def _verdict(path: str, found: Verified) -> Row:
    status = _DAMAGED if found.problems else _ABSENT if found.absent else _VALID
    problems, absent, spoilt = ([str(file) for file in files] for files in (found.problems, found.absent, found.spoilt))
    return _row_of(path, status, problems, absent, spoilt)


def _row_of(path: str, status: str, problems: list[str], absent: Sequence[str] = (), spoilt: Sequence[str] = ()) -> Row:
    return {
        "path": path, "status": status, "valid": status == _VALID,
        "problems": problems, "elsewhere": [*absent], "spoilt_copies": [*spoilt],
    }  # fmt: skip


def _checkpoints(path: str) -> list[str]:
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such folder; expected a checkpoint or a training run")
    if found := [checkpoint.path for checkpoint in list_checkpoints(path)]:
        return found
    if not any(os.path.exists(os.path.join(path, name)) for name in (MANIFEST_FILE, METADATA_FILE)):
        raise InputError(f"{path}: expected a checkpoint, or a training run that has one")
    return [path]  # one without a manifest is a damaged one


# ---- fetch


@reports_errors
def fetch(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint; a training run or a store (s3://bucket/run): its newest that is whole.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[str, typer.Argument(help="The folder to write; it must not exist.", metavar="OUT")],
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint after so many steps instead.")] = None,
    json: bool = JSON,
) -> None:
    """Collect a checkpoint into one folder: each file from the checkpoint, a node's disk that this machine has, or
    the run's store, whichever first has it with the manifest's SHA-256. If a file is whole nowhere, it is named and
    nothing is written."""
    with json_stdout(json) as emit:
        try:
            made = collect(source, out, step=step)
        except NotWholeError as error:
            _print_missing(error.missing)
            raise
        emit(made.to_dict())
        for note in made.notes:
            say(note, err_console())
        if not json:
            _print_collected(made)


def _print_missing(missing: Mapping[str, tuple[str, ...]]) -> None:
    for name, said in missing.items():
        say(name, err_console())
        for line in said:
            say(f"  {line}", err_console())


def _print_collected(made: Collected) -> None:
    out = out_console()
    if not sys.stdout.isatty():
        out.width = 4096  # names stay in one piece for whoever reads the lines
    table = columns("file", ">size", "from", "where")
    for origin in made.files:
        tier = f"node {origin.host}" if origin.host is not None else origin.tier
        cells = [plain(text).replace("[", r"\[") for text in (origin.name, size(origin.size), tier, origin.path)]
        table.add_row(*cells)
    out.print(table)
    total = sum(origin.size for origin in made.files)
    print(
        f"{plain(made.source)} → {plain(made.folder)}: step {made.step}, "
        f"{counted(len(made.files), 'file')}, {size(total)}"
    )
