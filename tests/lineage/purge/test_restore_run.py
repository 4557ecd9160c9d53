"""``quern lineage purge --duplicates restore`` on whole runs, held against whole fresh runs with the purge list."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern import storage
from quern.cli.main import app
from quern.data_pipeline import partition
from quern.lineage.sql.query import query
from quern.lineage.store import IndexedRun
from quern.lineage.trace import trace
from quern.tokenize.place import keyed_hashes
from quern.tokenize.shards import ShardReader
from support.data_pipeline.in_process import run_config
from support.lineage import scenario
from support.remote import s3_server

Corpus = dict[str, tuple[str, bytes]]
"""doc_id → the stream it stands in, and its tokens."""


def write_sources(folder: Path, seed: int) -> dict[str, str]:
    """Families of texts, each a chain of small changes, with copies and shared URLs among them."""
    draw = random.Random(seed)
    rows: dict[str, list[dict[str, Any]]] = {"left": [], "right": []}
    urls: list[str] = []
    for family in range(16):
        words = [f"{draw.choice(scenario.WORDS)}{draw.randrange(400)}" for _ in range(50)]
        for _ in range(draw.randrange(1, 9)):
            for place in draw.sample(range(len(words)), draw.choice([0, 1, 1, 1, 2])):
                words[place] = f"{draw.choice(scenario.WORDS)}{draw.randrange(400)}"
            tail = ["more"] * draw.randrange(3)
            url = f"https://site{family}.example/{draw.randrange(10**6)}"
            if urls and draw.random() < 0.08:
                url = draw.choice(urls)
            urls.append(url)
            rows[draw.choice(["left", "right"])].append({"url": url, "text": " ".join([*words, *tail])})
    paths = {}
    for name, own in rows.items():
        draw.shuffle(own)
        for row in own:
            row["id"] = f"{name}/{draw.getrandbits(60):x}"
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
        paths[name] = str(path)
    return paths


def config(run: Path, texts: dict[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "run_dir": str(run),
        "sources": [
            {"name": name, "kind": "jsonl", "paths": path, "priority": int(name == "right")}
            for name, path in texts.items()
        ],
        "quality": {"order": []},
        "duplicates": {"ngram": 2, "threshold": 0.85},
        "tokenize": {"encoding": "trained", "vocab_size": 300, "shard_tokens": 2000, "validation": 0.25},
        **scenario.PLAIN,
        **changes,
    }


def corpus(run: Path) -> Corpus:
    """What the present version holds; that documents stand by place key is checked."""
    record = json.loads((run / "tokens" / "VERSION.json").read_text())
    found: Corpus = {}
    for stream in record["sources"]:
        reader = ShardReader(str(run / "tokens" / stream), verify=True)
        ids: list[bytes] = []
        for shard, info in enumerate(reader.shards):
            spans = [reader.span(shard, index) for index in range(info.documents)]
            own = [span.doc_id for span in spans if not span.purged]
            for span in spans:
                assert span.doc_id.hex() not in found
                if not span.purged:
                    found[span.doc_id.hex()] = stream, reader.document(shard, span.index).tobytes()
            keys = keyed_hashes(reader.seed, "place", own).tolist()
            assert all(int(info.first_key, 16) <= key <= int(info.last_key, 16) for key in keys)
            ids += own
        places = list(zip(keyed_hashes(reader.seed, "place", ids).tolist(), ids, strict=True))
        assert places == sorted(places)
    return found


def invoke(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a lineage command says with ``--json``, which goes to the file descriptor itself."""
    capfd.readouterr()
    done = CliRunner().invoke(app, ["lineage", *arguments, "--json"])
    told = capfd.readouterr().out
    assert done.exit_code == 0, (told, done.output, done.exception)
    found: dict[str, Any] = json.loads(told)
    return found


def shard_files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.glob("tokens/*/shard_*")}


