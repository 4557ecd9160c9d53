from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from dedup_oracle import shingle_hash
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup import shingles as module
from quern.data_pipeline.dedup.shingles import hash_words, normalise, shingle_hashes
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each

_TEXT = st.text(
    st.one_of(
        st.sampled_from("aAbB zßİΣσςéÉñ①½²  \n\t.,;:-_'’\"()0123456789+$€|ָ́̀"),
        st.characters(min_codepoint=0x20, max_codepoint=0x5FF),
        st.characters(min_codepoint=0x900, max_codepoint=0x97F),  # Devanagari
        st.characters(min_codepoint=0xE00, max_codepoint=0xEFF),  # Thai, Lao
        st.characters(min_codepoint=0x3041, max_codepoint=0x30FF),  # Kana
        st.characters(min_codepoint=0x4E00, max_codepoint=0x4E20),  # Han
        st.characters(min_codepoint=0xAC00, max_codepoint=0xAC40),  # Hangul
        st.characters(min_codepoint=0xF900, max_codepoint=0xF920),  # Han that decomposes
    ),
    max_size=60,
)


@given(_TEXT)
def test_words_are_those_of_the_plain_definition(plain, text):
    assert normalise(text) == plain.plain_words(text)


@with_each(
    ("Caf\u00e9 CAFE\u0301 cafe", ["cafe", "cafe", "cafe"]),
    ("3.14 and 1,000,000 or 2024-05-01", ["0", "and", "0", "or", "0", "0", "0"]),
    ("well-known, isn't_it?", ["well", "known", "isn", "t", "it"]),
    ("\u0663\u0664 v1.2.", ["0", "v0"]),
    ("\u6c34\u3068 fire", ["\u6c34", "\u3068", "fire"]),
    ("\u0e19\u0e49\u0e33", ["\u0e19", "\u0e33"]),
    ("*** --- \u2764", []),
    ("", []),
    ("\ud800 lone", ["lone"]),
)
def test_normalisation_by_example(text, words) -> None:
    assert normalise(text) == words


@given(st.lists(_TEXT, max_size=8).map(" ".join), st.integers(1, 6))
def test_shingle_hashes_are_those_of_the_written_down_shingles(plain, text, ngram):
    written = {" ".join(words).encode() for words in plain.plain_shingles(text, ngram)}
    hashes = shingle_hashes(hash_words(text), ngram)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == sorted({shingle_hash(shingle) for shingle in written})


def test_the_hash_of_a_one_word_shingle_is_its_mixed_xxh3():
    value = xxhash.xxh3_64_intdigest(b"word")
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = (value ^ value >> 33) * factor % 2**64
    assert shingle_hash(b"word") == value ^ value >> 33


def test_the_order_of_words_matters():
    assert shingle_hash(b"a b c d e") != shingle_hash(b"b a c d e") != shingle_hash(b"e d c b a")


def test_a_text_with_fewer_words_than_a_shingle_has_none():
    assert len(shingle_hashes(hash_words("one two three four"), 5)) == 0
    assert len(shingle_hashes(hash_words("one two three four five"), 5)) == 1


@given(st.lists(st.sampled_from(["alpha", "b", "\u6c34\u6c34", "3.5", "x-y"]), max_size=40), st.integers(20, 60))
def test_a_text_taken_in_blocks_has_the_same_words(words, block):
    text = " ".join(words)
    assert (hash_words(text, block=block) == hash_words(text)).all()


def test_a_text_without_any_space_is_cut_only_where_a_block_ends():
    text = "\u6c34\u706b" * 500
    assert (hash_words(text, block=64) == hash_words(text)).all()


def test_full_caches_change_nothing(monkeypatch):
    texts = [f"Word{i} caf\u00e9{i % 7} {i}.{i} \u6c34{chr(0x4E00 + i)}" for i in range(200)]
    expected = [hash_words(text).tolist() for text in texts]
    for cache, most in ((module._CHARACTERS, 3), (module._WORDS, 2), (module._CHUNKS, 2)):
        monkeypatch.setattr(cache, "max_entries", most)
        cache.clear()
    assert [hash_words(text).tolist() for text in texts] == expected
    assert len(module._CHARACTERS) <= 3
    assert len(module._WORDS) <= 2
    assert len(module._CHUNKS) <= 2


@pytest.mark.slow
def test_hashes_do_not_depend_on_the_hash_seed_of_the_process():
    code = (
        "from quern.data_pipeline.dedup.shingles import *;"
        "print(shingle_hashes(hash_words('The quick brown fox jumps, over 12 lazy dogs'), 5).tolist())"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    here = module.shingle_hashes(module.hash_words("The quick brown fox jumps, over 12 lazy dogs"), 5)
    assert there == f"{here.tolist()}\n"


HOSTILE = {
    "marked letter": "a\u0301\u0323", "marks": "\u0301\u0323", "spacing marks": "\U0001d165\u302e", "numbers": "1.",
    "digits": "1,1", "sigma": "\u03a3'", "han": "\u6c34", "letter": "x", "voicing": "\u3099",
}  # fmt: skip


@pytest.mark.slow
def test_time_grows_with_the_length_of_a_hostile_text_only():
    """Four times the text takes less than eleven times as long; a quadratic step takes sixteen."""
    each(
        HOSTILE.items(),
        lambda _, unit: assert_grows_tamely(normalise, unit * 30_000, unit * 120_000, 11, grain_s=0.005),
    )


CHINESE = (
    "\u5317\u4eac\u662f\u4e2d\u534e\u4eba\u6c11\u5171\u548c\u56fd\u7684\u9996\u90fd\u662f\u5168\u56fd\u7684"
    "\u653f\u6cbb\u4e2d\u5fc3\u6587\u5316\u4e2d\u5fc3\u56fd\u9645\u4ea4\u5f80\u4e2d\u5fc3"
)


def test_texts_in_a_script_without_spaces_are_compared_by_character(plain):
    """As one word each, near copies would share nothing, and short pages would have no shingle at all."""
    other = (
        "\u4e0a\u6d77\u4f4d\u4e8e\u957f\u6c5f\u5165\u6d77\u53e3\u662f\u4e2d\u56fd"
        "\u7684\u7ecf\u6d4e\u91d1\u878d\u4e2d\u5fc3\u4e5f\u662f\u6e2f\u53e3\u57ce\u5e02"
    )
    near_copy = CHINESE[:-1] + "\u6838"

    def similarity(a: str, b: str) -> float:
        first, second = (set(shingle_hashes(hash_words(text), 5).tolist()) for text in (a, b))
        return plain.plain_jaccard(first, second)

    assert similarity(CHINESE, near_copy) > 0.8
    assert similarity(CHINESE, other) < 0.1
