"""Drops purged documents: first by id and URL, and at the last gates by text and by similarity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.bands import band_keys
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.shingles import hash_words, shingle_hashes
from quern.data_pipeline.dedup.signature import minhash
from quern.data_pipeline.dedup.verify import could_match
from quern.data_pipeline.page.document import HASH, SIGNATURE_SCHEMA, Page, content_hash
from quern.data_pipeline.page.keys import KEY, contains, key_set, keys_of
from quern.data_pipeline.page.url import canonicalize, url_key
from quern.errors import InputError
from quern.storage.parquet import open_table

__all__ = [
    "MADE_WITH",
    "PURGE_SCHEMA",
    "PurgeList",
    "Sketches",
    "Tombstones",
    "TombstonesBySimilarity",
    "TombstonesByText",
    "fingerprints",
    "read_purge_list",
]

#: A purge list's columns; any value may be null, and other columns may stand beside them.
PURGE_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH),
        pa.field("canonical_url", pa.string()),
        pa.field("post_filter_hash", HASH),
    ]
)


#: A file may also have the columns ``signature`` and ``shingles`` of a run's signatures. Under this key of its metadata
#: it then says how they were made: JSON with ``ngram``, ``num_perm`` and ``seed``.
MADE_WITH = b"quern.signatures"


@dataclass(frozen=True, eq=False)
class Sketches:
    """Signatures and shingles of purged documents, all made with the same settings."""

    ngram: int
    num_perm: int
    seed: int
    signatures: np.ndarray
    """uint32[documents, num_perm]."""
    starts: np.ndarray
    """int64[documents + 1]: where the shingles of each begin."""
    shingles: np.ndarray
    """uint64, sorted and unique in each document: eight bytes for about every word of what was purged."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PurgeList:
    """Three sorted unique arrays of 128-bit keys, ``S16[n]`` each; also sketches, if the list was made with them."""

    doc_ids: np.ndarray
    without_url: np.ndarray
    """Those of ``doc_ids`` that are listed without a URL."""
    urls: np.ndarray
    texts: np.ndarray
    sketches: tuple[Sketches, ...] = ()


class Tombstones:
    """Stage: fails a page whose ``doc_id`` or canonical URL was purged; fills ``canonical_url``.

    A page that was purged under ``http`` does not return under ``https``, nor the other way round. A ``doc_id`` is a
    place: the same line of another file of that name has it too. So it counts only where URLs do not tell that it is
    another page.
    """

    name = "purged"
    measures: tuple[str, ...] = ()

    def __init__(self, purge_list: str | PurgeList | None) -> None:
        self._purged = _open(purge_list)

    def __call__(self, page: Page) -> Page:
        if page.canonical_url is None and page.url is not None:
            page.canonical_url = canonicalize(page.url)
        if self._purged is None:
            return page
        url = None if page.canonical_url is None else url_key(page.canonical_url)
        listed = url is not None and _contains(self._purged.urls, url)
        if _contains(self._purged.doc_ids, page.doc_id) and (
            url is None or listed or _contains(self._purged.without_url, page.doc_id)
        ):
            page.fail("purged", "purged.doc_id")
        if listed:
            page.fail("purged", "purged.canonical_url")
        return page


class TombstonesByText:
    """Stage for the last gate: fails a page whose text, as it would be tokenized, was purged."""

    name = "purged_text"
    measures: tuple[str, ...] = ()

    def __init__(self, purge_list: str | PurgeList | None) -> None:
        self._purged = _open(purge_list)

    def __call__(self, page: Page) -> Page:
        if self._purged is None or page.text is None or not len(self._purged.texts):
            return page
        if _contains(self._purged.texts, content_hash(page.text)):
            page.fail("purged", "purged.text")
        return page


