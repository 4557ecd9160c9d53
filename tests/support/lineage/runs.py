"""Synthetic data runs, written in a moment and the same for the same arguments: what the real road leaves, in small.

:func:`listing` says in plain Python what :func:`write_run` writes for the same arguments. A text's tokens are its UTF-8
bytes, so that ``decode(tokens)`` is the text; every byte is a rank, and the other ranks are pairs nobody uses.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import itertools
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline.dedup.schemas import CLUSTER_SCHEMA, DECISION_SCHEMA
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, content_hash, make_doc_id, verdict_schema
from quern.data_pipeline.page.url import canonicalize, host, surt
from quern.tokenize.place import keyed_hashes
from quern.tokenize.shard_format import MANIFEST, VERSION_FILE, ShardWriter, version_entry

MEASURES = ("num_words", "gopher.mean_word_length", "repetition.dup_line_fraction")
ROW_GROUP = 64
PLACE_SEED = 7

HOSTS = [
    "example.com", "www.example.com", "blog.example.com", "a.b.example.com", "notexample.com", "example.com.evil.org",
    "www2.example.com", "example.org", "EXAMPLE.ORG", "example.com.", "bücher.example", "xn--bcher-kva.example",
    "www.com", "a.www.com", "192.0.2.7", "192.0.2.70", "[2001:db8::1]", "[2001:db8::1:2]", "example-site.com",
    "пример.рф", "co.uk", "news.co.uk", "localhost",
]  # fmt: skip
PORTS = ["", "", "", "", ":8080", ":80", ":443", ":81"]
PATHS = [
    "", "/", "/index.html", "/a/b/../c", "//double//slash", "/caf%C3%A9", "/café", "/%7Euser/", "/UPPER/Case",
    "/p;jsessionid=1234", "/semi;colon", "/%2e%2e/up", "/a b", "/%", "/%zz", "/emoji/😀", "/x)y,z", "/<script>",
]  # fmt: skip
QUERIES = [
    "",
    "",
    "?",
    "?b=2&a=1",
    "?a=1&b=2",
    "?utm_source=x&q=1",
    "?q=%41",
    "?q='; drop table verdicts;--",
    "?&&",
    "#top",
]

#: URLs that are no http(s) URL, or no URL at all, or would harm who prints them.
STRANGE = [
    "", " ", "ftp://example.com/file", "mailto:a@example.com", "urn:isbn:0451450523", "not a url", "http://",
    "https://user:pass@example.com/private", "http://example.com/\x1b[31mred\x1b[0m", "http://example.com/\u202eevil",
    "http://example.com/new\nline", "javascript:alert(1)", "http://exa mple.com/", "http://example.com:99999/",
    "HTTP://EXAMPLE.COM/index.html", "doc-123", "http://[::1]:8000/x", "\u0000", "http://0x7f.1/", "http://example.com/"
    + "x" * 5000,
]  # fmt: skip

REASONS = [
    ("language", "language.score"), ("quality", "gopher.too_short"), ("url", "url.blocked_domain"),
    ("extract", "extract.empty"), ("read", "read.empty"), ("quarantine", "quarantine.timeout"),
]  # fmt: skip


@dataclass
class Listing:
    """What stands in a run: rows as they stand in the tables, in the order of the files."""

    verdicts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """``<source>/<partition>`` → its rows, of :data:`MEASURES` too."""
    documents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    clusters: list[dict[str, Any]] = field(default_factory=list)
    spans: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Stream (``web``, ``web.val``, …) → doc_id, start (in the stream), length, purged, shard; in their order."""
    texts: dict[bytes, str] = field(default_factory=dict)
    """doc_id → text of every page that has one."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every verdict row, with ``file`` (below ``verdicts/``) and ``row``."""
        return [
            {**row, "file": f"{name}.parquet", "row": number}
            for name in sorted(self.verdicts)
            for number, row in enumerate(self.verdicts[name])
        ]


