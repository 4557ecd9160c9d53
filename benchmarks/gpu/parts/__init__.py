"""What the rows of the suite measure, a module a part. A function is given a mapping and gives a list of flat ones."""

from __future__ import annotations

__all__ = ["SkipError"]


class SkipError(Exception):
    """This machine cannot measure a row, and why."""
