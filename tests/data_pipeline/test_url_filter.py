"""Block lists of domains and URLs, and words in URLs."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.page.document import Page
from quern.data_pipeline.page.url import canonicalize
from quern.data_pipeline.stages import url_filter
from quern.data_pipeline.stages.url_filter import UrlConfig, UrlFilter, load_hashes, url_keys
from quern.errors import InputError
from support.named_cases import each
from support.programs import python


def page(url: str | None) -> Page:
    return Page("s", "f", "f", 0, url=url)


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def make(tmp_path: Path, action: str = "drop", **lists: tuple[str, ...]) -> UrlFilter:
    given: dict[str, Any] = {k: (write(tmp_path / f"{k}.txt", *v),) for k, v in lists.items()}
    return UrlFilter(UrlConfig(action=action, cache=str(tmp_path / "cache"), **given))


def failed(stage: UrlFilter, url: str | None) -> list[str]:
    return [rule for _, rule in stage(page(url)).failures]


def test_page_gets_its_canonical_url_surt_and_host(tmp_path: Path) -> None:
    result = make(tmp_path)(page("HTTP://WWW.Example.com:80/A/?utm_source=x"))
    assert result.canonical_url == "http://www.example.com/A/"
    assert result.surt == "com,example)/a"
    assert result.host == "www.example.com"
    assert result.measures == {}
    assert result.failures == []


def test_page_without_url_meets_no_rule(tmp_path: Path) -> None:
    stage = make(tmp_path, domains=("bad.com",), words=("bad",))
    for url in (None, "urn:isbn:9780306406157", "not a url"):
        result = stage(page(url))
        assert (result.canonical_url, result.surt, result.host) == (None, None, None)
        assert result.measures == {}
        assert result.failures == []


@pytest.mark.parametrize("action", ["drop", "measure"])
def test_a_url_too_long_for_any_server_is_cut_and_fails(tmp_path: Path, action: str) -> None:
    stage = make(tmp_path, action)
    url = "http://e.com/" + "a" * (16_384 - 13)
    assert stage(page(url)).canonical_url == url
    result = stage(page(url + "a"))
    assert (result.url, result.canonical_url, result.surt, result.host) == (url, None, None, None)
    assert result.failures == [("url", "url.too_long")]
    assert canonicalize(url + "a") is None


DOMAINS = (
    "# comment",
    "",
    "bad.com",
    "sub.half.org",
    "*.Star.net.",
    "0.0.0.0 hosts.io",
    "bücher.example",
    "4.3.2.1",
    "co.uk",
)


BELOW_DOMAINS = [
    ("http://bad.com/", True),
    ("https://www.bad.com/x", True),
    ("https://a.b.c.BAD.com:8080/x?y", True),
    ("http://bad.com./", True),
    ("http://notbad.com/", False),
    ("http://bad.com.example.org/", False),
    ("http://bad.co/", False),
    ("http://half.org/", False),
    ("http://x.sub.half.org/", True),
    ("http://subhalf.org/", False),
    ("http://a.star.net/", True),
    ("http://hosts.io/", True),
    ("http://0.0.0.0/", False),
    ("http://xn--bcher-kva.example/", True),
    ("http://4.3.2.1/", True),
    ("http://9.4.3.2.1.example/", False),
    ("http://0x04030201/", True),
    ("http://5.4.3.2/", False),
    ("http://fine.co.uk/", False),
    ("http://[2001:db8::1]/", False),
    ("http://comment/", False),
]


def test_listed_domain_blocks_what_is_below_it(tmp_path: Path) -> None:
    stage = make(tmp_path, domains=DOMAINS)

    def check(url: str, blocked: bool) -> None:
        result = stage(page(url))
        assert result.measures == {"url.blocked_domain": float(blocked)}
        assert result.failures == ([("url", "url.blocked_domain")] if blocked else [])

    each(BELOW_DOMAINS, check)


URLS = ("www.mixed.com/bad", "https://mixed.com/Case/", "mixed.com/q?id=1", "front.com", "mixed.com/a/b/")


BELOW_URLS = [
    ("http://mixed.com/bad", True),
    ("https://www.mixed.com/bad/", True),
    ("https://mixed.com/bad/deep/er?x=1", True),
    ("https://mixed.com/bad?x=1", True),
    ("https://mixed.com/badger", False),
    ("https://mixed.com/good/bad", False),
    ("https://other.mixed.com/bad", False),
    ("http://mixed.com/case", True),
    ("http://mixed.com/q?id=1", True),
    ("http://mixed.com/q?id=1&utm_source=x", True),
    ("http://mixed.com/q?id=10", False),
    ("http://mixed.com/q", False),
    ("http://front.com/", True),
    ("http://front.com/page", False),
    ("http://mixed.com/a/b", True),
    ("http://mixed.com/a", False),
    ("http://mixed.com/", False),
]


def test_listed_url_blocks_what_is_below_its_path(tmp_path: Path) -> None:
    stage = make(tmp_path, urls=URLS)

    def check(url: str, blocked: bool) -> None:
        assert failed(stage, url) == (["url.blocked_url"] if blocked else [])

    each(BELOW_URLS, check)


WITH_WORDS = [
    ("http://example.com/sex/", 1),
    ("http://example.com/SEX-free.html", 1),
    ("http://sex.example.com/sex?sex", 3),
    ("http://essex.gov.uk/sussex", 0),
    ("http://example.com/hot-girls/", 1),
    ("http://example.com/hot/girls", 1),
    ("http://example.com/girls-hot", 0),
    ("http://example.com/%D0%9F%D0%9E%D0%A0%D0%9D%D0%9E", 1),
    ("http://xn--h1ajim.example/", 1),
    ("http://example.com/s%65x", 1),
    ("http://example.com/SCHEI%C3%9FE", 1),
]


def test_words_are_whole_words_of_the_url(tmp_path: Path) -> None:
    # xn--h1ajim is the punycode of the Cyrillic host name below
    stage = make(tmp_path, action="measure", words=("Sex", "hot girls", "порно", "руни", "scheisse"))

    def check(url: str, hits: int) -> None:
        assert stage(page(url)).measures == {"url.banned_words": float(hits)}

    each(WITH_WORDS, check)


def test_soft_words_fail_only_together(tmp_path: Path) -> None:
    stage = make(tmp_path, soft_words=("adult", "teen"))
    assert failed(stage, "http://example.com/adult-education") == []
    assert failed(stage, "http://example.com/adult/teen") == ["url.soft_words"]


def test_measuring_fails_nothing(tmp_path: Path) -> None:
    stage = make(tmp_path, action="measure", domains=("bad.com",), urls=("bad.com/x",), words=("x",), soft_words=("x",))
    result = stage(page("http://bad.com/x"))
    assert result.failures == []
    assert result.measures == dict.fromkeys(stage.measures, 1.0)
    assert len(stage.measures) == 4


def test_every_failed_rule_is_noted(tmp_path: Path) -> None:
    stage = make(tmp_path, domains=("bad.com",), urls=("bad.com/x",), words=("x",))
    assert failed(stage, "http://bad.com/x") == ["url.blocked_domain", "url.blocked_url", "url.banned_words"]


LABELS = st.sampled_from(["a", "b", "ab", "aa", "ba", "co"])
ENDS = st.sampled_from(["com", "org"])


@pytest.mark.slow
@settings(max_examples=12)
@given(st.lists(st.tuples(st.lists(LABELS, min_size=1, max_size=3), ENDS), min_size=1, max_size=30))
def test_lookup_agrees_with_a_plain_set(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[list[str], str]]
) -> None:
    names = [".".join([*labels, end]) for labels, end in parts]
    tmp_path = tmp_path_factory.mktemp("lists")
    listed, asked = set(names[::2]), names
    stage = make(tmp_path, domains=tuple(listed))
    for name in asked:
        labels = name.split(".")
        expected = any(".".join(labels[i:]) in listed for i in range(len(labels) - 1))
        assert bool(stage(page(f"http://{name}/")).failures) == expected


def test_list_is_read_once_and_mapped_from_then_on(tmp_path: Path) -> None:
    path = write(tmp_path / "list", "b.com", "a.com", "b.com")
    cache = str(tmp_path / "cache")
    first = load_hashes([path], "domain", cache)
    assert first.dtype == np.uint64
    assert len(first) == 2
    assert first[0] < first[1]
    (file,) = Path(cache).iterdir()
    before = file.stat().st_mtime_ns
    again = load_hashes([path], "domain", cache)
    assert isinstance(again, np.memmap)
    assert file.stat().st_mtime_ns == before
    write(tmp_path / "list", "c.com")
    assert load_hashes([path], "domain", cache).tolist() != first.tolist()
    assert len(list(Path(cache).iterdir())) == 2


def test_damaged_cache_is_made_again(tmp_path: Path) -> None:
    path = write(tmp_path / "list", *(f"a{i}.com" for i in range(100)))
    cache = tmp_path / "cache"
    expected = load_hashes([path], "domain", str(cache)).tolist()
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:200])
    assert load_hashes([path], "domain", str(cache)).tolist() == expected


def test_unwritable_cache_changes_no_result(tmp_path: Path) -> None:
    path = write(tmp_path / "list", "a.com")
    blocker = write(tmp_path / "file", "x")
    in_memory = load_hashes([path], "domain", blocker + "/below")
    assert in_memory.tolist() == load_hashes([path], "domain", str(tmp_path / "cache")).tolist()


@pytest.mark.slow
def test_workers_starting_together_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "list", *(f"a{i}.com" for i in range(2000)))
    code = (
        "import sys; from quern.data_pipeline.stages.url_filter import load_hashes\n"
        "print('ready', flush=True); input()\n"
        "print(load_hashes([sys.argv[1]], 'domain', sys.argv[2]).tolist())"
    )
    command = [python(), "-c", code, path, str(tmp_path / "cache")]
    workers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    try:
        assert [worker.stdout.readline() for worker in workers if worker.stdout] == ["ready\n"] * 6
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
        said = [worker.communicate()[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * 6
    results = [json.loads(text) for text in said]
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 2000
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".npy"]


def test_gzipped_lists_and_globs_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.list").write_bytes(gzip.compress(b"bad.com\n"))
    write(tmp_path / "b.list", "worse.com")
    stage = UrlFilter(UrlConfig(domains=(str(tmp_path / "*.list"),), cache=str(tmp_path / "cache")))
    assert failed(stage, "http://bad.com/")
    assert failed(stage, "http://worse.com/")


@pytest.mark.parametrize("key", ["domains", "urls", "words", "soft_words"])
def test_missing_and_empty_lists_are_named(tmp_path: Path, key: str) -> None:
    for path in (str(tmp_path / "missing.txt"), str(tmp_path / "none*.txt"), str(tmp_path), write(tmp_path / "e", "#")):
        with pytest.raises(InputError, match=path.replace("*", r"\*")):
            UrlFilter(UrlConfig(**{key: (path,)}, cache=str(tmp_path / "cache")))


@pytest.mark.parametrize("key", ["domains", "words"])
def test_damaged_gzipped_list_is_named(tmp_path: Path, key: str) -> None:
    content = bytearray(gzip.compress("\n".join(f"a{i * 7919 % 99991}.com" for i in range(5000)).encode()))
    content[2000:2400] = bytes(400)
    (tmp_path / "x.gz").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"x\.gz: the list cannot be read"):
        UrlFilter(UrlConfig(**{key: (str(tmp_path / "x.gz"),)}, cache=str(tmp_path / "cache")))


def test_cached_list_is_made_anew_under_other_rules_for_tracking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "list", "a.com/x?fbclid=1")
    load_hashes([path], "url", str(tmp_path / "cache"))
    monkeypatch.setattr(url_filter, "TRACKING_VERSION", url_filter.TRACKING_VERSION + 1)
    load_hashes([path], "url", str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_keys_of_a_hostile_url_are_few() -> None:
    assert len(url_keys("http://example.com/" + "a/" * 10_000)) < 50


@pytest.mark.shared
def test_real_lists_block_what_they_name(shared: Path, tmp_path: Path) -> None:
    folder = shared / "data" / "wordlists" / "ut1"
    config = UrlConfig(domains=(f"{folder}/*.domains",), urls=(f"{folder}/adult.urls",), cache=str(tmp_path))
    stage = UrlFilter(config)
    for name in (folder / "gambling.domains").read_text().split()[::500]:
        assert failed(stage, f"https://www.{name}/x") or name.count(".") == 0, name
    for url in (folder / "adult.urls").read_text().split()[::50]:
        assert "url.blocked_url" in failed(stage, f"https://{url}"), url
    assert failed(stage, "https://en.wikipedia.org/wiki/Gambling") == []
