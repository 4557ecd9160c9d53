"""``scan_streams`` finds what the definition in plain Python finds, token by token, and no more."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quern.errors import InputError
from quern.lineage.match import GramIndex, Item, scan, scan_streams
from quern.lineage.match.index import MIN_WORDS
from quern.lineage.match.normalise import words as normalised
from quern.lineage.match.pieces import Pieces, Spellings, token_bytes
from quern.tokenize.encoding import load_encoding
from support.train import corpora as C

SPACELESS = regex.compile("|".join(rf"\p{{Script={name}}}" for name in (
    "Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Yi",
)))  # fmt: skip


def plain_words(data: bytes) -> list[tuple[str, int, int]]:
    """The definition: (word, first byte, one past its last) of the bytes of a text."""
    found: list[tuple[str, int, int]] = []
    open_word = False
    at = 0
    for character in data.decode("utf-8", "surrogateescape"):
        size = len(character.encode("utf-8", "surrogateescape"))
        folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
        for part in folded:
            category = unicodedata.category(part)
            if category in {"Mn", "Me", "Cf"}:
                continue
            if not (part.isalpha() or category in {"Nd", "Nl", "No", "Mc"}):
                open_word = False
            elif category[0] == "L" and SPACELESS.match(part):
                found.append((part, at, at + size))
                open_word = False
            elif open_word:
                word, start, _ = found[-1]
                found[-1] = (word + part, start, at + size)
            else:
                found.append((part, at, at + size))
                open_word = True
        at += size
    return found


Row = tuple[int, int, int, int, int]
"""Document's start, item, different grams, span start, stop."""


