"""The stream that chosen documents make, against lists of tokens that are put together one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.errors import InputError
from quern.tokenize.selection.chosen import Chosen, Identity, family_of, find_chosen, overlap, write_chosen

STREAM = "r1/web/3"


def spans(lengths: list[int], chosen: list[bool]) -> list[tuple[int, int]]:
    starts = np.cumsum([0, *lengths]).tolist()
    return [(start, length) for start, length, own in zip(starts, lengths, chosen, strict=False) if own]


def written(folder: Path, found: list[tuple[int, int]], at_once: int = 3, where: str = "x") -> Chosen:
    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, len(found), at_once):
            part = found[first : first + at_once]
            yield np.array([start for start, _ in part]), np.array([length for _, length in part])

    return write_chosen(str(folder), STREAM, where, blocks())


documents = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40)


@given(own=documents, at_once=st.integers(1, 5))
def test_places_and_pieces_are_those_of_the_tokens_laid_end_to_end(
    own: list[tuple[int, bool]], at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chosen")
    lengths, flags = [length for length, _ in own], [flag for _, flag in own]
    found = spans(lengths, flags)
    made = written(folder, found, at_once)
    tokens = [place for start, length in found for place in range(start, start + length)]  # of the source, laid out
    assert (made.tokens, made.documents) == (len(tokens), len(found))
    total = sum(lengths)
    expected = [tokens.index(place) if place in tokens else -1 for place in range(total)]
    assert made.place(np.arange(total)).tolist() == expected
    pairs = [(a, b) for a in range(len(tokens)) for b in range(a + 1, len(tokens) + 1)]
    begins, ends, which = made.pieces(np.array([a for a, _ in pairs], int), np.array([b for _, b in pairs], int))
    read: list[list[int]] = [[] for _ in pairs]
    for begin, end, pair in zip(begins.tolist(), ends.tolist(), which.tolist(), strict=True):
        assert begin < end
        read[pair] += range(begin, end)
    assert read == [tokens[a:b] for a, b in pairs]
    stretches = sum(1 for index, flag in enumerate(flags) if flag and not (index and flags[index - 1]))
    assert len(made) == stretches


@given(own=documents, at_once=st.integers(1, 5))
def test_equal_choices_are_equal_bytes_and_one_identity(
    own: list[tuple[int, bool]], at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = spans([length for length, _ in own], [flag for _, flag in own])
    one, other = (written(tmp_path_factory.mktemp(str(n)), found, n) for n in (at_once, 7))
    assert one.identity == other.identity
    assert Path(one.path).read_bytes() == Path(other.path).read_bytes()


@given(own=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=25))
def test_what_two_choices_share_is_found(own: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chosen")
    lengths = [length for length, _ in own]
    one, other = (spans(lengths, [bool(kind & bit) for _, kind in own]) for bit in (1, 2))
    both = {(start, length) for start, length in one} & set(other)
    found = overlap(written(folder, one, where="a"), written(folder, other, where="b"))
    assert (found is None) == (not both)
    assert found is None or any(start <= found < start + length for start, length in both)


def test_what_was_chosen_is_found_again_by_its_condition_and_source(tmp_path: Path) -> None:
    made = written(tmp_path / "one", [(0, 4), (9, 2)], where="a")
    assert made.identity.startswith(f"{family_of(STREAM, 'a')}/3-")
    assert Identity(made.identity).stream == STREAM
    assert Identity(made.identity).chosen
    assert not Identity(STREAM).chosen
    none = str(tmp_path / "none")
    found = find_chosen([none, str(tmp_path / "one")], STREAM, "a")
    assert found is not None
    assert found.identity == made.identity
    assert find_chosen([str(tmp_path / "one")], STREAM, "b") is None
    assert find_chosen([str(tmp_path / "one")], "r1/web/4", "a") is None
    assert find_chosen([str(tmp_path / "one")], "r2/web/3", "a") is None


@pytest.mark.parametrize("damage", ["byte", "short", "empty", "gone"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    made = written(tmp_path, [(0, 4), (9, 2)])
    data = bytearray(Path(made.path).read_bytes())
    if damage == "byte":
        data[20] ^= 1
    os.unlink(made.path)
    if damage != "gone":
        Path(made.path).write_bytes({"byte": data, "short": data[:-16], "empty": b""}[damage])
    with pytest.raises(InputError, match=r"\.chosen: is (damaged|missing)"):
        Chosen(str(tmp_path), made.identity)


def test_a_document_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="two verdicts or two spans"):
        written(tmp_path, [(0, 4), (4, 3), (4, 3)])
