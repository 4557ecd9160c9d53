"""What a page would cost its parser, counted before it is parsed."""

from __future__ import annotations

import lxml.etree
import lxml.html
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resiliparse.parse.html import HTMLTree

from quern.data_pipeline.extraction.page_bounds import (
    _attribute_counts,
    _has_long_tag,
    has_attributes_over,
    num_elements,
)
from support.growth import assert_grows_tamely
from support.named_cases import with_each

pytestmark = pytest.mark.slow

NAMES = [f"n{number}" for number in range(12_000)]

TAGS = st.lists(
    st.lists(
        st.sampled_from([" a", "\nb", "/c", " d=1", " e = 'x y>z'", ' f="<p g h>"', " i='", ' j="', " = k", " l=m=n"]),
        max_size=6,
    ).map(lambda parts: f"<p{''.join(parts)}>text</p>")
    | st.sampled_from(
        ["<!-- <p q r s> -->", "<script>if (a <b c d e) {}</script>", "<p>", "a < b c d", "<style> <u v w"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=100)
@given(TAGS)
def test_attributes_counted_are_no_fewer_than_the_parser_finds(html: str) -> None:
    root = lxml.html.document_fromstring(f"<html><body><div>x</div>{html}</body></html>")
    found = [len(element.attrib) for element in root.iter(lxml.etree.Element)]
    counted = list(_attribute_counts(html, 100))
    assert sum(counted) >= sum(found)
    assert max(counted, default=0) >= max(found)


def test_attributes_are_counted_where_they_stand() -> None:
    html = '<a b c=d e="f>g" h=\'i\' j/k><p><!-- <a b> --><script x>if (a<b c d e)</script><br/><i q = "x">< u v>'
    assert list(_attribute_counts(html, 100)) == [6, 1, 1]
    assert next(_attribute_counts(html, 3)) == 4


@with_each("<!-->", "<!--->", "<!-- --!>", "<script/>", "<style />", "<script>x</script x>", "<x y='")
def test_no_flood_hides_behind_what_looks_open(before: str) -> None:
    html = f"<html><body>{before}<p {' '.join(NAMES[:1_200])}>x</p></body></html>"
    found = max(len(element.attrib) for element in lxml.html.document_fromstring(html).iter(lxml.etree.Element))
    assert has_attributes_over(html, 50_000, 1_000) >= (found > 1_000)


@with_each(" ", "\n", "/", "=1 ", '="<>" ', "='>'")
def test_floods_of_attributes_are_seen_and_pages_within_the_bounds_are_not(parted: str) -> None:
    def page(num: int, tags: int = 1) -> str:
        return "<p>words of a page</p>" * 500 + f"<p {parted.join(NAMES[:num])}{parted}>text</p>" * tags

    valued = "=" in parted
    hidden = ">" in parted
    assert has_attributes_over(page(12_000 if hidden else 1_500), 50_000, 1_000)
    assert not has_attributes_over(page(900), 50_000, 1_000)
    assert not has_attributes_over(page(900, 50), 50_000, 1_000)
    if valued:
        assert has_attributes_over(page(900, 60), 50_000, 1_000)


def test_the_bounds_are_met_exactly() -> None:
    def page(*tags: int) -> str:
        return "x = y " * 100 + "".join(f"<p {' '.join(f'a{n}=1' for n in range(num))}>text</p>" for num in tags)

    assert not has_attributes_over(page(6, 10, 4), 20, 10)
    assert has_attributes_over(page(6, 10, 5), 20, 10)
    assert has_attributes_over(page(6, 11), 20, 10)


def test_text_and_scripts_are_no_attributes() -> None:
    for html in ("<p>" + "some words " * 50_000, "<script>for (i=0; i<n; i++) { " + "a = b; c = d; " * 30_000):
        assert not has_attributes_over(html, 50_000, 1_000)


SHAPES = [
    "<a ",
    "<a",
    "<a b",
    "a=",
    "a='",
    'a="',
    "<a b='",
    "<!--",
    "<script>",
    "</script",
    "<p a=b/",
    " ",
    "/",
    "<a b=c>",
    "='",
]


@with_each(*SHAPES)
def test_counting_attributes_takes_linear_time(shape: str) -> None:
    """Sixteen times the text; quadratic would be 256."""
    short, long = ("<p " + shape * (num // len(shape)) for num in (20_000, 320_000))
    assert_grows_tamely(lambda html: sum(_attribute_counts(html, 1 << 40)), short, long, 64)
    assert_grows_tamely(lambda html: _has_long_tag(html, 1 << 40), short, long, 64)


@with_each("</p>", "</P>", "</br>", "</BR >", "<path></p>", "<pre></pre></p>", "<p></P></P>", "<image>", "<p/></p\n>")
def test_closing_tags_that_make_elements_are_counted_as_a_browser_makes_them(body: str) -> None:
    html = f"<html><head></head><body>{body * 200}<i>x</i>"
    built = len(HTMLTree.parse(html).document.query_selector_all("*"))
    assert built <= num_elements(html) <= 2 * built + 4
