"""Which documents a condition chooses, against the same question asked of Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.tokenize.selection.chosen import Chosen
from quern.tokenize.selection.where import choose, open_chosen
from quern.tokenize.shards import ShardReader
from quern.train.batches.corpus import Corpus, NoWindowError
from support.train.chosen_site import STREAM, Site, write_site

Row = dict[str, Any]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return write_site(tmp_path)


def equals(value: Any, other: Any) -> bool:
    return value is not None and value == other


@pytest.mark.parametrize(
    ("where", "fulfils"),
    [
        pytest.param("language = 'de'", lambda r: equals(r["language"], "de"), id="text"),
        pytest.param("language <> 'de'", lambda r: r["language"] not in (None, "de"), id="null is not chosen"),
        pytest.param("language_score >= 0.7 -- good", lambda r: (r["language_score"] or 0) >= 0.7, id="a comment"),
        pytest.param("words > 20", lambda r: r["words"] is not None and r["words"] > 20, id="not in every file"),
        pytest.param("tokens between 3 and 7", lambda r: 3 <= r["tokens"] <= 7, id="tokens"),
        pytest.param("cluster_size >= 2", lambda r: r["cluster_size"] >= 2, id="cluster size"),
        pytest.param("CLUSTER_SIZE = 5", lambda r: r["cluster_size"] == 5, id="with what was removed"),
        pytest.param("doc_id < '7' and host is null", lambda r: r["doc_id"].hex() < "7" and not r["host"], id="hex"),
        pytest.param("true", lambda r: True, id="all"),
        pytest.param("false", lambda r: False, id="none"),
        pytest.param("host in ('a.org') or tokens = 1", lambda r: r["host"] == "a.org" or r["tokens"] == 1, id="in"),
    ],
)
def test_a_condition_chooses_what_python_chooses(
    site: Site, tmp_path: Path, where: str, fulfils: Callable[[Row], object]
) -> None:
    made = site.choose(where, tmp_path / "chosen")
    tokens = site.spans(fulfils)
    begins, ends, _ = made.pieces(np.array([0]), np.array([made.tokens]))
    assert [at for a, b in zip(begins.tolist(), ends.tolist(), strict=True) for at in range(a, b)] == tokens
    assert made.documents == sum(bool(fulfils(row)) for row in site.rows)


def test_a_table_of_measures_is_asked_by_its_name(site: Site, tmp_path: Path) -> None:
    folder = site.run / "measures" / "dsir"
    folder.mkdir(parents=True)
    known = site.rows[::2]
    rows = [{"doc_id": row["doc_id"], "rank": n, "log_weight": -n / 3} for n, row in enumerate(known)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    with pytest.raises(InputError, match="dsir"):
        site.choose("dsir.rank < 4", tmp_path / "chosen")  # its manifest says that it is whole
    table = {"table": "web/0.parquet"}
    written = hashlib.sha256((folder / "part-00000.parquet").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(
        json.dumps({"parts": [table | {"sha256": own} for own in (written, "0" * 64)]})
    )
    with pytest.raises(InputError, match=r"part-00001.parquet: is missing or changed"):
        site.choose("dsir.rank < 4", tmp_path / "chosen")
    (folder / "manifest.json").write_text(json.dumps({"parts": [table | {"sha256": written}]}))
    made = site.choose("dsir.rank < 4 and tokens > 2", tmp_path / "chosen")
    wanted = {row["doc_id"] for row in known[:4] if row["tokens"] > 2}
    assert 0 < made.documents == len(wanted)
    assert made.place(np.array([row["start"] for row in known[:4] if row["tokens"] > 2])).min() >= 0


@pytest.mark.parametrize(
    ("where", "told"),
    [
        pytest.param("random() < 0.5", "random: expected functions that always give the same", id="random"),
        pytest.param("fetched_at < now()", "now: expected", id="the time"),
        pytest.param("fetched_at < current_date", "current_date: expected", id="the day"),
        pytest.param("fetched_at < CURRENT_TIMESTAMP", "current_timestamp: expected", id="the moment"),
        pytest.param("fetched_at::time < localtime", "localtime: expected", id="the clock"),
        pytest.param("age(fetched_at) > interval 3 days", "age: expected", id="an age"),
        pytest.param("current_localtimestamp() > fetched_at", "current_localtimestamp: expected", id="the clock's"),
        pytest.param("session_user = 'x'", "session_user: expected", id="the user"),
        pytest.param("(" * 2000 + "true" + ")" * 2000, "depth", id="deep"),
        pytest.param("pg_postmaster_start_time() > fetched_at", "pg_postmaster_start_time: expected", id="a macro"),
        pytest.param("pg_sleep(0.1) is null", "pg_sleep: expected", id="a macro that waits"),
        pytest.param("columns('cluster_siz.') > 1", "one condition", id="columns by a pattern"),
        pytest.param("getenv('HOME') = 'x'", "getenv", id="the machine"),
        pytest.param("tokens > (select 3)", "one condition", id="a query"),
        pytest.param("tokens in (select tokens from spans)", "one condition", id="a query of a view"),
        pytest.param("exists (from read_text('/etc/passwd'))", "one condition", id="a file"),
        pytest.param("1=1) union select 1 from documents where (1=1", "one condition", id="a union"),
        pytest.param("tokens > 1) group by (tokens", "one condition", id="groups"),
        pytest.param("tokens > 1) limit (1", "one condition", id="a limit"),
        pytest.param("row_number() over () < 3", "one condition", id="a window"),
        pytest.param("count(*) > 1", "aggregates", id="an aggregate"),
        pytest.param("1=1); drop table shards; select (1", "expected one query", id="statements"),
        pytest.param("tokens >", "syntax error", id="no expression"),
        pytest.param("langage = 'de'", "langage", id="no column"),
        pytest.param("gopher.num_words > 3", 'is quoted ("gopher.num_words" > 100)', id="a dot"),
        pytest.param("language > 3", "", id="text that is no number"),
    ],
)
def test_what_is_no_condition_is_refused_by_name(site: Site, tmp_path: Path, where: str, told: str) -> None:
    with pytest.raises(InputError, match=r"tokens/web: where: .*") as error:
        site.choose(where, tmp_path / "chosen")
    assert told in str(error.value)
    assert not list((tmp_path / "chosen").glob("*"))


def test_documents_without_a_verdict_are_told(site: Site, tmp_path: Path) -> None:
    (site.run / "verdicts" / "web" / "one.parquet").unlink()
    with pytest.raises(InputError, match=r"35 documents have no verdict in .*/verdicts"):
        site.choose("true", tmp_path / "chosen")
    (site.run / "verdicts" / "web" / "two.parquet").unlink()
    with pytest.raises(InputError, match="verdicts/web: has no table of verdicts"):
        site.choose("true", tmp_path / "chosen")


def test_what_was_chosen_once_is_kept_and_asked_again_only_if_it_is_lost(site: Site, tmp_path: Path) -> None:
    first = site.choose("cluster_size = 1", tmp_path / "chosen")
    (site.run / "duplicates" / "clusters.parquet").unlink()  # all clusters are of one document now
    assert site.choose("cluster_size = 1", tmp_path / "chosen").identity == first.identity
    reader, folders = ShardReader(site.path), [str(tmp_path / "chosen")]
    assert open_chosen(folders, first.identity, reader, "cluster_size = 1").tokens == first.tokens
    Path(first.path).unlink()
    with pytest.raises(InputError, match="is missing, and 'cluster_size = 1' chooses other documents now"):
        open_chosen(folders, first.identity, reader, "cluster_size = 1")
    with pytest.raises(InputError, match="does not tell the condition"):
        open_chosen(folders, first.identity, reader, None)
    now = site.choose("cluster_size = 1", tmp_path / "chosen")
    Path(now.path).unlink()
    assert open_chosen(folders, now.identity, reader, "cluster_size = 1").documents == len(site.rows)


def test_what_a_run_has_read_is_that_choice_or_none(site: Site, tmp_path: Path) -> None:
    where, folder = "cluster_size = 1", tmp_path / "chosen"
    first = site.choose(where, folder)
    reader, clusters = ShardReader(site.path), site.run / "duplicates" / "clusters.parquet"
    other = site.choose("true", folder).identity

    def again() -> Chosen:
        return choose(reader, STREAM, where, str(folder), ids=[other, first.identity])

    kept, data = Path(first.path), Path(first.path).read_bytes()
    kept.unlink()
    assert again().identity == first.identity  # asked again, it chooses the same, and is kept again
    assert kept.read_bytes() == data
    clusters.rename(tmp_path / "clusters")
    kept.unlink()
    with pytest.raises(InputError, match=r"chooses other documents now .* put the file back from a copy"):
        again()
    assert {path.name for path in folder.glob("*.chosen")} == {Path(site.choose("true", folder).path).name}
    changed = choose(reader, STREAM, where, str(folder))  # another run's, in whose folder it might stand too
    assert changed.identity != first.identity
    kept.write_bytes(data)
    assert again().identity == first.identity


def test_a_corpus_of_conditions_on_one_source(site: Site, tmp_path: Path) -> None:
    folder, both = [str(tmp_path / "chosen")], [site.path] * 2
    wheres = ["tokens <= 4", "tokens > 4"]
    corpus = Corpus(both, 8, wheres, folder)
    assert sum(corpus.tokens) == ShardReader(site.path).total_tokens
    assert [len(site.spans(lambda row, w=own: (row["tokens"] <= 4) == w)) for own in (True, False)] == [*corpus.tokens]
    assert len(set(corpus.ids)) == 2
    others = [Corpus([site.path], 8), Corpus([site.path], 8, ["true"], folder), corpus]
    assert len({own.fingerprint for own in others}) == 3
    with pytest.raises(InputError, match=r"'tokens >= 4' and 'tokens <= 4' both choose the document at token"):
        Corpus(both, 8, ["tokens <= 4", "tokens >= 4"], folder)
    with pytest.raises(InputError, match=r"is the same data as .* each time with a where"):
        Corpus(both, 8, ["tokens <= 4", None], folder)
    with pytest.raises(NoWindowError, match="has 0 tokens where tokens > 99; seq_len 8 needs 9 or more"):
        Corpus([site.path], 8, ["tokens > 99"], folder)


def test_without_the_look_at_the_syntax_no_other_file_is_read(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quern.tokenize.selection.where.check_condition", lambda *_: None)
    (tmp_path / "secret.txt").write_text("x")
    with pytest.raises(InputError, match=r"tokens/web: where: .*disabled"):
        site.choose(f"(select count(*) from read_text('{tmp_path}/secret.txt')) = 1", tmp_path / "chosen")
