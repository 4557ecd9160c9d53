"""Duplicate removal over real books, papers, code and 411 languages: nothing goes that is not a copy."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from quern.data_pipeline.dedup.config import DuplicatesConfig

pytestmark = [pytest.mark.shared, pytest.mark.slow]

SOURCES = ("books", "cc_text", "code", "multilingual", "papers", "speeches", "wikipedia")


def real_texts(plain, shared: Path):
    docs = []
    for source in SOURCES:
        with gzip.open(shared / "data" / "text" / f"{source}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for position, line in enumerate(lines):
                docs.append(plain.Doc(json.loads(line)["text"], source, position=position))
    return docs


@pytest.mark.long
def test_every_removal_of_a_real_text_is_a_copy_by_brute_force(plain, shared, capsys):
    docs = real_texts(plain, shared)
    by_id = {doc.doc_id: doc for doc in docs}
    result = plain.deduplicate(docs, DuplicatesConfig())
    similarities = []
    for row in result.decisions:
        one, other = by_id[row["doc_id"]], by_id[row["duplicate_of"]]
        if row["kind"] == "exact":
            assert one.text == other.text
            continue
        assert row["kind"] == "near"
        similarity = plain.plain_jaccard(plain.plain_shingles(one.text, 5), plain.plain_shingles(other.text, 5))
        assert similarity == row["similarity"] >= 0.8
        similarities.append(similarity)
        with capsys.disabled():
            names = [f"{doc.source}:{doc.position}" for doc in (one, other)]
            print(f"\nnear duplicate {names[0]} of {names[1]}, similarity {similarity:.4f}, band {row['band']}", end="")
    assert similarities
    assert result.report.documents["books"] == 8
    assert "books" not in result.report.removed
    # no two documents with the same text are left
    left = [doc.text for doc in docs if doc.doc_id not in result.removed]
    assert len(left) == len(set(left))


@pytest.mark.long
def test_no_pair_of_real_texts_nine_tenths_alike_is_left(plain, shared):
    """All pairs, by prefix filtering (Chaudhuri, Ganti, Kaushik 2006); the bands promise 99.99 % of those at 0.9.

    Two sets with J ≥ 0.9 share one of the ⌊|A|/10⌋ + 1 rarest members of each.
    """
    docs = real_texts(plain, shared)
    removed = plain.deduplicate(docs, DuplicatesConfig()).removed
    sets = [plain.plain_shingles(doc.text, 5) for doc in docs]
    frequency = Counter(shingle for shingles in sets for shingle in shingles)
    owners: dict[tuple[str, ...], list[int]] = {}
    for index, shingles in enumerate(sets):
        rarest = sorted(shingles, key=lambda shingle: (frequency[shingle], shingle))[: len(shingles) // 10 + 1]
        for shingle in rarest:
            owners.setdefault(shingle, []).append(index)
    pairs = {pair for members in owners.values() for pair in combinations(members, 2)}
    alike = [(a, b) for a, b in pairs if plain.plain_jaccard(sets[a], sets[b]) >= 0.9]
    assert len(alike) > 10
    assert all(docs[a].doc_id in removed or docs[b].doc_id in removed for a, b in alike)
