"""tokenizer.json against tiktoken: the same ids for every text."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import unicodedata
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quern.errors import InputError
from quern.tokenize.encoding import ENDOFTEXT, Encoding, _known_definition, load_encoding
from quern.tokenize.hf_tokenizer import CONFIG, TOKENIZER, oniguruma, read_encoding, tokenizer_files
from quern.tokenize.writing.train_encoding import train_ranks
from support.named_cases import with_each

BYTES = [bytes([value]) for value in range(256)]
#: One encoding a pattern; the others have one of these.
PATTERNS = ("gpt2", "cl100k_base", "o200k_base")

SENTENCES = (
    "The cat's hat isn't there; we'll see, they've said, I'm sure you'd go. ",
    "def f(x):\n    return x  # 1234567 numbers\n\n\n\tif a != b:\r\n        pass   \n",
    "Größe und Maß, l'été à Paris, ¿qué tal?, Добрый день, 今天天气很好。 สวัสดี नमस्ते 안녕하세요 ",
    "HTTPServer camelCase SCREAMING_CASE 3.14159 2024-02-29 12:30 $1,000,000.00!!! ... -- == ",
)


def tokenizer_of(encoding: Encoding) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(encoding)[TOKENIZER].decode())


def own(ranks: dict[bytes, int], pattern: str, specials: dict[str, int] | None = None) -> Encoding:
    core = tiktoken.Encoding(
        "own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials or {ENDOFTEXT: len(ranks)}
    )
    return Encoding("own", None, core, ranks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ranks file as a run trains its own."""
    path = tmp_path_factory.mktemp("trained") / "ranks.tiktoken"
    path.write_bytes(train_ranks([sentence * 5 for sentence in SENTENCES], 600))
    return str(path)


@pytest.fixture(scope="module")
def pairs() -> Callable[[str], tuple[Encoding, Tokenizer]]:
    """Every two bytes are a token, so that ids show where pieces end; with the pattern of an encoding by name."""
    ranks = {token: rank for rank, token in enumerate([*BYTES, *(a + b for a in BYTES for b in BYTES)])}
    made: dict[str, tuple[Encoding, Tokenizer]] = {}

    def get(name: str) -> tuple[Encoding, Tokenizer]:
        if name not in made:
            definition = _known_definition(name, ranks)
            del definition["name"]
            definition.pop("explicit_n_vocab", None)
            specials = {text: token + 100_000 for text, token in definition["special_tokens"].items()}
            encoding = own(ranks, definition["pat_str"], specials)
            made[name] = encoding, tokenizer_of(encoding)
        return made[name]

    return get


def assert_same(encoding: Encoding, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    expected = encoding.core.encode_ordinary(text)
    if ids != expected:
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ids, expected)) if a != b)
        around = [encoding.core.decode_bytes(part[max(0, at - 3) : at + 4]) for part in (ids, expected)]
        raise AssertionError(f"token {at}: {around[0]!r}, expected {around[1]!r}")


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_any_ranks_merge_as_tiktoken_merges_them(data: st.DataObject) -> None:
    """Also ranks no training gives: a token before its parts, tokens nothing merges into, many ways to make one."""
    longer = data.draw(st.lists(st.text("abc", min_size=2, max_size=7), unique=True, max_size=25))
    tokens = [*BYTES, *(token.encode() for token in longer)]
    order = data.draw(st.permutations(range(len(longer))))
    ranks = dict(zip(tokens, [*range(256), *(256 + rank for rank in order)], strict=True))
    encoding = own(ranks, r"\w+|\W+")
    tokenizer = tokenizer_of(encoding)
    drawn = data.draw(st.lists(st.text("abc ", max_size=60), min_size=5, max_size=20))
    for text in [*longer, *drawn]:  # a whole piece that is a token is looked up, even one that nothing merges into
        assert_same(encoding, tokenizer, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=60)
