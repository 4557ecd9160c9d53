"""Another node's disk as a target for checkpoint files: the mirror of this node's.

The other node's :mod:`.peer_server` takes the files. It keeps no manifests: those lie where all nodes see them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

from quern.errors import InputError
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, checkpoint_name
from quern.train.checkpoint.mirror.peer_files import SHA256
from quern.train.checkpoint.mirror.peers import Peer, PeerError
from quern.train.checkpoint.store.errors import SourceError
from quern.train.checkpoint.store.rate import RateLimit

__all__ = ["PeerStore", "is_peer"]

_URL = re.compile(r"peer://(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[\w.-]+)):(?P<port>[0-9]{1,5})")


def is_peer(url: str) -> bool:
    """Whether ``url`` means another node's disk."""
    return url.startswith("peer:")


class PeerStore:
    """The node at ``peer://HOST:PORT``, an IPv6 address in brackets.

    Attributes:
        takes_manifests: no.

    Args:
        url: where its server listens.
        token: 64 hex digits that the nodes of the run share.
        sleep: waits between attempts; an error it raises ends the transfer.
        timeout_s: limit of a wait for the other node, a MiB.

    Raises:
        InputError: the address or the token has another form.
    """

    takes_manifests = False

    def __init__(
        self, url: str, token: str, *, sleep: Callable[[float], object] = time.sleep, timeout_s: float = 60.0
    ) -> None:
        found = _URL.fullmatch(url)
        if found is None or not 1 <= int(found["port"]) <= 65535:
            raise InputError(f"{url}: expected a node as peer://HOST:PORT, with an IPv6 address in brackets")
        if not SHA256.fullmatch(token):
            raise InputError(f"{url}: token: expected 64 hex digits")
        self.url = url
        self._peer = Peer(found["six"] or found["host"], int(found["port"]), token, timeout_s=timeout_s, sleep=sleep)

    def renew(self) -> None:
        """Nothing: each transfer connects anew, and the token is the run's."""

    def has(self, step: int, name: str, record: FileRecord) -> bool:
        """No: :meth:`put` asks the other node before it sends anything."""
        return False

    def put(
        self,
        step: int,
        name: str,
        path: str,
        record: FileRecord,
        rate: RateLimit | None = None,
        progress: Callable[[int], object] = lambda n: None,
    ) -> None:
        """See :class:`~quern.train.checkpoint.tiers.target.Target`; what was interrupted is resumed. Raises InputError
        for a manifest."""
        if name == MANIFEST_FILE:
            raise InputError(f"{self.url}: {name}: a node's disk keeps no manifests")
        peer = replace(self._peer, limit=_Metered(rate, progress))
        try:
            peer.send(checkpoint_name(step), name, path, record)
        except PeerError as error:
            raise StoreError(str(error), transient=True) from error
        except InputError as error:
            raise SourceError(f"{error}; not mirrored") from None


class _Metered(RateLimit):
    """Tells of each piece, and then asks ``rate`` for it."""

    def __init__(self, rate: RateLimit | None, progress: Callable[[int], object]) -> None:
        super().__init__(None)
        self._rate, self._progress = rate, progress

    def take(self, n: int) -> None:
        """Returns once ``n`` bytes may move."""
        self._progress(n)
        if self._rate is not None:
            self._rate.take(n)
