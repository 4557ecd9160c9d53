"""A document's complete history as plain data: source record, measures, verdict, duplicates, tokens, and readers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from quern import storage
from quern.data_pipeline.page.document import content_hash
from quern.data_pipeline.page.url import canonicalize, host, surt
from quern.errors import InputError
from quern.lineage.difference import difference
from quern.lineage.index.changes import PURGED, RESTORED
from quern.lineage.index.columns import I64
from quern.lineage.limits import config_of, limits, rules_of
from quern.lineage.store import IndexedRun, Stream, plain
from quern.storage.parquet import Table, open_table
from quern.tokenize.selection.measures import rows_of
from quern.train.history.consumers import read_consumers

__all__ = ["MAX_LISTED", "NUM_REMOVED", "TEXT_CHARS", "find_at", "find_document", "find_url", "summaries", "trace"]

TEXT_CHARS = 200_000
"""Characters of a text unless all of it is asked for."""
NUM_REMOVED = 10
"""Documents removed in favour of one that are shown."""
MAX_LISTED = 200
"""Documents under one URL that are listed."""

_NEAR = 5
_NEAR_CANDIDATES = 1000
_ROWS = 256

#: Columns of a verdict row that are no measurement.
_RECORD = {
    "source_file": "file", "record_offset": "offset", "record_length": "length", "record_id": "id",
    "fetched_at": "fetched_at", "payload_digest": "payload_digest", "charset": "charset",
}  # fmt: skip
_NO_MEASURE = {
    "doc_id", "source", "url", "canonical_url", "surt", "host", *_RECORD, "language", "language_score",
    "pre_filter_hash", "post_filter_hash", "stage", "reason", "failed_rules", "file", "row",
}  # fmt: skip


# ---- finding one


def find_document(lineage: IndexedRun, doc: str) -> int:
    """The number of the document with this doc_id (32 hex digits).

    Raises:
        InputError: it is no doc_id, or of no document of the run.
    """
    found = lineage.find(doc=doc.lower())
    if not len(found):
        raise InputError(f"{lineage.run}: has no document {doc.lower()}")
    return int(found[0])


def find_url(lineage: IndexedRun, url: str) -> I64:
    """The documents fetched from this URL, in any spelling.

    Raises:
        InputError: there are none; says what was looked for, how many the host has, and which are near.
    """
    found = lineage.find(url=url)
    if len(found):
        return found
    canonical = canonicalize(url)
    if canonical is None:
        raise InputError(f"{lineage.run}: has no document with the URL {url!r:.300} (it is no http or https URL)")
    known = len(lineage.find(host=host(canonical)))
    documents = f"{known:,} document{'' if known == 1 else 's'}"
    near = _near(lineage, canonical)
    offered = f"; near: {', '.join(near)}" if near else ""
    raise InputError(
        f"{lineage.run}: has no document with the URL {canonical:.300}; "
        f"it has {documents} of {host(canonical)}{offered}"
    )


def _near(lineage: IndexedRun, canonical: str) -> list[str]:
    """A few URLs of the run that share the longest beginning with this one, host first, the most alike first."""
    import difflib

    key = surt(canonical)
    while True:
        numbers = lineage.find(surt=key)
        if len(numbers):
            break
        if ")" not in key:
            return []
        base, mark, path = key.partition(")")
        parent = path.rstrip("/").rpartition("/")[0] if "?" not in path else path.partition("?")[0]
        key = f"{base}{mark}{parent}" if parent else (base + mark if path else base)
    urls = {text for text in lineage.documents(numbers[:_NEAR_CANDIDATES]).urls if text is not None}
    matcher = difflib.SequenceMatcher(None, b=canonical, autojunk=False)
    alike = []
    for text in urls:
        matcher.set_seq1(text[:300])
        alike.append((-matcher.quick_ratio(), text))
    return [text if len(text) <= 300 else f"{text[:300]}…" for _, text in sorted(alike)[:_NEAR]]


def find_at(lineage: IndexedRun, shard: str, token: int, source: str | None = None) -> tuple[int, int]:
    """The document whose span holds token ``token`` of a shard, and the token's place in it.

    ``shard``: ``RUN/tokens/<source>/shard_00000.bin``, ``<source>/shard_00000``, or with ``source`` a number.

    Raises:
        InputError: the run's corpus version has no such shard, or the shard no such token.
    """
    stream, index = _shard(lineage, shard, source)
    reader = stream.reader
    size = reader.shards[index].tokens
    if not 0 <= token < size:
        raise InputError(
            f"{stream.name}/{reader.shards[index].bin}: expected a token from 0 to {size - 1}, got {token}"
        )
    place = int(reader.offsets[index]) + token
    spans, _ = lineage.spans_in(stream, [place], [place + 1])
    return int(spans.numbers[0]), place - int(spans.starts[0])


def _shard(lineage: IndexedRun, shard: str, source: str | None) -> tuple[Stream, int]:
    folder, name = os.path.split(shard)
    above, given = os.path.split(folder)
    if source is None and not folder:
        raise InputError(f"shard: expected <source>/shard_00000, a path, or a number with --source, got {shard!r:.200}")
    if source is not None and folder and given != source:
        raise InputError(f"shard: {shard} is not of source {source}")
    if above and os.path.realpath(above) != os.path.realpath(os.path.join(lineage.run, "tokens")):
        raise InputError(f"shard: {shard}: is not in {lineage.run}/tokens")
    wanted = given if source is None else source
    stream = next((own for own in lineage.streams if own.name == wanted), None)
    if stream is None:
        known = ", ".join(own.name for own in lineage.streams) or "none"
        raise InputError(f"{lineage.run}: the corpus version has no source {wanted!r} (it has {known})")
    for index, info in enumerate(stream.reader.shards):
        if name in (info.bin, info.bin.partition(".")[0], str(index)):
            return stream, index
    raise InputError(f"{stream.path}: the corpus version has no shard {shard!r} (it has {len(stream.reader.shards)})")


def summaries(lineage: IndexedRun, numbers: I64) -> list[dict[str, Any]]:
    """Of each of the first :data:`MAX_LISTED` documents doc_id, url, source, fetched_at, outcome; newest first."""
    rows = []
    for number in numbers[:MAX_LISTED].tolist():
        row = lineage.verdict(number)
        rows.append(
            {
                "number": number,
                **{name: plain(row[name]) for name in ("doc_id", "url", "source", "fetched_at")},
                "outcome": _outcome(row, lineage.decision(number), lineage.change(number)),
            }
        )
    rows.sort(key=lambda row: row["fetched_at"] or "", reverse=True)
    return rows


def _outcome(row: Mapping[str, Any], decision: Mapping[str, Any] | None, change: Mapping[str, Any] | None) -> str:
    """``kept``, or the stage and the reason; ``duplicate: near`` for what its duplicates removed; ``purged: version 2``
    for what was kept until then."""
    if row["stage"] is not None:
        return f"{row['stage']}: {row['reason']}"
    if decision is not None:
        return f"duplicate: {decision['kind']}"
    return f"purged: version {change['version']}" if change is not None and change["action"] == PURGED else "kept"


# ---- its life


def trace(lineage: IndexedRun, number: int, text_chars: int | None = TEXT_CHARS) -> dict[str, Any]:
    """Everything a run knows of document ``number``; ``text_chars``: characters of its text (None: all).

    Raises:
        InputError: a file of the run is missing or has changed.
    """
    row = lineage.verdict(number)
    decision, change = lineage.decision(number), lineage.change(number)
    spans = lineage.spans_of([number])
    span = _span(lineage, spans, 0) if len(spans.numbers) else None
    stored = _stored_text(lineage.run, row)
    return {
        "run": lineage.run,
        "corpus_version": lineage.version,
        "number": number,
        **{name: plain(row[name]) for name in ("doc_id", "source", "url", "canonical_url", "surt", "host")},
        "record": {name: plain(row[column]) for column, name in _RECORD.items()},
        "language": {"code": row["language"], "score": row["language_score"]},
        **{name: plain(row[name]) for name in ("pre_filter_hash", "post_filter_hash")},
        "outcome": _outcome(row, decision, change),
        "change": _change(change),
        "stage": row["stage"],
        "reason": row["reason"],
        "failed_rules": list(row["failed_rules"] or ()),
        "verdict_file": {"file": row["file"], "row": row["row"]},
        **_measures(lineage.run, row),
        "selections": rows_of(lineage.run, row["file"], row["doc_id"]),
        "duplicates": _duplicates(lineage, number, decision, stored),
        "span": span,
        "text": _text(lineage, row, span, stored, text_chars),
        "training_runs": list(dict.fromkeys(started.train_run for started in read_consumers(lineage.run))),
    }


def _measures(run: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """``measures``: name, value, whether its rule failed, and the limits of the run's config where it names them;
    ``rules``: name → class and options of the rules of one's own that judged the page."""
    record = storage.read_json(os.path.join(run, "run.json"))
    config = config_of(record, row["source"])
    known = limits(config)
    failed = set(row["failed_rules"] or ())
    found = []
    for name in row:
        if name in _NO_MEASURE or (row[name] is None and name not in failed):
            continue
        limit = known.get(name)
        found.append(
            {
                "name": name,
                "value": row[name],
                "failed": name in failed,
                "limit": None if limit is None else asdict(limit),
            }
        )
    return {"measures": found, "rules": rules_of(config)}


