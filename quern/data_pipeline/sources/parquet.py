"""Parquet files: one row, one page."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.document import Page
from quern.data_pipeline.sources.fields import fill
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import SourceConfig
from quern.errors import InputError

__all__ = ["read_parquet"]

_BATCH_ROWS = 256


def read_parquet(path: str, relative_path: str, source: SourceConfig, log: ReadLog) -> Iterator[Page]:
    """A page for every row; ``position`` is the row's number from 0.

    A file or row group that cannot be read is noted as damage; the row groups behind it are read.

    Raises:
        InputError: a named column is missing, or the text column does not hold text.
    """
    with storage.open_read(path) as stream:
        try:
            file = pq.ParquetFile(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            _raise_if_of_the_store(error)
            log.damaged(path, 0, f"not a readable Parquet file: {_first_line(error)}")
            return
        columns = _columns(path, source, file.schema_arrow)
        first_row = 0
        for group in range(file.num_row_groups):
            row = first_row
            try:
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                    for values in zip(*map(_values, batch.columns), strict=True):
                        page = Page(source.name, path, relative_path, row, media="text")
                        fill(page, source, dict(zip(batch.schema.names, values, strict=True)))
                        yield page
                        row += 1
            except (pa.ArrowException, OSError) as error:
                _raise_if_of_the_store(error)
                log.damaged(path, row, f"row group {group} cannot be read from here: {_first_line(error)}")
            first_row += file.metadata.row_group(group).num_rows


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


def _raise_if_of_the_store(error: Exception) -> None:
    """Arrow reports a damaged page as OSError too; one with an errno comes from the store."""
    if getattr(error, "errno", None) is not None:
        raise error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
