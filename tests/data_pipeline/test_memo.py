"""Answers that are remembered: as many as a memo may hold, whatever pages bring, and the same as without it."""

from __future__ import annotations

import pytest

from quern.data_pipeline.dedup import shingles
from quern.data_pipeline.extraction import readability
from quern.data_pipeline.page.memo import Memo
from quern.data_pipeline.stages import toxicity

MEMOS = {
    "toxicity": toxicity._WORDS, "characters": shingles._CHARACTERS, "words": shingles._WORDS,
    "chunks": shingles._CHUNKS, "weights": readability._WEIGHTS, "unlikely": readability._UNLIKELY,
}  # fmt: skip


def test_a_memo_is_emptied_when_it_is_full_and_keeps_no_long_keys() -> None:
    asked: list[str] = []

    def answer(key: str) -> int:
        asked.append(key)
        return len(key)

    memo = Memo(answer, 2, 3)
    assert [memo[key] for key in ("a", "a", "bb", "long", "long", "ccc", "a")] == [1, 1, 2, 4, 4, 3, 1]
    assert asked == ["a", "bb", "long", "long", "ccc", "a"]
    assert dict(memo) == {"ccc": 3, "a": 1}


@pytest.mark.parametrize("name", MEMOS)
def test_what_pages_can_fill_stays_small(name: str) -> None:
    """In bytes of keys: of characters 4 each."""
    memo = MEMOS[name]
    characters = name == "characters"
    assert characters == (memo.max_length is None)
    assert memo.max_entries * (1 if characters else memo.max_length) * 4 <= 64 << 20  # type: ignore[operator]