def _duplicates(
    lineage: IndexedRun, number: int, decision: Mapping[str, Any] | None, text: str | None
) -> dict[str, Any]:
    """Why it was removed and what was removed in its favour, each with the difference of the texts."""
    removed = lineage.removed_for(number)
    cluster = lineage.cluster(number)
    deciding = (lineage.decision(member) for member in cluster.tolist()) if decision is None else iter([decision])
    cluster_id = next((why["cluster_id"] for why in deciding if why is not None), None)
    found: dict[str, Any] = {
        "decision": None,
        "removed_count": len(removed),
        "removed": [],
        "cluster": {"id": plain(cluster_id), "documents": len(cluster)} if cluster_id is not None else None,
    }
    if decision is not None:
        survivor = lineage.verdict(find_document(lineage, decision["duplicate_of"].hex()))
        found["decision"] = {
            **_evidence(decision),
            "survivor": {name: plain(survivor[name]) for name in ("doc_id", "url", "source")},
            "difference": _difference(text, _stored_text(lineage.run, survivor)),
        }
    for other in removed[:NUM_REMOVED].tolist():
        row, why = lineage.verdict(other), lineage.decision(other)
        assert why is not None
        found["removed"].append(
            {
                **{name: plain(row[name]) for name in ("doc_id", "url", "source")},
                **_evidence(why),
                "difference": _difference(_stored_text(lineage.run, row), text),
            }
        )
    return found


