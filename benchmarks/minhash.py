"""Microseconds a document from text to MinHash signature, beside datasketch, in one sitting and on one core.

    python benchmarks/minhash.py TEXTS.jsonl[.gz] … [--words 1000] [--rounds 5] [--json]

The texts are cut into documents of ``--words`` words. Every side is given the same documents and makes the same
signatures, which is checked: datasketch with xxHash (its fastest hash) is given the written-down word shingles, whose
making is counted apart; quern starts from the text. CPU time; the median of the rounds, caches of both warm.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import datasketch
import numpy as np
import xxhash
from dedup_oracle import minhash_hash

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.shingles import hash_words, normalise, shingle_hashes
from quern.data_pipeline.dedup.signature import SCHEME, Signature, minhash
from quern.data_pipeline.page.document import Page

CONFIG = DuplicatesConfig()


def documents(paths: Sequence[Path], num_words: int) -> list[str]:
    """The texts of JSON lines, as pieces of ``num_words`` words each; a text's shorter rest is left out."""
    pieces = []
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for line in lines:
                words = json.loads(line)["text"].split(" ")
                pieces += [" ".join(words[i : i + num_words]) for i in range(0, len(words) - num_words + 1, num_words)]
    return pieces


def written_shingles(text: str) -> list[bytes]:
    """What datasketch is given: the normalised word shingles as bytes."""
    words = normalise(text)
    return [" ".join(words[i : i + CONFIG.ngram]).encode() for i in range(len(words) - CONFIG.ngram + 1)]


def microseconds(work: Callable[[Any], Any], items: Sequence[Any], rounds: int) -> float:
    """Median over the rounds of the CPU time of ``work`` over all items, for one item."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        for item in items:
            work(item)
        times.append(time.process_time() - start)
    return median(times[1:]) / len(items) * 1e6


def sketch(shingles: list[bytes], hashfunc: Callable[[bytes], int] = xxhash.xxh32_intdigest) -> datasketch.MinHash:
    made = datasketch.MinHash(CONFIG.num_perm, seed=CONFIG.seed, hashfunc=hashfunc, scheme=SCHEME)
    made.update_batch(shingles)
    return made


def measure(texts: list[str], rounds: int) -> dict[str, float]:
    """Side → microseconds a document."""
    stage = Signature(CONFIG)
    written = [written_shingles(text) for text in texts]
    for text, shingles in list(zip(texts, written, strict=True))[:20]:
        expected = sketch(shingles, minhash_hash).hashvalues
        own = minhash(shingle_hashes(hash_words(text), CONFIG.ngram), CONFIG.num_perm, CONFIG.seed)
        if not np.array_equal(own, expected):
            raise SystemExit("the signatures differ; nothing was measured")

    def page(text: str) -> Page:
        return stage(Page("bench", "f", "f", 0, text=text, doc_id=b"0" * 16))

    hashed = [shingle_hashes(hash_words(text), CONFIG.ngram) for text in texts]
    many = {"num_perm": CONFIG.num_perm, "hashfunc": xxhash.xxh32_intdigest, "scheme": SCHEME}
    batches = [written[i : i + 100] for i in range(0, len(written), 100)]
    return {
        "quern, text to signature": microseconds(page, texts, rounds),
        "quern, shingle hashes to signature": microseconds(
            lambda hashes: minhash(hashes, CONFIG.num_perm, CONFIG.seed), hashed, rounds
        ),
        "writing shingles down": microseconds(written_shingles, texts, rounds),
        "datasketch update_batch, from written shingles": microseconds(sketch, written, rounds),
        "datasketch bulk, from written shingles": microseconds(
            lambda batch: datasketch.MinHash.bulk(batch, **many), batches, rounds
        )
        * len(batches)
        / len(texts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--words", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    texts = documents(args.texts, args.words)
    if not texts:
        raise SystemExit(f"no text of {args.words} words in {', '.join(map(str, args.texts))}")
    result = measure(texts, args.rounds)
    own = result["quern, text to signature"]
    writing = result["writing shingles down"]
    ratios = {
        f"{peer}, with the writing, against quern": (result[peer] + writing) / own
        for peer in result
        if peer.startswith("datasketch")
    }
    if args.json:
        json.dump({"documents": len(texts), "words": args.words, "microseconds": result, "ratios": ratios}, sys.stdout)
        print()
        return
    print(f"{len(texts)} documents of {args.words} words, {CONFIG.num_perm} permutations")
    for name, value in result.items():
        print(f"  {name:50} {value:8.0f} µs a document")
    for name, value in ratios.items():
        print(f"  {name:66} {value:5.1f} ×")
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
