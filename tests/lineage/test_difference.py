"""The word diff: what it shows can be put together again, is as short as can be, and ends whatever the texts are."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.lineage import difference as module
from quern.lineage.difference import MAX_CHARS, MAX_EDITS, MAX_PIECES, MAX_WORDS, PIECE_CHARS, Difference, difference
from support.named_cases import with_each

WORDS = st.lists(st.sampled_from("abcde"), max_size=30)


def shown_whole(removed: str, kept: str) -> Difference:
    """The difference with no word left out of its pieces."""
    with mock.patch.multiple(module, CONTEXT=10**6, PIECE_WORDS=10**7, PIECE_CHARS=10**9, MAX_PIECES=10**6):
        return difference(removed, kept)


def sides(found: Difference) -> tuple[list[str], list[str]]:
    """What the two texts were, by the pieces."""
    removed = [piece.text for piece in found.pieces if piece.kind != "kept"]
    kept = [piece.text for piece in found.pieces if piece.kind != "removed"]
    return " ".join(removed).split(), " ".join(kept).split()


def longest_common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, by the table of the textbook."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = row[:]
        for j, other in enumerate(b):
            row[j + 1] = before[j] + 1 if word == other else max(row[j], before[j + 1])
    return row[-1]


@given(WORDS, WORDS)
def test_pieces_make_both_texts_and_are_as_few_edits_as_can_be(a: list[str], b: list[str]) -> None:
    found = shown_whole(" ".join(a), " ".join(b))
    assert found.complete
    common = longest_common(a, b)
    assert (found.only_removed, found.only_kept) == (len(a) - common, len(b) - common)
    assert (found.removed_words, found.kept_words) == (len(a), len(b))
    assert found.equal is (a == b)
    if a == b:
        assert found.pieces == ()
        return
    assert sides(found) == (a, b)
    for piece in found.pieces:
        assert piece.words == len(piece.text.split()) > 0
    assert all(one.kind != other.kind for one, other in itertools.pairwise(found.pieces))


def test_white_space_alone_is_no_change_of_words() -> None:
    found = difference("a b\nc", "a  b c\n")
    assert (found.equal, found.pieces, found.complete) == (False, (), True)


def test_what_is_the_same_is_shortened_around_the_changes() -> None:
    before = [f"w{i}" for i in range(300)]
    after = [*before]
    after[150] = "new"
    found = difference(" ".join(before), " ".join(after))
    assert [(piece.kind, piece.words) for piece in found.pieces] == [
        ("same", 150), ("removed", 1), ("kept", 1), ("same", 149),
    ]  # fmt: skip
    assert [piece.text for piece in found.pieces] == [
        "… w145 w146 w147 w148 w149", "w150", "new", "w151 w152 w153 w154 w155 …",
    ]  # fmt: skip


@with_each(0, 1, 5, 6, 7, 10, 11, 12, 13)
def test_an_ellipsis_stands_for_words_that_are_left_out_and_only_for_those(words: int) -> None:
    same = " ".join(f"s{i}" for i in range(words))
    found = difference(f"a {same} b", f"c {same} d")
    texts = [piece.text for piece in found.pieces if piece.kind == "same"]
    assert texts == ([same] if 0 < words <= 11 else ["s0 s1 s2 s3 s4 … s7 s8 s9 s10 s11"] if words == 12 else []) or (
        words == 13 and texts == ["s0 s1 s2 s3 s4 … s8 s9 s10 s11 s12"]
    )


def test_more_edits_than_are_looked_for_are_said() -> None:
    draw = random.Random(1)
    left = [f"l{draw.random()}" for _ in range(MAX_EDITS)]
    right = [f"r{draw.random()}" for _ in range(MAX_EDITS)]
    found = shown_whole(" ".join(["head", *left, "tail"]), " ".join(["head", *right, "tail"]))
    assert not found.complete
    assert sides(found) == (["head", *left, "tail"], ["head", *right, "tail"])
    assert (found.only_removed, found.only_kept) == (MAX_EDITS, MAX_EDITS)
    few = shown_whole(" ".join(["head", *left[: MAX_EDITS // 2], "tail"]), " ".join(["head", *right[: MAX_EDITS // 2]]))
    assert not few.complete  # one edit more than there may be
    exact = shown_whole(" ".join(left[: MAX_EDITS // 2]), " ".join(right[: MAX_EDITS // 2]))
    assert exact.complete


def test_a_path_that_is_given_up_still_makes_both_texts() -> None:
    draw = random.Random(2)
    for _ in range(20):
        left = [draw.choice("abcdefgh") for _ in range(draw.randrange(0, 60))]
        right = [draw.choice("abcdefgh") for _ in range(draw.randrange(0, 60))]
        with mock.patch.object(module, "MAX_EDITS", draw.randrange(0, 12)):
            found = shown_whole(" ".join(left), " ".join(right))
        if found.pieces:
            assert sides(found) == (left, right)
        else:
            assert left == right


def test_a_middle_that_is_too_long_is_cut_and_said() -> None:
    left = ["x", *(f"l{i}" for i in range(MAX_WORDS + 5)), "y"]
    right = ["x", *left[1:-1], "more", "z"]
    found = shown_whole(" ".join(["first", *left]), " ".join(["second", *right]))
    assert not found.complete
    a, b = sides(found)
    assert a == ["first", *left][:MAX_WORDS]
    assert b == ["second", *right][:MAX_WORDS]


def test_long_texts_with_one_change_are_compared_whole() -> None:
    words = [f"{i % 997}" for i in range(100_000)]
    changed = [*words]
    changed[50_000] = "changed"
    found = difference(" ".join(words), " ".join(changed))
    assert found.complete
    assert (found.only_removed, found.only_kept) == (1, 1)


HOSTILE = {
    "one word": ("a" * 5_000_000, "b" * 5_000_000),
    "one word, over and over": ("a " * 2_000_000, "b " + "a " * 1_999_000 + "c"),
    "two words in turn": ("a b " * 1_000_000, "b a a " * 700_000),
    "nothing in common": (" ".join(f"l{i}" for i in range(300_000)), " ".join(f"r{i}" for i in range(300_000))),
    "shifted by one": ("x " + "a b c d " * 2000, "a b c d " * 2000 + "y"),
    "reversed": (" ".join(map(str, range(50_000))), " ".join(map(str, range(50_000, 0, -1)))),
    "empty": ("", " ".join(map(str, range(200_000)))),
    "controls": ("\x1b[2J \u202e \x00 " * 1000, "\x1b[2J \u202d \x00 " * 1000),
}


@pytest.mark.slow
@with_each(*HOSTILE)
def test_hostile_texts_are_answered_small(name: str) -> None:
    found = difference(*HOSTILE[name])
    assert len(found.pieces) <= MAX_PIECES
    assert all(len(piece.text) <= PIECE_CHARS + 1 for piece in found.pieces)
    assert found.complete is (max(map(len, HOSTILE[name])) <= MAX_CHARS and name in ("shifted by one",))
