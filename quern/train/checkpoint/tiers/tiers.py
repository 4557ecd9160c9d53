"""Locates a run's checkpoint files and brings them where they are needed: the nodes' own disks, then the store.

The run's folder, which all nodes share, always has the small files and decides what exists. The files of tensors are
there too, or with ``checkpoint.local`` on the disk of the node that wrote them, mirrored on the next node's. Behind
both is the store. The files that a load needs are first copied to the node's disk, each from the first place that has a
complete copy: this disk, another node's, the store. DCP then reads local files.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property

from quern.errors import InputError, QuernError
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.file_locations import PLACES_FILE, Place, elsewhere, places_to_bytes
from quern.train.checkpoint.format.folder import make_staging_folder, publish_folder, staging_path, write_file
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    MISSING,
    Checkpoint,
    FileRecord,
    Manifest,
    Problem,
    check_file,
    checkpoint_name,
    checkpoints_folder,
    is_tensor_file,
    list_checkpoints,
)
from quern.train.checkpoint.mirror.disk import Disk
from quern.train.checkpoint.mirror.nodes import find_nodes, reachable_address
from quern.train.checkpoint.mirror.peers import Peer, PeerError, ServerProcess, new_token
from quern.train.checkpoint.mirror.whole import Found, Sites, find_whole
from quern.train.checkpoint.store.identity import Identity, identify
from quern.train.checkpoint.store.owner import Owner
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers.replication import ReplicationWorker
from quern.train.checkpoint.tiers.upload import Uploader
from quern.train.config import CheckpointConfig
from quern.train.processes.agree import Agreement, describe

__all__ = ["Tiers"]

log = logging.getLogger(__name__)

#: For which a request to the store is repeated while the run waits for the answer.
_START_BUDGET_S = 30.0
#: How long a run that was asked to stop waits for its uploads: whoever asked may not wait for long.
_HURRY_S = 10.0
#: After so many checkpoints that were not uploaded, one is, beside what hangs.
_PATIENCE = 50


class Tiers:
    """The tiers of one run; all methods but :meth:`close` are collective. Opened after the run's lock is taken.

    Raises:
        InputError: the store is another run's.
        QuernError: a node's disk cannot be used, or its server does not start.
    """

    def __init__(self, run_dir: str, config: CheckpointConfig, agreement: Agreement, from_store: bool = False) -> None:
        self.run_dir, self.config, self.agreement = run_dir, config, agreement
        self.root = checkpoints_folder(run_dir)
        self.nodes = find_nodes(agreement)
        self.disk: Disk | None = None
        """This node's, with ``checkpoint.local``."""
        self._replication: ReplicationWorker | None = None
        self._unstored: Checkpoint | None = None
        """The last one, if it is not uploaded."""
        self._passed_over = 0
        """Checkpoints in a row that were not uploaded."""
        self._peers: dict[int, Peer] = {}
        self._holders: dict[str, int] | None = None
        """Node with a whole copy by tensor file, of the checkpoint that was found last, if they are on nodes' disks."""
        identity, self._owner = agreement.broadcast_from_rank0(lambda: self._identify(from_store))
        self.run, self._stored = identity.run, set(identity.stored)
        everyone = (tuple(range(agreement.world)),)
        self._shared = self._sites = Sites(everyone, 0)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _identify(self, from_store: bool) -> tuple[Identity, Owner]:
        """With the run's folder as rank 0 sees it: all nodes upload for the same one."""
        found = identify(self.run_dir, self._store if self.config.store else None, from_store)
        return found, Owner.of(found.run, self.run_dir)

    @cached_property
    def _store(self) -> Store:
        """Made where it is used: its libraries are large."""
        assert self.config.store is not None
        return Store(self.config.store, backoff=Backoff(budget_s=_START_BUDGET_S))

    def _open(self) -> None:
        config, nodes = self.config, self.nodes
        if config.local is not None:
            self.disk = Disk(os.path.join(config.local.replace("{node}", str(nodes.mine)), self.run))
            self._sites = Sites(tuple(nodes.ranks(node) for node in range(len(nodes.hosts))), nodes.mine)
            self.agreement.all_or_raise(self._open_disk if nodes.leads else lambda: None)
        token = self.agreement.broadcast_from_rank0(new_token)
        address = reachable_address(self.agreement, nodes)
        self.agreement.all_or_raise(lambda: self._start(token, address) if nodes.leads else None)
        port = None if self._replication is None else self._replication.port
        found = self.agreement.gather((address, port))
        for node in range(len(nodes.hosts)):
            host, port = found[nodes.ranks(node)[0]]
            if port is not None and node != nodes.mine:
                self._peers[node] = Peer(host, port, token)
        self.agreement.all_or_raise(lambda: self._mirror(token))

    def _open_disk(self) -> None:
        assert self.disk is not None
        try:
            self.disk.open()
        except OSError as error:
            host = self.nodes.hosts[self.nodes.mine]
            raise InputError(f"checkpoint.local: {host}: {self.disk.root}: {error.strerror or error}") from None

    def _mirror(self, token: str) -> None:
        """Begin to mirror this node's files on another machine's disk; on another node's, where there is but one."""
        nodes = self.nodes
        ring = [(nodes.mine + step) % len(nodes.hosts) for step in range(1, len(nodes.hosts))]
        if self._replication is None or self.disk is None or not ring or self.config.partner is False:
            return
        elsewhere = [node for node in ring if nodes.hosts[node] != nodes.hosts[nodes.mine]]
        if not elsewhere:
            log.warning("checkpoint.local: all nodes are on %s; losing it loses the mirrors too", nodes.hosts[0])
        partner = self._peers[(elsewhere or ring)[0]]
        self._replication.mirror = Uploader(f"peer://{partner}", environment={"QUERN_PEER_TOKEN": token})

    def _start(self, token: str, address: str) -> None:
        """What a node's first rank runs."""
        disk, config = self.disk, self.config
        if config.store is None and disk is None:
            return
        ports = [0]

        def serve() -> ServerProcess:
            assert disk is not None
            server = ServerProcess(disk.root, address, token, port=ports[0])
            ports[0] = server.port
            return server

        several = disk is not None and len(self.nodes.hosts) > 1
        worker = ReplicationWorker(self._writes, self.nodes.mine == 0, disk, None, None, serve if several else None)
        self._replication = worker  # closed with this, whatever comes
        if config.store is not None:
            worker.store = Uploader(config.store, bytes_per_s=config.store_bytes_per_s, owner=self._owner)

    def _writes(self, name: str) -> bool:
        """Whether a rank of this node writes files of this name."""
        return self.nodes.of_rank[self._shared.writer(name)] == self.nodes.mine

    def place(self, step: int, names: Iterable[str]) -> Place | None:
        """The folder of this rank's files of a step, for ``places.json``; None: the checkpoint's folder."""
        if self.disk is None:
            return None
        return Place(socket.gethostname(), os.path.abspath(self.disk.folder(step)), tuple(names))

    def stores(self, step: int, last: bool = False) -> bool:
        """Whether the checkpoint of a step, just published, is to be uploaded; rank 0 decides for all. Without
        ``store_every`` one upload is under way at a time, so that each becomes whole however slow the store is. The
        ``last`` of a run that is passed over here is uploaded by :meth:`finish`."""
        if self.config.store is None or self._replication is None:
            return False
        if self.config.store_every is not None:
            return step % self.config.store_every == 0
        under_way = self._replication.storing()
        self._passed_over = self._passed_over + 1 if under_way else 0
        if not under_way:
            return True
        if self._passed_over % _PATIENCE == 0:
            return True
        if last:
            return False
        before = ", ".join(map(str, sorted(under_way)))
        log.warning("checkpoint after step %d is not uploaded: that of %s is still under way", step, before)
        return False

    def published(self, checkpoint: Checkpoint, removed: Collection[str], store: bool) -> None:
        """Copy a new checkpoint to the other tiers, and drop what the ``removed`` ones left there. Not collective, on
        every rank. ``store``: what :meth:`stores` said on rank 0."""
        if self._replication is None:
            return
        self._replication.published(checkpoint.step, checkpoint.path, store=store)
        self._unstored = None if store else checkpoint
        self._replication.remove(int(name.removeprefix("step_")) for name in removed)

    def resume_pending(self, checkpoint: Checkpoint | None) -> None:
        """Go on with what the last start left: move the files of the checkpoint the run goes on from to where they are
        missing, and remove from the nodes' disks those that belong to no checkpoint."""
        self._tidy()
        if self._replication is not None and checkpoint is not None:
            # also one that the store has: it may be another of the same step, of a branch that was left
            store = self.config.store is not None
            self._replication.published(checkpoint.step, checkpoint.path, store=store, names=self._share())

    def _share(self) -> list[str] | None:
        """The tensor files that this node is to move of the checkpoint that was found last: those of which its copy is
        known to be whole. None: as if it had just been saved."""
        if self._holders is None:
            return None
        return sorted(name for name, site in self._holders.items() if site == self.nodes.mine)

    def _tidy(self) -> None:
        """Remove from this node's disk the files that belong to no checkpoint; before training, which may save one."""
        standing = self.agreement.broadcast_from_rank0(lambda: {found.step for found in list_checkpoints(self.run_dir)})

        def remove() -> None:
            if self.disk is None or not self.nodes.leads:
                return
            try:
                self.disk.remove([step for step in self.disk.steps() if step not in standing])
            except OSError as error:
                log.warning("%s: what a killed writer left could not be removed (%s)", self.disk.root, describe(error))

        self.agreement.all_or_raise_with_keepalive(remove)

    def finish(self, hurry: bool = False) -> None:
        """Upload the last checkpoint whatever its step, and wait until all files are where they go, for as long as the
        config says, but for seconds only in a ``hurry``; say what is left."""
        if self.config.store is None and self.disk is None:
            return
        limit = self.config.upload_wait_s
        worker, limit = self._replication, min(limit, _HURRY_S) if hurry else limit
        if worker is not None and self.config.store is not None and self._unstored is not None:
            worker.published(self._unstored.step, self._unstored.path, store=True, mirror=False)
            self._unstored = None
        self.agreement.all_or_raise_with_keepalive(lambda: None if worker is None else worker.wait(limit))
        left = [] if worker is None else worker.unfinished()
        if left:
            log.warning("not moved yet: %s; the next start moves the checkpoint it goes on from", ", ".join(left))

    def close(self) -> None:
        """End threads and processes."""
        if self._replication is not None:
            self._replication.close()
            self._replication = None

    def storing(self) -> set[int]:
        """Steps whose files are to stay until they are in the store; rank 0 knows of all nodes'. Not collective."""
        return set() if self._replication is None else self._replication.storing()

    def steps(self) -> set[int]:
        """Steps of which the store has a checkpoint."""
        return set(self._stored)

    def find(self, path: str, manifest: Manifest, *, hashes: bool) -> list[Problem]:
        """Ensure a complete copy of every file of a checkpoint of this run; return the problems with the others.

        The small files, and without ``checkpoint.local`` all, in its folder ``path``; the others on some node's disk.
        """
        own, away = self.agreement.broadcast_from_rank0(lambda: self._away(path, manifest))
        self._holders = None
        here = {name: record for name, record in manifest.files.items() if name not in away}
        there = {name: record for name, record in manifest.files.items() if name in away}
        problems = self._whole(self._shared, path, manifest.step if own else None, here, hashes).missing(here)
        if there and not problems:
            if self.disk is None or not own:
                what = "give the checkpoint.local it was saved with, or bring" if own else "bring"
                where = "its tensor files are on disks of nodes, which places.json names"
                return [Problem(path, f"{where}; {what} them together with `quern checkpoint fetch`")]
            folder = self.disk.folder(manifest.step)
            found = self._whole(self._sites, folder, manifest.step, there, hashes)
            problems, self._holders = found.missing(there), found.holders
        return problems

    def _away(self, path: str, manifest: Manifest) -> tuple[bool, frozenset[str]]:
        """Whether a checkpoint is this run's, and which of its files are on nodes' disks: where the run has those, all
        tensor files that are not in the folder; ``places.json`` may be damaged."""
        own = os.path.dirname(os.path.abspath(path)) == os.path.abspath(self.root)
        if self.disk is None or not own:
            return own, elsewhere(path)
        return own, frozenset(
            name for name in manifest.files
            if is_tensor_file(name) and not os.path.lexists(os.path.join(path, name))
        )  # fmt: skip

    def _whole(
        self, sites: Sites, folder: str, step: int | None, records: Mapping[str, FileRecord], hashes: bool
    ) -> Found:
        """``step``: of the store's checkpoint from which to take what is nowhere whole."""

        def fetch(name: str, record: FileRecord, into: str) -> None:
            assert step is not None
            os.makedirs(into, exist_ok=True)
            self._store.fetch(step, name, record, into)

        return find_whole(
            self.agreement, sites, folder, records, hashes=hashes, fetch=fetch if step in self._stored else None
        )

    def stored_manifest(self, step: int) -> Manifest:
        """The manifest of the checkpoint in the store.

        Raises:
            InputError: it is damaged, or gone.
            StoreError: it cannot be read.
        """
        return self.agreement.broadcast_from_rank0(lambda: self._store.manifest(step))

    def restore(self, manifest: Manifest) -> list[Problem]:
        """Put a checkpoint that only the store has back into the run's folder, and its tensor files onto disks.

        Returns what is wrong, and leaves nothing, when a file is not whole there either.
        """
        step, final = manifest.step, os.path.join(self.root, checkpoint_name(manifest.step))
        token = self.agreement.broadcast_from_rank0(lambda: make_staging_folder(final))
        staged = staging_path(final, token)
        tensors = {name: record for name, record in manifest.files.items() if is_tensor_file(name)}
        if self.disk is None:
            problems = self._whole(self._shared, staged, step, manifest.files, True).missing(manifest.files)
        else:
            small = {name: record for name, record in manifest.files.items() if name not in tensors}
            problems = self._whole(self._shared, staged, step, small, True).missing(small)
            if not problems:
                found = self._whole(self._sites, self.disk.folder(step), step, tensors, True)
                problems, self._holders = found.missing(tensors), found.holders
                places = self.agreement.gather(
                    self.place(step, [name for name, site in found.holders.items() if site == self.nodes.mine])
                )
                file = os.path.join(staged, PLACES_FILE)
                self.agreement.broadcast_from_rank0(lambda: write_file(file, _to_bytes(places)))

        def end() -> None:
            if problems:
                shutil.rmtree(staged, ignore_errors=True)
                return
            write_file(os.path.join(staged, MANIFEST_FILE), manifest.to_bytes())
            publish_folder(staged, final, token, replace=False)

        self.agreement.broadcast_from_rank0(end)
        return problems

    def bring(self, path: str, manifest: Manifest, needed: Collection[str]) -> str:
        """Bring the files that this rank reads to this node's disk; return the folder to read them from.

        Raises:
            QuernError: on every rank, naming the file and every place that was tried.
        """
        _, away = self.agreement.broadcast_from_rank0(lambda: self._away(path, manifest))
        if not away or self.disk is None:
            return path
        folder, step = self.disk.folder(manifest.step), manifest.step
        everyones = self.agreement.gather(sorted(set(needed) & away))
        ranks = self.nodes.ranks(self.nodes.mine)
        wanted = sorted({name for rank in ranks for name in everyones[rank]})
        mine = wanted[ranks.index(self.nodes.rank) :: len(ranks)]
        turn = len(mine) * self.nodes.mine // len(self.nodes.hosts)  # or all nodes would ask the same one first
        mine = mine[turn:] + mine[:turn]

        def bring() -> None:
            for name in mine:
                self._bring(folder, step, name, manifest.files[name])

        self.agreement.all_or_raise_with_keepalive(bring)
        return folder

    def _bring(self, folder: str, step: int, name: str, record: FileRecord) -> None:
        holder = (self._holders or {}).get(name)
        # what is known to be whole here has been hashed
        problem = check_file(folder, name, record, hashes=self.config.verify and holder != self.nodes.mine)
        if problem is None:
            return
        tried = [str(problem)]
        os.makedirs(folder, exist_ok=True)
        for node in sorted(self._peers, key=lambda node: node != holder):
            peer = self._peers[node]
            try:
                if peer.files(checkpoint_name(step)).get(name) == record.size:
                    peer.fetch(checkpoint_name(step), name, record, folder)
                    # another layout asks for files that were never here
                    level = logging.INFO if problem.what == MISSING else logging.WARNING
                    log.log(level, "%s; put back from %s", problem, peer)
                    return
                tried.append(f"{self.nodes.hosts[node]} does not have it")
            except PeerError as error:
                tried.append(f"{self.nodes.hosts[node]}: {error}")
        if step in self._stored:
            try:
                self._store.fetch(step, name, record, folder)
                return
            except StoreError as error:
                tried.append(str(error))
        raise QuernError("; ".join(tried))


def _to_bytes(places: Iterable[Place | None]) -> bytes:
    with suppress(ValueError):
        return places_to_bytes([place for place in places if place is not None])
    raise QuernError("checkpoint.local: the nodes' folders cannot be written down")
