"""The passes in their order, and the record of a removal that they share."""

from __future__ import annotations

import numpy as np

__all__ = ["KINDS", "REMOVED"]

#: The passes in their order: a document removed by one is not looked at by the next.
KINDS = ("exact", "url", "near")

#: A removed document and the one it is a duplicate of, as ranks; ``band`` is −1 and ``similarity`` NaN for none;
#: ``kind`` is the pass's place in :data:`KINDS`.
REMOVED = np.dtype([("rank", "<i8"), ("by", "<i8"), ("similarity", "<f8"), ("band", "<i2"), ("kind", "u1")])