def listing(
    *,
    seed: int = 0,
    documents: int = 500,
    files: int = 4,
    sources: tuple[str, ...] = ("web", "text"),
    shard_tokens: int = 4096,
    vocab_size: int = 1000,
) -> Listing:
    """What :func:`write_run` writes for the same arguments. ``files``: of each source."""
    draw = random.Random(f"runs {seed} {documents} {files} {sources}")
    found = Listing()
    kept: list[dict[str, Any]] = []
    urls: list[str] = []
    texts: list[str] = []
    for number in range(documents):
        source = sources[number % len(sources)]
        part = number // len(sources) % files
        name = f"part-{part:03d}.warc.gz"
        mine = found.verdicts.setdefault(f"{source}/{name}", [])
        row = _verdict(draw, source, name, 1000 * len(mine), _url(draw, source, urls))
        if row["stage"] in (None, "quality"):
            copied = texts and draw.random() < 0.15
            text = draw.choice(texts) if copied else _text(draw)
            texts.append(text)
            found.texts[row["doc_id"]] = text
            row["pre_filter_hash"] = content_hash(text if draw.random() < 0.8 else f"{text}\n")
            row["post_filter_hash"] = content_hash(text)
            row["num_words"] = float(len(text.split()))
            extracted = f"{text}\n" if row["pre_filter_hash"] != row["post_filter_hash"] else None
            found.documents.setdefault(f"{source}/{name}", []).append(
                {"doc_id": row["doc_id"], "text": text, "extracted": extracted, "kept": row["stage"] is None}
            )
            if row["stage"] is None:
                kept.append(row)
        mine.append(row)
    for name in found.verdicts:
        found.documents.setdefault(name, [])
    _remove_duplicates(draw, found, kept)
    _place(found, kept, sources, shard_tokens)
    return found


def _url(draw: random.Random, source: str, urls: list[str]) -> str | None:
    roll = draw.random()
    if roll < (0.5 if source == "text" else 0.03):
        return None
    if roll < 0.6 and urls and draw.random() < 0.15:
        return draw.choice(urls)
    if draw.random() < 0.08:
        url = draw.choice(STRANGE)
    else:
        path = draw.choice(PATHS) if draw.random() < 0.4 else f"/{draw.choice('abcd')}/{draw.randrange(10_000)}"
        host_and_port = draw.choice(HOSTS) + draw.choice(PORTS)
        url = f"{draw.choice(['http', 'https'])}://{host_and_port}{path}{draw.choice(QUERIES)}"
    urls.append(url)
    return url


def _verdict(draw: random.Random, source: str, name: str, position: int, url: str | None) -> dict[str, Any]:
    stage, reason = (None, None) if draw.random() < 0.65 else draw.choice(REASONS)
    # the chain never sees a quarantined page, so that nobody has canonicalised its URL
    canonical = canonicalize(url) if url is not None and stage != "quarantine" else None
    return {
        "doc_id": make_doc_id(source, name, position),
        "source": source,
        "url": url,
        "canonical_url": canonical,
        "surt": surt(canonical) if canonical is not None else None,
        "host": host(canonical) if canonical is not None else None,
        "source_file": f"/crawl/{source}/{name}",
        "record_offset": position,
        "record_length": draw.randrange(100, 1000),
        "record_id": f"<urn:uuid:{draw.randrange(1 << 60):015x}>" if draw.random() < 0.9 else None,
        "fetched_at": dt.datetime(2024, 2, 29, tzinfo=dt.UTC) + dt.timedelta(seconds=draw.randrange(10**6)),
        "payload_digest": None,
        "charset": "utf-8",
        "language": draw.choice(["en", "de", None]),
        "language_score": round(draw.random(), 3),
        "pre_filter_hash": None,
        "post_filter_hash": None,
        "stage": stage,
        "reason": reason,
        "failed_rules": [] if reason is None else [reason],
        "num_words": None,
        "gopher.mean_word_length": round(draw.uniform(2, 9), 4) if draw.random() < 0.9 else None,
        "repetition.dup_line_fraction": None if draw.random() < 0.5 else 0.25,
    }


