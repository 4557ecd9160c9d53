"""What comes back when survivors go, against brute force over what is left."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from dedup_oracle import BruteForce

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes import run as dedup
from quern.data_pipeline.dedup.schemas import DECISION_SCHEMA
from quern.data_pipeline.execution.tasks import InProcess
from quern.data_pipeline.page.document import DOCUMENT_SCHEMA, HASH
from quern.lineage.index.decided import Redecided
from quern.lineage.purge.restoration.restore import MOVED_SCHEMA, Restored, reconsider
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from quern.tokenize.place import keyed_hashes, validation_limit
from support.data_pipeline import random_runs as R
from support.lineage.versions import write_changes

SEED, VALIDATION = 5, 0.3


class Corpus:
    """A run of made-up documents up to its decisions, and every version that purges make of it."""

    def __init__(
        self, folder: Path, docs: Sequence[R.Doc], config: DuplicatesConfig, priorities: dict[str, int]
    ) -> None:
        docs = [replace(doc, url=None if doc.url is None else f"http://{doc.url}.example/") for doc in docs]
        self.folder, self.docs, self.config, self.priorities = folder, docs, config, priorities
        self.expected = BruteForce(docs, config, priorities)
        self.version = 1
        self.deletion_set: set[bytes] = set()
        self.kept = self.fresh()
        partitions = R.write(folder, docs)
        report = dedup.run(str(folder), partitions, priorities, config, InProcess(), str(folder / ".work"))
        self.report = report
        self.write_documents()
        commit = folder / "commits" / "duplicates" / "all" / "decisions.json"
        commit.parent.mkdir(parents=True)
        commit.write_text(json.dumps({"outputs": {}, "counts": asdict(report)}))
        sources = [{"name": name, "priority": priorities.get(name, 0)} for name in sorted({d.source for d in docs})]
        record = {
            "duplicates": config.model_dump(mode="json"), "sources": sources, "seed": SEED,
            "tokenize": {"validation": VALIDATION},
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps({"config": record}))
        (folder / "tokens").mkdir()
        self.write_version()

    def fresh(self) -> set[bytes]:
        """What a fresh run without the condemned keeps."""
        left = [doc for doc in self.docs if doc.doc_id not in self.deletion_set]
        found = BruteForce(left, self.config, self.priorities)
        return {doc.doc_id for doc in found.order} - set(found.rows)

    def write_documents(self) -> None:
        """Texts, which are null once a purge has taken them; of their signatures there is no row then."""
        schema = DOCUMENT_SCHEMA.set(1, pa.field("text", pa.string()))
        for verdicts in (self.folder / "verdicts").glob("*/*.parquet"):
            name = verdicts.relative_to(self.folder / "verdicts")
            rows = [
                {
                    "doc_id": doc.doc_id, "text": None if doc.doc_id in self.deletion_set else "", "extracted": None,
                    "kept": doc.kept,
                }
                for doc in self.docs
                if (doc.source, doc.partition) == (name.parent.name, name.stem)
            ]  # fmt: skip
            path = self.folder / "documents" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            signatures = self.folder / "signatures" / name
            signed = pq.read_table(signatures)
            gone = pc.is_in(signed["doc_id"], value_set=pa.array(sorted(self.deletion_set), HASH))
            pq.write_table(signed.filter(pc.invert(gone)), signatures, row_group_size=20)
            pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=7)

    def write_version(self) -> None:
        (self.folder / "tokens" / "VERSION.json").write_text(json.dumps({"version": self.version}))

    def closed(self, doc_ids: Collection[bytes]) -> set[bytes]:
        """With all that have the same text or URL as one of them."""
        found = set(doc_ids)
        while True:
            texts = {doc.text for doc in self.docs if doc.doc_id in found}
            urls = {doc.url for doc in self.docs if doc.doc_id in found and doc.url is not None}
            more = {doc.doc_id for doc in self.docs if doc.text in texts or doc.url in urls}
            if more <= found:
                return found
            found |= more

    def purge_with_duplicates(self, doc_ids: Collection[bytes]) -> None:
        """Check that nothing but the condemned changes when what was removed in their favour goes with them."""
        table = find_deletion_set(str(self.folder), Wanted(doc_ids=frozenset(doc_ids)), "purge")
        deletion_set = set(table["doc_id"].to_pylist()) - self.deletion_set
        assert self.closed(doc_ids) - self.deletion_set <= deletion_set
        self.deletion_set |= deletion_set
        fresh = self.fresh()
        assert fresh == self.kept - deletion_set
        self.version += 1
        write_changes(self.folder, self.version, dict.fromkeys(deletion_set & self.kept, "purged"))
        self.write_version()
        self.write_documents()
        self.kept = fresh

    def purge(self, deletion_set: set[bytes]) -> Restored:
        """Check what comes back, then make the version that has it."""
        found = reconsider(str(self.folder), table(deletion_set))
        self.deletion_set |= deletion_set
        fresh, kept = self.fresh(), self.kept - self.deletion_set
        assert ids(found.restored) == fresh - kept
        assert ids(found.displaced) == kept - fresh
        for moved in (found.restored, found.displaced):
            self.check_places(moved)
        self.version += 1
        changes = dict.fromkeys((deletion_set & self.kept) | (kept - fresh), "purged")
        write_changes(self.folder, self.version, changes | dict.fromkeys(fresh - kept, "restored"))
        if found.decisions.num_rows:
            pq.write_table(found.decisions, self.folder / "tokens" / f"decisions.v{self.version}.parquet")
        self.write_version()
        self.write_documents()
        self.kept = fresh
        self.check_decisions(found)
        return found

    def check_decisions(self, found: Restored) -> None:
        """What is written of decisions holds for everything that is left, and nothing is written for nothing."""
        left = [doc for doc in self.docs if doc.doc_id not in self.deletion_set]
        fresh = BruteForce(left, self.config, self.priorities).rows
        redecided = Redecided(str(self.folder / "tokens"), self.version)
        rows = {id_: (row[0], row[1]) for id_, row in self.expected.rows.items() if id_ not in redecided}
        for row in redecided.table().to_pylist():
            if row["kind"] is not None:
                rows[row["doc_id"]] = (row["kind"], row["duplicate_of"])
        assert {id_: row for id_, row in rows.items() if id_ not in self.deletion_set} == {
            id_: (row[0], row[1]) for id_, row in fresh.items()
        }
        assert found.decisions.schema == DECISION_SCHEMA
        for row in found.decisions.to_pylist():
            assert (row["kind"], row["duplicate_of"], row["similarity"], row["band"]) == fresh[row["doc_id"]]
            if row["doc_id"] in self.expected.clusters:
                assert row["cluster_id"] == self.expected.clusters[row["doc_id"]]

    def check_places(self, moved: pa.Table) -> None:
        docs = {doc.doc_id: doc for doc in self.docs}
        rows = moved.to_pylist()
        for row in rows:
            doc = docs[row["doc_id"]]
            cluster = self.expected.clusters.get(doc.doc_id, doc.doc_id)
            (hashed,) = keyed_hashes(SEED, "validation", [cluster])
            held_out = int(hashed) < validation_limit(VALIDATION)
            assert row["stream"] == (f"{doc.source}.val" if held_out else doc.source)
            assert (row["source"], row["partition"]) == (doc.source, doc.partition)
            assert row["place_key"] == int(keyed_hashes(SEED, "place", [doc.doc_id])[0])
            assert row["post_filter_hash"] == doc.text
        assert rows == sorted(rows, key=lambda row: (row["stream"], row["place_key"], row["doc_id"]))


def table(doc_ids: Collection[bytes]) -> pa.Table:
    return pa.table({"doc_id": pa.array(sorted(doc_ids), HASH)})


def ids(moved: pa.Table) -> set[bytes]:
    assert moved.schema == MOVED_SCHEMA
    found = moved["doc_id"].to_pylist()
    assert len(set(found)) == len(found)
    return set(found)


def pick(rng: random.Random, corpus: Corpus) -> set[bytes]:
    """Some documents, survivors of duplicates more often than others."""
    survivors = sorted({row[1] for row in corpus.expected.rows.values()} - corpus.deletion_set)
    others = sorted(doc.doc_id for doc in corpus.docs if doc.doc_id not in corpus.deletion_set)
    wanted = rng.sample(survivors, min(len(survivors), rng.randrange(1, 8)))
    return corpus.closed([*wanted, *rng.sample(others, min(len(others), rng.randrange(3)))])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))])
def test_what_comes_back_is_what_a_fresh_run_keeps(tmp_path, seed):
    rng = random.Random(seed)
    docs = R.corpus(rng, rng.choice([30, 80, 150]))
    corpus = Corpus(tmp_path, docs, R.config(rng), rng.choice([{}, {"a": 1}, {"b": 2, "c": -1}]))
    for _ in range(3):
        if len(corpus.deletion_set) < len(docs):
            corpus.purge(pick(rng, corpus))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_after_a_restore_duplicates_go_with_those_for_which_they_are_removed_now(tmp_path, seed):
    rng = random.Random(seed)
    config = replace_config(R.config(rng), near=True, threshold=0.3, max_band_members=1000)
    corpus = Corpus(tmp_path, R.corpus(rng, 100), config, {})
    for _ in range(3):
        found = corpus.purge(pick(rng, corpus))
        back = sorted(ids(found.restored))
        if back:
            corpus.purge_with_duplicates(rng.sample(back, min(len(back), 2)))


@pytest.mark.long
def test_the_corpora_of_these_tests_have_every_case(tmp_path):
    """Restored and displaced documents, whole corpora and parts, second purges of restored documents."""
    seen: dict[str, int] = {}
    for seed in range(4):
        rng = random.Random(100 + seed)
        config = replace_config(R.config(rng), near=True, threshold=0.3, max_band_members=rng.choice([2, 32]))
        corpus = Corpus(tmp_path / str(seed), R.corpus(rng, 40), config, {})
        restored: set[bytes] = set()
        for _ in range(3):
            deletion_set = corpus.closed(rng.sample(sorted(restored), 1)) if restored else pick(rng, corpus)
            again = bool(restored & deletion_set)
            found = corpus.purge(deletion_set - corpus.deletion_set)
            restored = ids(found.restored) or restored - corpus.deletion_set
            for name, is_so in (
                ("restored", found.restored.num_rows), ("displaced", found.displaced.num_rows),
                ("whole", found.whole), ("part", not found.whole and found.decided), ("again", again),
            ):  # fmt: skip
                seen[name] = seen.get(name, 0) + bool(is_so)
    assert all(seen[name] for name in ("restored", "displaced", "whole", "part", "again")), seen


@pytest.mark.parametrize("most", [1, 2, 32])
def test_who_is_first_of_a_full_band_changes_with_those_that_go(tmp_path, most):
    """X, A and B share their bands; A and B are similar, and are compared only when X is not before them both."""
    similar = frozenset(range(100, 120))
    x, a, b = (
        R.Doc(name * 16, "s", "p", name * 16, None, 0, words, (1,) * R.NUM_PERM, shingles)
        for name, words, shingles in ((b"x", 40, frozenset(range(20))), (b"a", 30, similar), (b"b", 20, similar))
    )
    config = replace_config(DuplicatesConfig(), num_perm=R.NUM_PERM, bands=R.BANDS, rows=R.ROWS, max_band_members=most)
    corpus = Corpus(tmp_path, [x, a, b], config, {})
    assert corpus.report.capped_bands == (R.BANDS if most < 3 else 0)
    found = corpus.purge({x.doc_id})
    assert found.whole == (most < 3)
    assert ids(found.displaced) == ({b.doc_id} if most == 1 else set())


@pytest.mark.slow
def test_what_was_displaced_is_restored_when_it_goes_for_which_it_was(tmp_path):
    """Of the chain C ~ B ~ A, C and A are kept; without C it is B, and without B, A again."""
    c, b, a = (
        R.Doc(name * 16, "s", "p", name * 16, None, 0, words, (1,) * R.NUM_PERM, frozenset(range(first, first + 20)))
        for name, words, first in ((b"c", 40, 0), (b"b", 30, 6), (b"a", 20, 12))
    )
    config = replace_config(DuplicatesConfig(), num_perm=R.NUM_PERM, bands=R.BANDS, rows=R.ROWS, threshold=0.5)
    corpus = Corpus(tmp_path, [c, b, a], config, {})
    assert corpus.kept == {c.doc_id, a.doc_id}
    found = corpus.purge({c.doc_id})
    assert (ids(found.restored), ids(found.displaced)) == ({b.doc_id}, {a.doc_id})
    found = corpus.purge({b.doc_id})
    assert (ids(found.restored), ids(found.displaced)) == ({a.doc_id}, set())


def replace_config(config: DuplicatesConfig, **changes: Any) -> DuplicatesConfig:
    return DuplicatesConfig.model_validate({**config.model_dump(), **changes})
