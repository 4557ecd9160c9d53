"""Benchmark text planted in real texts: what ``quern lineage match`` finds of it, by kind, and how fast.

    python benchmarks/lineage_match.py --data SHARED/data [--megabytes 40] [--rounds 3] [--json]

The corpus is web pages, encyclopedia articles, code and texts of many languages, tokenized with GPT-2's ranks into a
temporary folder. Items of GSM8K (questions) and HumanEval (prompts) are planted in it, each in one document: as they
stand, and changed in the ways copies on the web are. The peer is the definition in plain Python over the same tokens:
decode, normalise, split, a set of word tuples. Both must give the same (document, item, n-grams), or nothing is
printed. CPU time of one process, table building and reading of the benchmark left out; the least of the rounds, which
take turns.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
import shlex
import sys
import tempfile
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from quern.lineage.match import DEFAULT_N, MIN_WORDS, GramIndex, Item, read_benchmark, scan_streams
from quern.lineage.match.normalise import words
from quern.tokenize.encoding import Encoding, load_encoding
from quern.tokenize.shard_format import MANIFEST, VERSION_FILE, ShardWriter, version_entry
from quern.tokenize.shards import ShardReader

SOURCES = ("pages", "wikipedia", "code", "multilingual", "papers", "books", "speeches")
PER_KIND = 60
SHARD_BYTES = 8_000_000


def texts(data: Path, size: int) -> Iterator[str]:
    """Real texts, ``size`` bytes of UTF-8 at least where there are so many; each source in turn."""
    found = []
    for name in SOURCES:
        path = data / "groundtruth" / "groundtruth.jsonl.gz" if name == "pages" else data / "text" / f"{name}.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            found.append([row["text"] for row in map(json.loads, lines) if row.get("text")])
    total = 0
    for place in range(max(map(len, found))):
        for own in found:
            if place < len(own):
                yield own[place]
                total += len(own[place].encode("utf-8", "replace"))
                if total >= size:
                    return


def noise(rate: float) -> Callable[[random.Random, str], str]:
    """Each word becomes another with probability ``rate``."""

    def changed(draw: random.Random, text: str) -> str:
        return re.sub(r"\w+", lambda word: f"other{draw.randrange(99)}" if draw.random() < rate else word[0], text)

    return changed


def _marked_up(draw: random.Random, text: str) -> str:
    marked = re.sub(r"\w+", lambda word: draw.choice(["**{}**", "_{}_", "`{}`", "{}", "{}"]).format(word[0]), text)
    return marked.replace("'", "’").replace('"', "”").replace(". ", "!\n\n* ")


def _odd_characters(draw: random.Random, text: str) -> str:
    wide = {c: chr(c + 0xFEE0) for c in range(0x21, 0x7F)}
    some = re.sub(r"\w+", lambda word: word[0].translate(wide) if draw.random() < 0.3 else word[0], text)
    soft = re.sub(r"(\w{3})(\w{3})", "\\1\u00ad\\2", some)
    return unicodedata.normalize("NFD", soft).replace(" ", "\u00a0")


KINDS: dict[str, Callable[[random.Random, str], str]] = {
    "as it stands": lambda _, text: text,
    "wrapped at 40, quoted": lambda _, text: "> " + "\n> ".join(textwrap.wrap(text, 40)),
    "upper case": lambda _, text: text.upper(),
    "title case": lambda _, text: text.title(),
    "no punctuation": lambda _, text: re.sub(r"[^\w\s]|_", " ", text),
    "markup, other marks": _marked_up,
    "full width, soft hyphens": _odd_characters,
    "first half": lambda _, text: text[: len(text) // 2],
    "numbers changed": lambda draw, text: re.sub(r"\d+", lambda _: str(draw.randrange(1000)), text),
    "1% of words changed": noise(0.01),
    "2% of words changed": noise(0.02),
    "5% of words changed": noise(0.05),
    "10% of words changed": noise(0.10),
    "20% of words changed": noise(0.20),
}


Planted = list[tuple[str, int, int]]
"""(kind, document, item)."""


def plant(documents: list[str], hosts: list[int], items: list[Item], draw: random.Random) -> Planted:
    """Put :data:`PER_KIND` items of each kind into ``documents``, one in each of the ``hosts`` that it takes."""
    chosen = draw.sample(range(len(items)), min(len(items), PER_KIND * len(KINDS), len(hosts) // 2))
    hosts[:], hosts = hosts[len(chosen) :], hosts[: len(chosen)]
    planted: Planted = []
    for place, (item, host) in enumerate(zip(chosen, hosts, strict=True)):
        kind = list(KINDS)[place % len(KINDS)]
        text = documents[host]
        at = draw.choice([found.start() for found in re.finditer(r"\s|$", text)])
        documents[host] = f"{text[:at]}\n{KINDS[kind](draw, items[item].texts[0])}\n{text[at:]}"
        planted.append((kind, host, item))
    return planted


def write_source(root: Path, documents: list[str], encoding: Encoding) -> str:
    """A source ``web`` as a data run leaves it; returns its path."""
    folder = root / "tokens" / "web"
    folder.mkdir(parents=True)
    infos, batch, size = [], [], 0
    for number, text in enumerate(documents):
        ids = encoding.encode(text)
        batch.append((number.to_bytes(16, "big"), np.append(ids, np.asarray([encoding.eot_id], ids.dtype))))
        size += len(text)
        if size >= SHARD_BYTES or number == len(documents) - 1:
            with ShardWriter(str(folder), len(infos), encoding.dtype) as writer:
                for doc_id, own in batch:
                    writer.add(doc_id, np.array([len(own)]), own)
                infos.append(writer.finish(first_key=0, last_key=2**64 - 1))
            batch, size = [], 0
    own_ids = {"vocab_size": encoding.vocab_size, "dtype": encoding.dtype, "eot_id": encoding.eot_id}
    manifest = {"encoding": encoding.name, **own_ids, "seed": 0, "shards": [asdict(info) for info in infos]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    (root / "tokens" / "encoding.tiktoken").write_bytes(encoding.ranks_file)
    listed = version_entry("web", MANIFEST, hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(), infos)
    version = {"version": 1, "encoding": {"ranks": "encoding.tiktoken"}, "sources": {"web": listed}}
    (root / "tokens" / VERSION_FILE).write_text(json.dumps(version))
    return str(folder)


Rows = set[tuple[int, int, int]]
"""(document, item, different n-grams)."""


class PlainPython:
    """The definition: tuples of words in a set."""

    def __init__(self, items: list[Item], n: int) -> None:
        self.items_of: dict[tuple[str, ...], set[int]] = {}
        for number, item in enumerate(items):
            for text in item.texts:
                own = words(text)
                for gram in zip(*(own[i:] for i in range(n)), strict=False) if len(own) >= n else [tuple(own)]:
                    if len(gram) >= MIN_WORDS:
                        self.items_of.setdefault(gram, set()).add(number)
        self.lengths = sorted({len(gram) for gram in self.items_of})

    def scan(self, reader: ShardReader, encoding: Encoding) -> Rows:
        found: Rows = set()
        number = 0
        for shard in range(len(reader.shards)):
            for index in range(reader.shards[shard].documents):
                own = words(encoding.decode(reader.document(shard, index)[:-1]))
                held: dict[int, set[tuple[str, ...]]] = {}
                for length in self.lengths:
                    for gram in zip(*(own[i:] for i in range(length)), strict=False):
                        for item in self.items_of.get(gram, ()):
                            held.setdefault(item, set()).add(gram)
                found |= {(number, item, len(grams)) for item, grams in held.items()}
                number += 1
        return found


def rows_of(path: str, index: GramIndex, reader: ShardReader) -> Rows:
    found = scan_streams([path], index)
    starts = np.concatenate([reader.starts(shard) + reader.offsets[shard] for shard in range(len(reader.shards))])
    numbers = np.searchsorted(starts, found.documents)
    return set(zip(numbers.tolist(), found.items.tolist(), found.grams.tolist(), strict=True))


def measure(data: Path, size: int, rounds: int) -> dict[str, Any]:
    encoding = load_encoding("gpt2", str(data / "tokenizer" / "gpt2.tiktoken"))
    draw = random.Random(0)
    benchmarks = {"GSM8K": ("gsm8k_test.jsonl", "question"), "HumanEval": ("HumanEval.jsonl.gz", "prompt")}
    result: dict[str, Any] = {"n": DEFAULT_N, "recall": {}}
    items: list[Item] = []
    planted: Planted = []
    documents = list(texts(data, size))
    free = draw.sample(range(len(documents)), len(documents))  # documents without a planted text
    sizes = {}
    for name, (file, field) in benchmarks.items():
        own = read_benchmark(str(data / "benchmarks" / file), [field])
        planted += [(kind, host, len(items) + item) for kind, host, item in plant(documents, free, own, draw)]
        sizes[name] = (len(items), len(items) + len(own))
        items += own
    with tempfile.TemporaryDirectory() as folder:
        path = write_source(Path(folder), documents, encoding)
        reader = ShardReader(path)
        index, plain = GramIndex(items, DEFAULT_N), PlainPython(items, DEFAULT_N)
        scan_streams([path], GramIndex(items[:1], DEFAULT_N))  # imports
        seconds: dict[str, list[float]] = {"quern": [], "quern, empty source": [], "plain": []}
        empty = write_source(Path(folder) / "empty", documents[:1], encoding)

        def timed(name: str, call: Callable[[], Rows]) -> Rows:
            start = time.process_time()
            rows = call()
            seconds[name].append(time.process_time() - start)
            return rows

        for _ in range(rounds):
            found = timed("quern", lambda: rows_of(path, index, reader))
            timed("quern, empty source", lambda: rows_of(empty, index, ShardReader(empty)))
            expected = timed("plain", lambda: plain.scan(reader, encoding))
            if found != expected:
                raise SystemExit("the two found different things; nothing was measured")
    pairs = {(document, item): grams for document, item, grams in found}
    for name, (first, last) in sizes.items():
        for kind in KINDS:
            own_pairs = [(host, item) for k, host, item in planted if k == kind and first <= item < last]
            coverage = [pairs.get(pair, 0) / max(1, int(index.num_grams[pair[1]])) for pair in own_pairs]
            result["recall"][f"{name}, {kind}"] = {
                "planted": len(own_pairs),
                "found": sum(share > 0 for share in coverage),
                "mean_coverage": round(float(np.mean(coverage)), 3),
            }
    hosts = {host for _, host, _ in planted}
    flagged = {document for document, _, _ in found} - hosts
    megabytes = sum(len(text.encode("utf-8", "replace")) for text in documents) / 1e6
    table = min(seconds["quern, empty source"])
    speed = {"quern": megabytes / (min(seconds["quern"]) - table), "plain": megabytes / min(seconds["plain"])}
    return result | {
        "documents": len(documents),
        "megabytes": round(megabytes, 1),
        "tokens": reader.total_tokens,
        "grams": sum(len(kind.keys) for kind in index.grams),
        "clean": len(documents) - len({document for document, _, _ in expected} | hosts),
        "clean_flagged": len(flagged - {document for document, _, _ in expected}),
        "held_without_planting": len(flagged),
        "megabytes_a_second": {name: round(value, 1) for name, value in speed.items()},
        "table_s": round(table, 2),
        "ratio": round(speed["quern"] / speed["plain"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the shared data folder")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.data, int(args.megabytes * 1e6), args.rounds)
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['documents']:,} documents, {result['megabytes']} MB, {result['tokens']:,} tokens; "
        f"{result['grams']:,} {result['n']}-grams of GSM8K and HumanEval"
    )
    print(f"  {'planted':<40}{'items':>6}{'found':>7}{'recall':>9}{'coverage':>10}")
    for kind, row in result["recall"].items():
        recall = row["found"] / max(1, row["planted"])
        print(f"  {kind:<40}{row['planted']:6}{row['found']:7}{recall:9.1%}{row['mean_coverage']:10.1%}")
    print(
        f"  {result['clean']:,} documents share no n-gram by plain Python: {result['clean_flagged']} of them flagged; "
        f"{result['held_without_planting']} others hold one without our planting"
    )
    speed = result["megabytes_a_second"]
    print(
        f"  quern {speed['quern']:.1f} MB/s, plain Python {speed['plain']:.1f} MB/s, the same answers: "
        f"{result['ratio']} × (and {result['table_s']} s of table building a process)"
    )
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
