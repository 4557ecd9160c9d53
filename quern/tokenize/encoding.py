"""Loads tiktoken encodings and their ranks.

Page text is encoded with ``encode_ordinary`` only: a page that says ``<|endoftext|>`` gets the tokens of these
characters, never the control token.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import threading
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from quern import storage
from quern.config import Section
from quern.errors import InputError, QuernError, one_line
from quern.words import shorten

if TYPE_CHECKING:
    import tiktoken

__all__ = [
    "ENDOFTEXT", "OPTIONS", "TRAINED", "Encoding", "Keys", "TokenizeConfig", "encode_ordinary", "format_ranks",
    "load_encoding",
]  # fmt: skip

ENDOFTEXT = "<|endoftext|>"
TRAINED = "trained"
DEFAULT_VOCAB_SIZE = 32_768

#: A vocabulary up to this size fits uint16.
UINT16_VOCAB = 65_536

#: Longer texts are split outside tiktoken: its regex engine panics when one run of white space needs about a million
#: backtracking entries (measured with 0.14: 700,000 spaces before a letter pass, 1,000,000 do not).
MAX_NATIVE_CHARS = 500_000

#: tiktoken's download has no time-out of its own: a firewall that drops packets would hold a run for ever.
DOWNLOAD_TIMEOUT_S = 60.0


class Keys(NamedTuple):
    """The names by which error messages call the encoding and its ranks file."""

    encoding: str = "tokenize.encoding"
    ranks: str = "tokenize.ranks"
    otherwise: str = f", or tokenize.encoding={TRAINED}"


#: Of commands that have options for the two.
OPTIONS = Keys("--encoding", "--ranks", "")


class TokenizeConfig(Section):
    """How documents become token shards."""

    encoding: str = "gpt2"
    """A tiktoken encoding (``gpt2``, ``cl100k_base``, …), ``trained``, or with ``ranks`` any name."""
    ranks: str | None = None
    """A tiktoken ranks file: of the encoding that tiktoken knows by that name, else of a new one with GPT-2's pattern.
    Example: encodings/mine.tiktoken"""
    vocab_size: Annotated[int, Field(ge=257)] | None = None
    """[ids] Ids of a ``trained`` encoding, EOT included; null = 32,768. A small corpus may give fewer. Example:
    32768"""
    shard_tokens: Annotated[int, Field(ge=1)] = 2**30
    """[tokens] A shard is closed at the first document end at or above this size."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.002
    """[share] Clusters of duplicates that are held out for validation; 0 = none."""

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        if not self.encoding.strip():
            raise ValueError("expected the name of an encoding, got an empty text")
        if self.ranks is None and self.encoding != TRAINED and self.encoding not in known_encodings():
            names = ", ".join(known_encodings())
            raise ValueError(f"encoding: expected one of {names}, {TRAINED}, or ranks= as well, got {self.encoding!r}")
        if self.vocab_size is not None and not self.trains:
            raise ValueError(
                f"vocab_size: expected only with encoding: {TRAINED} and no ranks, got {self.vocab_size} "
                f"for {self.encoding!r}"
            )
        return self

    @property
    def trains(self) -> bool:
        """Whether the run trains its own encoding."""
        return self.encoding == TRAINED and self.ranks is None

    @property
    def trained_vocab_size(self) -> int:
        """Ids of the encoding to train, EOT included."""
        return self.vocab_size or DEFAULT_VOCAB_SIZE


def known_encodings() -> list[str]:
    """The encodings tiktoken knows by name, sorted."""
    import tiktoken

    return sorted(tiktoken.list_encoding_names())


