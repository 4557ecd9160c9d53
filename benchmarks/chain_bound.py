"""A lower bound of the data road: the recipe's work on each page, in one process, with nothing around it.

    python benchmarks/chain_bound.py --warc DIR --config configs/fineweb-en.yaml --out OUT tokenize.ranks=gpt2.tiktoken

No Ray, no isolation, no rows, no files, and every memo warm: the pages are judged twice, and the second time counts.
Reading is fastwarc's with a decode, tokens are tiktoken's for what is kept. All figures are milliseconds of CPU a page
record, in OUT/bound.json. References: lxml's parse alone, and stock trafilatura, of the pages that are extracted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lxml.html
from fastwarc.warc import ArchiveIterator, WarcRecordType

from quern.config import load_config
from quern.data_pipeline.chain import Chain
from quern.data_pipeline.extraction.trafilatura_fast import stock_text
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.sources import ReadLog
from quern.data_pipeline.sources.warc import read_warc
from quern.data_run.config import DataRun
from quern.tokenize.encoding import load_encoding

MAX_BYTES = 64 << 20


def pages_of(files: list[Path], step: int) -> list[Page]:
    found = (page for file in files for page in read_warc(str(file), file.name, "cc", MAX_BYTES, ReadLog()))
    return [page for number, page in enumerate(found) if number % step == 0]


def reading(files: list[Path]) -> tuple[float, int]:
    """Seconds of CPU to read and decode every response, and how many there are."""
    began, count = time.process_time(), 0
    for file in files:
        for record in ArchiveIterator(str(file), record_types=WarcRecordType.response):
            record.reader.read().decode("utf-8", "replace")
            count += 1
    return time.process_time() - began, count


def timed(work: Any, items: list[Any]) -> float:
    began = time.process_time()
    for item in items:
        work(item)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pages", type=int, default=600)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    files = sorted(args.warc.glob("*.warc.gz"))
    config = load_config(args.config, DataRun, [*args.settings, f"run_dir={args.out}"])
    read_s, num_records = reading(files)
    step = max(1, num_records // args.pages)
    chain = Chain(config.chain_of(config.sources[0]))
    for _ in range(2):
        pages = pages_of(files, step)
        chain.seconds = dict.fromkeys(chain.seconds, 0.0)
        for page in pages:
            chain(page)
    extracted = [page.raw for page in pages if page.extracted is not None and page.media == "html"]
    kept = [page.text for page in pages if page.stage is None and page.text]
    encoding = load_encoding(config.tokenize.encoding, config.tokenize.ranks)
    ms = 1e3 / len(pages)
    stages = {name: seconds * ms for name, seconds in chain.seconds.items()}
    stages["read, rows, files"] = 1e3 * read_s / num_records
    stages["tokens"] = timed(encoding.encode, kept) * ms
    references = {
        f"lxml's parse of the {len(extracted)} pages extracted": timed(_parse, extracted) * ms,
        "stock trafilatura on them": timed(stock_text, extracted[::4]) * 4 * ms,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bound.json").write_text(
        json.dumps({"pages": len(pages), "stages": stages, "references": references}, indent=1)
    )


def _parse(html: str) -> None:
    try:
        lxml.html.document_fromstring(html)
    except ValueError:  # a text with an encoding declaration
        lxml.html.document_fromstring(html.encode())


if __name__ == "__main__":
    main()