def decisions(run: Path, suffix: str = "") -> list[dict[str, Any]]:
    path = run / (f"tokens/decisions{suffix}.parquet" if suffix else "duplicates/decisions.parquet")
    return list(pq.read_table(path).to_pylist()) if path.exists() else []


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("restore")
    texts = write_sources(folder, seed=1)
    run_config(config(folder / "run", texts))
    return folder, texts


def fresh(folder: Path, texts: dict[str, str], name: str, run: Path) -> Corpus:
    """A whole run over the same inputs with the purge list, and with the encoding of ``run``."""
    ranks = str(run / "tokens" / "encoding.tiktoken")
    own = config(folder / name, texts, purge_list=str(folder / "list"))
    own["tokenize"] |= {"ranks": ranks}
    del own["tokenize"]["vocab_size"]
    partition._chain.cache_clear()  # a process keeps its chain, and that its purge list, which is longer now
    run_config(own)
    return corpus(folder / name)


@pytest.mark.slow
def test_the_corpus_after_restoring_purges_is_a_fresh_run_s(
    pristine: tuple[Path, dict[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, texts = pristine
    run = folder / "run"
    draw = random.Random(2)
    before = corpus(run)
    held_out = {row["doc_id"].hex(): row["cluster_id"] for row in decisions(run)}
    assert set(held_out).isdisjoint(before)
    moved = {"restored": 0, "displaced": 0, "purged": 0}
    restored_before: list[str] = []
    for turn in range(3):
        survivors = sorted({row["duplicate_of"].hex() for row in decisions(run) if row["kind"] == "near"} & set(before))
        chosen = draw.sample(survivors, 4) if turn != 1 else restored_before[:2]
        files = shard_files(run)
        arguments = ["--mode", "rewrite", "--duplicates", "restore", "--purge-list", str(folder / "list")]
        arguments += [word for doc_id in chosen for word in ("--doc", doc_id)]
        dry = invoke(capfd, "purge", str(run), *arguments, "--dry-run") if turn == 1 else None
        assert shard_files(run) == files
        report = invoke(capfd, "purge", str(run), *arguments)
        after = corpus(run)
        assert report["documents_restored"] + report["documents_purged"] > 0
        if dry is not None:
            for name in ("documents_restored", "documents_displaced", "documents_purged"):
                assert report[name] == dry[name]
        if turn != 1:  # what the second one leaves wrong, the third one builds upon
            wanted = fresh(folder, texts, f"fresh-{turn}", run)
            assert {doc_id: tokens for doc_id, (_, tokens) in after.items()} == {
                doc_id: tokens for doc_id, (_, tokens) in wanted.items()
            }
        assert set(chosen).isdisjoint(after)
        came, went = set(after) - set(before), set(before) - set(after)
        assert (len(came), len(went)) == (report["documents_restored"], report["documents_purged"])
        displaced = {row["doc_id"].hex() for row in decisions(run, f".v{report['version']['after']}")} & went
        assert len(displaced) == report["documents_displaced"]
        assert {doc_id: after[doc_id] for doc_id in after if doc_id in before} == {
            doc_id: before[doc_id] for doc_id in before if doc_id in after
        }
        untouched = {name for name in files if (run / name).exists()}
        assert all((run / name).read_bytes() == files[name] for name in untouched)
        proof = invoke(capfd, "verify", str(run))
        assert proof["holds"], proof
        check_lineage(run, came, went, displaced)
        moved["restored"] += len(came)
        moved["displaced"] += len(displaced)
        moved["purged"] += len(went)
        restored_before = sorted(came) or restored_before
        before = after
    assert all(moved.values()), moved


def check_lineage(run: Path, came: set[str], went: set[str], displaced: set[str]) -> None:
    lineage = IndexedRun(str(run))
    kept = {row[0] for row in query(str(run), "SELECT doc_id FROM verdicts WHERE stage IS NULL").rows}
    spans = {row[0] for row in query(str(run), "SELECT doc_id FROM spans").rows}
    assert spans <= kept
    assert came <= spans
    assert displaced.isdisjoint(kept)
    for doc_id in sorted(came)[:3]:
        life = trace(lineage, int(lineage.find(doc=doc_id)[0]))
        assert (life["outcome"], life["text"]["same"]) == ("kept", True)
    for doc_id in sorted(displaced)[:3]:
        life = trace(lineage, int(lineage.find(doc=doc_id)[0]))
        assert life["outcome"] == "duplicate: near"
        assert life["text"]["from"] == "documents"
    for doc_id in sorted(went - displaced)[:3]:
        assert trace(lineage, int(lineage.find(doc=doc_id)[0]))["text"]["text"] is None
    assert np.isin(sorted(went), sorted(spans)).sum() == 0


@pytest.mark.slow
def test_what_would_not_be_what_a_fresh_run_keeps_is_refused(
    pristine: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(pristine[0] / "run", run)
    files = shard_files(run)

    def refused(*arguments: str) -> str:
        chosen = sorted(
            {row["duplicate_of"].hex() for row in decisions(run) if row["kind"] == "near"} & set(corpus(run))
        )
        done = CliRunner().invoke(app, ["lineage", "purge", str(run), "--doc", chosen[0], *arguments])
        assert done.exit_code == 2, done.output
        assert shard_files(run) == files
        return " ".join(done.output.split())

    own = ("--purge-list", str(tmp_path / "own"))
    assert "use --mode rewrite" in refused("--mode", "mask", "--duplicates", "restore", *own)
    restore = ("--mode", "rewrite", "--duplicates", "restore")
    assert "keeps out what is similar" in refused(*restore, *own, "--similar")
    first = sorted(corpus(run))[0]
    done = CliRunner().invoke(app, ["lineage", "purge", str(run), "--doc", first, "--mode", "mask", "--similar", *own])
    assert done.exit_code == 0, done.output
    files = shard_files(run)
    assert "keeps out what is similar" in refused(*restore, *own)
    shutil.rmtree(run / "signatures")
    assert "is missing; --duplicates restore needs it" in refused(*restore, "--purge-list", str(tmp_path / "other"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    with s3_server.serve() as port, s3_server.bucket(port) as server:
        for name, value in server.environment(QUERN_STORE_TIMEOUT_S="20", QUERN_STORE_PATIENCE_S="60").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.long
def test_on_a_store_it_is_the_same(
    pristine: tuple[Path, dict[str, str]], server: s3_server.Server, tmp_path: Path
) -> None:
    run = tmp_path / "here" / "run"
    shutil.copytree(pristine[0] / "run", run)
    shutil.rmtree(run / "lineage", ignore_errors=True)
    away = f"{server.url}/run"
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.name != ".lock":
            storage.publish_bytes(f"{away}/{path.relative_to(run)}", path.read_bytes())
    there = set(corpus(run))
    removed = sorted({row["duplicate_of"].hex() for row in decisions(run) if row["kind"] == "near"} & there)
    words = [word for doc_id in removed[:3] for word in ("--doc", doc_id)]
    for place, purge_list in ((str(run), tmp_path / "list"), (away, tmp_path / "other")):
        arguments = ["--mode", "rewrite", "--duplicates", "restore", "--purge-list", str(purge_list), *words]
        done = CliRunner().invoke(app, ["lineage", "purge", place, *arguments])
        assert done.exit_code == 0, done.output
    names = [name for name in server.objects() if name.startswith("run/tokens/")]
    assert sorted(names) == sorted(
        f"run/{path.relative_to(run)}" for path in (run / "tokens").rglob("*") if path.is_file()
    )
    for name in names:
        found, own = server.read(name), (run / name.removeprefix("run/")).read_bytes()
        if name.endswith("VERSION.json"):  # the audit entries tell of different purge lists
            found, own = ({**json.loads(data), "audit": None} for data in (found, own))
        assert found == own, name
    assert set(corpus(run)) - there
    proof = CliRunner().invoke(app, ["lineage", "verify", away])
    assert proof.exit_code == 0, proof.output