class Encoding:
    """Maps text to ids and back; a pickle holds only (name, ranks path)."""

    def __init__(self, name: str, ranks_path: str | None, core: tiktoken.Encoding, ranks: Mapping[bytes, int]) -> None:
        self.name = name
        self.ranks_path = ranks_path
        self.vocab_size = core.n_vocab
        """Ids run from 0 to ``vocab_size - 1``."""
        self.eot_id = core.eot_token
        self.dtype: Literal["uint16", "uint32"] = "uint16" if self.vocab_size <= UINT16_VOCAB else "uint32"
        self.core = core
        self._ranks = ranks
        assert max(core.max_token_value, self.eot_id) <= np.iinfo(self.dtype).max

    @functools.cached_property
    def ranks_file(self) -> bytes:
        """The ranks as a tiktoken file: equal ranks are equal bytes."""
        return format_ranks(self._ranks)

    @functools.cached_property
    def ranks_sha256(self) -> str:
        return hashlib.sha256(self.ranks_file).hexdigest()

    def __reduce__(self) -> tuple[Callable[..., Encoding], tuple[str, str | None]]:
        return load_encoding, (self.name, self.ranks_path)

    def token_bytes(self) -> list[bytes | None]:
        """The bytes of each id from 0 to ``vocab_size - 1``; None of one that the encoding leaves out."""
        found: list[bytes | None] = [None] * self.vocab_size
        for token in range(self.vocab_size):
            with suppress(KeyError):
                found[token] = self.core.decode_single_token_bytes(token)
        return found

    def encode(self, text: str) -> np.ndarray:
        """The ids of ``text`` as a 1-d array of :attr:`dtype`, without EOT.

        Raises:
            QuernError: an id that does not fit the dtype (it would wrap silently).
        """
        ids = np.asarray(encode_ordinary(self.core, text), dtype=np.uint32)
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise QuernError(f"encoding {self.name}: id {int(ids.max())} is outside its {self.vocab_size} ids")
        return ids.astype(self.dtype, copy=False)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ``ids``; bytes that are no UTF-8 (a character cut in two) become U+FFFD."""
        return self.core.decode(np.asarray(ids).tolist(), errors="replace")


def encode_ordinary(core: tiktoken.Encoding, text: str) -> list[int] | np.ndarray:
    """The ids of ``core.encode_ordinary(text)``, also for texts on which tiktoken panics; linear time."""
    if len(text) <= MAX_NATIVE_CHARS:
        return core.encode_ordinary(text)
    import regex

    # The same pattern on a regex engine that backtracks on the heap; pieces go through tiktoken's own merge.
    parts = [
        np.asarray(core._encode_single_piece(match.group()), dtype=np.uint32)
        for match in regex.finditer(core._pat_str, text)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def load_encoding(name: str, ranks_path: str | None = None, keys: Keys = Keys()) -> Encoding:  # noqa: B008
    """The encoding ``name``: through tiktoken, or from the ranks file at ``ranks_path`` (local or fsspec).

    With ranks, a name that tiktoken knows keeps that encoding's pattern and special tokens; any other gets GPT-2's
    pattern and one EOT whose id is the number of ranks. Errors name ``keys``.

    Raises:
        InputError: the ranks cannot be had, or do not belong to the encoding.
    """
    if ranks_path is None:
        return _load_by_name(name, keys)
    try:
        content = storage.read_bytes(ranks_path)
    except OSError as error:
        raise InputError(f"{keys.ranks}: {ranks_path}: cannot be read ({error.strerror or error})") from None
    return _load_from_ranks(name, ranks_path, content, keys)


@functools.lru_cache(maxsize=4)
def _load_by_name(name: str, keys: Keys) -> Encoding:
    if name not in known_encodings():
        raise InputError(f"{keys.encoding}: {name!r} is not known to tiktoken; give {keys.ranks}, a ranks file")
    core = _get_encoding(name, keys)
    ranks = {token: core.encode_single_token(token) for token in core.token_byte_values()}
    return Encoding(name, None, core, ranks)


def _get_encoding(name: str, keys: Keys) -> tiktoken.Encoding:
    """tiktoken's encoding in bounded time: from its cache, else from the network."""
    import tiktoken

    outcome: list[tiktoken.Encoding | Exception] = []

    def load() -> None:
        try:
            outcome.append(tiktoken.get_encoding(name))
        except Exception as error:  # requests', OSError, a wrong hash: each means that there are no ranks
            outcome.append(error)

    thread = threading.Thread(target=load, daemon=True, name=f"load-{name}")
    thread.start()
    thread.join(DOWNLOAD_TIMEOUT_S)
    result = outcome[0] if outcome else TimeoutError(f"no answer within {DOWNLOAD_TIMEOUT_S:g} s")
    if isinstance(result, Exception):
        raise InputError(
            f"{keys.encoding}: the ranks of {name!r} are neither in tiktoken's cache nor can they be downloaded "
            f"({_first_cause(result)}); set TIKTOKEN_CACHE_DIR to a folder that holds them, or give {keys.ranks}, a "
            f".tiktoken file{keys.otherwise}. tiktoken deletes a cached file whose hash is wrong"
        )
    return result


