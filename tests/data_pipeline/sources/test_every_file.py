"""Every real crawler file there is, sound and damaged: nothing is lost that warcio or a brute-force scan can read."""

from __future__ import annotations

import bz2
import contextlib
import io
import json
import logging
import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.sources import ReadLog
from support.data_pipeline.sources_warc_files import pages

pytestmark = pytest.mark.shared

PAGES = {"response", "resource", "conversion"}

#: Files without a record in which warcio sees one: an image's first line as ARC, an empty line, a line of prose.
NOT_RECORDS = {
    "garbage.txt",
    "jhove__invalid__invalid-warcheaderversion-20.warc",
    "jhove__invalid__invalid-warcreader-diagnosis-1.warc",
}
#: HTTP header lines, behind a wrong length, that whoever made the list took for ARC documents.
NOT_DOCUMENTS = {
    "broken.warc": 2,
    "jhove__invalid__invalid-warcfile-fields-empty.warc": 1,
    "jhove__invalid__invalid-warcfile-fields-invalidformat.warc": 1,
}


@dataclass
class Scan:
    """What a scan by brute force finds: sound records, and whether they are all of the file."""

    records: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    covers: bool = True


def fields(head: bytes) -> dict[str, str]:
    lines = re.sub(rb"\r*\n[ \t]+", b" ", head).split(b"\n")  # a line that begins with a blank goes on with the last
    pairs = (line.partition(b":") for line in lines[1:] if b":" in line)
    found: dict[str, str] = {}
    for name, _, value in pairs:
        found.setdefault(name.strip().lower().decode("latin-1"), value.strip().decode("utf-8", "replace"))
    return found


def scan_plain(stream: bytes, scan: Scan) -> None:
    """Every record whose length leads to the next one or to the end; behind one that does not, at the next line that
    is a version line."""
    at = 0
    while at < len(stream):
        if stream[at : at + 1] in (b"\r", b"\n"):
            at += 1
            continue
        end_of_head = re.compile(rb"\n\r*\n").search(stream, at)
        head = stream[at : end_of_head.start()] if end_of_head else b""
        told = fields(head)
        if (
            re.match(rb"WARC/[01]\.", head, re.IGNORECASE)
            and "warc-type" in told
            and told.get("content-length", "").isdigit()
        ):
            assert end_of_head is not None
            end = end_of_head.end() + int(told["content-length"])
            behind = stream[end : end + 4000].lstrip(b"\r\n")
            if end <= len(stream) and (behind[:5].upper() == b"WARC/" or not stream[end:].strip(b"\r\n")):
                scan.records[told["warc-type"].lower(), told.get("warc-record-id")] += 1
                at = end
                continue
        scan.covers = False
        following = re.compile(rb"^WARC/[01]\.", re.MULTILINE | re.IGNORECASE).search(stream, at + 1)
        if following is None:
            return
        at = following.start()


def scan_gzip(content: bytes, scan: Scan) -> None:
    """Every place where zlib decodes a whole member, none inside another."""
    at, stream, sound_until = 0, b"", 0
    while (at := content.find(b"\x1f\x8b\x08", at)) >= 0:
        inflate = zlib.decompressobj(31)
        try:
            text = inflate.decompress(content[at:])
        except zlib.error:
            text = b""
        if not inflate.eof:
            at += 1
            continue
        if content[sound_until:at]:
            scan.covers = False
            scan_plain(stream, scan)
            stream = b""
        stream += text
        at = sound_until = len(content) - len(inflate.unused_data)
    scan.covers &= sound_until == len(content)
    scan_plain(stream, scan)


def scan_file(content: bytes) -> Scan:
    scan = Scan()
    if content.startswith(b"BZh"):
        scan_plain(bz2.decompress(content), scan)
    elif content.startswith(b"\x04\x22\x4d\x18"):
        scan_plain(pa.CompressedInputStream(pa.BufferReader(content), "lz4").read(), scan)
    elif content.startswith(b"\x28\xb5\x2f\xfd"):
        scan_plain(zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read(), scan)
    elif content.startswith(b"\x1f\x8b") or not re.search(rb"^WARC/[01]\.", content, re.MULTILINE):
        scan_gzip(content, scan)
    else:
        scan_plain(content, scan)
    return scan


