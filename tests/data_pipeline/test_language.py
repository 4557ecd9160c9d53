from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.extraction.extract import Extract, ExtractConfig
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages import language
from quern.data_pipeline.stages.language import Language, LanguageConfig, LanguageGuess, identify
from quern.errors import InputError, QuernError
from support.named_cases import with_each

ENGLISH = "The miller sets the stone, pours the grain and waits until the sacks are full of flour. " * 5
GERMAN = "Der Müller stellt den Stein ein, schüttet das Korn auf und wartet, bis die Säcke voll sind. " * 5
FRENCH = "Nous avons vu que le moulin de notre village est très vieux, mais il tourne encore chaque jour. " * 5


def page(raw: str = "", text: str | None = None, **fields: Any) -> Page:
    return Page(source="s", source_file="f", relative_path="f", position=0, raw=raw, text=text, **fields)


def decided(text: str | None, **config: Any) -> Page:
    return Language(LanguageConfig(**config))(page(text=text))


# --- the decision


@with_each((ENGLISH, "en"), (GERMAN, "de"), (FRENCH, "fr"), ("粉挽きは石臼を据える。" * 9, "ja"))
def test_languages_are_recognised(text: str, label: str) -> None:
    done = decided(text)
    assert (done.language, done.failures) == (label, [])
    assert 0.65 < float(done.language_score or 0) <= 1


def test_only_wanted_languages_pass() -> None:
    assert decided(ENGLISH, keep=["en"]).failures == []
    assert decided(GERMAN, keep=["en"]).failures == [("language", "language.not_wanted")]
    assert decided(GERMAN, keep=["en", "de"]).failures == []


@pytest.mark.parametrize("keep", [None, []])
def test_without_a_list_every_language_passes(keep: list[str] | None) -> None:
    done = decided("ok", keep=keep, threshold=0.99)
    assert done.failures == []
    assert done.language is not None


def test_threshold_is_strict() -> None:
    score = dict(identify(ENGLISH))["en"]
    below = score - 1e-6
    assert decided(ENGLISH, keep=["en"], threshold=below).failures == []
    if score < 1:
        assert decided(ENGLISH, keep=["en"], threshold=score).failures == [("language", "language.below_threshold")]


def test_unsure_page_of_a_kept_language_says_so() -> None:
    scores = identify("water")
    label, score = scores[0]
    done = decided("water", keep=[label], threshold=min(score + 0.01, 0.99))
    assert done.failures == [("language", "language.below_threshold")]


def test_label_of_a_kept_page_is_a_kept_language() -> None:
    """At low thresholds a page can pass by its second language; it must not be labelled with its first."""
    mixed = GERMAN * 3 + ENGLISH
    (first, _), (second, score) = identify(mixed)[:2]
    assert {first, second} == {"de", "en"}
    done = decided(mixed, keep=[second], threshold=score / 2)
    assert (done.language, done.failures) == (second, [])
    assert done.language_score == pytest.approx(score)


@pytest.mark.parametrize("text", [None, "", " \n\t "])
def test_no_text_is_unknown(text: str | None) -> None:
    done = decided(text, keep=["en"])
    assert (done.language, done.failures) == (None, [("language", "language.unknown")])
    assert decided(text).failures == []


def test_an_answer_without_labels_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Language(LanguageConfig(keep=["en"]))
    monkeypatch.setattr(language, "identify", lambda text, model, most: [])
    assert stage(page(text=ENGLISH)).failures == [("language", "language.unknown")]


@pytest.mark.slow
@given(
    st.lists(st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.5, 0.9)), min_size=4, max_size=4),
    st.sets(st.sampled_from("abcd")),
    st.sampled_from((0.0, 0.2, 0.65)),
)
@example([0.5, 0.3, 0.1, 0.0], {"c"}, 0.0)
def test_two_labels_decide_as_all_do(scores: list[float], keep: set[str], threshold: float) -> None:
    """Labels of a made-up model; of equal ones a question for two may name any, as a heap does."""
    listed = sorted(zip("abcd", scores, strict=True), key=lambda pair: -pair[1])
    of_two = sorted(reversed(listed), key=lambda pair: -pair[1])

    def decision(few: bool) -> tuple[Any, ...]:
        with pytest.MonkeyPatch.context() as patch:
            answer = lambda text, model, most=-1: of_two[:most] if few and most > 0 else listed  # noqa: E731
            patch.setattr(language, "identify", answer)
            patch.setattr(language, "_wanted", lambda config: tuple(keep))
            told = Language(LanguageConfig(keep=sorted(keep), threshold=threshold))(page(text="text"))
        return told.language, told.language_score, told.failures

    assert decision(few=True) == decision(few=False)


