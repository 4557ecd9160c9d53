"""Fencing: only workers of the current driver may write, and of two attempts at one partition only the later.

A killed driver or a lost machine may have a worker that is still running. It must not overwrite the work of its
successor. So before a worker publishes a file, it checks that it may still write: a file in the run's folder names the
driver, one in a partition's folder the attempt. Only the driver removes files.
"""

from __future__ import annotations

import json
import socket
import uuid
from dataclasses import dataclass

from quern import storage
from quern.errors import QuernError

__all__ = ["Fence", "SupersededError"]


class SupersededError(QuernError):
    """Another process has taken over this one's work; this one has written nothing since."""


@dataclass(frozen=True)
class Fence:
    """A file that names its current holder, who alone may write."""

    path: str
    holder: str

    @classmethod
    def claim(cls, path: str) -> Fence:
        """Write a new holder into the file; the previous holder may no longer write."""
        fence = cls(path, uuid.uuid4().hex)
        storage.write_json(path, {"holder": fence.holder, "host": socket.gethostname()})
        return fence

    def check(self) -> None:
        """Raise unless this process is still the holder.

        Raises:
            SupersededError: another is named.
            QuernError: there is no such file: the work is over, or this machine does not see the run's folder.
        """
        try:
            found = json.loads(storage.read_bytes(self.path))
        except FileNotFoundError:
            raise QuernError(
                f"{self.path}: is not seen on {socket.gethostname()}: every machine of the cluster must see the run's "
                "folder under the same path, or it must be on an object store"
            ) from None
        except (ValueError, RecursionError):
            found = None  # replaced at this very moment
        if not isinstance(found, dict) or found.get("holder") != self.holder:
            raise SupersededError(f"{self.path}: another works here now, this process has nothing more to write")
