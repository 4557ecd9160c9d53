"""C4's rules line by line, and the reason that depends on which line comes first."""

from __future__ import annotations

import re
from typing import Any

import pytest
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.stages.quality.c4 import MEASURES, C4Config, decide, measure
from quern.data_pipeline.stages.quality.words import Reading
from support.named_cases import with_each

FIVE = "One is here. Two is here. Three is here. Four is here. Five is here."
BLANK = spacy.blank("en")
BLANK.add_pipe("sentencizer")


def left_of(text: str, language: str = "en", **options: Any) -> str:
    return measure(Reading(text, language), C4Config(**options))[1].text


def failed(text: str, **options: Any) -> list[str]:
    config = C4Config(**options)
    return decide(measure(Reading(text, "en"), config)[0], config)


def first_reason(text: str) -> tuple[str | None, str]:
    """The page-dropping reading: stop at the first line that decides."""
    kept, sentences = [], 0
    for line in text.splitlines():
        line = line.strip()
        num_words = len(line.split())
        if any(len(word) > 1000 for word in line.split()):
            continue
        line = re.sub(r"\[\d*\]|\[edit\]|\[citation needed\]", "", line)
        if num_words < 3:
            continue
        if "lorem ipsum" in line.lower():
            return "c4.lorem_ipsum", text
        if "javascript" in line.lower():
            continue
        if "{" in line:
            return "c4.curly_bracket", text
        if re.search("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", line.lower()):
            continue
        sentences += max(1, len(list(BLANK(line).sents)))
        kept.append(line)
    return ("c4.num_sentences", text) if sentences < 5 else (None, "\n".join(kept).strip())


LINES = st.lists(
    st.lists(
        st.sampled_from(
            [
                "Lorem ipsum",
                "lorem",
                "{",
                "x{y}",
                "Java[1]Script",
                "javascript",
                "we use cookies",
                "A b.",
                "End.  ",
                "[2]",
                "terms of[edit] use",
                "a\u00a0b",
                "ok",
                "W" * 1001,
                "[citation needed]",
                "What?",
                "no",
                "\t",
                "İ",
            ]
        ),
        max_size=7,
    ).map(" ".join),
    max_size=9,
).map("\n".join)


@pytest.mark.slow
@given(LINES)
@settings(max_examples=80)
def test_first_failed_rule_and_text_are_those_of_the_page_dropping_reading(text: str) -> None:
    reason, kept = first_reason(text)
    assert (failed(text) or [None])[0] == reason
    if reason is None:
        assert left_of(text) == kept


@with_each(
    ("word " * 3 + "x" * 1000, True),
    ("word " * 3 + "x" * 1001, False),
    ("only two", False),
    ("now three words", True),
    ("needs JavaScript to run", False),
    ("read our Privacy Policy here", False),
    ("this site uses cookies often", False),
    ("no end mark here", True),
)
def test_lines_that_stay_and_lines_that_go(line: str, kept: bool) -> None:
    assert left_of(f"{FIVE}\n{line}") == (f"{FIVE}\n{line}" if kept else FIVE)


def test_line_rules_can_be_switched_off() -> None:
    text = f"two words\nneeds javascript here\nread our privacy policy now\n{'x' * 1001} a b\n{FIVE} [1]"
    assert (
        left_of(text, min_words_per_line=None, javascript=False, policy=False, max_word_length=None, citations=False)
        == text
    )
    assert left_of("a\n\nb c", min_words_per_line=0) == "a\n\nb c"


def test_a_line_of_one_word_that_is_too_long_goes() -> None:
    assert left_of(f"{'x' * 1001}\n{'y' * 1000}", min_words_per_line=None) == "y" * 1000


@with_each(("It ends.", True), ('He said "so"', True), ("It does not", False), ("It trails...", False))
def test_terminal_punctuation_when_asked_for(line: str, kept: bool) -> None:
    assert left_of(f"{FIVE}\n{line} ", terminal_punctuation=True, min_words_per_line=1).count("\n") == int(kept)


def test_citation_marks_are_taken_off_and_counted_as_words_before() -> None:
    assert left_of("It is so[12] here[] and[edit] there[citation needed].") == "It is so here and there."
    assert left_of("a b [3]\nc") == "a b"


def test_the_phrase_that_comes_first_is_the_reason() -> None:
    assert failed(f"{FIVE}\na lorem ipsum b\nc {'{'} d") == ["c4.lorem_ipsum", "c4.curly_bracket"]
    assert failed(f"{FIVE}\nc {{ d\na lorem ipsum b") == ["c4.curly_bracket", "c4.lorem_ipsum"]
    assert failed(f"{FIVE}\n{{ a lorem ipsum b") == ["c4.lorem_ipsum", "c4.curly_bracket"]
    assert failed(f"{FIVE}\na javascript {{ line") == []
    assert failed("Short {", lorem_ipsum=False) == ["c4.num_sentences"]


@pytest.mark.parametrize(("sentences", "fails"), [(4, True), (5, False), (6, False)])
def test_too_few_sentences(sentences: int, fails: bool) -> None:
    text = " ".join(["One is here."] * sentences)
    assert failed(text) == (["c4.num_sentences"] if fails else [])
    assert failed(text, min_sentences=None) == failed(text, min_sentences=0) == []


def test_rules_can_be_switched_off_after_measuring() -> None:
    measures = measure(Reading("a { lorem ipsum", "en"), C4Config())[0]
    assert decide(measures, C4Config(lorem_ipsum=False)) == ["c4.curly_bracket", "c4.num_sentences"]
    assert decide(measures, C4Config(curly_bracket=False, min_sentences=1)) == ["c4.lorem_ipsum"]
    for nothing in ({}, dict.fromkeys(MEASURES), dict.fromkeys(MEASURES, float("nan"))):
        assert decide(nothing, C4Config()) == []


def test_a_failed_page_still_has_the_text_it_would_have_had() -> None:
    assert left_of("a b { c\ngo\nlorem ipsum d") == "a b { c\nlorem ipsum d"


def test_empty_text_has_no_sentence() -> None:
    measures, left = measure(Reading("", "en"), C4Config())
    assert (measures["c4.num_sentences"], measures["c4.num_kept_lines"], left.text) == (0, 0, "")


def test_lines_without_spaces_count_characters_as_words() -> None:
    line = "今天天气很好。" * 300
    assert left_of(f"{line}\n好。", language="zh") == line
