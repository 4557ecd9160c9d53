"""The order of the road, its gates, and what it must not drag in."""

from __future__ import annotations

import pytest

from quern.data_pipeline.chain import QUALITY_GATE, Chain, chain
from quern.data_pipeline.config import ChainConfig
from quern.data_pipeline.page.document import STAGES, Page
from support.data_pipeline import ARTICLE


def page(raw: str, **fields: object) -> Page:
    return Page("s", "s.warc.gz", "s.warc.gz", 0, raw=raw, url="https://a.example/b", **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def english() -> Chain:
    return Chain(ChainConfig.model_validate({"language": {"keep": ["en"]}}))


def test_the_order_is_the_documented_one() -> None:
    names = [[stage.name for stage in gate] for gate in chain(ChainConfig())]
    assert names == [
        ["purged", "url"],
        ["language_guess"],
        ["extract"],
        ["language"],
        ["quality", "pii", "toxicity", "purged_text"],
        ["signature", "purged_similar"],
    ]
    assert names[QUALITY_GATE][0] == "quality"


def test_no_two_stages_fill_the_same_column() -> None:
    measures = Chain(ChainConfig()).measures
    assert len(measures) == len(set(measures))


def test_a_good_page_passes_every_gate_and_is_signed(english: Chain) -> None:
    done, reached = english(page(f"<html><body><article><p>{ARTICLE}</p></article></body></html>"))
    assert (done.stage, done.reason, done.failed_rules) == (None, None, [])
    assert reached == QUALITY_GATE + 1
    assert done.text == ARTICLE
    assert done.signature is not None
    assert done.canonical_url == "https://a.example/b"


def test_a_page_that_could_not_be_read_still_has_its_url(english: Chain) -> None:
    done, reached = english(page("", fault="read.empty"))
    assert (done.stage, done.reason, reached) == ("read", "read.empty", 0)
    assert done.host == "a.example"
    assert done.signature is None


def test_a_dropped_page_keeps_all_measures_of_its_gate_and_all_failed_rules(english: Chain) -> None:
    """Too short, repetitive, and it holds an address: the families after the first failure are measured too."""
    text = "The mail of the man is john@mail.org and that is to be it. " * 3
    done, reached = english(page(f"<html><body><article><p>{text}</p></article></body></html>"))
    assert (done.stage, reached) == ("quality", QUALITY_GATE)
    assert done.reason == done.failed_rules[0]
    assert {rule.partition(".")[0] for rule in done.failed_rules} >= {"repetition", "gopher"}
    assert done.measures["pii.emails"] == 3
    assert "toxicity.lexicon_hits" in done.measures
    assert "fineweb.line_punct_ratio" in done.measures
    assert "john@mail.org" not in (done.text or "")
    assert "john@mail.org" in (done.extracted or "")
    assert done.signature is None, "only kept pages are signed"


def test_a_page_dropped_early_is_not_looked_at_further(english: Chain) -> None:
    german = "Die Fähre verließ den Kai kurz nach Sonnenaufgang, und niemand an Bord sprach ein Wort. " * 20
    done, reached = english(page(f"<html><body><p>{german}</p></body></html>"))
    assert (done.stage, done.reason) == ("language", "language.pre_skip")
    assert reached == 1
    assert done.text is None
    assert not any(name.startswith("gopher") for name in done.measures)


def test_what_can_drop_a_page_is_a_known_stage(english: Chain) -> None:
    for raw in ("", "<p>x</p>", ARTICLE):
        done, _ = english(page(raw))
        assert done.stage in {None, *STAGES}


def test_seconds_are_kept_by_stage(english: Chain) -> None:
    english(page(f"<p>{ARTICLE}</p>"))
    assert set(english.seconds) == {stage.name for gate in english.gates for stage in gate}
    assert english.seconds["extract"] > 0
