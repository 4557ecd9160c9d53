"""Real crawler files, sound and damaged, against the corpus's own lists and against warcio."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import cchardet
import pytest
from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.sources import ReadLog, SourceConfig, plan, read
from support.data_pipeline.sources_warc_files import pages

pytestmark = pytest.mark.shared

#: What a label of the corpus's list means, by the WHATWG Encoding Standard.
CODECS = {"gb2312": "gb18030", "gbk": "gb18030", "iso-8859-1": "cp1252", "windows-1252": "cp1252", "us-ascii": "ascii"}


def manifest(shared: Path) -> dict[str, dict[str, Any]]:
    with open(shared / "data" / "manifest.jsonl", encoding="utf-8") as file:
        return {row["record_id"]: row for row in map(json.loads, file)}


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
def test_every_page_of_the_real_files_has_the_identity_and_text_it_should(shared: Path, every: int) -> None:
    """Of every so-many-th file, from the last one on, which holds the page whose text is another."""
    listed = manifest(shared)
    source = SourceConfig(name="crawl", kind="warc", paths=str(shared / "data" / "warc" / "*.warc.gz"))
    log, seen, different = ReadLog(), set(), Counter[str]()
    peer_better = 0
    partitions = plan(source)[::-every]
    for partition in partitions:
        path = Path(partition.files[0].path)
        payloads = {}
        with open(path, "rb") as file:
            for record in ArchiveIterator(file):
                if record.rec_type == "response":
                    payloads[record.rec_headers["WARC-Record-ID"]] = record.content_stream().read()
        content = path.read_bytes()
        for page in read(source, partition, log):
            assert page.record_id is not None
            row = listed[page.record_id]
            assert (page.relative_path, page.record_offset, page.url) == (row["warc"], row["offset"], row["url"])
            assert page.fault is None
            member = gzip.decompress(content[page.record_offset : page.record_offset + page.record_length])
            assert f"WARC-Record-ID: {page.record_id}\r\n".encode() in member
            payload = payloads[page.record_id]
            codec = CODECS.get(row["charset"], row["charset"])
            truth = payload.decode(codec, "replace").removeprefix("\ufeff").replace("\0", "")
            if page.raw != truth:
                different[row["charset_how"]] += 1
            try:
                assert page.raw == payload.decode("utf-8").removeprefix("\ufeff").replace("\0", "")
            except UnicodeDecodeError:
                guess = cchardet.detect(payload)["encoding"]
                with contextlib.suppress(UnicodeDecodeError, LookupError, TypeError):
                    peer_better += payload.decode(guess) == truth and page.raw != truth
            seen.add(page.record_id)
    read_from = {partition.files[0].relative_path for partition in partitions}
    assert seen == {record_id for record_id, row in listed.items() if row["warc"] in read_from}
    assert len(seen) == {1: 1994, 3: 664}[every]
    assert log.damage == []
    assert log.other_records == {"warcinfo": len(partitions), "request": len(seen)}
    # The one page the list calls dirty UTF-8 has no valid UTF-8 character beyond ASCII: it is windows-1252.
    assert different == {"utf8,dirty": 1}
    assert peer_better == 0


#: What is left of the 25 records of 00-good.warc.gz, as the kind of damage allows.
BROKEN = {
    "01-truncated-mid-member.warc.gz": 21,
    "02-truncated-mid-record.warc": 21,
    "13-empty.warc.gz": 0,
    "14-empty-member.warc.gz": 0,
    "15-html-error-page-instead.warc.gz": 0,
    "16-second-half-only.warc.gz": 13,
}
#: Damage that leaves every record whole, or that is none.
SOUND = ("00-good.warc", "00-good.warc.gz", "07-whole-file-one-gzip-member.warc.gz")


def records_of(path: Path, log: ReadLog) -> int:
    found = pages(path, log)
    assert len({page.doc_id for page in found}) == len(found)
    for page in found:
        page.raw.encode("utf-8")
    return len(found) + sum(log.other_records.values())


@pytest.mark.slow
def test_every_record_a_damage_leaves_is_found(shared: Path) -> None:
    folder = shared / "data" / "warc_broken_derived"
    good = {page.record_id: page.raw for page in pages(folder / "00-good.warc.gz")}
    for path in sorted(folder.iterdir()):
        log = ReadLog()
        assert records_of(path, log) == BROKEN.get(path.name, 25), path.name
        assert bool(log.damage) == (path.name not in SOUND), path.name
        changed = [page for page in pages(path) if page.fault is None and page.raw != good[page.record_id]]
        assert len(changed) <= (12 if "lf-only" in path.name else 1), path.name


def test_arc_files_give_what_warcio_gives(shared: Path) -> None:
    expected = {"example.arc": 1, "example.arc.gz": 1, "bad.arc": 3, "example-space-in-url.arc": 1}
    for name, count in expected.items():
        path = shared / "data" / "warc_real" / "webrecorder+warcio" / name
        assert len(pages(path)) == count, name
    for name in ("hello-world.arc", "hello-world2.arc"):  # warcio stops at the second, which is version 2
        found = pages(shared / "data" / "warc_real" / "richardlehane+webarchive" / name)
        assert [page.url for page in found] == ["http://www.dryswamp.edu:80/index.html"], name


def test_wet_files_are_text(shared: Path) -> None:
    derived = next((shared / "data" / "wet_derived").iterdir())
    found = pages(derived, kind="wet")
    assert len(found) == 468
    assert {(page.media, page.charset, page.fault) for page in found} == {("text", "utf-8", None)}
    listed = manifest(shared)
    assert {page.url for page in found} <= {row["url"] for row in listed.values()}
    fake = shared / "data" / "warc_real" / "tensorflow+datasets" / "c4__cc_0.warc.wet"
    log = ReadLog()
    assert [page.url for page in pages(fake, log, kind="wet")] == ["http://fake/url/1", "http://fake/url/2"]
    assert log.damage


def test_real_json_lines_are_read(shared: Path) -> None:
    for name in ("speeches", "wikipedia", "code"):
        path = shared / "data" / "text" / f"{name}.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        assert [page.raw for page in pages(path, kind="jsonl") if page.fault is None] == [
            row["text"].replace("\0", "") for row in rows if row["text"].strip()
        ]
