"""Repetition measures against the definitions written out plainly, and every rule at its threshold."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.stages.quality import repetition
from quern.data_pipeline.stages.quality.repetition import MEASURES, RepetitionConfig, decide, measure
from quern.data_pipeline.stages.quality.words import Reading
from support.growth import assert_grows_tamely
from support.named_cases import with_each

TEXT = st.lists(
    st.sampled_from(
        [
            "a",
            "bb",
            "a b",
            "ccc",
            ".",
            "(",
            "can not",
            "cannot",
            "\n",
            "\n\n",
            "\n\n\n",
            " ",
            "\u00a0",
            "中文",
            "😀",
            "the",
        ]
    ),
    max_size=60,
).map(" ".join) | st.lists(st.sampled_from(["ab", "a", "b", "ba"]), max_size=60).map(" ".join)


def datatrove_by_definition(text: str, words: list[str]) -> dict[str, float | None]:
    expected: dict[str, float | None] = {"empty": 0.0}
    for kind, segments in (("para", re.split(r"\n\n+", text.strip())), ("line", re.split(r"\n+", text))):
        later = [s for i, s in enumerate(segments) if s in segments[:i]]
        expected[f"dup_{kind}_frac"] = len(later) / len(segments)
        expected[f"dup_{kind}_char_frac"] = sum(map(len, later)) / len(text)
    for n in (2, 3, 4):
        grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
        top = max(grams, key=grams.count) if grams else None
        expected[f"top_{n}gram_char_frac"] = len(top) * grams.count(top) / len(text) if top is not None else None
    for n in range(5, 11):
        seen: list[str] = []
        chars = i = 0
        while i + n <= len(words):
            gram = "".join(words[i : i + n])
            if gram in seen:
                chars += len(gram)
                i += n
            else:
                seen.append(gram)
                i += 1
        expected[f"dup_{n}gram_char_frac"] = chars / len(text)
    return {f"repetition.{name}": value for name, value in expected.items()}


def paper_by_definition(text: str) -> dict[str, float | None]:
    words = text.split()
    total = sum(map(len, words))
    expected: dict[str, float | None] = {"empty": 0.0}
    for kind, pattern in (("para", r"\n\n+"), ("line", r"\n+")):
        segments = [s for s in re.split(pattern, text.strip() if kind == "para" else text) if s.strip()]
        twice = [s for s in segments if segments.count(s) > 1]
        expected[f"dup_{kind}_frac"] = len(twice) / len(segments) if segments else None
        expected[f"dup_{kind}_char_frac"] = sum(map(len, twice)) / sum(map(len, segments)) if segments else None

    def covered(grams: list[tuple[str, ...]], wanted: set[tuple[str, ...]], n: int) -> int:
        under = {j for i, gram in enumerate(grams) if gram in wanted for j in range(i, i + n)}
        return sum(len(words[j]) for j in under)

    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        if n > 4:
            chars = covered(grams, {gram for gram, count in counts.items() if count > 1}, n)
            expected[f"dup_{n}gram_char_frac"] = chars / total if total else None
        elif not grams:
            expected[f"top_{n}gram_char_frac"] = None
        else:
            most = max(counts.values())
            top = max((gram for gram in counts if counts[gram] == most), key=lambda gram: len("".join(gram)))
            expected[f"top_{n}gram_char_frac"] = covered(grams, {top}, n) / total if most > 1 else 0.0
    return {f"repetition.{name}": value for name, value in expected.items()}


@pytest.mark.slow
@given(TEXT)
@settings(max_examples=80)
def test_datatrove_dialect_is_its_definition(text: str) -> None:
    if text:
        reading = Reading(text, "en")
        assert measure(reading) == datatrove_by_definition(text, reading.words)


@pytest.mark.slow
@given(TEXT, st.integers(1, 40), st.integers(0, 20))
@settings(max_examples=60)
def test_blocks_and_sorting_are_for_memory_only(text: str, block: int, sorted_from: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "_BLOCK", block)
        patch.setattr(repetition, "_SORTED_FROM", sorted_from)
        if text:
            reading = Reading(text, "en")
            assert measure(reading) == datatrove_by_definition(text, reading.words)
            assert measure(reading, dialect="paper") == paper_by_definition(text)


@pytest.mark.slow
@given(TEXT)
@settings(max_examples=80)
def test_paper_dialect_is_its_definition(text: str) -> None:
    if text:
        assert measure(Reading(text, "en"), dialect="paper") == paper_by_definition(text)


def test_spelled_alike_but_parted_otherwise_is_a_duplicate_for_datatrove_only() -> None:
    words = ["q", "ab", "c", "d", "e", "f", "z", "a", "bc", "d", "e", "f"]
    reading = Reading(" ".join(words), "en")
    assert reading.words == words
    assert measure(reading)["repetition.dup_5gram_char_frac"] == 6 / len(reading.text)
    assert measure(reading, dialect="paper")["repetition.dup_5gram_char_frac"] == 0


def test_an_ngram_that_occurs_once_is_repetition_for_datatrove_only() -> None:
    text = "Eleven words that repeat nothing fail here by the top rule."
    datatrove, paper = measure(Reading(text, "en")), measure(Reading(text, "en"), dialect="paper")
    assert decide(datatrove, RepetitionConfig()) == ["repetition.top_2gram_char_frac"] * (
        len("Eleven words") / len(text) > 0.2
    ) + ["repetition.top_3gram_char_frac", "repetition.top_4gram_char_frac"]
    assert decide(paper, RepetitionConfig()) == []


@with_each(
    ("a\n\nb\n\na\n\nc", "dup_para_frac", 1 / 4),
    ("aa\n\nbbb\n\naa", "dup_para_char_frac", 2 / 11),
    ("a\nb\n\n\na\nc\n", "dup_line_frac", 1 / 5),
    ("aa\nb\naa", "dup_line_char_frac", 2 / 7),
    ("x y x y z", "top_2gram_char_frac", 6 / 9),
    ("k l m n o p k l m n o", "dup_5gram_char_frac", 5 / 21),
)
def test_a_rule_fails_above_its_threshold_and_not_at_it(text: str, rule: str, value: float) -> None:
    measures = measure(Reading(text, "en"))
    assert measures[f"repetition.{rule}"] == value
    off: dict[str, float | None] = {name.removeprefix("repetition."): None for name in MEASURES[1:]}
    assert decide(measures, RepetitionConfig(**off)) == []
    assert decide(measures, RepetitionConfig(**(off | {rule: value}))) == []
    assert decide(measures, RepetitionConfig(**(off | {rule: value - 1e-9}))) == [f"repetition.{rule}"]
    assert decide(measures, RepetitionConfig(**(off | {rule: 0}))) == [f"repetition.{rule}"]


def test_the_defaults_are_those_of_table_a1() -> None:
    """Rae et al. 2021, table A1, row by row."""
    assert RepetitionConfig().model_dump() == {
        "dup_line_frac": 0.30,
        "dup_para_frac": 0.30,
        "dup_line_char_frac": 0.20,
        "dup_para_char_frac": 0.20,
        "top_2gram_char_frac": 0.20,
        "top_3gram_char_frac": 0.18,
        "top_4gram_char_frac": 0.16,
        "dup_5gram_char_frac": 0.15,
        "dup_6gram_char_frac": 0.14,
        "dup_7gram_char_frac": 0.13,
        "dup_8gram_char_frac": 0.12,
        "dup_9gram_char_frac": 0.11,
        "dup_10gram_char_frac": 0.10,
    }


def test_empty_text_fails_as_empty_and_blank_text_by_nothing() -> None:
    assert decide(measure(Reading("", "en")), RepetitionConfig()) == ["repetition.empty"]
    for dialect in ("datatrove", "paper"):
        assert decide(measure(Reading(" \t ", "en"), dialect=dialect), RepetitionConfig()) == []


def test_failed_rules_come_in_the_order_paragraphs_lines_top_duplicates() -> None:
    text = "\n\n".join(["same old words once more again and again here now"] * 8)
    failed = decide(measure(Reading(text, "en")), RepetitionConfig())
    assert failed == [name for name in MEASURES if name in failed]
    assert failed[0] == "repetition.dup_para_frac"
    assert {"repetition.dup_line_frac", "repetition.dup_10gram_char_frac"} <= set(failed)


def test_missing_null_and_nan_measures_fail_nothing() -> None:
    assert decide({}, RepetitionConfig()) == []
    assert decide(dict.fromkeys(MEASURES), RepetitionConfig()) == []
    assert decide(dict.fromkeys(MEASURES, float("nan")), RepetitionConfig()) == []


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_impossible_thresholds_are_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        RepetitionConfig(dup_line_frac=value)


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "times"), [("a ", 160_000), ("ab", 400_000), ("x y\n", 48_000)])
def test_long_monotonous_text_is_measured_within_bounds(unit: str, times: int) -> None:
    """Sixteen times the text; quadratic would be 256."""
    for dialect in ("datatrove", "paper"):

        def measured(text: str, dialect: Any = dialect) -> None:
            measures = measure(Reading(text, "en"), dialect=dialect)
            assert all(value is None or value >= 0 for value in measures.values())

        assert_grows_tamely(measured, unit * (times // 16), unit * times, 64)