@with_each("The water is cold. Das Wasser ist kalt.", "ok", "1 2 3", "l'eau est froide; Wasser")
def test_the_model_says_the_same_of_two_labels_as_of_all(text: str) -> None:
    assert language.identify(text, most=2) == language.identify(text)[:2]


def test_lines_are_read_to_the_end() -> None:
    assert identify("Le meunier.\n" + ENGLISH)[0][0] == "en"
    assert identify(ENGLISH.replace(" ", "\n")) == identify(ENGLISH)


@settings(max_examples=40)
@given(st.text(alphabet=st.characters(), max_size=60))
def test_any_text_has_probabilities_in_order(text: str) -> None:
    scores = [score for _, score in identify(text)]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


def test_lone_surrogates_and_control_characters_do_no_harm() -> None:
    assert identify("\ud800 " + ENGLISH)[0][0] == "en"
    assert identify("\x00\x0b\x85\u2028" + ENGLISH)


@pytest.mark.slow
def test_answers_are_the_same_in_another_process() -> None:
    code = """
import json, sys
from quern.data_pipeline.stages.language import identify
print(json.dumps(identify(sys.argv[1])))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, FRENCH + ENGLISH],
        env={
            "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        check=True,
        text=True,
    )
    assert [tuple(pair) for pair in json.loads(done.stdout)] == identify(FRENCH + ENGLISH)


def test_endless_text_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "MAX_CHARS", len(FRENCH))
    assert identify(FRENCH + ENGLISH * 10) == identify(FRENCH)


# --- the guess


def html(text: str) -> str:
    head = "<style>p { margin: 0 }</style><script>var the = 'and';</script>"
    return f"<html><head>{head}</head><body><p>{text}</p></body></html>"


def guessed(raw: str, **config: Any) -> Page:
    return LanguageGuess(LanguageConfig(**{"keep": ["en"], **config}))(page(raw))


def test_only_a_surely_unwanted_page_is_skipped_and_it_is_labelled() -> None:
    done = guessed(html(GERMAN))
    assert done.failures == [("language", "language.pre_skip")]
    assert done.language == "de"
    assert done.measures["language.guess_score"] < 0.02
    for raw in (html(ENGLISH), html(GERMAN * 2 + ENGLISH * 2)):
        done = guessed(raw)
        assert done.failures == []
        assert done.measures["language.guess_score"] >= 0.02


def test_probability_of_several_kept_languages_adds_up() -> None:
    one, two, both = (
        guessed(html(GERMAN + ENGLISH), keep=keep).measures["language.guess_score"]
        for keep in (["en"], ["de"], ["de", "en"])
    )
    assert both == pytest.approx(min(one + two, 1.0))


@pytest.mark.parametrize("config", [{"keep": None}, {"keep": []}, {"pre_skip": False}])
def test_guess_can_be_off(config: dict[str, Any]) -> None:
    done = guessed(html(GERMAN), **config)
    assert (done.failures, done.measures) == ([], {})


def test_plain_text_and_invisible_pages_are_left_to_later_stages() -> None:
    stage = LanguageGuess(LanguageConfig(keep=["en"]))
    assert stage(page(GERMAN, media="text")).failures == []
    assert stage(page(html(""))).failures == []


def test_a_language_in_one_part_of_a_long_page_is_seen() -> None:
    """A page of English with a long quotation in its middle, where a single sample would look."""
    assert guessed(html(GERMAN * 8)).failures != []
    assert guessed(html(ENGLISH * 8 + GERMAN * 8 + ENGLISH * 8)).failures == []


# --- the model


def test_unknown_label_is_refused_with_a_hint() -> None:
    with pytest.raises(
        InputError, match=r"language\.keep: 'eng' is not one of the model's 176 languages; did you mean"
    ):
        Language(LanguageConfig(keep=["eng"]))
    with pytest.raises(InputError, match="'EN'"):
        LanguageGuess(LanguageConfig(keep=["EN"]))


def test_model_can_be_given_by_path(tmp_path: Path) -> None:
    copy = tmp_path / "model.ftz"
    copy.write_bytes(Path(language._installed_model()).read_bytes())
    assert identify(ENGLISH, str(copy)) == identify(ENGLISH)


@pytest.fixture
def no_model_loaded() -> Iterator[None]:
    """Before the test and after it."""
    language._load.cache_clear()
    yield
    language._load.cache_clear()


def test_missing_and_foreign_models_are_refused(
    no_model_loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="no such file"):
        identify(ENGLISH, str(tmp_path / "absent.ftz"))
    other = tmp_path / "other.ftz"
    other.write_bytes(b"not a model")
    with pytest.raises(InputError, match="not a fastText model"):
        identify(ENGLISH, str(other))
    monkeypatch.setattr(language, "_installed_model", lambda: str(other))
    with pytest.raises(InputError, match="expected the lid"):
        identify(ENGLISH)


def test_another_fasttext_api_is_refused_loudly(no_model_loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import fasttext.FastText

    class Other:
        def __init__(self, model_path: str) -> None:
            pass

    monkeypatch.setattr(fasttext.FastText, "_FastText", Other)
    with pytest.raises(QuernError, match="install fasttext-predict"):
        identify(ENGLISH)


@with_each(
    {"threshold": 1.0},
    {"threshold": -0.1},
    {"pre_skip": True},
    {"pre_skip": 1.0},
    {"pre_skip": "off"},
    {"keep": "en"},
)
def test_impossible_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        LanguageConfig.model_validate(values)


def test_defaults_are_those_of_fineweb() -> None:
    config = LanguageConfig()
    assert (config.keep, config.threshold, config.pre_skip, config.model) == (None, 0.65, 0.02, None)


def test_zero_is_a_probability_and_not_off() -> None:
    assert LanguageConfig(pre_skip=False).pre_skip is False
    for config in (LanguageConfig(pre_skip=0), LanguageConfig.model_validate_json('{"pre_skip": 0}')):
        assert config.pre_skip is not False
        assert config.pre_skip == 0
    done = guessed(html(GERMAN), pre_skip=0)
    assert done.failures == []
    assert 0 <= done.measures["language.guess_score"] < 0.02


# --- real pages


@pytest.mark.shared
@pytest.mark.exhaustive
def test_decisions_are_datatroves_and_the_skip_loses_next_to_nothing(
    shared: Path, real_pages: Callable[..., Iterator[Any]]
) -> None:
    """On every real page datatrove 0.10.1 could read; the skip on all of them."""
    with gzip.open(shared / "data" / "groundtruth" / "datatrove_verdicts.jsonl.gz", "rt", encoding="utf-8") as lines:
        dropped_as = {row["record_id"]: row["stage"] for row in map(json.loads, lines)}
    config = LanguageConfig(keep=["en"])
    extract, decide, guess = Extract(ExtractConfig()), Language(config), LanguageGuess(config)
    compared = skipped = lost = num_kept = 0
    for real in real_pages():
        done = extract(page(real.html))
        if done.failures:
            continue
        decide(done)
        kept = not done.failures
        if real.record_id in dropped_as:
            compared += 1
            assert kept == (dropped_as[real.record_id] != "non_english"), real.record_id
        skip = bool(guess(page(real.html)).failures)
        skipped, num_kept, lost = skipped + skip, num_kept + kept, lost + (skip and kept)
        assert not (skip and dropped_as.get(real.record_id) == "kept"), real.record_id
    assert compared == 1968
    assert skipped > 0.45 * 1994
    assert lost <= 0.004 * num_kept
