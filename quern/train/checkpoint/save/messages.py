"""Messages between trainer and writer process: one JSON document per line.

``{"lay_out": files}`` has no answer. ``{"write": folder}`` and ``{"publish": …}`` are answered by ``{"done": …}`` or
``{"failed": text}``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from quern.train.checkpoint.format.manifest import Manifest
from quern.train.checkpoint.retention.prune import Keep
from quern.train.checkpoint.save.work import Publication

__all__ = ["publication_from_json", "publication_to_json"]


def publication_to_json(asked: Publication) -> dict[str, Any]:
    """Plain JSON."""
    plain = {**vars(asked), "manifest": asked.manifest.to_dict()}
    plain["metadata"] = None if asked.metadata is None else base64.b64encode(asked.metadata).decode()
    plain["keep"] = None if asked.keep is None else vars(asked.keep)
    return plain


def publication_from_json(plain: Mapping[str, Any]) -> Publication:
    """The inverse."""
    keep, metadata = plain["keep"], plain["metadata"]
    return Publication(**{
        **plain,
        "manifest": Manifest.from_dict(plain["manifest"], name=f"{plain['final']}: manifest"),
        "metadata": None if metadata is None else base64.b64decode(metadata),
        "keep": None if keep is None else Keep(**{**keep, "steps": tuple(keep["steps"])}),
    })  # fmt: skip
