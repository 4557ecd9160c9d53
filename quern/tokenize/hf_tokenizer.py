"""Converts a tiktoken encoding to ``tokenizer.json`` of the ``tokenizers`` library and back, with the same ids.

Both merge the leftmost pair with the lowest priority until none is left, but tiktoken looks pairs up by what they make
(any two neighbours whose bytes together are a token), ``tokenizers`` in a list of pairs. One pair a token is enough:
inside the bytes of a token T, what either has merged before T appears is what it would have merged on T's bytes alone,
because no merge crossed T's edges and lower priorities come first everywhere. So T is only ever made from the last two
parts of T's own bytes, merged alone; a token whose own bytes never merge into it stands in a text only where a piece
of the pattern is exactly this token, and both look whole pieces up first (``ignore_merges``).

A special token that stands written out in a text: here ``encode_ordinary`` reads its characters; ``transformers``
turns it into the control token, unless it is called with ``split_special_tokens=True``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiktoken_ext.openai_public import r50k_pat_str

from quern import storage
from quern.errors import InputError
from quern.tokenize.byte_level import shown_bytes
from quern.tokenize.encoding import TRAINED, Encoding, format_ranks, known_encodings, load_encoding

__all__ = ["TOKENIZER", "last_merge", "oniguruma", "read_encoding", "tokenizer_files"]

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"

#: The key of tokenizer_config.json that names the encoding; ``transformers`` keeps keys that it does not know.
ENCODING_KEY = "quern_encoding"


def tokenizer_files(encoding: Encoding, *, max_length: int | None = None) -> dict[str, bytes]:
    """File name → content: what ``transformers.AutoTokenizer`` needs to give the ids of ``encoding``.

    ``max_length``: tokens a sequence, where known. EOT is the only special token with a role (``eos_token``): training
    puts one after each document and nothing before it, so there is no BOS, and nothing is added to a text.

    Raises:
        InputError: the encoding's pattern or tokens cannot be said in this format.
    """
    definition = _definition(encoding)
    eos = next(text for text, token in definition.specials.items() if token == encoding.eot_id)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "pad_token": None,
        "unk_token": None,
        ENCODING_KEY: encoding.name,
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    contents = {TOKENIZER: _tokenizer_json(definition), CONFIG: config, SPECIALS: {"eos_token": eos}}
    return {name: (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode() for name, value in contents.items()}


def read_encoding(folder: str, scratch: str) -> Encoding:
    """The encoding that ``folder``'s tokenizer.json states; its ranks file is written into the folder ``scratch``.

    The file's vocabulary gives the ranks; the pattern and the special tokens must be those of an encoding that tiktoken
    knows, or GPT-2's pattern with one EOT, and the merges must be those that the ranks imply.

    Raises:
        InputError: a file that is not there, or that gives other ids than any such encoding.
    """
    path = storage.join(folder, TOKENIZER)
    stated = _parse(path, storage.read_json(path))
    ranks_path = storage.join(scratch, "encoding.tiktoken")
    storage.publish_bytes(ranks_path, format_ranks(stated.ranks))
    for name in dict.fromkeys([*_stated_name(folder), *known_encodings(), TRAINED]):
        try:
            encoding = load_encoding(name, ranks_path)
            candidate = _definition(encoding)
        except InputError:
            continue
        if candidate.specials == stated.specials and candidate.pattern == stated.pattern:
            return encoding
    raise _refused(
        path, f"its pattern or special tokens ({', '.join(stated.specials) or 'none'}) are no known encoding's"
    )


def _stated_name(folder: str) -> list[str]:
    path = storage.join(folder, CONFIG)
    if not storage.is_file(path):
        return []
    config = storage.read_json(path)
    name = config.get(ENCODING_KEY) if isinstance(config, dict) else None
    return [name] if isinstance(name, str) and name.strip() else []


@dataclass(frozen=True)
class _Definition:
    """What decides an encoding's ids."""

    ranks: Mapping[bytes, int]
    specials: Mapping[str, int]
    pattern: str
    """In Oniguruma's syntax."""


def _definition(encoding: Encoding) -> _Definition:
    core = encoding.core
    ranks = {token: core.encode_single_token(token) for token in core.token_byte_values()}
    specials = {text: core.encode_single_token(text) for text in sorted(core.special_tokens_set)}
    taken = _shown(ranks)
    for text in specials:
        if text.encode() in ranks or text in taken:  # one vocabulary, by text, holds both kinds
            raise InputError(f"encoding {encoding.name}: {text!r} is a special token and an ordinary one as well")
    return _Definition(ranks, specials, oniguruma(core._pat_str))


