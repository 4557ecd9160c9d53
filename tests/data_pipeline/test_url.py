"""Canonical URLs and SURT keys."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quern.data_pipeline.page.url import canonicalize, host, surt
from support.named_cases import with_each

# Expected values by the URL standard's parsing rules and its own examples (url.spec.whatwg.org, 4.3 and 4.4).
WHATWG = [
    ("http://example.com", "http://example.com/"),
    ("HTTP://EXAMPLE.com/../x", "http://example.com/x"),
    ("https:example.org", "https://example.org/"),
    ("https://////example.com///", "https://example.com///"),
    ("https://example.com/././foo", "https://example.com/foo"),
    ("https://example.com/a/./b/../../c", "https://example.com/c"),
    ("https://example.com/a/%2e%2E/b", "https://example.com/b"),
    ("https:\\example.com\\a\\..\\b", "https://example.com/b"),
    ("https://EXAMPLE.com/Path/To", "https://example.com/Path/To"),
    ("  http://example.com/a b \n", "http://example.com/a%20b"),
    ("http://ex\tam\nple.com/a\r\nb", "http://example.com/ab"),
    ("http://example.com:80/", "http://example.com/"),
    ("https://example.com:443/", "https://example.com/"),
    ("http://example.com:443/", "http://example.com:443/"),
    ("http://example.com:0080/", "http://example.com/"),
    ("http://0x7F.1/", "http://127.0.0.1/"),
    ("http://2130706433/", "http://127.0.0.1/"),
    ("http://0300.0250.0.01/", "http://192.168.0.1/"),
    ("http://1.2.3/", "http://1.2.0.3/"),
    ("http://[1:0::]/", "http://[1::]/"),
    ("http://[::127.0.0.1]/", "http://[::7f00:1]/"),
    ("http://faß.ExAmPlE/", "http://xn--fa-hia.example/"),
    ("http://Bücher.example/", "http://xn--bcher-kva.example/"),
    ("http://☃.net/", "http://xn--n3h.net/"),
    ("http://日本語。ＪＰ/", "http://xn--wgv71a119e.jp/"),
    ("http://EXAMPLE%2Ecom/", "http://example.com/"),
    ("http://ex%61mple.com/", "http://example.com/"),
    ("http://example.com/ü?ö", "http://example.com/%C3%BC?%C3%B6"),
    ('http://example.com/"<>`{}', "http://example.com/%22%3C%3E%60%7B%7D"),
    ("http://example.com/?it's", "http://example.com/?it%27s"),
    ("http://example.com/foo%", "http://example.com/foo%"),
    ("http://example.com/\ud800", "http://example.com/%EF%BF%BD"),
]

OURS = [
    ("http://example.com/%7efoo/%7Ebar", "http://example.com/~foo/~bar"),
    ("http://example.com/%e4%f6", "http://example.com/%E4%F6"),
    ("http://example.com/a%2fb%3F", "http://example.com/a%2Fb%3F"),
    ("http://example.com/%41%2D?%5F=%61", "http://example.com/A-?_=a"),
    ("https://user:secret@example.com/x", "https://example.com/x"),
    ("https://user@example.com:8443/x", "https://example.com:8443/x"),
    ("https://example.com/x#part", "https://example.com/x"),
    ("https://example.com/x?#part", "https://example.com/x"),
    ("https://example.com/x?", "https://example.com/x"),
    ("https://example.com/x?&", "https://example.com/x"),
    ("https://example.com/x?b=2&a=1&b=1", "https://example.com/x?b=2&a=1&b=1"),
    ("https://example.com/?utm_source=a&id=7&UTM_Medium=b&gclid=c", "https://example.com/?id=7"),
    ("https://example.com/?utm%5Fsource=a", "https://example.com/"),
    ("https://example.com/?fbclid=x&q=utm_source%3D1", "https://example.com/?q=utm_source%3D1"),
    ("https://example.com/?mc_cid=1&mc_eid=2&msclkid=3&srsltid=4", "https://example.com/"),
    ("https://example.com/?PHPSESSID=1234&page=2", "https://example.com/?page=2"),
    ("https://example.com/a.jsp;jsessionid=0A1B.node1?x=1", "https://example.com/a.jsp?x=1"),
    ("https://example.com/a;JSESSIONID=0A1B/b;v=1", "https://example.com/a/b;v=1"),
    ("https://example.com/a/b/..;jsessionid=1/c", "https://example.com/a/c"),
    ("https://example.com/(S(lit3py55t21z5v55vlm25s55))/a.aspx", "https://example.com/a.aspx"),
    ("https://example.com/t?sid=58428beaa14598c2e02d93ad5c773e4d&f=4", "https://example.com/t?f=4"),
    # content, not a visit
    ("https://example.com/article?sid=123", "https://example.com/article?sid=123"),
    ("https://example.com/article?sid=a1b2c3", "https://example.com/article?sid=a1b2c3"),
    ("https://example.com/?session=" + "9" * 30, "https://example.com/?session=" + "9" * 30),
    ("https://example.com/?s=porous+materials", "https://example.com/?s=porous+materials"),
    ("https://example.com/?ref=home&source=web&id=1", "https://example.com/?ref=home&source=web&id=1"),
    ("https://example.com/?utm", "https://example.com/?utm"),
    ("https://example.com/utm_source=1", "https://example.com/utm_source=1"),
]  # fmt: skip

NOT_PAGES = [
    "", "example.com", "/path", "//example.com/x", "http://", "http://a b/", "http://256.256.256.256/",
    "http://[::1/", "http://example.com:99999/", "http://exa%00mple.com/", "mailto:a@example.com",
    "ftp://example.com/x", "data:,x", "file:///etc/passwd", "urn:isbn:9780306406157", "javascript:alert(1)",
    "dns:example.com", "localhost:80", "\ud800",
]  # fmt: skip

# Made with the Internet Archive's own package: surt 0.3.1, surt.surt(url).
SURT = [
    ("http://www.archive.org/goo/?a=2&b&a=1", "org,archive)/goo?a=1&a=2&b"),
    ("http://10.0.0.100/x", "100,0,0,10)/x"),
    ("http://example.com:8080/A/b/", "com,example:8080)/a/b"),
    ("https://www2.example.co.uk/", "uk,co,example)/"),
    ("http://example.com/%D0%B0/%2F%3a?q=%2B+%20", "com,example)/%d0%b0/:?q=++%20"),
    ("http://example.com/a//b", "com,example)/a/b"),
    ("http://example.com/a|b?c|d", "com,example)/a|b?c|d"),
    ("http://xn--bcher-kva.example/%C3%BC?%C3%BC", "example,xn--bcher-kva)/%c3%bc?%c3%bc"),
    ("http://www.com/", "com)/"),
    ("http://[2001:db8::1]/a", "2001:db8::1)/a"),
    ("http://example.com./a", "com,example)/a"),
    ("http://example.com/?a=b%26c%3Dd", "com,example)/?a=b&c=d"),
    ("http://example.com/100%25", "com,example)/100%25"),
    ("http://example.com/?=&=a", "com,example)/?=&=a"),
]


@with_each(*WHATWG, *OURS)
def test_canonical_form(url: str, expected: str) -> None:
    assert canonicalize(url) == expected
    assert canonicalize(expected) == expected


@with_each(*NOT_PAGES)
def test_what_names_no_page_has_no_canonical_form(url: str) -> None:
    assert canonicalize(url) is None


@with_each(*SURT)
def test_surt_is_the_key_of_the_commoncrawl_index(url: str, expected: str) -> None:
    assert surt(url) == expected


@with_each(
    ("https://example.com/", "example.com"),
    ("https://example.com:8443/x:y", "example.com"),
    ("https://example.com./x", "example.com"),
    ("http://[2001:db8::1]:81/", "[2001:db8::1]"),
    ("http://127.0.0.1:81/", "127.0.0.1"),
)
def test_host_has_no_port_and_no_final_dot(url: str, expected: str) -> None:
    assert host(url) == expected


@given(st.text(max_size=80))
def test_any_text_is_answered(url: str) -> None:
    canonical = canonicalize(url)
    assert canonical is None or canonicalize(canonical) == canonical


PIECES = [
    "%", "%2", "%25", "%2e", "%41", "%34", "%31", "4", "1", "A", ".", "..", "/", ";jsessionid=1",
    "(S(" + "a" * 24 + "))", "?", "&", "=", "utm_a", "sid", "a1" * 16, "#", "\\", ":", "@", "ü", "\ud800", "\t", " ",
    ";", "%3b", "jsessionid=",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("/%%34%31")
@example("/%4%31")
@example("/..;jsessionid=1/(S(" + "a" * 24 + "))/..")
def test_canonical_form_is_its_own(tail: str) -> None:
    canonical = canonicalize("http://Example.com/" + tail)
    assert canonical is not None
    assert canonicalize(canonical) == canonical
    assert canonical.startswith("http://example.com/")
    assert "#" not in canonical
    assert all(escape.isupper() or escape.isdigit() for escape in re.findall("%([0-9A-Fa-f]{2})", canonical))
    assert surt(canonical).startswith("com,example)/")


@given(st.text("abcXYZ019-._~", min_size=1, max_size=20))
def test_escaping_unreserved_characters_changes_nothing(name: str) -> None:
    escaped = "".join(f"%{ord(c):02x}" for c in name)
    assert canonicalize(f"http://h/{escaped}?{escaped}") == canonicalize(f"http://h/{name}?{name}")


@pytest.mark.shared
def test_real_urls_are_canonical_after_one_pass(shared) -> None:  # type: ignore[no-untyped-def]
    import json

    with open(shared / "data" / "manifest.jsonl", encoding="utf-8") as lines:
        urls = [json.loads(line)["url"] for line in lines]
    assert len(urls) > 1900
    for url in urls:
        canonical = canonicalize(url)
        assert canonical is not None
        assert canonicalize(canonical) == canonical
