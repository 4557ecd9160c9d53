"""Hostile files and pages, WARC files with known damage, random runs for duplicate removal."""

from __future__ import annotations

#: A page that every rule keeps.
ARTICLE = (
    "The ferry left the northern quay shortly after dawn, and the few people on deck watched the town grow small. "
    "Nobody had expected the old engine to start, but the mechanic knew every one of its habits. "
    "By noon the wind had turned, so the captain decided to wait behind the island until the evening. "
    "A boy from the village brought bread, and somebody found a tin of coffee in the galley. "
    "They talked about the harbour that was never built and the money that went with it. "
    "When the lights of the other shore came up at last, hardly anyone wanted to go home."
)
