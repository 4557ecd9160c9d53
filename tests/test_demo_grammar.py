"""Frames, slots and alternatives: every slot filled, nothing said twice, nothing left to chance."""

from __future__ import annotations

import re

import pytest

from quern.demo.grammar import Stock, Voice, compose, keyed, load_stock

FULL = ("en", "de", "fr", "es")


def voice(words: dict[str, tuple[str, ...]], key: object = 0) -> Voice:
    return Voice(Stock("en", words, {}), keyed("test", key), topic="bread")


def test_a_slot_takes_the_topics_own_words_first():
    words = {"bread.flour": ("rye",), "flour": ("sand",), "other": ("stone",)}
    assert voice(words).say("{flour} and {other}") == "Rye and stone"


def test_words_come_round_only_after_all_have_come():
    speaker = voice({"tool": ("saw", "file", "plane")})
    drawn = [speaker.say("{tool}") for _ in range(6)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == ["File", "Plane", "Saw"]


def test_a_person_has_the_full_name_once():
    speaker = voice({"A": ("Marta Lindqvist",), "P": ("Quarry Bank",)})
    assert speaker.say("{A} met {A} in {P} and {P}") == "Marta Lindqvist met Marta in Quarry Bank and Quarry Bank"


def test_numbers_stay_in_their_range_and_alternatives_among_themselves():
    seen = {voice({}, key).say("{3-5} [geese|ducks]") for key in range(200)}
    assert seen == {f"{n} {bird}" for n in (3, 4, 5) for bird in ("geese", "ducks")}


@pytest.mark.parametrize("language", [*FULL, "ru", "nl"])
def test_a_stock_fills_every_slot_it_names(language):
    stock = load_stock(language)
    assert len(stock.sections["generic"]) + sum(len(stock.sections[f"topic {t}"]) for t in stock.topics) >= (
        60 if language in FULL else 12
    )
    for number, topic in enumerate(stock.topics):
        voice = Voice(stock, keyed("test", language, number), topic=topic)
        everything = len(stock.sections["generic"]) + len(stock.sections[f"topic {topic}"])
        text = "\n".join(compose(voice, everything))
        assert not re.search(r"[{}\[\]|]", text), text