def _change(change: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a later version did, and of a restored document what had removed it."""
    if change is None:
        return None
    was = change["decision"] if change["action"] == RESTORED else None
    removed = None if was is None else {**_evidence(was), "duplicate_of": was["duplicate_of"].hex()}
    return {"action": change["action"], "version": change["version"], "was_removed": removed}


def _evidence(decision: Mapping[str, Any]) -> dict[str, Any]:
    return {name: decision[name] for name in ("kind", "similarity", "band")}


def _difference(removed: str | None, kept: str | None) -> dict[str, Any] | None:
    """None where one of the texts is not there any more."""
    return None if removed is None or kept is None else asdict(difference(removed, kept))


def _span(lineage: IndexedRun, spans: Any, index: int) -> dict[str, Any]:
    stream = lineage.streams[int(spans.streams[index])]
    reader, start = stream.reader, int(spans.starts[index])
    shard = int(np.searchsorted(reader.offsets, start, "right")) - 1
    return {
        "stream": stream.name,
        "identity": stream.identity,
        "shard": shard,
        "file": os.path.join(stream.path, reader.shards[shard].bin),
        "start": start - int(reader.offsets[shard]),
        "stream_start": start,
        "length": int(spans.lengths[index]),
        "purged": bool(spans.purged_since[index]),
        "purged_since": int(spans.purged_since[index]) or None,
        "held_out": stream.held_out,
    }


def _text(
    lineage: IndexedRun, row: Mapping[str, Any], span: Mapping[str, Any] | None, stored: str | None, chars: int | None
) -> dict[str, Any]:
    """The text: decoded from its tokens; of a page without tokens, the one that is stored. ``same``: whether it is
    the text that was hashed when the page was judged; null where not all of it is here."""
    if span is not None and not span["purged"]:
        stream = next(own for own in lineage.streams if own.name == span["stream"])
        origin, text, whole = "tokens", *stream.text(span["stream_start"], span["length"] - 1, chars)
    elif span is None and stored is not None:
        origin, text, whole = "documents", stored[:chars], chars is None or len(stored) <= chars
    else:
        origin, text, whole = None, None, False
    return {
        "from": origin,
        "text": text,
        "complete": whole,
        "same": content_hash(text) == row["post_filter_hash"] if text is not None and whole else None,
        "why_none": _why_no_text(row, span) if text is None else None,
    }


def _why_no_text(row: Mapping[str, Any], span: Mapping[str, Any] | None) -> str:
    if span is not None:
        return "its tokens were purged"
    if row["post_filter_hash"] is None:
        return "no text is stored: the page was dropped before the quality gate, or quarantined"
    return "its text is not stored any more"


def _stored_text(run: str, row: Mapping[str, Any]) -> str | None:
    """The text of a page in ``documents/``; None if the page never got there, or a purge has taken it."""
    path = os.path.join(run, "documents", row["file"])
    if row["post_filter_hash"] is None or not os.path.exists(path):
        return None
    with open_table(path, ("doc_id", "text")) as table:
        for group in range(table.num_row_groups):
            ids = table.read_row_group(group, ["doc_id"])["doc_id"].to_pylist()
            if row["doc_id"] in ids:
                return _read_text(path, table, group, ids.index(row["doc_id"]))
    return None


def _read_text(path: str, table: Table, group: int, row: int) -> str | None:
    """The text in a row of a row group, without holding all texts of the group."""
    batches = table.iter_batches(_ROWS, row_groups=[group], columns=["text"])
    batch = next(itertools.islice(batches, row // _ROWS, None))
    try:
        text = batch["text"][row % _ROWS].as_py()
    except UnicodeDecodeError:
        raise InputError(f"{path}: text: expected UTF-8") from None
    if not isinstance(text, str | None):
        raise InputError(f"{path}: text: expected {pa.string()}, got {batch['text'].type}")
    return text