def item_grams(item: Item, n: int) -> set[tuple[str, ...]]:
    grams = set()
    for text in item.texts:
        words = [word for word, _, _ in plain_words(text.encode("utf-8", "replace"))]
        if len(words) >= n:
            grams |= {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
        elif len(words) >= MIN_WORDS:
            grams.add(tuple(words))
    return grams


def plain_matches(
    documents: Sequence[Sequence[int]], vocabulary: Sequence[bytes], items: Sequence[Item], n: int
) -> list[Row]:
    """What the definition finds in documents of token ids (without their EOT)."""
    wanted = [item_grams(item, n) for item in items]
    rows: list[Row] = []
    start = 0
    for document in documents:
        words = plain_words(
            b"\n".join(b"".join(vocabulary[t] for t in part) for part in split_controls(document, vocabulary))
        )
        # a control token stands for one byte that separates
        ends = list(itertools.accumulate(len(vocabulary[token]) or 1 for token in document))
        for number, grams in enumerate(wanted):
            spans, held = [], set()
            for length in {len(gram) for gram in grams}:
                for i in range(len(words) - length + 1):
                    gram = tuple(word for word, _, _ in words[i : i + length])
                    if gram in grams:
                        held.add(gram)
                        spans.append((token_at(ends, words[i][1]), token_at(ends, words[i + length - 1][2] - 1) + 1))
            for first, last in merged(spans):
                rows.append((start, number, len(held), start + first, start + last))
        start += len(document) + 1
    return rows


def split_controls(document: Sequence[int], vocabulary: Sequence[bytes]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in document:
        if vocabulary[token]:
            parts[-1].append(token)
        else:
            parts.append([])
    return parts


def token_at(ends: Sequence[int], byte: int) -> int:
    return next(i for i, end in enumerate(ends) if end > byte)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if out and start < out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def write(folder: Path, shards: Sequence[Sequence[Sequence[int]]], vocabulary: Sequence[bytes], **sources: bool) -> str:
    """A source of shards of documents (ids without EOT); ``vocabulary``: every token's bytes, without the EOT."""
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(vocabulary))
    eot = len(vocabulary)
    docs = [[C.Doc((*ids, eot)) for ids in shard] for shard in shards]
    (path,) = C.write_run(folder, {"web": docs}, vocab_size=eot + 1, ranks=ranks)
    return str(path)


def rows_of(path: str, items: Sequence[Item], n: int, **options: int) -> list[Row]:
    found = scan_streams([path], GramIndex(items, n), **options)
    columns = (found.documents, found.items, found.grams, found.starts, found.stops)
    return list(zip(*(column.tolist() for column in columns), strict=True))


#: Every byte, and tokens of all shapes: halves of characters, words with what stands around them, several words.
STRANGE = [
    b" a", b"a ", b" a ", b"ab", b"a b", b" a b ", b"a-b c", b"--", b" \n", b"A", b"aB", b"\xc3", b"\xa9", b"a\xc3",
    b"\xa9a", b"\xc3\xa9 b", b"\xe6\xb0", b"\xb4", b"\xb4\xe6", b"e", b"\xcc", b"\x81", b"\x81 ", b"\xff",
    b"\xff\xfe", b"a\xff",
    b"\xf0\x9d", b"\x92\x9c", b"\xed\xa0\x80", b"1", b" 1", b"a1", b"ss", b"\xe2\x80", b"\x99", b"_", b"'", b"\x00",
    *(text.encode() for text in (
        "é", " é", "水", " 水a", "½", "ﬁ", "\u0301", "ß", "İ", "\u00ad", "’", "ガ", "ｶ", "ﾞ", "ก", "कि", "\ufeff", "한",
        "ᾳ",
    )),
]  # fmt: skip
VOCABULARY = [bytes([value]) for value in range(256)]
VOCABULARY += [token for token in dict.fromkeys(STRANGE) if token not in set(VOCABULARY)]
EOT = len(VOCABULARY)
IDS = {token: number for number, token in enumerate(VOCABULARY)}
SHOWN = [IDS[token] for token in dict.fromkeys(STRANGE)]

tokens = st.lists(st.sampled_from(SHOWN), max_size=60)


@pytest.mark.slow
@given(st.lists(tokens, min_size=1, max_size=3))
def test_words_of_any_tokens_are_those_of_their_bytes(documents: list[list[int]]) -> None:
    pieces = Pieces([*VOCABULARY, b""])
    ids = [token for document in documents for token in (*document, EOT)]
    expected, at = [], 0
    for document in documents:
        ends = list(itertools.accumulate(len(VOCABULARY[token]) for token in document))
        for word, first, stop in plain_words(b"".join(VOCABULARY[token] for token in document)):
            expected.append((word.encode(), at + token_at(ends, first), at + token_at(ends, stop - 1) + 1))
        at += len(document) + 1
    words = pieces.read(np.array(ids, np.uint16))
    assert list(zip(words.starts.tolist(), words.stops.tolist(), strict=True)) == [row[1:] for row in expected]
    spellings = Spellings.of([row[0] for row in expected])
    everything = np.arange(len(words))
    assert pieces.spelled(words, everything, spellings, everything).all()
    assert (spellings.hashes() == words.hashes).all()


@given(st.text())
@example("0ー々 カー")
def test_words_of_a_text_are_the_definitions(text: str) -> None:
    assert normalised(text) == [word for word, _, _ in plain_words(text.encode("utf-8", "replace"))] or "\ufffd" in text


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([1, 2, 3, 8, 9, 10, 13]),
    chunk=st.sampled_from([1, 2, 7, 30, 100, 1000]),
)
def test_scan_finds_what_the_definition_finds(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, chunk: int
) -> None:
    draw = random.Random(seed)
    words = ["a", "b", "ab", "é", "水", "1", "ss", "fi", "a1", "한"][: draw.randint(2, 10)]
    marks = [" ", " ", ", ", "-", "\n", "’", " _ ", "  "]

    def text(size: int) -> str:
        return "".join(draw.choice(words) + draw.choice(marks) for _ in range(size))

    items = [
        Item(str(i), i, tuple(text(draw.choice([0, 1, 5, 8, 9, 12, 13, 14, 20])) for _ in range(draw.randint(0, 3))))
        for i in range(draw.randint(1, 6))
    ]
    items += draw.sample(items, min(2, len(items)))  # twice the same
    shards = []
    for _ in range(draw.randint(1, 3)):
        shard = []
        for _ in range(draw.randint(1, 6)):
            data = text(draw.choice([0, 3, 10, 30])).encode()
            for item in draw.sample(items, draw.randint(0, 2)):
                piece = "".join(item.texts)
                data += (piece.upper() if draw.random() < 0.5 else piece).encode() + text(draw.randint(0, 3)).encode()
            ids = tokenized(draw, data)
            for _ in range(draw.choice([0, 0, 0, 1, 3])):
                ids.insert(
                    draw.randint(0, len(ids)), draw.choice([EOT, IDS[b"\xff"], IDS["\u00ad".encode()], IDS[b"\xc3"]])
                )
            shard.append(ids)
        shards.append(shard)
    path = write(tmp_path_factory.mktemp("run"), shards, VOCABULARY)
    expected = plain_matches([ids for shard in shards for ids in shard], [*VOCABULARY, b""], items, n)
    assert rows_of(path, items, n, chunk_tokens=chunk) == expected


