"""The index of a run that ``quern data run`` has made, against its own tables."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.page.url import canonicalize
from quern.demo import write_site
from quern.lineage.store import IndexedRun
from quern.tokenize.encoding import load_encoding
from support.programs import python

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    site = write_site(str(folder / "site"), seed=3, pages=160)
    arguments = [
        python(), "-m", "quern.cli.main", "data", "run", str(ROOT / "configs" / "demo.yaml"),
        f"run_dir={folder / 'run'}", f"sources.0.paths={folder / 'site' / 'warc' / '*.warc.gz'}", "workers=1",
        f"toxicity.lexicons.en={Path(site.lexicon).resolve()}", "tokenize.shard_tokens=9000",
    ]  # fmt: skip
    done = subprocess.run(arguments, env=dict(os.environ), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "run"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.long
def test_a_real_run_is_walked_from_url_to_tokens_and_back(run: Path) -> None:
    lineage = IndexedRun(str(run))
    verdicts = rows(run / "verdicts")
    texts = {row["doc_id"]: row["text"] for row in rows(run / "documents")}
    decisions = {row["doc_id"]: row for row in pq.read_table(run / "duplicates" / "decisions.parquet").to_pylist()}
    assert lineage.num_documents == len(verdicts) > 100
    by_url: dict[str, set[bytes]] = {}
    for row in verdicts:
        by_url.setdefault(canonicalize(row["url"]) or "", set()).add(row["doc_id"])
    in_tokens = set()
    for row in verdicts:
        (number,) = lineage.find(doc=row["doc_id"]).tolist()
        found = lineage.verdict(number)
        assert {name: found[name] for name in row} == row
        assert set(lineage.documents(lineage.find(url=row["url"])).doc_ids) == by_url[canonicalize(row["url"]) or ""]
        assert lineage.decision(number) == decisions.get(row["doc_id"])
        spans = lineage.spans_of(number)
        assert len(spans) == (row["stage"] is None and row["doc_id"] not in decisions)
        for stream, start, length in zip(
            spans.streams.tolist(), spans.starts.tolist(), spans.lengths.tolist(), strict=True
        ):
            in_tokens.add(row["doc_id"])
            own = lineage.streams[stream]
            back, _ = lineage.spans_in(own, [start], [start + length])
            assert back.numbers.tolist() == [number]
            encoding = load_encoding(own.reader.encoding, own.reader.ranks_path)
            assert encoding.decode(own.reader.tokens(start, start + length - 1)) == texts[row["doc_id"]]
    assert in_tokens
    listed = [doc_id for path in (run / "tokens").rglob("*.spans.parquet") for doc_id in ids(path)]
    assert sorted(listed) == sorted(in_tokens)
    surts = [lineage.verdict(number)["surt"] for number in range(lineage.num_documents)]
    known = [surt for surt in surts if surt is not None]
    assert known == sorted(known) == surts[: len(known)]
    for name in ("pre_filter_hash", "post_filter_hash"):
        for value in {row[name] for row in verdicts} - {None}:
            expected = {row["doc_id"] for row in verdicts if value in (row["pre_filter_hash"], row["post_filter_hash"])}
            assert set(lineage.documents(lineage.find(hash=value)).doc_ids) == expected
    assert np.array_equal(lineage.find(surt=""), np.arange(len(known)))


def ids(path: Path) -> list[bytes]:
    column: pa.ChunkedArray = pq.read_table(path)["doc_id"]
    return list(column.to_pylist())