@given(
    parts=st.lists(
        st.one_of(
            st.sampled_from(["'s", "'LL", "'ve", "’s", "ſ", "K", "\r\n", "\n\n", "  ", "\t", "\u3000", "\u2028", "\x85",
                             "\xa0", "\x1c", "1234567", "٣٤٥٦", "½", "a", "Za", "ZZ", "é", "e\u0301", "漢", "!?", "/"]),
            st.text(max_size=6),
        ),
        max_size=20,
    )
)  # fmt: skip
def test_pieces_end_where_tiktokens_end(pairs: Any, name: str, parts: list[str]) -> None:
    text = "".join(parts).encode("utf-8", "ignore").decode()
    assert_same(*pairs(name), text)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_every_kind_of_character_is_classed_as_tiktoken_classes_it(pairs: Any, name: str) -> None:
    """All assigned characters but the insides of long alphabets, each in several neighbourhoods."""
    encoding, tokenizer = pairs(name)
    characters = [
        character
        for code in range(sys.maxunicode + 1)
        if (category := unicodedata.category(character := chr(code))) not in ("Cn", "Co", "Cs")
        and (category != "Lo" or code % 256 == 0 or code < 0x3400)
    ]
    assert len(characters) > 15_000
    for start in range(0, len(characters), 1000):
        text = "".join(f"a{c}1{c} {c}'{c}\n" for c in characters[start : start + 1000])
        assert_same(encoding, tokenizer, text)


@with_each(*product([1, 2, 127, 128, 129, 10_000], ["", "x", "\n", "\nx"]))
def test_runs_of_white_space(spaces: int, end: str, *, trained: str) -> None:
    encoding = load_encoding("trained", trained)
    assert_same(encoding, tokenizer_of(encoding), "x" + " " * spaces + end)


