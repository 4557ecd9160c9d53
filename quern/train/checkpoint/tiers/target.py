"""Targets of copied checkpoint files: a store, or another node's disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quern.remote.retry import Backoff
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peer_store import PeerStore, is_peer
from quern.train.checkpoint.store.rate import RateLimit
from quern.train.checkpoint.store.store import Store

__all__ = ["TOKEN_VARIABLE", "Target", "open_target"]

TOKEN_VARIABLE = "QUERN_PEER_TOKEN"
"""The environment variable from which the process that moves files has the token of the nodes' servers."""


class Target(Protocol):
    """Where files of checkpoints go. A file appears under its name whole, with the bytes of its record, or not."""

    @property
    def takes_manifests(self) -> bool:
        """Whether a checkpoint's manifest goes there too, after all files it names."""

    def renew(self) -> None:
        """Connect anew, since credentials may have changed."""

    def has(self, step: int, name: str, record: FileRecord) -> bool:
        """Whether the file is known to be there. No where :meth:`put` alone finds out, before it sends anything."""

    def put(
        self,
        step: int,
        name: str,
        path: str,
        record: FileRecord,
        rate: RateLimit | None = None,
        progress: Callable[[int], object] = lambda n: None,
    ) -> None:
        """Put the local file ``path`` under ``name``, replacing what is there; sends nothing of what is there already.

        Args:
            progress: called with the size of each piece before it is sent; an error it raises ends the transfer.

        Raises:
            SourceError: the local file is missing or not what ``record`` says.
            IncompleteError: a manifest waits for files it names.
            StoreError: it could not be put.
        """


def open_target(url: str, *, token: str = "", backoff: Backoff | None = None, timeout_s: float = 120.0) -> Target:
    """What ``url`` names: ``peer://HOST:PORT`` is another node, anything else a store.

    Args:
        token: of the nodes' servers.
        backoff: how a request is tried again.
        timeout_s: limit of one request.

    Raises:
        InputError: there is no such kind of store, or no node or token of this form.
    """
    if is_peer(url):
        return PeerStore(url, token, sleep=(backoff or Backoff()).sleep, timeout_s=timeout_s)
    return Store(url, backoff=backoff, timeout_s=timeout_s)