def _parse(path: str, content: Any) -> _Definition:
    """The parts of a tokenizer.json that decide its ids, checked against each other."""
    try:
        model = content["model"]
        specials = {entry["content"]: int(entry["id"]) for entry in content["added_tokens"]}
        byte_of = {text: byte for byte, text in shown_bytes().items()}
        texts = {text: int(token) for text, token in model["vocab"].items() if text not in specials}
        merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        kind, whole_pieces = model["type"], bool(model.get("ignore_merges"))
        unread = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
        pattern, normalizer = _pattern_of(content["pre_tokenizer"]), content.get("normalizer")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused(
            path, f"expected model, added_tokens and pre_tokenizer ({type(error).__name__}: {error})"
        ) from None
    if kind != "BPE" or normalizer is not None or unread or pattern is None:
        raise _refused(path, "its model, normalizer or pre_tokenizer is of another kind")
    try:
        ranks = {bytes(byte_of[character] for character in text): token for text, token in texts.items()}
    except KeyError as error:
        raise _refused(path, f"a token holds {error.args[0]!r}, which stands for no byte") from None
    implied, unmade = _merges(ranks)
    if merges != implied or (unmade and not whole_pieces):
        raise _refused(path, "its merges are not those that its vocabulary implies")
    return _Definition(ranks, specials, pattern)


def _pattern_of(pre_tokenizer: Mapping[str, Any]) -> str | None:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *split, byte_level = steps
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        return None
    if not split:
        return oniguruma(r50k_pat_str) if byte_level.get("use_regex", True) else None  # built in: GPT-2's
    if len(split) > 1 or byte_level.get("use_regex", True) or split[0]["type"] != "Split":
        return None
    if split[0]["behavior"] != "Isolated" or split[0]["invert"]:
        return None
    return str(split[0]["pattern"]["Regex"])


def _refused(path: str, why: str) -> InputError:
    return InputError(
        f"{path}: {why}; expected byte-level BPE with the pattern and special tokens of a tiktoken encoding, "
        "or give the encoding and its ranks file"
    )


def _merges(ranks: Mapping[bytes, int]) -> tuple[list[tuple[str, str]], int]:
    """The merges by priority, as byte-level text, and how many tokens of several bytes have none."""
    shown = shown_bytes()
    longer = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    pairs = [pair for token in longer if (pair := last_merge(token, ranks)) is not None]
    texts = [("".join(map(shown.__getitem__, left)), "".join(map(shown.__getitem__, right))) for left, right in pairs]
    return texts, len(longer) - len(pairs)


def _tokenizer_json(definition: _Definition) -> dict[str, Any]:
    ranks = definition.ranks
    specials = sorted(definition.specials.items(), key=lambda item: item[1])
    # The special tokens stand in the model's vocabulary too: without, they get the next free ids, not their own.
    vocabulary = _shown(ranks) | dict(specials)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for text, token in specials
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": definition.pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])),
            "merges": _merges(ranks)[0],
        },
    }  # fmt: skip


def _shown(ranks: Mapping[bytes, int]) -> dict[str, int]:
    """Tokens as byte-level text → rank."""
    shown = shown_bytes()
    return {"".join(map(shown.__getitem__, token)): rank for token, rank in ranks.items()}


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts whose merge makes ``token`` when its bytes are merged alone; None when they never become it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        found = [ranks.get(left + right) for left, right in itertools.pairwise(parts)]
        known = [rank for rank in found if rank is not None]
        if not known:
            return None
        at = found.index(min(known))
        if len(parts) == 2:
            return parts[0], parts[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def oniguruma(pattern: str) -> str:
    """tiktoken's pattern (Rust's ``fancy-regex``) in the syntax of Oniguruma, which ``tokenizers`` runs.

    Three things read differently: ``$`` and ``^`` are line ends there, and ``X{1,3}+`` is a repeat of a repeat, not a
    possessive one; ``X++``, ``X*+`` and ``X?+`` are possessive in both.

    Raises:
        InputError: a possessive interval after a group.
    """
    out: list[str] = []
    for piece in _PIECES.findall(pattern):
        if piece in "^$":
            out.append({"^": r"\A", "$": r"\z"}[piece])
        elif _POSSESSIVE_INTERVAL.fullmatch(piece):
            if out[-1:] in ([], [")"], ["("], ["|"]):
                raise InputError(f"encoding: the pattern {pattern!r} repeats a group possessively, {piece!r}")
            out.append(f"(?>{out.pop()}{piece[:-1]})")
        else:
            out.append(piece)
    return "".join(out)


#: A class, an escape, an interval with what follows it, or one character.
_PIECES = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\[pP]\{[^}]*\}|\\.|\{\d+(?:,\d*)?\}[+?]?|.", re.DOTALL)
_POSSESSIVE_INTERVAL = re.compile(r"\{\d+(?:,\d*)?\}\+")
