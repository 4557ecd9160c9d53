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
                    for values in batch.to_pylist():
                        page = Page(source.name, path, relative_path, row, media="text")
                        fill(page, source, values)
                        yield page
                        row += 1
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                _raise_if_of_the_store(error)
                log.damaged(path, row, f"row group {group} cannot be read from here: {_first_line(error)}")
            first_row += file.metadata.row_group(group).num_rows


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
