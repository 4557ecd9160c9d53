"""Answers with the complete history of a document, as plain data: ``quern lineage show --json``."""

from __future__ import annotations

from typing import Any

import numpy as np

from quern.errors import InputError
from quern.lineage.store import IndexedRun
from quern.lineage.trace import TEXT_CHARS, find_at, find_document, find_url, summaries, trace

__all__ = ["show_answer"]


def show_answer(
    run: IndexedRun,
    *,
    url: str | None = None,
    doc: str | None = None,
    shard: str | None = None,
    token: int | None = None,
    source: str | None = None,
    text_chars: int | None = TEXT_CHARS,
) -> dict[str, Any]:
    """``found``, how many documents there are; ``documents``, a line of each; ``document``, all of it where there is
    one; ``position``, the place of the token in it.

    Of a ``url`` in any spelling, of a ``doc`` (doc_id, 32 hex digits), or of token ``token`` of a ``shard``, whose
    ``source`` a number alone needs. ``text_chars``: characters of the text (None: all).

    Raises:
        InputError: none or several of the three are given, or no document is meant.
    """
    if sum(value is not None for value in (url, doc, shard)) != 1 or (shard is None) is not (token is None):
        raise InputError("expected one of url, doc, and shard with token")
    position = None
    if url is not None:
        numbers = find_url(run, url)
    elif doc is not None:
        numbers = np.array([find_document(run, doc)])
    else:
        assert shard is not None
        assert token is not None
        number, position = find_at(run, shard, token, source)
        numbers = np.array([number])
    life = trace(run, int(numbers[0]), text_chars) if len(numbers) == 1 else None
    listed = summaries(run, numbers)
    return {"found": len(numbers), "documents": listed, "position": position, "document": life}
