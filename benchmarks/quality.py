"""Milliseconds a document for all four quality families, beside datatrove's own filters, in one sitting.

    python benchmarks/quality.py --peer PEER/bin/python TEXTS … [--limit 400] [--rounds 2] [--language en] [--json]

TEXTS are JSON lines with a ``text`` (and, with ``--language``, a ``lang``), gzipped or not, or the ``documents`` tables
of a run (``*.parquet``), whose extracted texts are read. ``--peer`` is the interpreter of an environment with datatrove
0.10.1 and spaCy. Both sides are given the same texts as English. datatrove stops at the first filter that drops a
text, quern measures all families. The decisions, first reasons and kept texts are compared, and the command fails if
any differs. CPU time; the rounds of both sides alternate, the median counts; quern's first round starts with nothing
remembered ("cold"), datatrove's first round is left out.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from quern.data_pipeline.stages.quality import QualityConfig, decide, measure
from quern.data_pipeline.stages.quality.words import Reading

CONFIG = QualityConfig()

PEER = """
import hashlib, json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter)
filters = [GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(filter_no_terminal_punct=False),
           FineWebQualityFilter()]
texts = json.loads(sys.stdin.readline())
def chain(text):
    document = Document(text=text, id="")
    for number, one in enumerate(filters):
        answer = one.filter(document)
        if answer is not True:
            return [number, answer[1]], None
    return None, hashlib.blake2b(document.text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
for _ in sys.stdin:
    start = time.process_time()
    answers = [chain(text) for text in texts]
    print(json.dumps([time.process_time() - start, answers]), flush=True)
"""

#: datatrove's reason of each filter and quern's rule.
RULES: tuple[dict[str, str], ...] = (
    {
        "empty": "empty",
        **{name: name for name in ("dup_para_frac", "dup_para_char_frac", "dup_line_frac", "dup_line_char_frac")},
        **{f"top_{n}_gram": f"top_{n}gram_char_frac" for n in (2, 3, 4)},
        **{f"duplicated_{n}_n_grams": f"dup_{n}gram_char_frac" for n in range(5, 11)},
    },
    {
        "gopher_short_doc": "num_words",
        "gopher_long_doc": "num_words",
        "gopher_below_avg_threshold": "mean_word_length",
        "gopher_above_avg_threshold": "mean_word_length",
        "gopher_too_many_hashes": "hash_ratio",
        "gopher_too_many_ellipsis": "ellipsis_ratio",
        "gopher_too_many_bullets": "bullet_line_frac",
        "gopher_too_many_end_ellipsis": "ellipsis_line_frac",
        "gopher_below_alpha_threshold": "alpha_word_frac",
        "gopher_enough_stop_words": "num_stop_words",
    },
    {"lorem_ipsum": "lorem_ipsum", "curly_bracket": "curly_bracket", "too_few_sentences": "num_sentences"},
    {name: name for name in ("empty", "line_punct_ratio", "short_line_ratio", "char_dup_ratio", "list_ratio")},
)


def read_texts(paths: list[Path], language: str | None, limit: int) -> list[str]:
    """The first ``limit`` texts that are not empty."""
    texts: list[str] = []
    for path in paths:
        if path.suffix == ".parquet":
            table = pq.read_table(path, columns=["text", "extracted"]).to_pydict()
            texts += [old or new for new, old in zip(table["text"], table["extracted"], strict=True)]
        else:
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
                rows = map(json.loads, lines)
                texts += [row["text"] for row in rows if language is None or row.get("lang") == language]
    return [text for text in texts if text][:limit]


def quern_round(texts: list[str]) -> tuple[float, list[Any]]:
    """CPU seconds, and for each text the first failed rule (or None) and the hash of the text if it is kept."""
    start = time.process_time()
    found = []
    for text in texts:
        measures, left = measure(text, CONFIG, "en")
        found.append((decide(measures, CONFIG), left))
    seconds = time.process_time() - start
    answers = []
    for failed, left in found:
        kept = hashlib.blake2b(left.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        answers.append((failed[0], None) if failed else (None, kept))
    return seconds, answers


def peer_rule(reason: list[Any] | None) -> str | None:
    return None if reason is None else f"{CONFIG.order[reason[0]]}.{RULES[reason[0]][reason[1]]}"


def compare(peer: str, texts: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds a document of both sides and the number of texts on which they differ."""
    Reading("loads the rules, e.g. these.", "en").words  # noqa: B018
    times: dict[str, list[float]] = {"quern": [], "datatrove": []}
    differing = 0
    with subprocess.Popen([peer, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(texts) + "\n")
        for _ in range(rounds + 1):
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{peer} cannot run datatrove's filters; its error is above")
            seconds, theirs = json.loads(line)
            times["datatrove"].append(seconds)
            seconds, ours = quern_round(texts)
            times["quern"].append(seconds)
            differing = sum((peer_rule(reason), kept) != own for (reason, kept), own in zip(theirs, ours, strict=True))
        process.stdin.close()
    a_document = 1000 / len(texts)
    return {
        "datatrove": median(times["datatrove"][1:]) * a_document,
        "quern, cold": times["quern"][0] * a_document,
        "quern, warm": median(times["quern"][1:]) * a_document,
        "differing": differing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--peer", required=True, help="python of an environment with datatrove 0.10.1")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--language")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    texts = read_texts(args.texts, args.language, args.limit)
    if not texts:
        raise SystemExit(f"no text in {', '.join(map(str, args.texts))}")
    result = compare(args.peer, texts, args.rounds)
    ratios = {side: result["datatrove"] / result[side] for side in ("quern, cold", "quern, warm")}
    if args.json:
        print(json.dumps({"documents": len(texts), "milliseconds": result, "ratios": ratios}))
    else:
        print(f"{len(texts)} documents, {sum(map(len, texts)) / len(texts):.0f} characters on average")
        for name in ("datatrove", "quern, cold", "quern, warm"):
            print(f"  {name:12} {result[name]:8.2f} ms a document {result['datatrove'] / result[name]:8.1f} ×")
        print(f"  decision, first reason and kept text differ on {result['differing']:.0f}")
        print(f"repeat: {shlex.join(['python', *sys.argv])}")
    sys.exit(1 if result["differing"] else 0)


if __name__ == "__main__":
    main()
