"""``STORE/owner.json``: the run folder that a store belongs to.

Checkpoints carry their run's id, which a copy of the run's folder has too. The file tells the two apart: it names the
folder that uploads. It is looked at when a run begins and before every upload.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from quern.errors import InputError
from quern.remote.retry import StoreError
from quern.train.checkpoint.store.store import Store

__all__ = ["OWNER_FILE", "RUN_ID_FILE", "Owner", "check_owner_folder", "hold", "read_owner", "write_owner"]

OWNER_FILE = "owner.json"
RUN_ID_FILE = "run_id"
"""In a run's folder: its random id."""


@dataclass(frozen=True)
class Owner:
    """A run in a folder."""

    run: str
    """32 hex digits."""
    folder: str
    """Absolute, without symbolic links."""
    host: str = ""
    """The machine that wrote it; says nothing about who else sees the folder."""
    store: str = ""
    """The store's address, as it was written: a store that was copied has no owner."""

    @classmethod
    def of(cls, run: str, run_dir: str) -> Owner:
        """The run in ``run_dir``, as this machine sees it."""
        return cls(run, os.path.realpath(run_dir), socket.gethostname())

    def is_same(self, other: Owner) -> bool:
        """Whether both are one folder of one run, whichever machine wrote it."""
        return (self.run, self.folder) == (other.run, other.folder)

    def stands(self) -> bool:
        """Whether the folder still has the run, as seen from this machine."""
        try:
            with open(os.path.join(self.folder, RUN_ID_FILE), encoding="utf-8", errors="replace") as file:
                return file.read(64).strip() == self.run
        except OSError:
            return False


def read_owner(store: Store) -> Owner | None:
    """The owner of ``store``; None if none is recorded, or the store is a copy of the recorded one.

    Raises:
        InputError: the file is damaged.
        StoreError: it cannot be read.
    """
    data = store.note(OWNER_FILE)
    if data is None:
        return None
    try:
        plain = json.loads(data)
        owner = Owner(plain["run"], plain["folder"], plain["host"], plain["store"])
        if not all(isinstance(value, str) for value in vars(owner).values()) or "\0" in owner.folder:
            raise ValueError("not texts")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{store.url}/{OWNER_FILE}: expected run, folder, host and store, got {data[:80]!r}; remove the file if "
            f"the store is this run's"
        ) from None
    return owner if owner.store == store.url else None


def write_owner(store: Store, owner: Owner) -> None:
    """Record ``owner`` as the owner of ``store``."""
    store.put_note(OWNER_FILE, (json.dumps(asdict(owner) | {"store": store.url}, ensure_ascii=False) + "\n").encode())


def hold(store: Store, mine: Owner) -> None:
    """Refuse to upload into a store that belongs to another folder; claim one without an owner.

    Raises:
        StoreError: naming both; or the file cannot be read or written.
    """
    owner = read_owner(store)
    if owner is None:
        write_owner(store, mine)
    elif not owner.is_same(mine):
        raise StoreError(
            f"{store.url}: belongs to the run {owner.run} in {owner.folder} now, not to {mine.run} in {mine.folder}; "
            f"nothing is uploaded",
            transient=False,
        )


def check_owner_folder(store: Store, run: str, run_dir: str) -> None:
    """Refuse a store that belongs to another folder of the same run, or to another run, which still stands.

    Raises:
        InputError: naming both.
        StoreError: the store cannot be read.
    """
    owner, mine = read_owner(store), Owner.of(run, run_dir)
    if owner is None or owner.is_same(mine) or not owner.stands() or os.path.samefile(owner.folder, run_dir):
        return
    what = "is a copy of it" if owner.run == run else f"is the run {run}"
    raise InputError(
        f"checkpoint.store: {store.url} belongs to the run {owner.run} in {owner.folder}, and {run_dir} {what}: the "
        f"two would replace each other's checkpoints; give this one a store of its own, or remove {owner.folder}. "
        f"quern train fork makes a run of its own from a checkpoint"
    )
