"""Crawls as Common Crawl lays them out, from a web server that has bad days, or from a folder."""

from __future__ import annotations

import gzip
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
from pydantic import ValidationError

from quern import storage
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.sources import ReadLog, SourceConfig, plan, read
from quern.data_pipeline.sources.commoncrawl import parse_files
from quern.errors import InputError
from quern.remote.objects import Objects
from quern.remote.retry import Backoff, StoreError
from support.data_pipeline.digests import pages_hash
from support.data_pipeline.sources_warc_files import record
from support.named_cases import with_each
from support.remote import web_server
from support.remote.web_server import Fault, Web

CRAWL = "CC-MAIN-2026-30"
FILES = 12
OFTEN = 10**6


def name(number: int, form: str = "warc") -> str:
    segment = f"crawl-data/{CRAWL}/segments/1780000000000.{number // 6}"
    return f"{segment}/{form}/CC-MAIN-20260701000000-{number:05d}.warc{'.wet' if form == 'wet' else ''}.gz"


def warc(number: int, pages: int = 30) -> bytes:
    """A WARC file that gzip cannot make small, so that reading it takes several requests."""
    draw = random.Random(number)
    return b"".join(
        record(f"<html><body>{draw.randbytes(6000).hex()}</body></html>".encode(), url=f"http://e.com/{number}/{page}")
        for page in range(pages)
    )


def publish(web: Web, files: list[bytes]) -> None:
    for number, data in enumerate(files):
        web.files[name(number)] = data
    names = "".join(f"{name(number)}\n" for number in range(len(files)))
    web.files[f"crawl-data/{CRAWL}/warc.paths.gz"] = gzip.compress(names.encode())


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return [warc(number) for number in range(FILES)]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, files: list[bytes]) -> Iterator[Web]:
    for key, value in (("QUERN_STORE_TIMEOUT_S", "5"), ("QUERN_STORE_PATIENCE_S", "20"), ("NO_PROXY", "127.0.0.1")):
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys.modules[Objects.__module__], "Backoff", partial(Backoff, base_s=0.05, cap_s=0.5))
    with web_server.serve() as web:
        publish(web, files)
        yield web


def source(base: str, **more: Any) -> SourceConfig:
    return SourceConfig.model_validate({"name": "cc", "kind": "commoncrawl", "crawl": CRAWL, "base": base} | more)


def pages(settings: SourceConfig) -> list[tuple[Any, ...]]:
    log = ReadLog()
    found = [
        (p.doc_id, p.relative_path, p.position, p.record_length, p.url, p.raw, p.fault)
        for partition in plan(settings)
        for p in read(settings, partition, log)
    ]
    assert log.damage == []
    return found


def test_the_files_that_are_asked_for_are_planned_and_no_other_is_touched(web: Web, files: list[bytes]) -> None:
    planned = plan(source(web.url, files="10, 0-2,1"))
    assert [p.files[0].relative_path for p in planned] == [name(0), name(1), name(2), name(10)]
    assert [p.files[0].path for p in planned][3] == f"{web.url}/{name(10)}"
    assert [p.files[0].size for p in planned] == [len(files[n]) for n in (0, 1, 2, 10)]
    assert web.count("HEAD") == 4
    assert web.count("GET") == 1
    again = plan(source(web.url, files="0-2,10"))
    assert again == planned
    web.files[name(1)] = warc(99)
    assert [a != b for a, b in zip(plan(source(web.url, files="0-2,10")), planned, strict=True)] == [0, 1, 0, 0]


def test_all_files_are_planned_by_few_requests_at_a_time(web: Web) -> None:
    web.faults = [Fault("slow", "HEAD", "", OFTEN)]
    assert len(plan(source(web.url))) == FILES
    assert web.count("HEAD") == FILES
    assert web.most_under_way <= 4


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "cut", "503", "429", "hang up", "slow"])
def test_pages_and_their_ids_are_those_of_a_copy_in_a_folder(
    web: Web, files: list[bytes], tmp_path: Path, what: str
) -> None:
    for number in (0, 7):
        path = tmp_path / name(number)
        path.parent.mkdir(parents=True)
        path.write_bytes(files[number])
    (tmp_path / "crawl-data" / CRAWL / "warc.paths.gz").write_bytes(web.files[f"crawl-data/{CRAWL}/warc.paths.gz"])
    copy = source(str(tmp_path), files="0,7")
    expected = pages(copy)
    assert len(expected) == 60
    named = {"name": "cc", "kind": "warc", "paths": f"{tmp_path}/**/*.warc.gz", "root": str(tmp_path)}
    assert pages(SourceConfig.model_validate(named)) == expected
    if what:
        web.faults = [Fault(what, "GET", "", 5), Fault(what, "HEAD", "", 1)]
    assert pages(source(web.url, files="0,7")) == expected
    assert not what or web.struck(what) >= 5


def test_texts_of_wet_files(web: Web, tmp_path: Path) -> None:
    text = b"Words of a page.\n"
    web.files[name(0, "wet")] = record(text, kind="conversion", content_type="text/plain")
    web.files[f"crawl-data/{CRAWL}/wet.paths.gz"] = gzip.compress(f"{name(0, 'wet')}\n".encode())
    ((_, relative, _, _, _, raw, fault),) = pages(source(web.url, format="wet"))
    assert (relative, raw, fault) == (name(0, "wet"), text.decode(), None)


