"""The visible text of a page, by which its language is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.stages.language import visible_text
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each


@with_each(
    ("<p>a<b class='x'>b</b></p>c", "a b c"),
    ("<SCRIPT>no</Script>yes<style>no</style>", "yes"),
    ("a<!-- no <p> -->b", "a b"),
    ("a<script>no", "a no"),  # never closed: its tags go, the page after it is not lost
    ("<script>'<style>'</script>yes</style>", "yes"),
    ("<scripty>yes</scripty>", "yes"),
    ("a < b > c", "a c"),
    ("a<p", "a"),
    ("", ""),
)
def test_visible_text(raw: str, visible: str) -> None:
    assert visible_text(raw) == visible


def spelled_out(raw: str) -> str:
    """The same by one look at a character: hidden elements and comments that are closed go, then tags."""
    names = ("script", "style", "noscript", "template", "svg", "textarea")
    shown, at = "", 0
    while at < len(raw):
        lower = raw[at:].lower()
        end = -1
        if lower.startswith("<!--"):
            end = raw.find("-->", at + 4)
            end = end + 3 if end >= 0 else -1
        for name in names:
            behind = raw[at + 1 + len(name) : at + 2 + len(name)]
            if lower.startswith(f"<{name}") and not (behind.isascii() and (behind.isalnum() or behind == "-")):
                close = raw.lower().find(f"</{name}", at + 1 + len(name))
                if close >= 0:
                    end = close + 2 + len(name)
                    while end < len(raw) and raw[end] not in "<>":
                        end += 1
                    end += raw[end : end + 1] == ">"
        shown, at = (shown + " ", end) if end >= 0 else (shown + raw[at], at + 1)
    text, inside = "", False
    for char in shown:
        if char == "<":
            inside = True
            text += " "
        elif char == ">" and inside:
            inside = False
        elif not inside:
            text += char
    return " ".join(text.split())


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<",
                ">",
                " ",
                "a",
                "<p>",
                "</p ",
                "<script",
                "<SCRIPT>",
                "</script",
                "</Script>",
                "<style>",
                "</style>",
                "<!--",
                "-->",
                "<svg/>",
                "</svg",
                "\n",
                "\x1c",
                "-",
                "é",
                "<spam>",
                "<t",
                "<n",
                "<!",
            ]
        ),
        max_size=12,
    ).map("".join)
)
def test_visible_text_is_what_a_look_at_each_character_leaves(raw: str) -> None:
    assert visible_text(raw) == spelled_out(raw)


@pytest.mark.slow
def test_visible_text_takes_linear_time() -> None:
    """Sixteen times the text; quadratic would be 256."""
    units = ["<script>", "<script", "<!--", "<", "<p ", "<svg><style>", "</script>", "<script></style>"]
    each(units, lambda unit: assert_grows_tamely(visible_text, unit * 4_000, unit * 64_000, 64))
