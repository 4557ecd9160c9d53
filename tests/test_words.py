"""Numbers of things and long texts as messages show them."""

from __future__ import annotations

from quern.words import counted, shorten, size


def test_a_number_agrees_with_its_noun():
    assert [counted(number, "file") for number in (0, 1, 2, 12345)] == ["0 files", "1 file", "2 files", "12,345 files"]


def test_a_long_text_ends_with_a_whole_word_where_one_is_near():
    assert shorten("the quick brown fox", 19) == "the quick brown fox"
    assert [shorten("the quick brown fox", limit) for limit in (18, 16, 12)] == [
        "the quick brown…",
        "the quick brown…",
        "the quick…",
    ]
    assert shorten("x" * 100, 20) == "x" * 19 + "…"
    assert shorten("word " + "x" * 100, 80) == "word " + "x" * 74 + "…"
    for limit in range(2, 30):
        assert len(shorten("one two, three  four five six seven", limit)) <= limit


def test_bytes_are_told_in_the_largest_unit_of_which_there_is_one():
    told = {0: "0 B", 1023: "1,023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 9_400_000: "9.0 MiB", 5 << 60: "5,120.0 PiB"}
    assert {number: size(number) for number in told} == told
