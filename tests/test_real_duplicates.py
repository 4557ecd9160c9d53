"""Near duplicates among all real pages, every language, against a comparison of every pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import regex
from scipy.sparse import csr_matrix, triu
from scipy.stats import binom

ROOT = Path(__file__).resolve().parents[1]
BANDS, ROWS, THRESHOLD = 16, 8, 0.8

pytestmark = [pytest.mark.shared, pytest.mark.long]

SPACELESS = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u3005-\u3007\u30fc]"
)


def words_of(text: str) -> list[str]:
    """Words by the documented rule, in the plainest way."""
    text = regex.sub(r"\d+([.,]\d+)*", "0", text.lower())
    text = "".join(c for c in unicodedata.normalize("NFD", text) if unicodedata.category(c) != "Mn")
    text = SPACELESS.sub(r" \g<0> ", text)
    return regex.findall(r"[\p{L}\p{N}\p{M}]+", text)


def similar_pairs(texts: dict[bytes, str]) -> dict[tuple[bytes, bytes], float]:
    """Jaccard similarity of 5-word shingles, for every pair at or above the threshold: one sparse product."""
    ids, columns, indices, starts = list(texts), {}, [], [0]
    for doc_id in ids:
        words = words_of(texts[doc_id])
        found = {tuple(words[i : i + 5]) for i in range(len(words) - 4)}
        indices += [columns.setdefault(shingle, len(columns)) for shingle in found]
        starts.append(len(indices))
    matrix = csr_matrix((np.ones(len(indices), np.int32), indices, starts), (len(ids), len(columns)))
    shared = triu(matrix @ matrix.T, k=1).tocoo()
    sizes = np.diff(starts)
    jaccard = shared.data / (sizes[shared.row] + sizes[shared.col] - shared.data)
    keep = jaccard >= THRESHOLD
    return {
        (ids[a], ids[b]): float(j) for a, b, j in zip(shared.row[keep], shared.col[keep], jaccard[keep], strict=True)
    }


@pytest.fixture(scope="module")
def run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages that have a text: no language and no quality rule drops any."""
    folder = tmp_path_factory.mktemp("all") / "run"
    command = [
        sys.executable, "-m", "quern.cli.main", "data", "run", "configs/fineweb-en.yaml", f"run_dir={folder}",
        f"sources.0.paths={shared}/data/warc/*.warc.gz", "language.keep=null", "quality.order=[]",
        "pii.action=measure", "tokenize.validation=0",
    ]  # fmt: skip
    cache = str(shared / "data" / "tokenizer" / "tiktoken_cache")
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def texts(run: Path) -> dict[bytes, str]:
    rows = [row for file in (run / "documents").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    return {row["doc_id"]: row["text"] for row in rows if row["kept"]}


@pytest.fixture(scope="module")
def pairs(texts: dict[bytes, str]) -> dict[tuple[bytes, bytes], float]:
    return similar_pairs(texts)


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return pq.read_table(run / "duplicates" / name).to_pylist()


def test_every_pair_nine_tenths_alike_is_found_and_misses_below_are_within_chance(
    run: Path, texts: dict[bytes, str], pairs: dict[tuple[bytes, bytes], float], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = {row["doc_id"]: row["cluster_id"] for row in rows(run, "clusters.parquet")}

    def found(pair: tuple[bytes, bytes]) -> bool:
        return cluster.get(pair[0]) is not None and cluster.get(pair[0]) == cluster.get(pair[1])

    near = {pair: j for pair, j in pairs.items() if j < 0.9}
    missed = {pair: j for pair, j in near.items() if not found(pair)}
    with capsys.disabled():
        print(f"\n{len(texts)} texts, {len(pairs)} pairs ≥ 0.8, {len(near)} of them below 0.9, {len(missed)} missed")
        for (a, b), j in missed.items():
            print(f"  missed {j:.3f}: {a.hex()} {b.hex()}")
    assert len(texts) > 1900
    assert sum(j >= 0.9 for j in pairs.values()) >= 10, "the corpus has such pairs"
    assert [pair for pair, j in pairs.items() if j >= 0.9 and not found(pair)] == []
    miss = 1 - (1 - (1 - THRESHOLD**ROWS) ** BANDS)  # the likeliest miss: a pair at the threshold
    assert len(missed) <= binom.ppf(0.99, len(near), miss)


def test_every_removal_is_similar_to_a_document_of_its_cluster(
    run: Path, texts: dict[bytes, str], pairs: dict[tuple[bytes, bytes], float]
) -> None:
    decisions = rows(run, "decisions.parquet")
    assert {row["kind"] for row in decisions} >= {"exact", "near"}
    for row in decisions:
        a, b = row["doc_id"], row["duplicate_of"]
        if row["kind"] == "exact":
            assert texts[a] == texts[b]
        elif row["kind"] == "near":
            jaccard = pairs.get((a, b)) or pairs.get((b, a))
            assert jaccard is not None, f"{a.hex()} and {b.hex()} are not 0.8 alike"
            assert abs(jaccard - row["similarity"]) < 0.02
    removed = {row["doc_id"] for row in decisions}
    both_left = [pair for pair, j in pairs.items() if j >= 0.9 and not removed & set(pair)]
    assert both_left == []


def test_the_known_natural_pairs_of_the_corpus_are_among_them(
    run: Path, shared: Path, pairs: dict[tuple[bytes, bytes], float]
) -> None:
    """The corpus lists near pairs of whole pages; where also the extracted texts are equal, they were removed."""
    verdicts = [row for file in (run / "verdicts").rglob("*.parquet") for row in pq.read_table(file).to_pylist()]
    ids = {row["record_id"]: row["doc_id"] for row in verdicts}
    known = json.loads((shared / "data" / "groundtruth" / "near_duplicate_pairs.json").read_text())
    removed = {row["doc_id"] for row in rows(run, "decisions.parquet")}
    alike = [(ids[p["a"]], ids[p["b"]]) for p in known if p["jaccard"] >= 0.9]
    both = [pair for pair in alike if pair in pairs or pair[::-1] in pairs]
    assert len(both) >= 5
    for pair in both:
        assert removed & set(pair)
