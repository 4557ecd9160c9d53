"""Writes the sample site: the crawl's WARC files, a manifest of its pages, and a lexicon of rude words."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from quern.demo.grammar import keyed, load_stock
from quern.demo.kinds import drafts, kinds
from quern.demo.warc import warc_file

__all__ = ["Site", "SitePage", "write_site"]

NUM_FILES = 4


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
    """The entry of its kind in ``kinds.json``."""
    text: tuple[str, ...]
    """The article's paragraphs as written; empty for pages that are not articles."""


@dataclass(frozen=True)
class Site:
    """The files that were written, as paths, and the pages in the order of the records."""

    folder: str
    warcs: tuple[str, ...]
    manifest: str
    lexicon: str
    pages: tuple[SitePage, ...]


def write_site(folder: str, seed: int = 0, pages: int = 320) -> Site:
    """Write the site of ``seed`` with ``pages`` page-carrying records into ``folder``, replacing files of these names.

    The folder then holds ``warc/*.warc.gz`` (the crawl), ``pages.jsonl`` (every page with what is expected of it) and
    ``lexicon.txt`` (one word a line). The same seed and number of pages give the same bytes with the same zlib.

    Raises:
        ValueError: for fewer pages than every kind needs.
    """
    root = Path(folder)
    crawl, began = list(drafts(seed, pages)), datetime(2024, 3, 1, 6, tzinfo=UTC)
    keyed(seed, "crawl order").shuffle(crawl)
    dates = [f"{began + timedelta(minutes=7 * place):%Y-%m-%dT%H:%M:%SZ}" for place in range(len(crawl))]
    (root / "warc").mkdir(parents=True, exist_ok=True)
    warcs, found = [], []
    for number in range(NUM_FILES):
        path = root / "warc" / f"sample-{number:05d}.warc.gz"
        share = list(zip(dates, crawl, strict=True))[number::NUM_FILES]
        data, ids = warc_file(path.name, share, seed)
        path.write_bytes(data)
        warcs.append(str(path))
        for (_, draft), record in zip(share, ids, strict=True):
            expected = kinds()[draft.kind]
            found.append(
                SitePage(draft.url, draft.kind, draft.language, record, path.name, draft.group, expected, draft.text)
            )
    manifest, lexicon = root / "pages.jsonl", root / "lexicon.txt"
    lines = [json.dumps(asdict(page), ensure_ascii=False) for page in found]
    for file, rows in ((manifest, lines), (lexicon, load_stock("forms").words["swear"])):
        file.write_bytes("".join(f"{row}\n" for row in rows).encode())  # bytes: the same line ends on every system
    return Site(str(root), tuple(warcs), str(manifest), str(lexicon), tuple(found))
