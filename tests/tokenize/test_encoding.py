"""Encodings: ids, dtype, control tokens, hostile texts, ranks that cannot be had."""

from __future__ import annotations

import base64
import gzip
import json
import pickle
import socket
import threading
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.errors import InputError
from quern.tokenize import encoding as encoding_module
from quern.tokenize.encoding import OPTIONS, TokenizeConfig, encode_ordinary, load_encoding
from support.named_cases import with_each

pieces = [
    "the",
    " the",
    " a",
    " in",
    "  ",
    "    ",
    "aaaa",
    "on",
    "er",
    *" \n\t\r'sdAB12.,!/é的\u0301\u00a0\u2028\x1c\x85",
]
hostile = st.lists(st.one_of(st.sampled_from(pieces), st.characters(codec="utf-8")), max_size=40).map("".join)
#: Texts of one repeated character; whether in other encodings than the own they are more than for the long tests.
REPEATED = [
    (" " * 1_000_000 + "x", True), ("\n" * 1_000_000 + "b", False), ("a" * 1_000_000, False), ("\t" * 600_000, False),
]  # fmt: skip
relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_tokens_decode_to_the_text_with_the_longest_merges(tiny_ranks: str) -> None:
    encoding = load_encoding("tiny", tiny_ranks)
    ids = encoding.encode("the aaaa")
    assert [encoding.decode(ids[i : i + 1]) for i in range(len(ids))] == ["the", " a", "aa", "a"]
    assert encoding.decode(ids) == "the aaaa"


def test_a_page_that_writes_the_control_token_does_not_get_it(tiny_ranks: str) -> None:
    encoding = load_encoding("tiny", tiny_ranks)
    text = "before<|endoftext|><|endoftext|>after"
    ids = encoding.encode(text)
    assert encoding.eot_id == 270
    assert encoding.eot_id not in ids
    assert encoding.decode(ids) == text


@pytest.mark.parametrize(("pairs", "dtype"), [(65_279, "uint16"), (65_280, "uint32")])
def test_ids_are_uint16_up_to_65536_of_them(tmp_path: Path, pairs: int, dtype: str) -> None:
    tokens = [*(bytes([b]) for b in range(256)), *(bytes(divmod(n, 256)) for n in range(pairs))]
    path = tmp_path / "ranks"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)))
    encoding = load_encoding("own", str(path))
    assert encoding.vocab_size == 256 + pairs + 1
    assert encoding.dtype == dtype
    assert encoding.encode("ab").dtype == dtype
    assert np.asarray(encoding.eot_id, encoding.dtype) == encoding.vocab_size - 1


def test_ids_above_65535_survive(wide_ranks: str) -> None:
    encoding = load_encoding("wide", wide_ranks)
    ids = encoding.encode("zzzz")
    assert ids.max() > 65_535
    assert encoding.decode(ids) == "zzzz"


def test_a_pickle_holds_the_name_and_the_path_only(tiny_ranks: str) -> None:
    encoding = load_encoding("tiny", tiny_ranks)
    data = pickle.dumps(encoding)
    assert len(data) < 500
    again = pickle.loads(data)
    assert (again.name, again.ranks_sha256) == ("tiny", encoding.ranks_sha256)


def test_new_content_under_the_same_path_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "ranks"
    singles = [b"%s %d\n" % (base64.b64encode(bytes([b])), b) for b in range(256)]
    path.write_bytes(b"".join(singles))
    assert load_encoding("own", str(path)).vocab_size == 257
    path.write_bytes(b"".join([*singles, b"YWI= 256\n"]))
    assert load_encoding("own", str(path)).encode("ab").tolist() == [256]


@relaxed
@given(text=hostile)
@pytest.mark.parametrize("name", ["own", "cl100k_base", "o200k_base"])
def test_long_texts_get_the_ids_of_plain_tiktoken(
    tiny_ranks: str, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    core = load_encoding(name, tiny_ranks).core
    monkeypatch.setattr(encoding_module, "MAX_NATIVE_CHARS", 0)
    assert list(encode_ordinary(core, text)) == core.encode_ordinary(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=f"{name}-{text[0]!r}", marks=() if name == "own" or soon else pytest.mark.long)
        for name in ("own", "cl100k_base", "o200k_base")
        for text, soon in REPEATED
    ],
)
def test_a_page_of_one_repeated_character_is_encoded_whole(tiny_ranks: str, name: str, text: str) -> None:
    """tiktoken 0.14 alone panics on several of these."""
    encoding = load_encoding(name, tiny_ranks)
    assert encoding.decode(encoding.encode(text)) == text


def test_missing_ranks_say_how_to_provide_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    encoding_module._load_by_name.cache_clear()
    with pytest.raises(InputError) as caught:
        load_encoding("cl100k_base")
    assert str(caught.value) == (
        "tokenize.encoding: the ranks of 'cl100k_base' are neither in tiktoken's cache nor can they be downloaded "
        "(OSError: no network in tests); set TIKTOKEN_CACHE_DIR to a folder that holds them, or give tokenize.ranks, a "
        ".tiktoken file, or tokenize.encoding=trained. tiktoken deletes a cached file whose hash is wrong"
    )
    with pytest.raises(InputError) as caught:
        load_encoding("cl100k_base", keys=OPTIONS)
    assert str(caught.value).startswith("--encoding: the ranks of 'cl100k_base'")
    assert "or give --ranks, a .tiktoken file. tiktoken" in str(caught.value)
    assert "tokenize." not in str(caught.value)


