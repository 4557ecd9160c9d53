"""Extraction: milliseconds of CPU a page against stock trafilatura, and token F1 against ground truth, by language.

Stock and ours take turns page by page in one process, so both see the same machine. Repeat with
``python benchmarks/extraction.py --every 3``; it needs the shared corpus of real pages beside the checkout
(or QUERN_SHARED). Prints one table, or JSON with ``--json``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from warcio.archiveiterator import ArchiveIterator

from quern.data_pipeline.extraction import trafilatura_fast as extract_trafilatura
from quern.data_pipeline.extraction.extract import Extract, ExtractConfig
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages.language import Language, LanguageConfig, LanguageGuess

DEFAULT_SHARED = Path(__file__).resolve().parents[2] / "shared"
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")


def pages(shared: Path, every: int) -> Iterator[tuple[str, str, str]]:
    """(record id, language, decoded HTML) of every so-many-th page."""
    lines = (shared / "data" / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    manifest = {row["record_id"]: row for row in map(json.loads, lines)}
    number = 0
    for path in sorted((shared / "data" / "warc").glob("*.warc.gz")):
        with path.open("rb") as file:
            for record in ArchiveIterator(file):
                if record.rec_type != "response":
                    continue
                number += 1
                if number % every == 0:
                    row = manifest[record.rec_headers.get_header("WARC-Record-ID")]
                    html = record.content_stream().read().decode(row["charset"] or "utf-8", "replace")
                    yield row["record_id"], row["lang"], html


def ground_truth(shared: Path) -> dict[str, str]:
    """Main text by record id, where people wrote the whole of it down."""
    with gzip.open(shared / "data" / "groundtruth" / "groundtruth.jsonl.gz", "rt", encoding="utf-8") as lines:
        return {row["record_id"]: row["text"] for row in map(json.loads, lines) if row["kind"] == "full-human"}


def token_f1(truth: str, text: str) -> float:
    """F1 of the multisets of words (of characters in Chinese and Japanese)."""
    expected, found = Counter(WORD.findall(truth.lower())), Counter(WORD.findall(text.lower()))
    shared = sum((expected & found).values())
    return 2 * shared / (sum(expected.values()) + sum(found.values())) if shared else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("QUERN_SHARED", DEFAULT_SHARED)))
    parser.add_argument("--every", type=int, default=5, help="take every so-many-th page")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    config = LanguageConfig(keep=["en"])
    extract, guess, language = Extract(ExtractConfig()), LanguageGuess(config), Language(config)
    resiliparse = Extract(ExtractConfig(engine="resiliparse"))
    cpu: dict[str, float] = defaultdict(float)
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    truths = ground_truth(arguments.shared)
    num_pages = num_different = num_texts = 0

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.process_time()
        call()
        cpu[name] += time.process_time() - start

    for record_id, label, html in pages(arguments.shared, max(1, arguments.every)):
        fresh = [Page("bench", "f", "f", num_pages, raw=html) for _ in range(3)]
        stock: list[str | None] = []
        turns = [
            lambda stock=stock, html=html: timed("stock", lambda: stock.append(extract_trafilatura.stock_text(html))),
            lambda fresh=fresh: timed("extract", lambda: extract(fresh[0])),
        ]
        if num_pages == 0:  # lazy imports and stop lists, once a process
            extract_trafilatura.stock_text(html)
            extract(Page("bench", "f", "f", 0, raw=html))
        for turn in turns if num_pages % 2 else reversed(turns):
            turn()
        timed("language_guess", lambda fresh=fresh: guess(fresh[2]))
        timed("resiliparse", lambda fresh=fresh: resiliparse(fresh[1]))
        num_pages += 1
        num_different += (stock[0] or "") != (fresh[0].text or "")
        if fresh[0].text:
            num_texts += 1
            timed("language", lambda fresh=fresh: language(fresh[0]))
        if record_id in truths:
            scores[label].append(tuple(token_f1(truths[record_id], page.text or "") for page in fresh[:2]))

    ms = {name: 1000 * seconds / num_pages for name, seconds in cpu.items()}
    result: dict[str, Any] = {
        "backend": extract_trafilatura.backend(),
        "pages": num_pages,
        "ms_per_page": {name: round(value, 2) for name, value in ms.items()},
        "stock_to_extract": round(ms["stock"] / ms["extract"], 2),
        "texts_unlike_stock": num_different,
        "f1": {
            label: {
                "pages": len(pairs),
                "trafilatura": round(sum(pair[0] for pair in pairs) / len(pairs), 4),
                "resiliparse": round(sum(pair[1] for pair in pairs) / len(pairs), 4),
            }
            for label, pairs in sorted(scores.items(), key=lambda item: -len(item[1]))
        },
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"extraction on {result['backend']}, {num_pages} real pages, CPU ms a page:")
    for name, value in ms.items():
        print(f"  {name:<16}{value:8.2f}   {value / ms['stock']:6.3f} of stock trafilatura")
    print(f"stock / ours = {result['stock_to_extract']}; texts unlike stock: {num_different}")
    print("token F1 against human ground truth: language, pages, trafilatura, resiliparse")
    for label, row in result["f1"].items():
        print(f"  {label:<5}{row['pages']:5}{row['trafilatura']:10.4f}{row['resiliparse']:10.4f}")
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
