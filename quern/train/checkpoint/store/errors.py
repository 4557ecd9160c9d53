"""Errors, other than the store's, that keep a checkpoint file from being moved."""

from __future__ import annotations

from quern.errors import QuernError
from quern.remote.retry import StoreError

__all__ = ["IncompleteError", "SourceError"]


class IncompleteError(StoreError):
    """A manifest cannot be uploaded yet, since other nodes are still uploading files that it names."""

    def __init__(self, message: str) -> None:
        super().__init__(message, transient=True)


class SourceError(QuernError):
    """A local file to be uploaded is missing or no longer has the saved bytes."""