def by_warcio(path: Path) -> Counter[tuple[str, str | None]]:
    """(type, record id) of every record warcio reads before it gives up; it warns on stderr."""
    found: Counter[tuple[str, str | None]] = Counter()
    logging.disable(logging.WARNING)
    try:
        with open(path, "rb") as file, contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
            for record in ArchiveIterator(file, no_record_parse=True):
                identity = record.rec_headers.get_header("WARC-Record-ID")
                found[(record.rec_type or "").strip().lower(), identity] += 1
    finally:
        logging.disable(logging.NOTSET)
    return found


def by_kind(records: Counter[tuple[str, str | None]]) -> Counter[str]:
    """How many of each type, pages together."""
    counts = Counter[str]()
    for (kind, _), number in records.items():
        kind = kind.strip().lower()
        counts["page" if kind in PAGES else "none" if kind in ("", "null") else kind] += number
    return counts


def listed(shared: Path) -> dict[Path, dict[str, Any]]:
    folder = shared / "data" / "warc_real"
    rows = json.loads((folder / "INDEX.json").read_text())
    return {folder / row["repo"].replace("/", "+") / row["file"]: row for row in rows}


def all_files(shared: Path) -> list[Path]:
    found = {path for path in (shared / "data" / "warc_broken_derived").iterdir() if path.is_file()}
    found |= {path for path in (shared / "data" / "warc_real").rglob("*") if path.is_file()}
    return sorted(path for path in found if path.name not in ("INDEX.json", "bench.warc.bz2"))


def is_arc(path: Path) -> bool:
    return ".arc" in path.name


@pytest.mark.slow
def test_every_file_gives_what_warcio_and_a_scan_find_in_it(shared: Path) -> None:
    index, wrong, num_damaged = listed(shared), [], 0
    for path in all_files(shared):
        log, content = ReadLog(), path.read_bytes()
        found = pages(path, log)
        assert len({page.doc_id for page in found}) == len(found), path
        ours = Counter(page.record_id for page in found)
        numbers = Counter(log.other_records) + Counter({"page": len(found)})
        scan, warcio = scan_file(content), by_warcio(path)
        if path.name in NOT_RECORDS:
            assert not found, path
            assert log.damage[-1]["why"] == "no WARC or ARC record found"
            continue
        expected = [
            Counter({identity: n for (kind, identity), n in found.items() if kind in PAGES and identity})
            for found in (warcio, scan.records)
        ]
        for who, identities in zip(("warcio", "the scan"), expected, strict=True):
            if identities - ours:
                wrong.append(f"{path.name}: {who} has pages {identities - ours}")
        kinds = {"warcio": by_kind(warcio), "the scan": by_kind(scan.records)}
        if path in index:
            kinds["the list"] = by_kind(Counter({(kind, None): n for kind, n in index[path]["records"].items()}))
        for who, counts in kinds.items():
            if is_arc(path):
                counts["arc_header"] += counts.pop("warcinfo", 0)
            if who == "the list":
                counts["page"] -= NOT_DOCUMENTS.get(path.name, 0)
            if counts - numbers:
                wrong.append(f"{path.name}: {who} has {counts - numbers} more, of {numbers}")
        for item in log.damage:
            assert item["file"] == str(path)
            assert 0 <= item["offset"] <= len(content), path
        if not scan.covers and not is_arc(path) and not log.damage:
            wrong.append(f"{path.name}: no damage is noted, and the scan has gaps")
        if scan.covers and scan.records and log.damage:
            wrong.append(f"{path.name}: the scan has no gap, and damage is noted: {log.damage}")
        num_damaged += bool(log.damage)
    assert not wrong, "\n".join(wrong)
    assert num_damaged >= 50
