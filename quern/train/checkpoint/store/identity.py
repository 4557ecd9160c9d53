"""The random id of a run, by which its folder and its store are known to belong together."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from quern import storage
from quern.errors import InputError, QuernError
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.manifest import HISTORY_FILE, Manifest, list_checkpoints
from quern.train.checkpoint.store.owner import RUN_ID_FILE, Owner, check_owner_folder, read_owner, write_owner
from quern.train.checkpoint.store.store import Store
from quern.train.history.branch import LEDGER_FILE

__all__ = ["Identity", "identify"]

log = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Identity:
    """The identity of a run, according to its folder and its store."""

    run: str
    """32 hex digits."""
    stored: tuple[int, ...]
    """Steps of the checkpoints that are in the store; empty also if it cannot be reached."""


def identify(run_dir: str, store: Store | None, from_store: bool) -> Identity:
    """Read or make the run's id, and see what its store has. For the holder of the run's lock, before the ledger is
    opened: a run folder without one gets the newest that the store has.

    Raises:
        InputError: the store holds another run's checkpoints, or the run's folder has none and nobody said that it may
            go on from the store's, or another folder has the store.
        StoreError: a run that has not begun yet cannot reach its store.
    """
    run, steps, theirs, owner = _read_id(run_dir), [], None, None
    reached = store is not None
    if store is not None:
        try:
            steps = store.checkpoints()
            theirs = _run_of(store, steps)
            owner = read_owner(store)
        except StoreError as error:
            if run is None or not _begun(run_dir):  # its owner, or that nothing can be resumed, is unknown
                raise
            steps, reached = [], False
            log.warning("%s; the run goes on without what is there", error)
    if run is None and steps:
        if not from_store or _begun(run_dir):
            raise InputError(
                f"checkpoint.store: {store and store.url} holds checkpoints up to step {steps[-1]}, and {run_dir} has "
                "not written them; give another store, or an empty run_dir and resume.from_store=true to go on from "
                "them"
            )
        run = theirs or None
    if run is None:
        run = uuid.uuid4().hex
    if theirs is not None and theirs != run:
        raise InputError(
            f"checkpoint.store: {store and store.url} holds checkpoints of another run ({theirs or 'without an id'}; "
            f"this one is {run}); give each run a store of its own"
        )
    if store is not None and reached:
        _take(store, owner, run, run_dir)
    # first: a ledger without it would be another run's
    with storage.publish(os.path.join(run_dir, RUN_ID_FILE)) as file:
        file.write(f"{run}\n".encode())
    if store is not None and steps and not os.path.exists(os.path.join(run_dir, LEDGER_FILE)):
        _restore_ledger(run_dir, store, steps)
    return Identity(run, tuple(steps))


def _take(store: Store, owner: Owner | None, run: str, run_dir: str) -> None:
    """Record this folder as the store's owner, unless another existing run owns it."""
    check_owner_folder(store, run, run_dir)
    mine = Owner.of(run, run_dir)
    if owner is not None and owner.is_same(mine):
        return
    try:
        write_owner(store, mine)
    except StoreError as error:
        if not _begun(run_dir):
            raise
        log.warning("%s; it is written with the next upload", error)
        return
    if owner is not None:
        log.warning("%s: was the store of %s:%s; it is that of %s now", store.url, owner.host, owner.folder, run_dir)


def _read_id(run_dir: str) -> str | None:
    path = os.path.join(run_dir, RUN_ID_FILE)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = file.read(64).strip()
    except FileNotFoundError:
        return None
    if not _ID.fullmatch(found):
        raise InputError(f"{path}: expected the run's id, 32 hex digits, got {found!r}")
    return found


def _begun(run_dir: str) -> bool:
    return bool(list_checkpoints(run_dir)) or os.path.exists(os.path.join(run_dir, LEDGER_FILE))


def _manifest(store: Store, step: int) -> Manifest | None:
    try:
        return store.manifest(step)
    except InputError as error:
        log.warning("%s; it does not count", error)
        return None


def _run_of(store: Store, steps: Sequence[int]) -> str | None:
    """The run whose checkpoints these are; None if no manifest can be read."""
    found = (_manifest(store, step) for step in reversed(steps))
    return next((manifest.run for manifest in found if manifest is not None), None)


def _restore_ledger(run_dir: str, store: Store, steps: Sequence[int]) -> None:
    """The longest ledger that a checkpoint brings: it is only ever appended to, so it says most."""
    found = [manifest for manifest in (_manifest(store, step) for step in steps) if manifest is not None]
    for manifest in sorted(found, key=lambda manifest: manifest.ledger_offset, reverse=True):
        record = manifest.files.get(HISTORY_FILE)
        if record is None:
            continue
        try:
            store.fetch(manifest.step, HISTORY_FILE, record, run_dir)
        except QuernError as error:
            log.warning("%s; an older ledger is taken", error)
            continue
        assert HISTORY_FILE == LEDGER_FILE
        log.info("%s: put back from %s", os.path.join(run_dir, LEDGER_FILE), store.url)
        return
