"""A small run whose index is built in several segments, and all that it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quern.lineage.index.build import FOLDER
from quern.lineage.store import IndexedRun

#: Documents a segment: a run of 240 has several.
SEGMENT = 60


def open_run(run: Path, **arguments: Any) -> IndexedRun:
    return IndexedRun(str(run), segment_documents=SEGMENT, **arguments)


def answers(lineage: IndexedRun) -> dict[str, Any]:
    """What it says of a quarter of the documents, by doc_id: the same for every numbering."""
    numbers = np.arange(lineage.num_documents)
    documents = lineage.documents(numbers)
    ids = documents.doc_ids
    spans = lineage.spans_of(numbers)
    columns = (getattr(spans, name).tolist() for name in ("numbers", "streams", "starts", "lengths", "purged"))
    span_of = {ids[row[0]]: (lineage.streams[row[1]].identity, *row[2:]) for row in zip(*columns, strict=True)}
    return {
        doc_id: (
            url,
            source,
            span_of.get(doc_id),
            lineage.decision(number),
            sorted(ids[other] for other in lineage.removed_for(number)),
            sorted(ids[other] for other in lineage.cluster(number)),
            sorted(ids[other] for other in (lineage.find(url=url) if url is not None else ())),
            [ids[other] for other in lineage.find(doc=doc_id)],
        )
        for number, (doc_id, url, source) in enumerate(zip(ids, documents.urls, documents.sources, strict=True))
        if doc_id[0] % 4 == 0
    }


def parts(run: Path) -> dict[str, int]:
    """Folders of the index, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in (run / FOLDER).iterdir() if path.is_dir()}