def tokenized(draw: random.Random, data: bytes) -> list[int]:
    """A random cut of ``data`` into tokens."""
    ids, at = [], 0
    while at < len(data):
        fitting = [size for size in (1, 2, 3, 4) if data[at : at + size] in IDS and at + size <= len(data)]
        size = draw.choice(fitting)
        ids.append(IDS[data[at : at + size]])
        at += size
    return ids


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (THIRTEEN, True),
        (THIRTEEN.upper().replace(" ", "\n*"), True),
        (THIRTEEN.replace("one", "ône").replace("five", "fi\u00adve").replace("six", "ｓｉｘ"), True),
        (THIRTEEN.replace("seven", "sevens"), False),
        (THIRTEEN.removesuffix(" thirteen"), False),
        ("x" + THIRTEEN, False),
        (THIRTEEN.replace("six ", "six seven "), False),
    ],
)
def test_thirteen_words_in_a_row_match_whatever_stands_between_them(tmp_path: Path, text: str, found: bool) -> None:
    path = write(tmp_path, [[as_bytes(f"before. {text}! after")]], VOCABULARY)
    size = len(text.encode())
    assert rows_of(path, [Item("i", 1, (THIRTEEN,))], 13) == ([(0, 0, 1, 8, 8 + size)] if found else [])


def test_no_gram_reaches_over_a_document_end_or_a_control_token_joins_words(tmp_path: Path) -> None:
    half, rest = THIRTEEN[:30], THIRTEEN[30:]
    documents = [as_bytes(half), as_bytes(rest), [*as_bytes("on"), EOT, *as_bytes(THIRTEEN[2:])]]
    path = write(tmp_path, [documents], VOCABULARY)
    assert rows_of(path, [Item("i", 1, (THIRTEEN,))], 13) == []
    # a control token inside separates words and is otherwise nothing
    path = write(tmp_path / "2", [[[*as_bytes(half), EOT, EOT, *as_bytes(rest)]]], VOCABULARY)
    at_space = half.endswith(" ") or rest.startswith(" ")
    assert bool(rows_of(path, [Item("i", 1, (THIRTEEN,))], 13)) is at_space


def test_short_items_are_whole_or_not_looked_for() -> None:
    eight, seven = " ".join(THIRTEEN.split()[:8]), " ".join(THIRTEEN.split()[:7])
    items = [
        Item(str(i), i, texts)
        for i, texts in enumerate([(eight,), (seven,), (), ("?! …",), (THIRTEEN, eight), (eight, eight)])
    ]
    assert GramIndex(items, 13).num_grams.tolist() == [1, 0, 0, 0, 2, 1]
    assert GramIndex(items, 3).num_grams.tolist() == [6, 5, 0, 0, 11, 6]


def test_purged_spans_do_not_match(tmp_path: Path) -> None:
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(VOCABULARY))
    ids = (*as_bytes(THIRTEEN), EOT)
    docs = [C.Doc(ids, purged=True), C.Doc(ids), C.Doc((EOT,) * 40, purged=True), C.Doc(ids, purged=True)]
    (path,) = C.write_run(tmp_path, {"web": [docs]}, vocab_size=EOT + 1, ranks=ranks)
    assert rows_of(str(path), [Item("i", 1, (THIRTEEN,))], 13) == [(len(ids), 0, 1, len(ids), 2 * len(ids) - 1)]


def test_hostile_texts_with_words_longer_than_a_chunk(tmp_path: Path) -> None:
    long = "x" * 3000
    text = " ".join([long, THIRTEEN, long, *(["y" * 700] * 15), THIRTEEN.replace(" ", "-" * 500), long])
    documents = [as_bytes(text), as_bytes("\u0301" * 2000 + THIRTEEN), [IDS[b"\xff"]] * 3000 + as_bytes(THIRTEEN)]
    path = write(tmp_path, [documents], VOCABULARY)
    items = [Item("i", 1, (THIRTEEN,)), Item("j", 2, (" ".join(["y" * 700] * 13),))]
    expected = plain_matches(documents, VOCABULARY, items, 13)
    assert len(expected) == 5
    for chunk in (64, 1000, 1 << 18):
        assert rows_of(path, items, 13, chunk_tokens=chunk) == expected


