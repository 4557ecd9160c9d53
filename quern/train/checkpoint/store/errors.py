"""What can keep a checkpoint's file from where it is to go, besides the store."""

from __future__ import annotations

from quern.errors import QuernError
from quern.remote.retry import StoreError

__all__ = ["IncompleteError", "SourceError"]


class IncompleteError(StoreError):
    """A manifest was to be put, and files that it names are not there yet: other nodes are still at it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


class SourceError(QuernError):
    """A local file that was to be put is missing, or no longer holds the bytes that were saved."""
