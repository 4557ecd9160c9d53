"""The passes in their order, and the record of a removal that they share."""

from __future__ import annotations

import numpy as np

__all__ = ["KINDS", "REMOVED", "kind_code"]

#: The passes in their order: a document removed by one is not looked at by the next.
KINDS = ("exact", "url", "near")

#: A removed document and the one it is a duplicate of, as ranks; ``band`` is −1 and ``similarity`` NaN for none.
REMOVED = np.dtype([("rank", "<i8"), ("by", "<i8"), ("similarity", "<f8"), ("band", "<i2"), ("kind", "u1")])


def kind_code(kind: str) -> int:
    """The place of a pass in :data:`KINDS`."""
    return KINDS.index(kind)
