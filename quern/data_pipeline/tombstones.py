"""What was purged once and must not return: applied first by place and URL, and last by text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.document import Page, content_hash
from quern.data_pipeline.url import canonicalize
from quern.errors import InputError

__all__ = ["PURGE_SCHEMA", "PurgeList", "Tombstones", "TombstonesByText", "read_purge_list"]

#: A purge list's columns; any value may be null, and other columns may stand beside them.
PURGE_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.binary(16)),
        pa.field("canonical_url", pa.string()),
        pa.field("post_filter_hash", pa.binary(16)),
    ]
)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class PurgeList:
    """Three sorted unique arrays of 128-bit keys, ``S16[n]`` each."""

    doc_ids: np.ndarray
    urls: np.ndarray
    texts: np.ndarray


class Tombstones:
    """Stage: fails a page whose ``doc_id`` or canonical URL was purged; fills ``canonical_url``.

    A page that was purged under ``http`` does not return under ``https``, nor the other way round.
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
        if _contains(self._purged.doc_ids, page.doc_id):
            page.fail("purged", "purged.doc_id")
        if page.canonical_url is not None and _contains(self._purged.urls, _url_key(page.canonical_url)):
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


def read_purge_list(path: str) -> PurgeList:
    """The purge list in a Parquet file, or in all ``*.parquet`` files of a folder (columns: :data:`PURGE_SCHEMA`).

    Raises:
        InputError: there is no such file, it is not Parquet, or a column is missing or of another type.
    """
    doc_ids, urls, texts = [], [], []
    for file in _files(path):
        table = _read(file)
        doc_ids.append(_keys(table["doc_id"].drop_null().to_pylist()))
        texts.append(_keys(table["post_filter_hash"].drop_null().to_pylist()))
        urls.append(_keys(_url_key(canonicalize(url) or url) for url in table["canonical_url"].drop_null().to_pylist()))
    return PurgeList(*(np.unique(np.concatenate(parts)) for parts in (doc_ids, urls, texts)))


def _files(path: str) -> list[str]:
    return [file for file in storage.list_files(path) if file.endswith(".parquet")] or [path]


#: Lists in use, by path and the fingerprints of its files: both stages of a chain hold one and the same.
_IN_USE: WeakValueDictionary[tuple[str, ...], PurgeList] = WeakValueDictionary()


def _open(purge_list: str | PurgeList | None) -> PurgeList | None:
    if not isinstance(purge_list, str):
        return purge_list
    key = (purge_list, *(f"{file} {storage.fingerprint(file)}" for file in _files(purge_list) if storage.exists(file)))
    found = _IN_USE.get(key)
    if found is None:
        found = _IN_USE[key] = read_purge_list(purge_list)
    return found


def _read(file: str) -> pa.Table:
    try:
        with storage.open_read(file) as stream:
            parquet = pq.ParquetFile(stream)
            missing = [name for name in PURGE_SCHEMA.names if name not in parquet.schema_arrow.names]
            if missing:
                raise InputError(f"{file}: purge list has no column {missing[0]!r}; it may be null but must be there")
            table = parquet.read(PURGE_SCHEMA.names)
    except FileNotFoundError:
        raise InputError(f"{file}: no such purge list") from None
    except IsADirectoryError:
        raise InputError(f"{file}: expected *.parquet files in the folder, found none") from None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file}: not a readable Parquet file ({_first_line(error)})") from None
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


def _is_accepted(given: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(given) or given == wanted:
        return True
    if pa.types.is_string(wanted):
        return bool(pa.types.is_large_string(given))
    return bool(pa.types.is_binary(given) or pa.types.is_large_binary(given))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _url_key(canonical: str) -> bytes:
    return blake2b(canonical.partition("://")[2].encode() or canonical.encode(), digest_size=16).digest()


def _keys(values: Iterable[bytes]) -> np.ndarray:
    return np.array(list(values), dtype="S16")


def _contains(keys: np.ndarray, wanted: bytes) -> bool:
    # as an S16 itself: numpy leaves zero bytes at the end out of what it compares
    key = np.array(wanted, dtype="S16")[()]
    place = int(np.searchsorted(keys, key))
    return place < len(keys) and bool(keys[place] == key)