def test_a_download_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: release.wait())
    monkeypatch.setattr(encoding_module, "DOWNLOAD_TIMEOUT_S", 0.05)
    encoding_module._load_by_name.cache_clear()
    try:
        with pytest.raises(InputError, match="no answer within"):
            load_encoding("o200k_base")
    finally:
        release.set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[1:], "each of the 256 bytes, 0 has none"),
        (lambda lines: [*lines, b"YWI= 300"], "expected the ranks 0 to 256, got 300"),
        (lambda lines: [*lines, b"YWI= 7"], "got one twice"),
        (lambda lines: [*lines[:9], b"not base64", *lines[10:]], "line 10: expected a base64 token"),
        (lambda lines: [*lines[:9], b"YWI=", *lines[10:]], "line 10: expected a base64 token"),
    ],
)
def test_a_wrong_ranks_file_is_refused(tmp_path: Path, change: object, message: str) -> None:
    lines = [b"%s %d" % (base64.b64encode(bytes([b])), b) for b in range(256)]
    path = tmp_path / "wrong.tiktoken"
    path.write_bytes(b"\n".join(change(lines)))  # type: ignore[operator]
    with pytest.raises(InputError, match=message) as error:
        load_encoding("own", str(path))
    assert str(path) in str(error.value)


def test_ranks_of_another_encoding_are_refused_for_gpt2(tiny_ranks: str) -> None:
    with pytest.raises(InputError, match="not those of 'gpt2'"):
        load_encoding("gpt2", tiny_ranks)


def test_a_missing_ranks_file_is_named() -> None:
    with pytest.raises(InputError, match=r"/nowhere/ranks: cannot be read"):
        load_encoding("own", "/nowhere/ranks")


def test_a_known_name_keeps_its_pattern_and_special_tokens(tiny_ranks: str) -> None:
    encoding = load_encoding("cl100k_base", tiny_ranks)
    assert (encoding.eot_id, encoding.vocab_size, encoding.dtype) == (100_257, 100_277, "uint32")
    assert r"\p{N}{1,3}" in encoding.core._pat_str  # cl100k cuts numbers in threes, GPT-2 does not
    assert r"\p{N}{1,3}" not in load_encoding("own", tiny_ranks).core._pat_str


@with_each(
    {"encoding": "gtp2"},
    {"encoding": ""},
    {"validation": 1.0},
    {"validation": -0.1},
    {"validation": float("nan")},
    {"shard_tokens": 0},
    {"vocab_size": 1000},
    {"encoding": "trained", "vocab_size": 256},
    {"encoding": "trained", "ranks": "x", "vocab_size": 1000},
)
def test_impossible_settings_are_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        TokenizeConfig(**given)


def test_settings_survive_being_written_out() -> None:
    for config in (TokenizeConfig(), TokenizeConfig(encoding="trained"), TokenizeConfig(encoding="x", ranks="y")):
        assert TokenizeConfig(**config.model_dump()) == config


# --- against independent tokenizers ---------------------------------------------------------------------------------


def huggingface_gpt2(ranks_path: Path):  # type: ignore[no-untyped-def]
    """A `tokenizers` BPE whose merges are recovered from the ranks: the last two parts that the lower ranks leave."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ranks = {base64.b64decode(t): int(r) for t, r in map(bytes.split, ranks_path.read_bytes().splitlines())}
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    show = {b: chr(b) for b in visible}
    show |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in show)}

    def shown(token: bytes) -> str:
        return "".join(show[b] for b in token)

    def halves(token: bytes) -> tuple[str, str]:
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return shown(parts[0]), shown(parts[1])

    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [halves(token) for token in by_rank if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({shown(t): r for t, r in ranks.items()}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


@pytest.mark.slow
@pytest.mark.shared
def test_gpt2_by_name_and_from_its_ranks_is_one_encoding(gpt2_ranks: Path) -> None:
    named, local = load_encoding("gpt2"), load_encoding("gpt2", str(gpt2_ranks))
    assert named.encode("Hello world").tolist() == [15496, 995]
    assert (named.vocab_size, named.eot_id, named.dtype) == (50_257, 50_256, "uint16")
    assert named.ranks_sha256 == local.ranks_sha256
    assert named.ranks_file == gpt2_ranks.read_bytes()


@pytest.mark.shared
@pytest.mark.slow
def test_gpt2_ids_are_those_of_huggingface_tokenizers(shared: Path, gpt2_ranks: Path) -> None:
    ours, theirs = load_encoding("gpt2", str(gpt2_ranks)), huggingface_gpt2(gpt2_ranks)
    texts = ["<|endoftext|> I'll  go\n\n\tthere 'S", "é的\u0301 𝔘 \u200d👩‍🚀" * 3]
    for name in ("papers", "code", "multilingual", "wikipedia"):
        with gzip.open(shared / "data" / "text" / f"{name}.jsonl.gz", "rt") as file:
            texts += [json.loads(line)["text"][:2_000] for line in islice(file, 30)]
    assert len(texts) > 100
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False).ids
