"""Gopher's rules against the definition written out plainly, each at its thresholds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.stages.quality.gopher import MEASURES, GopherConfig, decide, measure
from quern.data_pipeline.stages.quality.words import PUNCTUATION, Reading
from support.named_cases import with_each

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
OFF = {name: None for name in GopherConfig.model_fields if name != "stop_words"}
TEXT = st.lists(
    st.sampled_from(
        [
            "the",
            "The",
            "be,",
            "word",
            "#",
            "##a",
            "...",
            "…",
            "- x",
            "•",
            "\n",
            "\n - ",
            "end...\n",
            "1,5",
            "中",
            "(b)",
            "★",
            "\x0b",
        ]
    ),
    max_size=40,
).map(" ".join)


def by_definition(text: str, words: list[str], stop_words: tuple[str, ...]) -> dict[str, float | None]:
    real = [word for word in words if any(char not in PUNCTUATION for char in word)]
    lines = text.splitlines()
    bullets = [line for line in lines if line.lstrip()[:1] in ("•", "-") and line.strip()]
    ends = [line for line in lines if line.rstrip()[-3:] == "..." or line.rstrip()[-1:] == "…"]
    alpha = [word for word in words if any(char.isalpha() for char in word)]
    values = {
        "num_words": float(len(real)),
        "mean_word_length": sum(map(len, real)) / len(real) if real else None,
        "hash_ratio": text.count("#") / len(words) if words else None,
        "ellipsis_ratio": (text.count("...") + text.count("…")) / len(words) if words else None,
        "bullet_line_frac": len(bullets) / len(lines) if lines else None,
        "ellipsis_line_frac": len(ends) / len(lines) if lines else None,
        "alpha_word_frac": len(alpha) / len(words) if words else None,
        "num_stop_words": float(len(set(words) & set(stop_words))),
    }
    return {f"gopher.{name}": value for name, value in values.items()}


@given(TEXT)
@settings(max_examples=150)
def test_datatrove_dialect_is_its_definition(text: str) -> None:
    reading = Reading(text, "en")
    assert measure(reading, STOP_WORDS) == by_definition(text, reading.words, STOP_WORDS)


def test_paper_dialect_counts_whitespace_words_bullets_and_stop_words_in_any_case() -> None:
    measures = measure(Reading("The end, of it...\n\n* a # ...\n", "en"), STOP_WORDS, dialect="paper")
    assert measures == {
        "gopher.num_words": 8.0,
        "gopher.mean_word_length": (3 + 4 + 2 + 5 + 1 + 1 + 1 + 3) / 8,
        "gopher.hash_ratio": 1 / 8,
        "gopher.ellipsis_ratio": 2 / 8,
        "gopher.bullet_line_frac": 1 / 2,
        "gopher.ellipsis_line_frac": 2 / 2,
        "gopher.alpha_word_frac": 5 / 8,
        "gopher.num_stop_words": 2.0,
    }


@with_each(
    ("a b c , .", "num_words", "min_words", 3),
    ("a b c , .", "num_words", "max_words", 3),
    ("aa bbbb .", "mean_word_length", "min_mean_word_length", 3),
    ("aa bbbb .", "mean_word_length", "max_mean_word_length", 3),
    ("a # b c", "hash_ratio", "max_hash_ratio", 0.25),
    ("a … b c", "ellipsis_ratio", "max_ellipsis_ratio", 0.25),
    ("- a\n• b\nc\nd - e", "bullet_line_frac", "max_bullet_line_frac", 0.5),
    ("a ...\nb… \nc\n…d", "ellipsis_line_frac", "max_ellipsis_line_frac", 0.5),
    ("a b 1 ,", "alpha_word_frac", "min_alpha_word_frac", 0.5),
    ("the The to to x", "num_stop_words", "min_stop_words", 2),
)
def test_a_rule_passes_at_its_threshold_and_fails_beyond(
    text: str, measure_name: str, option: str, value: float
) -> None:
    measures = measure(Reading(text, "en"), STOP_WORDS)
    rule = f"gopher.{measure_name}"
    assert measures[rule] == value

    def failed(**thresholds: Any) -> list[str]:
        return decide(measures, GopherConfig(**{**OFF, **thresholds}))

    step = (1 if isinstance(value, int) else 1e-9) * (1 if option.startswith("min") else -1)
    assert failed() == []
    assert failed(**{option: value}) == []
    assert failed(**{option: value + step}) == [rule]
    assert failed(**{option: 0}) == ([] if option.startswith("min") else [rule])


def test_the_defaults_are_the_papers() -> None:
    config = GopherConfig()
    assert (config.min_words, config.max_words) == (50, 100_000)
    assert (config.min_mean_word_length, config.max_mean_word_length) == (3, 10)
    assert (config.max_hash_ratio, config.max_ellipsis_ratio) == (0.1, 0.1)
    assert (config.max_bullet_line_frac, config.max_ellipsis_line_frac) == (0.9, 0.3)
    assert (config.min_alpha_word_frac, config.min_stop_words) == (0.8, 2)
    assert config.stop_words == {"en": STOP_WORDS}


@with_each(*product(["", " ", "\n", ". , !", "...", "★"], ["datatrove", "paper"]))
def test_texts_without_words_are_measured_and_only_count_rules_fail_them(text: str, dialect: Any) -> None:
    measures = measure(Reading(text, "en"), STOP_WORDS, dialect=dialect)
    assert all(value is None or value == value for value in measures.values())
    failed = decide(measures, GopherConfig())
    assert failed[0] == "gopher.num_words"
    assert failed[-1] == "gopher.num_stop_words"
    if not text.strip():
        assert decide(measures, GopherConfig(min_words=None, min_stop_words=None)) == []


def test_a_language_without_a_list_has_no_stop_word_rule() -> None:
    measures = measure(Reading("ein Wort", "de"), None)
    assert measures["gopher.num_stop_words"] is None
    assert "gopher.num_stop_words" not in decide(measures, GopherConfig())


def test_mean_length_is_not_measured_where_words_are_characters() -> None:
    measures = measure(Reading("我们都是人。" * 20, "zh"), None)
    assert measures["gopher.num_words"] == 100
    assert measures["gopher.mean_word_length"] is None
    assert decide(measures, GopherConfig()) == []


def test_missing_null_and_nan_measures_fail_nothing() -> None:
    for measures in ({}, dict.fromkeys(MEASURES), dict.fromkeys(MEASURES, float("nan"))):
        assert decide(measures, GopherConfig()) == []


@with_each(
    {"min_words": -1},
    {"min_words": 5, "max_words": 4},
    {"min_alpha_word_frac": 1.2},
    {"max_hash_ratio": float("inf")},
)
def test_impossible_thresholds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GopherConfig(**options)
