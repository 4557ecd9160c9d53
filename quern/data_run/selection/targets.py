"""What chosen documents are to be like: texts in JSON lines, Parquet or plain files, or the documents of a data run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quern import storage
from quern.data_pipeline.sources.log import ReadLog
from quern.data_pipeline.sources.plan import Partition, SourceConfig, plan
from quern.data_pipeline.sources.reading import read
from quern.data_pipeline.sources.tree import TEXT_SUFFIXES
from quern.errors import InputError

__all__ = ["TargetFile", "open_targets", "target_texts"]

_ENDS = {"parquet": (".parquet",), "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "text": TEXT_SUFFIXES}
_MAX_BYTES = 256 << 20

TargetFile = tuple[SourceConfig, Partition]
"""How files are read, and which."""


def open_targets(paths: Sequence[str], text_field: str) -> list[TargetFile]:
    """The files of a target, each a path, a glob, or a folder of plain texts, by path. A plain text is one document.

    Raises:
        InputError: one is nothing of these, is not there, or is given twice; or a folder has files of other kinds.
    """
    found: list[TargetFile] = []
    for path in paths:
        kind = next((kind for kind, ends in _ENDS.items() if path.endswith(ends)), None)
        if kind is None and not storage.is_folder(path):
            ends = " ".join(end for own in _ENDS.values() for end in own)
            raise InputError(f"--target: expected a data run, a folder of texts or a file of {ends}, got {path!r:.200}")
        others = (*_ENDS["jsonl"], *_ENDS["parquet"])
        if kind is None and (rows := [file for file in storage.list_files(path) if file.endswith(others)]):
            raise InputError(f"--target: {path}: of a folder only plain texts are read; give {rows[0]} by itself")
        given = {"text_field": text_field} if kind in ("jsonl", "parquet") else {}
        values = {"name": "target", "kind": kind or "text", "paths": path, "max_bytes": _MAX_BYTES, **given}
        source = SourceConfig.model_validate(values)
        found += [(source, partition) for partition in plan(source)]
    files = [file.path for _, partition in found for file in partition.files]
    if len({*files}) < len(files):
        raise InputError(f"--target: expected each file once, got {max(files, key=files.count)} twice")
    return sorted(found, key=lambda own: ([file.path for file in own[1].files], own[1].name))


def target_texts(target: TargetFile) -> Iterator[str]:
    """The texts of some files; empty ones are left out.

    Raises:
        InputError: a file is damaged, or a record has no text.
    """
    source, log = target[0], ReadLog()
    for page in read(*target, log):
        if page.fault is None:
            yield page.raw
        elif page.fault != "read.empty":
            field = "" if source.kind == "text" else f"{source.text_field}: "
            raise InputError(f"{page.source_file}: record {page.position}: {field}expected a text, got {page.fault}")
    if log.damage:
        one = log.damage[0]
        raise InputError(f"{one['file']}: is damaged at {one['offset']}: {one['why']}")
