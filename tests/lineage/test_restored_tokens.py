"""The tokens of restored documents: of the texts that were judged, in the order of the corpus, range by range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.errors import InputError, QuernError
from quern.lineage.purge.restoration import restored_tokens
from quern.lineage.purge.restoration.restore import MOVED_SCHEMA, reconsider
from quern.lineage.purge.restoration.restored_tokens import TOKENS_SCHEMA, read_tokens, write_tokens
from quern.tokenize.place import place_key
from support.lineage import runs


@pytest.fixture
def case(tmp_path: Path) -> tuple[Path, runs.Listing, pa.Table]:
    """A run, and what was removed of it as if it were to be restored."""
    listing = runs.listing(seed=5, documents=300)
    run = tmp_path / "run"
    runs.write_listing(run, listing, identity="tokens")
    rows = []
    by_id = {row["doc_id"]: row for row in listing.rows}
    for decision in listing.decisions:
        row = by_id[decision["doc_id"]]
        rows.append(
            {
                "doc_id": row["doc_id"], "source": row["source"],
                "partition": row["file"].split("/")[1].removesuffix(".parquet"),
                "stream": row["source"] + (".val" if row["doc_id"][0] < 60 else ""),
                "place_key": place_key(runs.PLACE_SEED, row["doc_id"]),
                "post_filter_hash": row["post_filter_hash"], "kind": "near", "duplicate_of": None,
            }
        )  # fmt: skip
    rows.sort(key=lambda row: (row["stream"], row["place_key"], row["doc_id"]))
    return run, listing, pa.Table.from_pylist(rows, MOVED_SCHEMA)


def test_tokens_are_those_of_the_text_and_read_by_range(
    case: tuple[Path, runs.Listing, pa.Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, listing, restored = case
    monkeypatch.setattr(restored_tokens, "_GROUP_BYTES", 3000)
    monkeypatch.setattr(restored_tokens, "_TOKENS", 3)
    path = str(tmp_path / "tokens.parquet")
    count = write_tokens(str(run), restored, path)
    assert pq.ParquetFile(path).num_row_groups > 5
    assert pq.read_table(path).schema == TOKENS_SCHEMA
    rows: list[dict[str, Any]] = restored.to_pylist()
    found = []
    for stream in sorted({row["stream"] for row in rows}):
        mine = [row for row in rows if row["stream"] == stream]
        whole = list(read_tokens(path, stream, "uint16"))
        assert [(own.place_key, own.doc_id) for own in whole] == [(row["place_key"], row["doc_id"]) for row in mine]
        for own in whole:
            assert own.tokens.dtype == np.uint16
            assert own.tokens[:-1].astype(np.uint8).tobytes().decode() == listing.texts[own.doc_id]
            assert own.tokens[-1] == 999  # EOT of the 1,000 ids that these runs have
        first, last = mine[len(mine) // 3]["place_key"], mine[-2]["place_key"]
        some = [own.doc_id for own in read_tokens(path, stream, "uint16", first, last)]
        assert some == [row["doc_id"] for row in mine if first <= row["place_key"] <= last]
        found += whole
    assert count == sum(len(own.tokens) for own in found)
    assert list(read_tokens(path, "other", "uint16")) == []
    assert write_tokens(str(run), restored.slice(0, 0), path) == 0
    assert list(read_tokens(path, "web", "uint16")) == []


def test_a_text_that_is_gone_or_another_is_refused(case: tuple[Path, runs.Listing, pa.Table], tmp_path: Path) -> None:
    run, _, restored = case
    row = restored.slice(0, 1).to_pylist()[0]
    documents = run / "documents" / row["source"] / f"{row['partition']}.parquet"
    table = pq.read_table(documents)
    place = table["doc_id"].to_pylist().index(row["doc_id"])
    path = str(tmp_path / "tokens.parquet")
    texts = table["text"].to_pylist()
    for text, message in (("another", "its text is not the one that was judged"), (None, "its text is not the one")):
        changed = [text if at == place else own for at, own in enumerate(texts)]
        pq.write_table(table.set_column(1, pa.field("text", pa.string()), pa.array(changed, pa.string())), documents)
        with pytest.raises(InputError, match=rf"documents/.*{row['doc_id'].hex()}: {message}"):
            write_tokens(str(run), restored, path)
        assert not Path(path).exists()
    pq.write_table(pa.concat_tables([table.slice(0, place), table.slice(place + 1)]), documents)
    with pytest.raises(InputError, match=rf"{row['doc_id'].hex()}: its text is not in documents/"):
        write_tokens(str(run), restored, path)


def test_another_encoding_than_the_corpus_s_is_refused(
    case: tuple[Path, runs.Listing, pa.Table], tmp_path: Path
) -> None:
    run, _, restored = case
    version = run / "tokens" / "VERSION.json"
    version.write_text(version.read_text().replace('"vocab_size": 1000', '"vocab_size": 1001'))
    with pytest.raises(InputError, match=r"VERSION\.json: encoding\.vocab_size: is 1001, and 1000 of the ranks"):
        write_tokens(str(run), restored, str(tmp_path / "tokens.parquet"))


def test_a_run_that_lacks_what_is_needed_is_refused(case: tuple[Path, runs.Listing, pa.Table]) -> None:
    run, listing, _ = case
    record = '{"config": {"sources": [{"name": "web"}, {"name": "text"}], "tokenize": {}, "seed": 7}}'
    (run / "run.json").write_text(record)
    survivors = {row["duplicate_of"] for row in listing.decisions if row["kind"] == "near"}
    equal = {row["duplicate_of"]: row["doc_id"] for row in listing.decisions if row["kind"] != "near"}
    alone = min(survivors - set(equal))

    def ask(doc_id: bytes) -> None:
        reconsider(str(run), pa.table({"doc_id": pa.array([doc_id], pa.binary(16))}))

    with pytest.raises(
        InputError, match=r"signatures/.*parquet: is missing; --duplicates restore needs it"
    ):  # an imported run has none
        ask(alone)
    one = min(equal)
    with pytest.raises(QuernError, match=f"document {one.hex()} is condemned and [0-9a-f]{{32}}, which has the same"):
        ask(one)
    for name in (CLUSTERS, DECISIONS):
        (run / name).unlink()
        with pytest.raises(InputError, match=rf"{name}: is missing; --duplicates restore needs it"):
            ask(alone)