def test_a_file_that_changed_since_it_was_planned_is_an_error(web: Web) -> None:
    settings = source(web.url, files="3")
    (partition,) = plan(settings)
    web.files[name(3)] = warc(98)
    with pytest.raises(InputError, match=r"00003\.warc\.gz: changed since the run was planned; start it again"):
        list(read(settings, partition, ReadLog()))


def test_a_file_that_changes_just_before_its_first_byte_is_read_is_an_error(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = source(web.url, files="3")
    (partition,) = plan(settings)
    opened = storage.open_read

    def changing(path: str, *fingerprint: str) -> IO[bytes]:
        web.files[name(3)] = warc(98)
        return opened(path, *fingerprint)

    monkeypatch.setattr(storage, "open_read", changing)
    with pytest.raises(InputError, match=r"00003\.warc\.gz: changed since the run was planned; start it again"):
        list(read(settings, partition, ReadLog()))


@pytest.mark.slow
def test_a_server_that_stays_away_is_one_error(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUERN_STORE_PATIENCE_S", "1")
    settings = source(web.url, files="3")
    (partition,) = plan(settings)
    web.faults = [Fault("503", "GET", "00003", OFTEN)]
    with pytest.raises(StoreError, match=r"00003\.warc\.gz: .*503.*given up after \d+ tries in"):
        list(read(settings, partition, ReadLog()))


def test_a_crawl_that_is_not_there_and_numbers_beyond_its_files(web: Web) -> None:
    with pytest.raises(InputError, match=r"crawl: http.* has no crawl 'CC-MAIN-1999-01' \(http.*paths\.gz: no"):
        plan(source(web.url, crawl="CC-MAIN-1999-01"))
    with pytest.raises(InputError, match=r"files: expected numbers from 0 to 11, since CC-MAIN-2026-30 has 12"):
        plan(source(web.url, files="3,5-12"))
    del web.files[name(4)]
    with pytest.raises(InputError, match=r"00004\.warc\.gz: no such file"):
        plan(source(web.url))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<html>", "expected a gzip file"),
        (gzip.compress(b"crawl-data/a.gz\n" * 50)[:-12], "is cut off"),
        (gzip.compress(b""), "is empty"),
        (b"", "is empty"),
        (gzip.compress(b"a/b.gz\n\na/c.gz\n"), "line 2: expected a path such as"),
        (gzip.compress(b"a/b.gz\n../../etc/passwd\n"), "line 2: expected a path such as"),
        (gzip.compress(b"/etc/passwd\n"), "line 1: expected a path"),
        (gzip.compress(b"http://elsewhere/x.gz\n"), "line 1: expected a path"),
        (gzip.compress(b"a/b.gz?x=1\n"), "line 1: expected a path"),
        (gzip.compress(b"a/b.gz\n\xff\xfe\n"), "line 2: expected a path"),
        (gzip.compress(b"a/b.gz\na/c.gz\na/b.gz\n"), "line 3: a/b.gz: is listed twice"),
        (gzip.compress(bytes(70 << 20), 9), "expected at most 67108864 bytes of paths"),
        (bytes(65 << 20), "expected at most 67108864 bytes, has more"),
        (gzip.compress(b"".join(b"%x\n" % number for number in range(1_000_001)), 1), "expected at most 1000000 paths"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_list_that_is_none_is_named_with_its_line(web: Web, data: bytes, message: str) -> None:
    web.files[f"crawl-data/{CRAWL}/warc.paths.gz"] = data
    with pytest.raises(InputError, match=r"warc\.paths\.gz: ") as caught:
        plan(source(web.url))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_lists_in_several_gzip_members_and_without_a_last_newline(web: Web) -> None:
    web.files[f"crawl-data/{CRAWL}/warc.paths.gz"] = gzip.compress(f"{name(0)}\n".encode()) + gzip.compress(
        name(1).encode()
    )
    assert [p.files[0].relative_path for p in plan(source(web.url))] == [name(0), name(1)]


def test_ranges_of_files() -> None:
    assert [n for span in parse_files("7,0-3, 2-5") for n in span] == [0, 1, 2, 3, 4, 5, 7]
    assert parse_files("0-999999999") == [range(10**9)]
    for text in ("", "a", "1-", "-1", "1,,2", "1.5", "5-3", "1;2", "0-9999999999"):
        with pytest.raises(ValueError, match="expected"):
            parse_files(text)


@with_each(
    ({"crawl": None}, "crawl: expected the name of a crawl"),
    ({"crawl": "../x"}, "String should match pattern"),
    ({"paths": "x"}, "expected crawl, and files, instead"),
    ({"files": "9-1"}, "expected ranges that go up"),
    ({"kind": "warc", "paths": "x"}, "crawl: expected only with kind commoncrawl, got kind warc"),
    ({"kind": "warc", "crawl": None, "base": None}, "paths: expected at least one path"),
    ({"format": "wat"}, "Input should be 'warc' or 'wet'"),
)
def test_settings_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    given = {"name": "cc", "kind": "commoncrawl", "crawl": CRAWL, "base": "https://x.example"} | change
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate(given)


def test_where_a_crawl_is_read_from_decides_no_row(web: Web, tmp_path: Path) -> None:
    def hashes(**more: Any) -> dict[str, str]:
        given = source(web.url).model_dump() | more
        return pages_hash(PipelineConfig.model_validate({"run_dir": "r", "sources": [given]}))

    assert hashes() == hashes(base="s3://commoncrawl", files="0-3")
    assert hashes() != hashes(max_bytes=5)