def test_a_trained_encoding_gives_the_same_ids(trained: str) -> None:
    encoding = load_encoding("trained", trained)
    assert encoding.vocab_size > 350
    tokenizer = tokenizer_of(encoding)
    for text in ("", *SENTENCES, "".join(SENTENCES) * 20):
        assert_same(encoding, tokenizer, text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.slow
@pytest.mark.shared
def test_real_pages_get_the_same_ids(gpt2_ranks: Path, shared: Path) -> None:
    encoding = load_encoding("gpt2", str(gpt2_ranks))
    tokenizer = tokenizer_of(encoding)
    count = 0
    for name in ("multilingual", "code", "cc_text", "papers", "wikipedia"):
        with gzip.open(shared / "data" / "text" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            for line in itertools.islice(file, 0, 900, 9):
                text = json.loads(line)["text"]
                assert_same(encoding, tokenizer, text[:500])
                count += 1
    assert count > 230


def test_ids_of_special_tokens_keep_their_holes(pairs: Any) -> None:
    """cl100k_base leaves ids between its ranks and its special tokens unused, and between these."""
    encoding, tokenizer = pairs("cl100k_base")
    assert {text: tokenizer.token_to_id(text) for text in encoding.core.special_tokens_set} == {
        ENDOFTEXT: 200_257, "<|fim_prefix|>": 200_258, "<|fim_middle|>": 200_259, "<|fim_suffix|>": 200_260,
        "<|endofprompt|>": 200_276,
    }  # fmt: skip


def test_eot_written_in_a_text_becomes_the_control_token_unless_asked_not_to(trained: str) -> None:
    encoding = load_encoding("trained", trained)
    tokenizer = tokenizer_of(encoding)
    text = f"say {ENDOFTEXT} now"
    before, after = (encoding.core.encode_ordinary(part) for part in ("say ", " now"))
    assert tokenizer.encode(text).ids == [*before, encoding.eot_id, *after]
    tokenizer.encode_special_tokens = True  # what transformers' split_special_tokens=True sets
    assert tokenizer.encode(text).ids == encoding.core.encode_ordinary(text)


@pytest.mark.parametrize(("token", "special"), [("<|end|>", "<|end|>"), ("xyz", "Ġ")])  # Ġ: how a space is written
def test_a_special_token_that_is_an_ordinary_one_too_is_refused(token: str, special: str) -> None:
    ranks = {token: rank for rank, token in enumerate([*BYTES, token.encode()])}
    with pytest.raises(InputError, match=r"'(<\|end\|>|Ġ)' is a special token and an ordinary one"):
        tokenizer_files(own(ranks, r"\S+|\s+", {ENDOFTEXT: 300, special: 301}))


@with_each(
    (r"\p{N}{1,3}+| ?x++$", r"(?>\p{N}{1,3})| ?x++\z"),
    (r"[$^a\]+]{2}+^", r"(?>[$^a\]+]{2})\A"),
    (r"\${2,}\$", r"\${2,}\$"),
    (r"a{2}?b*+", r"a{2}?b*+"),
)
def test_a_pattern_is_said_in_onigurumas_words(pattern: str, expected: str) -> None:
    assert oniguruma(pattern) == expected


def test_a_group_repeated_possessively_is_refused() -> None:
    with pytest.raises(InputError, match=r"repeats a group possessively, '\{1,3\}\+'"):
        oniguruma(r"(?:ab){1,3}+")


@pytest.fixture
def written(trained: str, tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer_files(load_encoding("trained", trained)).items():
        (folder / name).write_bytes(content)
    return folder


def test_a_written_tokenizer_reads_back_as_the_same_encoding(written: Path, trained: str, tmp_path: Path) -> None:
    encoding = load_encoding("trained", trained)
    found = read_encoding(str(written), str(tmp_path))
    assert (found.name, found.ranks_file, found.eot_id) == ("trained", Path(trained).read_bytes(), encoding.eot_id)
    (written / CONFIG).unlink()
    nameless = read_encoding(str(written), str(tmp_path))
    assert (nameless.ranks_file, nameless.eot_id) == (encoding.ranks_file, encoding.eot_id)
    assert list(nameless.encode(SENTENCES[2])) == list(encoding.encode(SENTENCES[2]))


def test_gpt2s_own_tokenizer_json_reads_as_the_encoding(written: Path, trained: str, tmp_path: Path) -> None:
    """There the pattern is ByteLevel's built-in one and merges are texts; here every token of the file is mergeable."""
    content = json.loads((written / TOKENIZER).read_text())
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    content["model"]["ignore_merges"] = False
    (written / TOKENIZER).write_text(json.dumps(content))
    found = read_encoding(str(written), str(tmp_path))
    tokenizer = Tokenizer.from_file(str(written / TOKENIZER))
    for text in SENTENCES:
        assert_same(found, tokenizer, text)


def _swap_merges(content: Any) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _add_special(content: Any) -> None:
    """One id more than any known encoding has beside these ranks."""
    more = {**content["added_tokens"][0], "content": "<s>", "id": content["added_tokens"][0]["id"] + 1}
    content["added_tokens"].append(more)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        for key in parents:
            content = content[key]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_swap_merges, "its merges are not those"),
        (_set("pre_tokenizer.pretokenizers.0.pattern.Regex", r"\w+|\W+"), "are no known encoding's"),
        (_set("pre_tokenizer.pretokenizers.0.behavior", "Removed"), "of another kind"),
        (_set("pre_tokenizer.pretokenizers.1.add_prefix_space", True), "of another kind"),
        (_set("normalizer", {"type": "NFC"}), "of another kind"),
        (_set("model.type", "Unigram"), "of another kind"),
        (_set("model.vocab.▁the", 70), "'▁', which stands for no byte"),
        (_add_special, r"pattern or special tokens \(<\|endoftext\|>, <s>\) are"),
        (_set("added_tokens.0.content", "<s>"), "are no known encoding's"),
        (_set("model", None), "expected model, added_tokens and pre_tokenizer"),
    ],
)
def test_a_tokenizer_with_other_ids_is_refused(
    written: Path, tmp_path: Path, change: Callable[[Any], None], why: str
) -> None:
    content = json.loads((written / TOKENIZER).read_text())
    change(content)
    (written / TOKENIZER).write_text(json.dumps(content))
    with pytest.raises(InputError, match=why) as caught:
        read_encoding(str(written), str(tmp_path))
    assert str(caught.value).startswith(str(written / TOKENIZER))
    assert "\n" not in str(caught.value)
