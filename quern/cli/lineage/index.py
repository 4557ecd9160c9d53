"""``quern lineage index``: builds the index of a data run, or verifies its checksums."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer
from rich.text import Text

from quern.cli.open_run import open_run
from quern.cli.output import JSON, json_stdout, out_console, plain, reports_errors
from quern.errors import QuernError

__all__ = ["index"]


@reports_errors
def index(
    run: Annotated[str, typer.Argument(help="A data run, on this machine.", metavar="RUN")], json: bool = JSON
) -> None:
    """Build the lineage index of RUN, or verify every checksum of the existing one and rebuild what is damaged.

    Commands that need the index build it themselves; RUN/lineage may be deleted at any time.
    """
    from quern.lineage.index.build import FOLDER, discard
    from quern.lineage.index.columns import DamagedIndexError
    from quern.lineage.store import IndexedRun

    with json_stdout(json) as emit:
        begun = time.monotonic()
        lineage = open_run(run)
        try:
            lineage.check()
        except DamagedIndexError:
            discard(lineage.built)
            lineage = IndexedRun(run)
        seconds = time.monotonic() - begun
        if lineage.built.folder != os.path.join(lineage.run, FOLDER):
            raise QuernError(f"{lineage.run}: cannot be written to; run this command where it can be")
        sizes = _sizes(lineage.built.folder)
        found: dict[str, Any] = {
            "run": lineage.run,
            "run_id": lineage.run_id,
            "corpus_version": lineage.version,
            "documents": lineage.num_documents,
            "spans": {stream.name: stream.num_spans for stream in lineage.streams},
            "segments": len(lineage.built.record["segments"]),
            "segments_written": lineage.built.segments_written,
            "built": lineage.built.new,
            "size_bytes": sizes,
            "seconds": round(seconds, 3),
        }
        emit(found)
        if not json:
            _print(found)


def _sizes(folder: str) -> dict[str, int]:
    """Bytes of each kind of part below the index's folder."""
    sizes = {"segments": 0, "spans": 0, "duplicates": 0}
    for entry in os.scandir(folder):
        kind = entry.name.partition("_")[0].replace("segment", "segments")
        if kind in sizes and entry.is_dir():
            sizes[kind] += sum(os.path.getsize(file.path) for file in os.scandir(entry.path))
    return sizes


def _print(found: dict[str, Any]) -> None:
    console = out_console()
    spans, sizes = found["spans"], found["size_bytes"]
    state = f"built, {found['segments_written']} of {found['segments']} segments anew" if found["built"] else "whole"
    for line in (
        f"index of {plain(found['run'])}: {state}, {found['seconds']:.1f} s",
        f"documents  {found['documents']:,}",
        f"spans      {sum(spans.values()):,}" + "".join(f"  {plain(name)} {count:,}" for name, count in spans.items()),
        f"bytes      {sum(sizes.values()):,}" + "".join(f"  {name} {size:,}" for name, size in sizes.items()),
    ):
        console.print(Text(line))