class TombstonesBySimilarity:
    """Stage behind ``Signature``: fails a page that is as similar to a purged one as a near duplicate.

    As in duplicate removal bands of the signature only propose, and the shingle sets decide, by ``config.threshold``;
    whatever the scope, purged documents are compared with the pages of every source. Only lists that were made with
    signatures (``quern lineage purge --similar``) have any.
    """

    name = "purged_similar"
    measures: tuple[str, ...] = ()

    def __init__(self, purge_list: str | PurgeList | None, config: DuplicatesConfig) -> None:
        purged = _open(purge_list)
        self._config = config
        self._bands = [_Bands(sketches, config) for sketches in purged.sketches] if purged is not None else []

    def __call__(self, page: Page) -> Page:
        for bands in self._bands:
            ngram = bands.sketches.ngram
            shingles, signature = page.shingles, page.signature
            if ngram != self._config.ngram or not self._config.near:
                shingles, signature = shingle_hashes(hash_words(page.text or ""), ngram), None
            if shingles is None or not len(shingles):
                continue
            if signature is None:
                signature = minhash(shingles, self._config.num_perm, self._config.seed)
            if bands.has_similar(signature, shingles):
                page.fail("purged", "purged.similar")
                break
        return page


class _Bands:
    """Sketches by the keys of their bands."""

    def __init__(self, sketches: Sketches, config: DuplicatesConfig) -> None:
        self.sketches, self._config, self._threshold = sketches, config, config.threshold
        signatures, starts = sketches.signatures, sketches.starts
        if (sketches.num_perm, sketches.seed) != (config.num_perm, config.seed):
            own = [sketches.shingles[first:end] for first, end in pairwise(starts.tolist())]
            signatures = np.array([minhash(shingles, config.num_perm, config.seed) for shingles in own])
        keys = band_keys(signatures, config.bands, config.rows).ravel()
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._documents = order // config.bands

    def has_similar(self, signature: np.ndarray, shingles: np.ndarray) -> bool:
        """Whether a set of shingles (sorted, unique) is similar to one of those that share a band with it."""
        keys = band_keys(signature[None], self._config.bands, self._config.rows)[0]
        first, end = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        found = [self._documents[a:b] for a, b in zip(first.tolist(), end.tolist(), strict=True) if a < b]
        if not found:
            return False
        documents = np.unique(np.concatenate(found))
        starts = self.sketches.starts
        sizes = starts[documents + 1] - starts[documents]
        possible = documents[could_match(sizes, np.array(len(shingles)), self._threshold)]
        for document in possible.tolist():
            own = self.sketches.shingles[starts[document] : starts[document + 1]]
            common = int(np.count_nonzero(contains(shingles, own)))
            if common / (len(own) + len(shingles) - common) >= self._threshold:
                return True
        return False


def read_purge_list(path: str) -> PurgeList:
    """The purge list in a Parquet file, or in all ``*.parquet`` files of a folder (columns: :data:`PURGE_SCHEMA`, and
    those of :data:`MADE_WITH`, if they are there).

    Raises:
        InputError: there is no such file, it is not Parquet, or a column is missing or of another type.
    """
    doc_ids, without_url, urls, texts = [], [], [], []
    sketches: dict[tuple[int, int, int], list[pa.Table]] = {}
    for file in _files(path):
        table = _read(file)
        if "shingles" in table.column_names:
            sketches.setdefault(_made_with(file, table), []).append(table)
        ids, given = table["doc_id"].cast(HASH), table["canonical_url"]
        doc_ids.append(keys_of(ids))
        without_url.append(keys_of(ids.filter(given.is_null())))
        urls.append(np.array([url_key(canonicalize(url) or url) for url in given.drop_null().to_pylist()], KEY))
        texts.append(keys_of(table["post_filter_hash"].cast(HASH)))
    by_id, bare, by_url, by_text = map(key_set, (doc_ids, without_url, urls, texts))
    return PurgeList(by_id, bare, by_url, by_text, _all_sketches(sketches))


def fingerprints(path: str | None) -> tuple[str, ...]:
    """Of the files of a purge list as they are now; none without a list."""
    files = [] if path is None else [file for file in _files(path) if storage.exists(file)]
    return tuple(f"{file} {found}" for file, (_, found) in zip(files, storage.describe(files), strict=True))


def _files(path: str) -> list[str]:
    return [file for file in storage.list_files(path) if file.endswith(".parquet")] or [path]


#: Lists in use, by path and the fingerprints of its files: both stages of a chain hold one and the same.
_IN_USE: WeakValueDictionary[tuple[str, ...], PurgeList] = WeakValueDictionary()


