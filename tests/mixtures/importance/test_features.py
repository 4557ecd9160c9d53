"""Features and weights against plain Python, and against what data-selection gives for the same texts."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quern.errors import InputError
from quern.mixtures.importance import features
from quern.mixtures.importance.features import Features
from quern.mixtures.importance.weights import log_ratio

#: data-selection is the authors' own package; the file says how it was asked.
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "data_selection.json").read_text())
TEXTS = st.text(st.sampled_from(" \n\t\u00a0abAB_9.,!-İΣ水é\u0301ß😀\x00"), max_size=60)


@pytest.fixture(autouse=True)
def _few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table of them is made in no time."""
    monkeypatch.setattr(features, "_PAIR_BITS", 12)


def plain_words(text: str) -> list[str]:
    """Character by character: runs of one kind."""

    def kind(char: str) -> str:
        return "space" if char.isspace() else "word" if char.isalnum() or char == "_" else "mark"

    return ["".join(run) for name, run in groupby(text.lower(), kind) if name != "space"]


def plain_counts(text: str, num_buckets: int) -> Counter[int]:
    words = plain_words(text)
    grams = [*words, *(f"{first} {second}" for first, second in pairwise(words))]
    return Counter(int(hashlib.sha256(gram.encode()).hexdigest(), 16) % num_buckets for gram in grams)


def found_of(own: Features, texts: list[str]) -> list[tuple[Counter[int], int]]:
    """Features and words of each text."""
    counts: list[Counter[int]] = [Counter() for _ in texts]
    words = [0] * len(texts)
    for buckets, texts_of, of_words in own.of(texts):
        assert texts_of.tolist() == sorted(texts_of.tolist())
        for bucket, text in zip(buckets.tolist(), texts_of.tolist(), strict=True):
            counts[text][bucket] += 1
            words[text] += of_words
    return list(zip(counts, words, strict=True))


def plain(texts: list[str], num_buckets: int) -> list[tuple[Counter[int], int]]:
    return [(plain_counts(text, num_buckets), len(plain_words(text))) for text in texts]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS, max_size=6), st.sampled_from([1, 2, 5, 1 << 17]), st.sampled_from([0, 9, 1 << 20]))
def test_features_are_those_of_plain_python_in_whatever_pieces(texts: list[str], piece: int, whole: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "_PIECE_WORDS", piece)
        patch.setattr(features, "_WHOLE_CHARS", whole)
        patch.setattr(features, "_PAIR_BITS", 9)
        assert found_of(Features(97), texts) == plain(texts, 97)


@pytest.mark.parametrize(("words", "chars", "bits"), [(3, 1 << 25, 9), (1 << 19, 20, 9), (1 << 19, 1 << 25, 1)])
def test_what_is_forgotten_is_hashed_again(monkeypatch: pytest.MonkeyPatch, words: int, chars: int, bits: int) -> None:
    monkeypatch.setattr(features, "_WORDS", words)
    monkeypatch.setattr(features, "_CHARS", chars)
    monkeypatch.setattr(features, "_PAIR_BITS", bits)
    own = Features(1000)
    for text in filter(str.strip, GOLDEN["raw"] * 2):
        assert found_of(own, [text]) == plain([text], 1000)
        assert len(own._ids) == len(own._words) <= words + len({*plain_words(text)})
        assert sum(map(len, own._ids)) <= chars + len(text.lower())


@pytest.mark.parametrize("piece", [1, 40, 1 << 17])
def test_a_texts_weight_depends_on_no_other(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """To the last bit, whatever stands before it in a batch; of a text in pieces too."""
    monkeypatch.setattr(features, "_PIECE_WORDS", piece)
    monkeypatch.setattr(features, "_WHOLE_CHARS", 300)
    own = Features(64)
    ratio = np.random.default_rng(1).normal(size=64) * 10.0 ** np.random.default_rng(2).integers(-6, 6, 64)
    alone = [own.log_weights([text], ratio)[0][0] for text in GOLDEN["raw"]]
    assert own.log_weights(GOLDEN["raw"], ratio)[0].tolist() == alone
    assert own.log_weights(GOLDEN["raw"][::-1], ratio)[0].tolist() == alone[::-1]


def test_counts_of_texts_are_their_sums() -> None:
    counts = Features(64).count(GOLDEN["raw"])
    expected = sum((plain_counts(text, 64) for text in GOLDEN["raw"]), Counter())
    assert dict(enumerate(counts.tolist())) == {bucket: expected[bucket] for bucket in range(64)}


@pytest.mark.parametrize("num_buckets", [64, 10_000])
def test_log_weights_are_those_of_data_selection_and_of_plain_python(num_buckets: int) -> None:
    own = Features(num_buckets)
    ratio = log_ratio(own.count(GOLDEN["target"]), own.count(GOLDEN["raw"]))
    found, words = own.log_weights(GOLDEN["raw"], ratio)
    assert words.tolist() == GOLDEN["words"]
    weights = found.tolist()
    np.testing.assert_allclose(weights, GOLDEN["log_weights"][str(num_buckets)], rtol=1e-12, atol=1e-9)
    both = [sum((plain_counts(text, num_buckets) for text in GOLDEN[name]), Counter()) for name in ("target", "raw")]
    totals = [sum(counts.values()) for counts in both]
    for text, weight in zip(GOLDEN["raw"], weights, strict=True):
        terms = (
            times * (math.log(both[0][bucket] / totals[0] + 1e-8) - math.log(both[1][bucket] / totals[1] + 1e-8))
            for bucket, times in plain_counts(text, num_buckets).items()
        )
        assert weight == pytest.approx(math.fsum(terms), rel=1e-12, abs=1e-9)


def test_texts_without_a_word_have_no_distribution() -> None:
    some, none = np.array([1, 2]), np.zeros(2, np.int64)
    with pytest.raises(InputError, match="the target has no words"):
        log_ratio(none, some)
    with pytest.raises(InputError, match="the run has no words"):
        log_ratio(some, none)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * 3_000_000, "!" * 3_000_000, "\u0130" * 30_000, "ab " * 30_000])
def test_a_hostile_text_takes_memory_in_proportion(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of 3 MB, a lower case that is twice as long and has a word a character, and many words."""
    monkeypatch.setattr(features, "_WHOLE_CHARS", 1 << 14)
    monkeypatch.setattr(features, "_CHARS", 1 << 20)
    monkeypatch.setattr(features, "_PIECE_WORDS", 1 << 11)
    monkeypatch.setattr(features, "_PAIR_BITS", 10)
    own = Features(10_000)
    tracemalloc.start()
    try:
        counts = own.count([text])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert counts.sum() == 2 * len(features._WORD.findall(text.lower())) - 1
    assert peak < 60 * len(text) + 1e6
    own.count(["short"])
    assert len(own._ids) == len(own._words) <= 3