def test_words_with_equal_hashes_are_told_apart(tmp_path: Path) -> None:
    """Thue–Morse words: their polynomial hashes mod 2^64 are equal for every odd base."""
    morse = "".join("ab"[bin(i).count("1") % 2] for i in range(2048))
    other = morse.translate(str.maketrans("ab", "ba"))
    assert len(set(Spellings.of([morse.encode(), other.encode()]).hashes().tolist())) == 1
    line = " ".join(f"{word}" for word in THIRTEEN.split()[:12])
    documents = [as_bytes(f"{line} {word}") for word in (morse, other)]
    path = write(tmp_path, [documents], VOCABULARY)
    for items in (
        [Item("a", 1, (f"{line} {morse}",))],
        [Item("b", 1, (f"{line} {other}",))],
        [Item("a", 1, (f"{line} {morse}",)), Item("b", 2, (f"{line} {other}",))],
    ):
        expected = plain_matches(documents, VOCABULARY, items, 13)
        assert len(expected) == len(items)
        assert rows_of(path, items, 13) == expected


def test_an_id_that_no_token_has_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    path = Path(write(tmp_path, [[as_bytes("some text"), as_bytes("more")]], VOCABULARY))
    shard = path / "shard_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\xff\xff" * 2)
    with pytest.raises(InputError, match=r"shard_00000\.bin: token 65535 is outside the encoding's"):
        rows_of(str(path), [Item("i", 1, (THIRTEEN,))], 13)


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    shards = [[as_bytes(f"{i} {THIRTEEN if draw.random() < 0.3 else 'none'} {j}") for j in range(20)] for i in range(5)]
    path = write(tmp_path, shards, VOCABULARY)
    items = [Item("i", 1, (THIRTEEN,))]
    expected = rows_of(path, items, 13)
    assert len(expected) > 10
    monkeypatch.setattr(scan, "JOB_TOKENS", 100)
    assert rows_of(path, items, 13, workers=2) == rows_of(path, items, 13) == expected


def test_nothing_to_look_for(tmp_path: Path) -> None:
    path = write(tmp_path, [[as_bytes("some text")]], VOCABULARY)
    assert rows_of(path, [], 13) == rows_of(path, [Item("i", 1, ("too short",)), Item("j", 2, ())], 13) == []


@pytest.mark.slow
def test_real_texts_with_benchmark_items_in_them(tmp_path: Path, shared: Path, gpt2_ranks: Path) -> None:
    """GSM8K in encyclopedia articles, code and texts of many languages, in the real encoding."""
    encoding = load_encoding("gpt2", str(gpt2_ranks))
    draw = random.Random(1)
    with (shared / "data" / "benchmarks" / "gsm8k_test.jsonl").open() as lines:
        questions = [json.loads(line)["question"] for line in lines][:40]
    items = [Item(str(i), i, (question,)) for i, question in enumerate(questions)]
    documents = []
    for name in ("wikipedia", "code", "multilingual"):
        with gzip.open(shared / "data" / "text" / f"{name}.jsonl.gz", "rt") as lines:
            for line in list(lines)[:13]:
                text = json.loads(line)["text"][:2000]
                if draw.random() < 0.5:
                    place = draw.randint(0, len(text))
                    words = draw.choice(questions).split(" ")
                    text = text[:place] + draw.choice([" ", "\n> "]).join(words[draw.randint(0, 9) :]) + text[place:]
                documents.append(encoding.encode(text).tolist())
    vocabulary = token_bytes(encoding)
    ranks = gpt2_ranks.read_bytes()
    docs = [C.Doc((*ids, encoding.eot_id)) for ids in documents]
    (path,) = C.write_run(
        tmp_path, {"web": [docs[:16], docs[16:]]}, vocab_size=encoding.vocab_size, ranks=ranks, encoding="gpt2"
    )
    expected = plain_matches(documents, vocabulary, items, 13)
    assert len(expected) > 10
    assert rows_of(str(path), items, 13) == expected
    assert rows_of(str(path), items, 13, chunk_tokens=150) == expected