def _open(purge_list: str | PurgeList | None) -> PurgeList | None:
    if not isinstance(purge_list, str):
        return purge_list
    key = (purge_list, *fingerprints(purge_list))
    found = _IN_USE.get(key)
    if found is None:
        found = _IN_USE[key] = read_purge_list(purge_list)
    return found


def _read(file: str) -> pa.Table:
    if storage.is_local(file) and storage.is_folder(file):
        raise InputError(f"{file}: expected *.parquet files in the folder, found none")
    with open_table(file, missing="no such purge list") as parquet:
        missing = [name for name in PURGE_SCHEMA.names if name not in parquet.schema_arrow.names]
        if missing:
            raise InputError(f"{file}: purge list has no column {missing[0]!r}; it may be null but must be there")
        also = [name for name in _SKETCH if name in parquet.schema_arrow.names]
        table = parquet.read([*PURGE_SCHEMA.names, *also])
    for field in PURGE_SCHEMA:
        column = table[field.name]
        if not _is_accepted(column.type, field.type):
            raise InputError(f"{file}: column {field.name!r}: expected {field.type}, got {column.type}")
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            lengths = pc.unique(pc.binary_length(column.drop_null())).to_pylist()
            if any(length != 16 for length in lengths):
                raise InputError(
                    f"{file}: column {field.name!r}: expected values of 16 bytes, got one of another length"
                )
    return table


_SKETCH = ("signature", "shingles")


def _made_with(file: str, table: pa.Table) -> tuple[int, int, int]:
    """n-gram, number of permutations and seed of a file's signatures."""
    for name in _SKETCH:
        found = table.schema.field(name).type if name in table.column_names else None
        if found != SIGNATURE_SCHEMA.field(name).type:
            raise InputError(f"{file}: column {name!r}: expected {SIGNATURE_SCHEMA.field(name).type}, got {found}")
    try:
        made = json.loads((table.schema.metadata or {})[MADE_WITH])
        ngram, num_perm, seed = (int(made[name]) for name in ("ngram", "num_perm", "seed"))
        DuplicatesConfig(ngram=ngram, num_perm=num_perm, seed=seed, bands=1, rows=1)
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InputError(f"{file}: its metadata does not say how its signatures were made") from None
    table = table.filter(table["shingles"].is_valid())
    if pc.any(pc.not_equal(pc.list_value_length(table["signature"]), num_perm).fill_null(True)).as_py():
        raise InputError(f"{file}: column 'signature': expected {num_perm} values beside every shingle set")
    return ngram, num_perm, seed


def _all_sketches(tables: Mapping[tuple[int, int, int], Sequence[pa.Table]]) -> tuple[Sketches, ...]:
    made = (_sketches(settings, tables[settings]) for settings in sorted(tables))
    return tuple(sketches for sketches in made if len(sketches.signatures))


def _sketches(made: tuple[int, int, int], tables: Sequence[pa.Table]) -> Sketches:
    """What is in the tables; equal sets of shingles once."""
    ngram, num_perm, seed = made
    signatures, shingles, seen = [], [], set[bytes]()
    for signature, own in _rows(tables):
        key = blake2b(own.tobytes(), digest_size=16).digest()
        if len(own) and key not in seen:
            seen.add(key)
            signatures.append(signature)
            shingles.append(own)
    return Sketches(
        ngram,
        num_perm,
        seed,
        np.array(signatures, np.uint32).reshape(-1, num_perm),
        np.cumsum([0, *map(len, shingles)]),
        np.concatenate([np.empty(0, np.uint64), *shingles]),
    )


def _rows(tables: Sequence[pa.Table]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for table in tables:
        for batch in table.filter(table["shingles"].is_valid()).to_batches():
            columns = [(c.offsets.to_numpy(), c.values.to_numpy()) for c in (batch["signature"], batch["shingles"])]
            for row in range(batch.num_rows):
                signature, own = (values[offsets[row] : offsets[row + 1]] for offsets, values in columns)
                yield signature, np.unique(own)


def _is_accepted(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(given) or given == wanted:
        return True
    if pa.types.is_string(wanted):
        return bool(pa.types.is_large_string(given))
    return bool(pa.types.is_binary(given) or pa.types.is_large_binary(given))


def _contains(keys: np.ndarray, wanted: bytes) -> bool:
    return bool(contains(keys, np.array([wanted], KEY))[0])
