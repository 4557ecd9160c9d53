"""Access to object stores and web servers: error classification, retries, and whole objects only.

Everything that goes over a network to a file goes through here; :mod:`quern.storage` is the door.
"""

from quern.remote.lease import hold, takes_leases
from quern.remote.objects import Info, Objects, objects
from quern.remote.retry import Backoff, ChangedError, StoreError
from quern.remote.waits import around_waits

__all__ = [
    "Backoff",
    "ChangedError",
    "Info",
    "Objects",
    "StoreError",
    "around_waits",
    "hold",
    "objects",
    "takes_leases",
]