_WORDS = [
    "the",
    "of",
    "stone",
    "mill",
    "grinds",
    "wheat",
    "slowly",
    "über",
    "naïve",
    "水車",
    "and\n",
    "flour",
    "água",
    "\x1b[2J",
    "<b>bold</b>",
    "река",
]


def _text(draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.choice([1, 3, 8, 20, 60, 150, 400])))


def _remove_duplicates(draw: random.Random, found: Listing, kept: list[dict[str, Any]]) -> None:
    """Equal texts and some near ones: chains of removals too, as a later pass may remove a survivor."""
    groups: dict[bytes, list[dict[str, Any]]] = {}
    for row in kept:
        groups.setdefault(row["post_filter_hash"], []).append(row)
    parent: dict[bytes, bytes] = {}
    decisions = {}

    def root(doc_id: bytes) -> bytes:
        """The smallest doc_id of the component."""
        while parent.setdefault(doc_id, doc_id) != doc_id:
            doc_id = parent[doc_id] = parent[parent[doc_id]]
        return doc_id

    def remove(
        row: dict[str, Any], survivor: dict[str, Any], kind: str, similarity: float | None, band: int | None
    ) -> None:
        ends = sorted([root(row["doc_id"]), root(survivor["doc_id"])])
        parent[ends[1]] = ends[0]
        decisions[row["doc_id"]] = {
            "doc_id": row["doc_id"], "kind": kind, "duplicate_of": survivor["doc_id"],
            "similarity": similarity, "band": band,
        }  # fmt: skip

    for rows in groups.values():
        for row in rows[1:]:
            remove(row, rows[0], "exact", 1.0, None)
    heads = [rows[0] for rows in groups.values()]
    by_url: dict[str, dict[str, Any]] = {}
    for row in heads:
        url = row["canonical_url"]
        if url is not None and by_url.setdefault(url, row) is not row:
            remove(row, by_url[url], "url", None, None)
    left = [row for row in heads if row["doc_id"] not in decisions]
    for before, row in itertools.pairwise(left):
        if before["doc_id"] not in decisions and draw.random() < 0.1:
            remove(row, before, "near", round(draw.uniform(0.75, 1), 6), draw.randrange(14))
    for decision in decisions.values():
        decision["cluster_id"] = root(decision["doc_id"])
    found.decisions = [decisions[doc_id] for doc_id in sorted(decisions)]
    found.clusters = [{"doc_id": doc_id, "cluster_id": root(doc_id)} for doc_id in sorted(parent)]


def _place(found: Listing, kept: list[dict[str, Any]], sources: tuple[str, ...], shard_tokens: int) -> None:
    removed = {decision["doc_id"] for decision in found.decisions}
    for source in sources:
        mine = [row["doc_id"] for row in kept if row["source"] == source and row["doc_id"] not in removed]
        keys = dict(zip(mine, keyed_hashes(PLACE_SEED, "place", mine).tolist(), strict=True))
        for stream, held_out in ((source, False), (f"{source}.val", True)):
            start = shard = full = 0
            rows = []
            for doc_id in sorted(mine, key=lambda doc_id: (keys[doc_id], doc_id)):
                if (doc_id[0] < 20) is not held_out:
                    continue
                length = len(found.texts[doc_id].encode()) + 1
                purged = doc_id[1] < 10
                rows.append({"doc_id": doc_id, "start": start, "length": length, "purged": purged, "shard": shard})
                start, full = start + length, full + length
                if full >= shard_tokens:
                    shard, full = shard + 1, 0
            found.spans[stream] = rows


def write_run(folder: Path, *, seed: int = 0, vocab_size: int = 1000, **more: Any) -> Path:
    """Write a complete data run to ``folder`` and return it: verdicts, documents, duplicates, tokens, ``run.json``.

    ``more``: arguments of :func:`listing`. Documents whose spans are purged keep their tokens.
    """
    found = listing(seed=seed, vocab_size=vocab_size, **more)
    write_listing(folder, found, identity=f"run{seed:05d}", vocab_size=vocab_size)
    return folder


