"""Writes the sample site: ``python -m quern.demo.site FOLDER``.

FOLDER then holds ``warc/*.warc.gz`` (the crawl), ``pages.jsonl`` (every page with what is expected of it),
``benchmark.jsonl`` (an invented benchmark, a few questions of which leaked into the site) and ``lexicon.txt`` (rude
words, one a line). The same seed and number of pages give the same records, and the same bytes with the same zlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from quern.demo.forms import puzzles
from quern.demo.grammar import keyed
from quern.demo.kinds import Draft, drafts, expectations
from quern.demo.traps import lexicon
from quern.demo.warc import Response, warc_file

__all__ = ["Site", "SitePage", "main", "write_site"]

NUM_FILES = 4
NUM_PUZZLES = 40


@dataclass(frozen=True)
class SitePage:
    """One page-carrying record of the crawl, and its expected verdict."""

    url: str
    kind: str
    language: str
    record_id: str
    """The WARC-Record-ID of its response, as it stands in the header."""
    file: str
    """The name of its WARC file."""
    group: str | None
    """The same for the two pages of a pair, of which one survives; else None."""
    expected: dict[str, Any]
    """The entry of its kind in ``expected.json``."""
    text: tuple[str, ...]
    """The article's paragraphs as written; empty for pages that are not articles."""


@dataclass(frozen=True)
class Site:
    """The files that were written, as paths, and the pages in the order of the records."""

    folder: str
    warcs: tuple[str, ...]
    manifest: str
    benchmark: str
    lexicon: str
    pages: tuple[SitePage, ...]


def write_site(folder: str, seed: int = 0, pages: int = 320) -> Site:
    """Write the site of ``seed`` with ``pages`` page-carrying records into ``folder``, replacing files of these names.

    Raises:
        ValueError: for fewer pages than every kind needs.
    """
    root = Path(folder)
    crawl = list(drafts(seed, pages))
    keyed(seed, "crawl order").shuffle(crawl)
    (root / "warc").mkdir(parents=True, exist_ok=True)
    warcs, records = [], []
    for number in range(NUM_FILES):
        name = f"sample-{number:05d}.warc.gz"
        share = range(number, len(crawl), NUM_FILES)
        data, ids = warc_file(
            name, [_response(crawl[place], place) for place in share], seed, quirks=number == NUM_FILES - 1
        )
        (root / "warc" / name).write_bytes(data)
        warcs.append(str(root / "warc" / name))
        records += [_page(crawl[place], record, name) for place, record in zip(share, ids, strict=True)]
    _write_lines(root / "pages.jsonl", [asdict(record) for record in records])
    _write_lines(root / "benchmark.jsonl", [asdict(puzzle) for puzzle in puzzles(seed, NUM_PUZZLES)])
    (root / "lexicon.txt").write_bytes(("\n".join(lexicon()) + "\n").encode())
    return Site(
        folder=str(root),
        warcs=tuple(warcs),
        manifest=str(root / "pages.jsonl"),
        benchmark=str(root / "benchmark.jsonl"),
        lexicon=str(root / "lexicon.txt"),
        pages=tuple(records),
    )


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    # Bytes, so that line ends are the same on every system.
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def _page(draft: Draft, record: str, file: str) -> SitePage:
    expected = expectations()[draft.kind]
    return SitePage(draft.url, draft.kind, draft.language, record, file, draft.group, expected, draft.text)


def _response(draft: Draft, place: int) -> Response:
    date = datetime(2024, 3, 1, 6, tzinfo=UTC) + timedelta(minutes=7 * place)
    return Response(
        url=draft.url,
        date=date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        payload=draft.html.encode(draft.charset, "xmlcharrefreplace"),
        status=draft.status,
        headers=(("Content-Type", draft.content_type), ("Server", "sample")),
        delivery=draft.delivery,
        media=draft.content_type.partition(";")[0],
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quern.demo.site", description="Write the sample site.")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=320)
    given = parser.parse_args(arguments)
    try:
        site = write_site(given.folder, given.seed, given.pages)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kinds = len({page.kind for page in site.pages})
    print(f"{len(site.pages)} pages of {kinds} kinds in {len(site.warcs)} WARC files: {site.folder}/warc/*.warc.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main())
