"""Parquet files: one row, one page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.sources.fields import fill
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import SourceConfig
from quern.errors import InputError

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
        InputError: a named column is missing, or the text column does not hold text.
    """
    with storage.open_read(path, fingerprint) as stream:
        try:
            file = _open(stream, source.text_field)
        except (pa.ArrowException, OSError) as error:
            _raise_if_not_damage(error)
            log.damaged(path, 0, f"not a readable Parquet file: {_first_line(error)}")
            return
        columns = _columns(path, source, file.schema_arrow)
        first_row = 0
        for group in range(file.num_row_groups):
            row = first_row
            try:
                for batch in file.iter_batches(_batch_rows(file, group), row_groups=[group], columns=columns):
                    at = batch.schema.names.index(source.text_field)
                    others = batch.remove_column(at)
                    rest = zip(*map(_values, others.columns), strict=True) if others.num_columns else ((),) * len(batch)
                    for values, text in zip(rest, _texts(batch.column(at), source.max_bytes), strict=True):
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
                log.damaged(path, row, f"row group {group} cannot be read from here: {_first_line(error)}")
            first_row += file.metadata.row_group(group).num_rows


_TOO_LARGE = object()


def _open(stream: IO[bytes], text_field: str) -> pq.ParquetFile:
    """The file, its texts read as a dictionary: one that all rows share is held once, as it is stored."""
    try:
        return pq.ParquetFile(stream, page_checksum_verification=True, read_dictionary=[text_field])
    except KeyError:  # no such column, which is said later
        return pq.ParquetFile(stream, page_checksum_verification=True)


def _batch_rows(file: pq.ParquetFile, group: int) -> int:
    """As many rows as a batch may have bytes, by the mean of the row group."""
    metadata = file.metadata.row_group(group)
    return max(1, min(_BATCH_ROWS, metadata.num_rows * _BATCH_BYTES // max(1, metadata.total_byte_size)))


def _texts(column: pa.Array, max_bytes: int) -> Iterator[object]:
    """As :func:`_values`, one at a time; :data:`_TOO_LARGE` for what is longer than ``max_bytes``."""
    if pa.types.is_dictionary(column.type):
        small = _at_most(column.dictionary, max_bytes)
        keys = column.indices.to_pylist()
        return (None if key is None else _value(column.dictionary[key]) if small[key] else _TOO_LARGE for key in keys)
    if all(small := _at_most(column, max_bytes)):
        return iter(_values(column))
    return (_value(text) if fits else _TOO_LARGE for text, fits in zip(column, small, strict=True))


def _at_most(texts: pa.Array, max_bytes: int) -> list[bool]:
    """Which of them are no longer; a null is not."""
    return list(pc.less_equal(pc.binary_length(texts), max_bytes).fill_null(True).to_pylist())


def _values(column: pa.Array) -> list[object]:
    """The values of a column in Python; one that Python cannot hold must not cost its neighbours.

    Text that is not UTF-8 comes as bytes, a moment beyond the year 9999 as None.
    """
    if pa.types.is_timestamp(column.type):
        # Python has microseconds and may not know the zone; what is stored is UTC either way.
        unit = "us" if column.type.unit == "ns" else column.type.unit
        column = column.cast(pa.timestamp(unit, "UTC"), safe=False)
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


def _columns(path: str, source: SourceConfig, schema: pa.Schema) -> list[str]:
    """The columns to read. A field that is named as the default and is not there is simply not read."""
    columns = []
    for setting in ("text_field", "id_field", "url_field", "date_field"):
        name = getattr(source, setting)
        if name is None:
            continue
        if name in schema.names:
            columns.append(name)
        elif setting == "text_field" or name != type(source).model_fields[setting].default:
            raise InputError(
                f"source {source.name}: {path}: no column {name!r} ({setting}); columns: {', '.join(schema.names[:20])}"
            )
    kind = schema.field(source.text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise InputError(f"source {source.name}: {path}: column {source.text_field!r}: expected text, got {kind}")
    return list(dict.fromkeys(columns))


def _raise_if_not_damage(error: Exception) -> None:
    """Arrow reports a damaged page as OSError too; one with an errno comes from the store. Nor is it damage when this
    process runs out of memory."""
    if getattr(error, "errno", None) is not None or isinstance(error, MemoryError):
        raise error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