def _first_cause(error: BaseException) -> str:
    """What went wrong at first: errors of downloads quote those below them at length."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return shorten(f"{type(error).__name__}: {one_line(error)}", 160)


@functools.lru_cache(maxsize=4)
def _load_from_ranks(name: str, path: str, content: bytes, keys: Keys) -> Encoding:
    try:
        return Encoding(name, path, *_make(name, content))
    except ValueError as error:
        raise InputError(f"{keys.ranks}: {path}: {error}") from None


@functools.lru_cache(maxsize=4)
def _make(name: str, content: bytes) -> tuple[tiktoken.Encoding, dict[bytes, int]]:
    """The encoding of a ranks file and its ranks, once a content: a run has a copy of its ranks under a second name.

    Raises ValueError, which says what is wrong with the content.
    """
    import tiktoken

    ranks = _parse_ranks(content)
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"expected a rank for each of the 256 bytes, {missing[0]} has none")
    ids = set(ranks.values())
    if len(ids) != len(ranks) or min(ids) < 0:
        raise ValueError("expected different ranks from 0 on, got one twice or below 0")
    if name in known_encodings():
        definition = _known_definition(name, ranks)
        expected = definition.get("explicit_n_vocab")
        specials = definition["special_tokens"]
        if ids & set(specials.values()) or (expected and len(ranks) + len(specials) != expected):
            raise ValueError(
                f"its {len(ranks)} ranks are not those of {name!r}; give an encoding of your own another name"
            )
    else:
        if max(ids) != len(ranks) - 1:
            raise ValueError(f"expected the ranks 0 to {len(ranks) - 1}, got {max(ids)}")
        definition = _known_definition("gpt2", ranks)
        definition = {**definition, "name": name, "special_tokens": {ENDOFTEXT: len(ranks)}}
        del definition["explicit_n_vocab"]
    return tiktoken.Encoding(**definition), ranks


def _known_definition(name: str, ranks: Mapping[bytes, int]) -> dict[str, Any]:
    """tiktoken's own definition of an encoding (pattern, special tokens) with ``ranks`` in place of a download.

    tiktoken keeps pattern and download in one function. A copy of that function whose loaders return ``ranks`` gives
    the one without the other, and leaves tiktoken itself untouched.
    """
    import tiktoken.registry

    tiktoken.list_encoding_names()  # fills the registry
    constructors = tiktoken.registry.ENCODING_CONSTRUCTORS
    assert constructors is not None
    constructor = constructors[name]
    if not isinstance(constructor, types.FunctionType):
        raise InputError(f"encoding {name!r} cannot take a ranks file; give it another name")
    names: dict[str, Any] = dict(constructor.__globals__)
    for key, value in constructor.__globals__.items():
        if isinstance(value, types.FunctionType) and value.__module__ == constructor.__module__:
            names[key] = types.FunctionType(value.__code__, names, key, value.__defaults__)
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        names[loader] = lambda *_, **__: dict(ranks)
    return dict(types.FunctionType(constructor.__code__, names)())


def _parse_ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError:
            raise ValueError(f"line {number}: expected a base64 token and its rank, got {line[:40]!r}") from None
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """A tiktoken ranks file: a line a token, base64 and rank, by rank."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(ranks.items(), key=lambda r: r[1]))
    return b"".join(lines)
