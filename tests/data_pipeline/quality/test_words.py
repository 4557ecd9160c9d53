"""Words and sentences against spaCy itself, and the bounds hostile text runs into."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import spacy
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.stages.quality import words as under_test
from quern.data_pipeline.stages.quality.words import PUNCTUATION, TERMINAL_PUNCTUATION, UNSPACED_LANGUAGES, Reading
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each

CHUNK_CHARS = "aZbé9.,'’\"”“():;-—/…!?$%@#_·中。xD\u200b+"


@cache
def spacy_blank(language: str) -> Any:
    blank = spacy.blank(language)
    blank.add_pipe("sentencizer")
    return blank


alone = cache(under_test._tokenizer)


def spacy_words(text: str, language: str = "en") -> list[str]:
    return [token.text for token in spacy_blank(language).tokenizer(text) if token.text.strip()]


def spacy_sentences(line: str) -> int:
    return max(1, len(list(spacy_blank("en")(line).sents)))


def check_words(chunk: str) -> None:
    assert Reading(chunk, "en").words == spacy_words(chunk)


@given(st.text(CHUNK_CHARS, min_size=1, max_size=12))
@settings(max_examples=70)
def test_a_chunk_has_the_words_spacy_gives_it_alone(chunk: str) -> None:
    check_words(chunk)


@pytest.mark.slow
def test_thousands_of_chunks_have_the_words_spacy_gives_them_alone() -> None:
    draw = random.Random(1)
    each(("".join(draw.choices(CHUNK_CHARS, k=draw.randint(1, 12))) for _ in range(2000)), check_words)


@pytest.mark.slow
def test_common_shapes_split_as_spacy_splits_them() -> None:
    shapes = itertools.product(
        ["", '"', "“", "("],
        ["word", "Mr", "etc", "cannot", "that", "it", "St", "gonna", "dont", "We", "vs", "e", "am"],
        ["", "-not", "—Lets", "-etc"],
        ["", ".", ",", ":", ")", '."', ".”", ").", "),", "'s", "’s", "s'", ":)", "..", '",', '".', "?”"],
    )
    each(map("".join, shapes), check_words)


@with_each(
    ("I can't, they cannot.", ["I", "ca", "n't", ",", "they", "can", "not", "."]),
    ("Mr. Smith's U.S. visit", ["Mr.", "Smith", "'s", "U.S.", "visit"]),
    ("10km at 5$ (see http://a.com/b?c)", ["10", "km", "at", "5", "$", "(", "see", "http://a.com/b?c", ")"]),
    ("a\u00a0b\u2028c\td", ["a", "b", "c", "d"]),
    ("", []),
    (" \n\t\u3000", []),
)
def test_english_words(text: str, words: list[str]) -> None:
    assert Reading(text, "en").words == words
    assert Reading(text, "en").num_words == len(words)


@pytest.mark.slow
# not French, whose rules take spaCy seconds to load: Hungarian and Turkish too say what is one word whatever is in it
@pytest.mark.parametrize("language", ["de", "it", "hu", "tr", "ru", "el", "pl", "xx"])
def test_spaced_languages_have_their_own_spacy_words(language: str) -> None:
    text = "L'été, z.B. 3,5 km! „Ja“ (м. Київ) κ.λπ. d'accord"
    assert Reading(text, language).words == [w for c in text.split() for w in spacy_words(c, language)]


@with_each("ko", "vi", "eo", "qq")
def test_languages_spacy_cannot_split_are_split_neutrally(language: str) -> None:
    assert Reading("안녕, xin chào!", language).words == ["안녕", ",", "xin", "chào", "!"]


@with_each(
    ("zh", "我有iPhone 15。", ["我", "有", "iPhone", "15", "。"]),
    ("ja", "カードを見る", ["カー", "ド", "を", "見", "る"]),
    ("th", "กินข้าว", ["กิ", "น", "ข้", "า", "ว"]),
    ("bo", "བོད་སྐད།", ["བོད", "སྐད", "།"]),
)
def test_languages_without_spaces_are_split_into_characters(language: str, text: str, words: list[str]) -> None:
    assert language in UNSPACED_LANGUAGES
    assert Reading(text, language).words == words


@pytest.mark.slow
@given(st.lists(st.text("ab.!?。)\"' \t\u00a0…A1", max_size=20), min_size=1, max_size=4))
@settings(max_examples=100)
def test_sentences_are_those_of_the_sentencizer_line_by_line(lines: list[str]) -> None:
    # The special cases of spaCy may look across a gap; what a line's chunks are alone is the rule here.
    expected = sum(map(spacy_sentences, lines))
    alone = [spacy_words(line) == [w for c in line.split() for w in spacy_words(c)] for line in lines]
    if all(alone):
        assert Reading("\n".join(lines), "en").num_sentences == expected


@with_each(
    ("One. Two! Three?", 3),
    ('He said "no." Then left.', 2),
    ("One.\nTwo.\n\nno end", 4),
    ("", 1),
    ("Ends. ", 1),
    ("Ends.  ", 2),
    ("Ends. \nNext", 2),
    ("Aa.\u00a0Bb.\tCc", 3),
    ("...and so on", 1),
)
def test_sentence_counts(text: str, count: int) -> None:
    assert Reading(text, "en").num_sentences == count == sum(map(spacy_sentences, text.split("\n")))


@pytest.mark.slow
def test_what_was_read_before_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(5)
    texts = [
        " ".join("".join(source.choices(CHUNK_CHARS, k=source.randint(1, 9))) for _ in range(40)) for _ in range(60)
    ]
    expected = {text: (Reading(text, "en").words, Reading(text, "en").num_sentences) for text in texts}
    monkeypatch.setattr(under_test, "_MAX_MEMO", 30)
    monkeypatch.setattr(under_test, "_MAX_MEMO_CHUNK", 4)
    under_test.splitter.cache_clear()
    under_test._spaced.cache_clear()
    for text in source.sample(texts * 3, 180):
        assert (Reading(text, "en").words, Reading(text, "en").num_sentences) == expected[text]
    memo = under_test.splitter("en").tokens
    assert max(len(memo._newer), len(memo._older)) <= 30 + 40
    under_test.splitter.cache_clear()
    under_test._spaced.cache_clear()


@pytest.mark.slow
@with_each(
    "(" * 200_000,
    "http://a." * 50_000,
    "s'" * 100_000,
    "x" * 5_000_000,
    " ".join("(" * 400 + str(i) for i in range(2000)),
)
def test_hostile_chunks_are_split_without_spacy(text: str) -> None:
    """spaCy would want from minutes to days for each of these."""
    reading = Reading(text, "en")
    assert reading._splitter is under_test._by_pattern(under_test._PLAIN_WORD)
    assert "".join(reading.words) == "".join(text.split())
    assert reading.num_sentences >= 1


@pytest.mark.parametrize("unit", [". ", ". , "], ids=["end marks", "end marks and others"])
def test_sentences_of_end_marks_alone_are_counted_in_linear_time(unit: str) -> None:
    """Sixteen times the text; quadratic would be 256."""

    def count(text: str) -> None:
        assert Reading(text, "en").num_sentences == 1
        assert Reading(text + "a", "en").num_sentences == 2

    assert_grows_tamely(count, unit * (10_000 // len(unit)), unit * (160_000 // len(unit)), 64)


def test_the_alphabets_are_those_named() -> None:
    assert len(TERMINAL_PUNCTUATION) == 159
    assert set(".?!。؟।…") - TERMINAL_PUNCTUATION == {"…"}
    assert set("…#$%()*,-/:;<=>@[]^_`{|}~\"'—“”’\x00\x0b\x85") <= PUNCTUATION
    assert not any(char.isalnum() and char != "１" for char in PUNCTUATION)
    assert PUNCTUATION.isdisjoint("\t\n ")


@pytest.mark.shared
def test_words_of_real_books_and_speeches_are_those_of_spacy(shared: Path) -> None:
    import gzip

    with gzip.open(shared / "data" / "text" / "speeches.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"][:20_000] for line in file][::7]
    for text in texts:
        assert Reading(text, "en").words == spacy_words(text)


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "hu"])
@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="aBé1.,:;'’\"()[]{}/@#$%&*+-–—_=<>~|\\ sdntmkh€°😀", max_size=40))
def test_the_tokenizer_alone_gives_the_words_of_the_whole_pipeline(language: str, text: str) -> None:
    assert [t.text for t in alone(language)(text)] == [t.text for t in spacy_blank(language).tokenizer(text)]


def test_special_cases_and_urls_are_split_as_in_the_whole_pipeline() -> None:
    text = "don't (can't) U.S.A. e.g. http://a.b/c?d=1. x@y.org, 10km/h... :-) I'm o'clock we'll've :) cannot gonna"
    assert [t.text for t in under_test._tokenizer("en")(text)] == [t.text for t in spacy_blank("en").tokenizer(text)]


@pytest.mark.slow
def test_spacy_is_imported_without_its_command_line_and_torch() -> None:
    code = (
        "import sys; from quern.data_pipeline.stages.quality import words; words.splitter('en')\n"
        "assert not {'torch', 'spacy.cli', 'httpx'} & sys.modules.keys()\n"
        "from spacy.cli.info import info; assert callable(info), 'whoever wants it has the real one'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
