"""Replicates a published checkpoint in the background, to the next node's disk and the store, and removes old files.

One thread per node communicates with two processes (:mod:`.upload`). Nothing here blocks or fails the run; failures are
logged and tried again.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from quern.errors import InputError
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    is_tensor_file,
    read_manifest,
    sha256_of,
)
from quern.train.checkpoint.mirror.disk import Disk
from quern.train.checkpoint.mirror.peers import ServerProcess
from quern.train.checkpoint.tiers.upload import Died, Event, Failed, Uploaded, Uploader
from quern.train.processes.agree import describe

__all__ = ["ReplicationWorker"]

log = logging.getLogger(__name__)

_POLL_S = 0.5
_AGAIN_S = 60.0
#: A file system may show a new file late on other machines.
_MANIFEST_PATIENCE_S = 120.0


@dataclass(frozen=True)
class _Published:
    step: int
    path: str
    names: tuple[str, ...] | None
    """The files that are this node's to move; None: those it wrote."""
    mirror: bool
    store: bool


class ReplicationWorker:
    """Replicates one node's files in the background; used by one thread of its first rank.

    Args:
        writes: whether a file was written by a rank of this node.
        first: whether rank 0 is on this node, which also uploads the small files and, last, the manifest.
        disk: the node's own disk; None: the files are in the run's folder.
        server: makes the server of this node's files again when it has died.
    """

    def __init__(
        self,
        writes: Callable[[str], bool],
        first: bool,
        disk: Disk | None,
        mirror: Uploader | None,
        store: Uploader | None,
        server: Callable[[], ServerProcess] | None = None,
    ) -> None:
        self._writes, self._first, self._disk = writes, first, disk
        self.mirror, self.store = mirror, store
        """Where files go; set before the first checkpoint."""
        self._server = server
        self._serving = None if server is None else server()
        self._serve_after = 0.0
        self._asked: queue.SimpleQueue[_Published | list[int] | None] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._queue: list[_Published] = []
        """What stands and nobody has been asked to move yet."""
        self._again: list[tuple[float, _Published]] = []
        """Of these, what could not be read, and when it is tried again."""
        self._changed = threading.Condition()
        self._unfinished: list[str] = []
        self._storing: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="checkpoint mover", daemon=True)
        self._thread.start()

    @property
    def _uploaders(self) -> list[tuple[Uploader, str]]:
        """Those that there are, and where each moves files."""
        known = (self.mirror, "the next node's disk"), (self.store, "the store")
        return [(uploader, where) for uploader, where in known if uploader is not None]

    @property
    def port(self) -> int | None:
        """The port at which this node's files are served."""
        return None if self._serving is None else self._serving.port

    def published(
        self, step: int, path: str, *, store: bool, names: Iterable[str] | None = None, mirror: bool = True
    ) -> None:
        """Start replicating a published checkpoint. ``store``: upload it. ``names``: the files this node is to move,
        instead of those it wrote."""
        asked = _Published(step, path, None if names is None else tuple(names), mirror, store)
        with self._changed:
            self._queue.append(asked)
        self._asked.put(asked)

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the files of these steps, which no manifest names any more."""
        if gone := list(steps):
            with self._changed:  # now: a step may be saved again before they are removed
                self._queue = [waiting for waiting in self._queue if waiting.step not in gone]
            self._asked.put(gone)

    def unfinished(self) -> list[str]:
        """Descriptions of the files still to be moved."""
        with self._changed:
            return list(dict.fromkeys([*self._unfinished, *(f"step {asked.step}" for asked in self._queue)]))

    def storing(self) -> set[int]:
        """Steps that are to be uploaded and are not in the store yet; of rank 0's node, also for the others' files."""
        with self._changed:
            return self._storing | {asked.step for asked in self._queue if asked.store}

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds until all is moved; return whether it is."""
        end = time.monotonic() + seconds
        while self.unfinished():
            if time.monotonic() >= end:
                return False
            if self._asked.empty():
                self._asked.put([])  # listen now, not at the next poll
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        return True

    def close(self) -> None:
        """Stop; what is not moved is left to the next start."""
        self._asked.put(None)
        self._thread.join(30)
        for uploader, _ in self._uploaders:
            uploader.close()
        if self._serving is not None:
            self._serving.close()

    def _run(self) -> None:
        while True:
            asked: _Published | list[int] | None = []
            with suppress(queue.Empty):
                asked = self._asked.get(timeout=_POLL_S)
            if asked is None:
                return
            try:
                if isinstance(asked, _Published):
                    self._try(asked)
                elif asked:
                    self._remove(asked)
                for waiting in [waiting for waiting in self._again if waiting[0] <= time.monotonic()]:
                    self._again.remove(waiting)
                    self._try(waiting[1])
                self._listen()
            except Exception as error:  # the training does not end for this
                self._warn(f"moving checkpoints: {describe(error)}")

    def _try(self, asked: _Published) -> None:
        if not any(waiting is asked for waiting in self._queue):
            return  # removed since
        try:
            self._move(asked)
        except Exception:
            self._again.append((time.monotonic() + _AGAIN_S, asked))
            raise
        with self._changed:
            self._queue = [waiting for waiting in self._queue if waiting is not asked]

    def _move(self, asked: _Published) -> None:
        try:
            manifest, data = self._read(asked.path)
            names = [name for name in manifest.files if self._writes(name)] if asked.names is None else asked.names
            tensors = {name: manifest.files[name] for name in names if is_tensor_file(name)}
            away = self._disk is not None and any(
                not os.path.lexists(os.path.join(asked.path, name)) for name in tensors
            )
            folder = self._disk.folder(asked.step) if self._disk is not None and away else asked.path
            if self.mirror is not None and asked.mirror and away:
                self.mirror.upload(asked.step, folder, tensors)
            if self.store is not None and asked.store:
                if tensors:
                    self.store.upload(asked.step, folder, tensors)
                if self._first:
                    small = {name: record for name, record in manifest.files.items() if not is_tensor_file(name)}
                    last = {MANIFEST_FILE: FileRecord(sha256_of(data), len(data))}
                    self.store.upload(asked.step, asked.path, small, last)
        finally:
            self._look()  # before it leaves the queue: at no moment all seems to be done

    @staticmethod
    def _read(path: str) -> tuple[Manifest, bytes]:
        end = time.monotonic() + _MANIFEST_PATIENCE_S
        while True:
            try:
                manifest = read_manifest(path)
                with open(os.path.join(path, MANIFEST_FILE), "rb") as file:
                    return manifest, file.read()
            except (InputError, OSError):
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def _remove(self, steps: list[int]) -> None:
        with self._changed:
            self._again = [waiting for waiting in self._again if waiting[1] in self._queue]
        for uploader, _ in self._uploaders:
            for step in {step for step, _ in uploader.unfinished}.intersection(steps):
                self._warn(f"the checkpoint after step {step} was removed before it was moved everywhere")
                uploader.cancel(step)
        if self._disk is not None:
            self._disk.remove(steps)

    def _listen(self) -> None:
        for uploader, where in self._uploaders:
            for event in uploader.poll():
                self._tell(event, where)
        self._look()
        if self._serving is not None and self._server is not None and not self._serving.alive():
            self._warn("the server of this node's checkpoint files has died; it is started again")
            self._serving.close()
            if time.monotonic() >= self._serve_after:
                self._serve_after = time.monotonic() + _AGAIN_S
                self._serving = self._server()

    def _look(self) -> None:
        with self._changed:
            left = (f"step {step} to {where}" for own, where in self._uploaders for step, _ in own.unfinished)
            self._unfinished = list(dict.fromkeys(left))
            self._storing = set() if self.store is None else {step for step, _ in self.store.unfinished}

    def _tell(self, event: Event, where: str) -> None:
        match event:
            case Uploaded(step=step, last=last, num_bytes=num_bytes, seconds=seconds):
                self._said.clear()
                if last:
                    log.info("checkpoint after step %d is whole in %s", step, where)
                else:
                    rate = num_bytes / 1e9, seconds
                    log.debug("checkpoint after step %d: moved to %s, %.3g GB in %.3g s", step, where, *rate)
            case Failed(step=step, why=why, dropped=dropped):
                then = "it is not moved" if dropped else "tried again later"
                self._warn(f"checkpoint after step {step}: {why}; {then}")
            case Died(why=why):
                self._warn(f"{why}; it is started again")

    def _warn(self, text: str) -> None:
        """Once until something goes well."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
