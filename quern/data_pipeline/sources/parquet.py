"""Reads Parquet files: each row is one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.page.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.page.url import MAX_CHARS
from quern.data_pipeline.sources.fields import fill
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import SourceConfig
from quern.errors import InputError, first_line
from quern.storage.parquet import Table

__all__ = ["read_parquet"]

_BATCH_ROWS = 256
#: Bytes of a batch, by the file's own account of its row group; one row is read at least.
_BATCH_BYTES = 32 << 20


def read_parquet(
    path: str, relative_path: str, source: SourceConfig, log: ReadLog, fingerprint: str | None = None
) -> Iterator[Page]:
    """A page for every row; ``position`` is the row's number from 0.

    A file or row group that cannot be read is noted as damage; the row groups behind it are read. A text above
    ``source.max_bytes`` is never made a Python string.

    Raises:
        InputError: a named column is missing, or holds what cannot be its field.
    """
    ahead = not storage.is_local(path)
    with storage.open_read(path, fingerprint) as stream:
        try:
            file = Table(stream, pre_buffer=ahead)
        except (pa.ArrowException, OSError) as error:
            _raise_if_not_damage(error)
            log.damaged(path, 0, f"not a readable Parquet file: {first_line(error)}")
            return
        columns, shared = _columns(path, source, file.schema_arrow)
        # As dictionaries: a text or URL that all rows share is held once, as it is stored.
        file = Table(
            stream, metadata=file.metadata, pre_buffer=ahead, read_dictionary=shared, page_checksum_verification=True
        )
        first_row = 0
        for group in range(file.num_row_groups):
            row = first_row
            try:
                for batch in file.iter_batches(_batch_rows(file, group), row_groups=[group], columns=columns):
                    at = batch.schema.names.index(source.text_field)
                    others = batch.remove_column(at)
                    rest = zip(*map(_values, others.columns), strict=True) if others.num_columns else ((),) * len(batch)
                    texts = _texts(batch.column(at), source.max_bytes, lambda _: _TOO_LARGE)
                    for values, text in zip(rest, texts, strict=True):
                        page = Page(source.name, path, relative_path, row, media="text")
                        fields = dict(zip(others.schema.names, values, strict=True))
                        try:
                            fill(page, source, {**fields, source.text_field: "" if text is _TOO_LARGE else text}, log)
                        except MemoryError:
                            page.fault = OUT_OF_MEMORY
                        else:
                            page.fault = "read.too_large" if text is _TOO_LARGE else page.fault
                        yield page
                        row += 1
            except (pa.ArrowException, OSError) as error:
                _raise_if_not_damage(error)
                log.damaged(path, row, f"row group {group} cannot be read from here: {first_line(error)}")
            first_row += file.metadata.row_group(group).num_rows


_TOO_LARGE = object()


def _batch_rows(file: Table, group: int) -> int:
    """As many rows as a batch may have bytes, by the mean of the row group."""
    metadata = file.metadata.row_group(group)
    return max(1, min(_BATCH_ROWS, metadata.num_rows * _BATCH_BYTES // max(1, metadata.total_byte_size)))


def _texts(column: pa.Array, max_bytes: int, large: Callable[[pa.Scalar], object]) -> Iterator[object]:
    """The values of a column of texts, one at a time; ``large`` of what is longer than ``max_bytes``."""
    if pa.types.is_dictionary(column.type):
        small = _at_most(column.dictionary, max_bytes)
        for key in column.indices.to_pylist():
            yield None if key is None else (_value if small[key] else large)(column.dictionary[key])
    elif all(small := _at_most(column, max_bytes)):
        yield from _to_python(column)
    else:
        for text, fits in zip(column, small, strict=True):
            yield (_value if fits else large)(text)


def _at_most(texts: pa.Array, max_bytes: int) -> list[bool]:
    """Which of them are no longer; a null is not."""
    return list(pc.less_equal(pc.binary_length(texts), max_bytes).fill_null(True).to_pylist())


def _values(column: pa.Array) -> list[object]:
    """The values of a column that is not the text; of long ones the beginning, more than a URL may have.

    Text that is not UTF-8 comes as bytes, a moment beyond the year 9999 as None.
    """
    if _is_text(_stored(column.type)):
        return list(_texts(column, 4 * MAX_CHARS + 4, _beginning))
    if pa.types.is_timestamp(column.type):
        # Python has microseconds and may not know the zone; what is stored is UTC either way.
        unit = "us" if column.type.unit == "ns" else column.type.unit
        column = column.cast(pa.timestamp(unit, "UTC"), safe=False)
    return _to_python(column)


def _beginning(text: pa.Scalar) -> str:
    return text.as_buffer().slice(0, 4 * MAX_CHARS + 4).to_pybytes().decode("utf-8", "ignore")


def _to_python(column: pa.Array) -> list[object]:
    """One that Python cannot hold must not cost its neighbours."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # UnicodeDecodeError is a ValueError
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        text = scalar.value if pa.types.is_dictionary(scalar.type) else scalar
        return text.as_buffer().to_pybytes()
    except (ValueError, OverflowError):
        return None


def _columns(path: str, source: SourceConfig, schema: pa.Schema) -> tuple[list[str], list[str]]:
    """The columns to read, and those of them that hold text.

    A field that is named as the default and is not there, or holds nothing that can be one, is simply not read; nor is
    an id or a date of another type, which are what a page can do without.
    """
    columns = []
    for setting, (wanted, fits) in _FIELDS.items():
        name = getattr(source, setting)
        if name is None:
            continue
        named = setting == "text_field" or name != type(source).model_fields[setting].default
        if name in schema.names and fits(_stored(kind := schema.field(name).type)):
            columns.append(name)
        elif named and name not in schema.names:
            raise InputError(
                f"source {source.name}: {path}: no column {name!r} ({setting}); columns: {', '.join(schema.names[:20])}"
            )
        elif setting == "text_field" or (setting == "url_field" and named and not pa.types.is_null(kind)):
            raise InputError(
                f"source {source.name}: {path}: column {name!r} ({setting}): expected {wanted}, got {kind}"
            )
    columns = list(dict.fromkeys(columns))
    return columns, [name for name in columns if _is_text(_stored(schema.field(name).type))]


def _stored(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, where they stand in a dictionary too."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_identity(kind: pa.DataType) -> bool:
    return _is_text(kind) or pa.types.is_integer(kind) or getattr(kind, "extension_name", None) == "arrow.uuid"


def _is_date(kind: pa.DataType) -> bool:
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return _is_text(kind) or numbers or pa.types.is_timestamp(kind) or pa.types.is_date(kind)


#: What each field of a source may be, in words and as a test of its column's type.
_FIELDS: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "text_field": ("text", _is_text),
    "id_field": ("text or integers", _is_identity),
    "url_field": ("text", _is_text),
    "date_field": ("text, dates, timestamps or numbers", _is_date),
}


def _raise_if_not_damage(error: Exception) -> None:
    """Arrow reports a damaged page as OSError too; one with an errno comes from the store. Nor is it damage when this
    process runs out of memory."""
    if getattr(error, "errno", None) is not None or isinstance(error, MemoryError):
        raise error
