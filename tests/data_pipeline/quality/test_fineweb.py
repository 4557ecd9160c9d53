"""FineWeb's rules against the definition written out plainly, each at its threshold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.stages.quality.fineweb import MEASURES, FinewebConfig, decide, measure
from quern.data_pipeline.stages.quality.words import TERMINAL_PUNCTUATION, Reading
from support.named_cases import with_each

OFF: dict[str, Any] = {
    "line_punct_ratio": None,
    "short_line_ratio": None,
    "char_dup_ratio": None,
    "list_ratio": None,
}
LINES = st.lists(
    st.sampled_from(["", " ", "end.", "end. ", "终。", "no end", "x" * 30, "x" * 31, "\u00a0", "\u2028", "a\rb"]),
    max_size=12,
).map("\n".join)


def by_definition(text: str, num_words: int) -> dict[str, float | None]:
    lines = [line for line in text.split("\n") if line.strip()]
    later = [line for i, line in enumerate(lines) if line in lines[:i]]
    return {
        "fineweb.empty": 0.0,
        "fineweb.line_punct_ratio": len([x for x in lines if x[-1] in TERMINAL_PUNCTUATION]) / len(lines),
        "fineweb.short_line_ratio": len([x for x in lines if len(x) <= 30]) / len(lines),
        "fineweb.char_dup_ratio": sum(map(len, later)) / len(text.replace("\n", "")),
        "fineweb.list_ratio": text.count("\n") / num_words,
    }


@given(LINES)
@settings(max_examples=150)
def test_measures_are_their_definition(text: str) -> None:
    reading = Reading(text, "en")
    if text.strip():
        assert measure(reading) == by_definition(text, len(reading.words))
    else:
        assert measure(reading)["fineweb.empty"] == 1
        assert decide(measure(reading), FinewebConfig()) == ["fineweb.empty"]


@with_each(
    ("a.\nb\nc\nd", "line_punct_ratio", 0.25, 1e-9),
    (f"a\n{'b' * 31}\n{'c' * 30}\n{'d' * 31}", "short_line_ratio", 0.5, -1e-9),
    ("ab\ncdef\nab", "char_dup_ratio", 0.25, -1e-9),
    ("a b\nc d", "list_ratio", 0.25, -1e-9),
)
def test_a_rule_passes_at_its_threshold_and_fails_beyond(
    text: str, rule: str, value: float, fails_beyond: float
) -> None:
    measures = measure(Reading(text, "en"))
    assert measures[f"fineweb.{rule}"] == value
    assert decide(measures, FinewebConfig(**OFF)) == []
    assert decide(measures, FinewebConfig(**{**OFF, rule: value})) == []
    assert decide(measures, FinewebConfig(**{**OFF, rule: value + fails_beyond})) == [f"fineweb.{rule}"]
    at_zero = [] if rule == "line_punct_ratio" else [f"fineweb.{rule}"]
    assert decide(measures, FinewebConfig(**{**OFF, rule: 0})) == at_zero


def test_a_page_without_end_marks_can_be_excused() -> None:
    measures = measure(Reading("no end\nnone here", "en"))
    only = {**OFF, "line_punct_ratio": 0.12}
    assert decide(measures, FinewebConfig(**only)) == ["fineweb.line_punct_ratio"]
    assert decide(measures, FinewebConfig(**only, line_punct_exclude_zero=True)) == []


def test_the_defaults_are_those_of_the_code_and_the_papers_duplicate_share_can_be_had() -> None:
    config = FinewebConfig()
    assert (config.line_punct_ratio, config.short_line_ratio, config.short_line_length) == (0.12, 0.67, 30)
    assert (config.char_dup_ratio, config.list_ratio) == (0.01, 0.3)
    measures = {"fineweb.char_dup_ratio": 0.05}
    assert decide(measures, config) == ["fineweb.char_dup_ratio"]
    assert decide(measures, FinewebConfig(char_dup_ratio=0.1)) == []


def test_missing_null_and_nan_measures_fail_nothing() -> None:
    for measures in ({}, dict.fromkeys(MEASURES), dict.fromkeys(MEASURES, float("nan"))):
        assert decide(measures, FinewebConfig()) == []


@pytest.mark.parametrize("options", [{"line_punct_ratio": 1.1}, {"short_line_length": -1}, {"list_ratio": -1.0}])
def test_impossible_thresholds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FinewebConfig(**options)