def write_listing(folder: Path, found: Listing, *, identity: str, vocab_size: int = 1000) -> None:
    """Write what a listing says."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in found.verdicts.items():
        _write_table(folder / "verdicts" / f"{name}.parquet", rows, verdict_schema(MEASURES))
    for name, rows in found.documents.items():
        _write_table(folder / "documents" / f"{name}.parquet", rows, DOCUMENT_SCHEMA)
    _write_table(folder / "duplicates" / "decisions.parquet", found.decisions, DECISION_SCHEMA)
    _write_table(folder / "duplicates" / "clusters.parquet", found.clusters, CLUSTER_SCHEMA)
    write_tokens(folder, found, vocab_size)
    record = {"id": identity, "config": {"run_dir": str(folder)}, "counts": {}, "status": "complete"}
    (folder / "run.json").write_text(json.dumps(record))


def _write_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=ROW_GROUP, compression="zstd")


def write_tokens(folder: Path, found: Listing, vocab_size: int = 1000, version: int = 1) -> None:
    """Write ``tokens/`` of a listing, through the real writer; VERSION.json last."""
    root = folder / "tokens"
    root.mkdir(parents=True, exist_ok=True)
    pairs = [bytes([n // 256, n % 256]) for n in range(vocab_size - 257)]
    tokens = [*(bytes([n]) for n in range(256)), *pairs]
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (root / "encoding.tiktoken").write_bytes(ranks)
    eot, dtype = vocab_size - 1, "uint16" if vocab_size <= 65_536 else "uint32"
    encoding = {
        "name": "own", "ranks": "encoding.tiktoken", "sha256": hashlib.sha256(ranks).hexdigest(),
        "vocab_size": vocab_size, "dtype": dtype, "eot_id": eot,
    }  # fmt: skip
    entries = {}
    for stream, rows in found.spans.items():
        (root / stream).mkdir(exist_ok=True)
        infos = []
        for shard in sorted({row["shard"] for row in rows}):
            mine = [row for row in rows if row["shard"] == shard]
            ids = [np.array([*found.texts[row["doc_id"]].encode(), eot], dtype) for row in mine]
            with ShardWriter(str(root / stream), shard, dtype) as writer:
                writer.add(
                    b"".join(row["doc_id"] for row in mine),
                    np.array([row["length"] for row in mine]),
                    np.concatenate(ids),
                    np.array([row["purged"] for row in mine]),
                )
                keys = keyed_hashes(PLACE_SEED, "place", [mine[0]["doc_id"], mine[-1]["doc_id"]]).tolist()
                infos.append(writer.finish(first_key=keys[0], last_key=keys[1]))
        manifest = {
            "source": stream, "encoding": "own", "ranks_sha256": encoding["sha256"], "vocab_size": vocab_size,
            "dtype": dtype, "eot_id": eot, "seed": PLACE_SEED, "shards": [asdict(info) for info in infos],
        }  # fmt: skip
        (root / stream / MANIFEST).write_text(json.dumps(manifest))
        sha256 = hashlib.sha256((root / stream / MANIFEST).read_bytes()).hexdigest()
        entries[stream] = version_entry(stream, MANIFEST, sha256, infos)
    record = {"version": version, "parent": None, "kind": "initial", "encoding": encoding, "sources": entries}
    (root / VERSION_FILE).write_text(json.dumps(record))


def places(found: Listing) -> dict[bytes, dict[str, Any]]:
    """doc_id → its span, with the stream and the start in the shard."""
    by_id = {}
    for stream, spans in found.spans.items():
        first: dict[int, int] = {}
        for span in spans:
            origin = first.setdefault(span["shard"], span["start"])
            by_id[span["doc_id"]] = {**span, "stream": stream, "origin": origin}
    return by_id
