"""Who may still write in a run: its present driver's workers, and of two that do one partition the later.

A driver that was killed, or a machine that was given up, may have a worker that is not gone yet. What it still writes
must not stand over the work of its successor. So before a file gets its name, the worker looks whether it is still
meant: the run's folder says whose workers may write, a partition's folder which attempt. Nobody but the driver removes.
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
    """What this process was at is another's now; it has written nothing since."""


@dataclass(frozen=True)
class Fence:
    """A file that names who may write: its holder until another claims it."""

    path: str
    holder: str

    @classmethod
    def claim(cls, path: str) -> Fence:
        """Name a new holder; whoever held it before is shut out."""
        fence = cls(path, uuid.uuid4().hex)
        storage.write_json(path, {"holder": fence.holder, "host": socket.gethostname()})
        return fence

    def check(self) -> None:
        """Nothing happens while the holder is the one named.

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
