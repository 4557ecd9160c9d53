"""Killed at any change of a file, in every phase of a purge: afterwards all of it is done, or nothing."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.lineage.purge.apply.transaction import recover
from support.processes import environment
from support.programs import python
from support.purge import corpus_scan as C
from support.purge import small_run
from support.remote import s3_server

DOMAIN = "leak.example"
#: Of an audit entry: what tells one purge from another that is the same.
OWN = ("id", "time", "purge_list", "taint", "train_runs", "notes", "files")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run; beside it a training run whose page shows one of its documents."""
    return make(tmp_path_factory.mktemp("source"), documents=96, files=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As :func:`source`, of fewer files: to be copied to a store often."""
    return make(tmp_path_factory.mktemp("tiny"), documents=32, files=1)


def make(base: Path, *, documents: int, files: int) -> Path:
    small_run.write_input(base / "in", documents, files)
    run = base / "case" / "run"
    small_run.make(small_run.settings(str(run), base / "in"))
    page = base / "case" / "train" / "forensics" / "step_00000001.html"
    page.parent.mkdir(parents=True)
    page.write_text(f"<p>{selected(run)[0].hex()}</p>")
    return run


def selected(run: Path) -> list[bytes]:
    """The documents of the domain, by its verdicts."""
    found = C.verdicts(run, ["doc_id", "canonical_url"])
    return [row["doc_id"] for row in found if f"//{DOMAIN}/" in (row["canonical_url"] or "")]


def kills(source: Path, out: str, case: Path, **more: Any) -> dict[str, Any]:
    case.write_text(json.dumps({"source": str(source), "out": out, "domain": DOMAIN, "duplicates": "purge", **more}))
    command = [python(), "-m", "support.purge.kill_case", str(case)]
    done = subprocess.run(command, capture_output=True, env=environment(), timeout=1500)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return dict(json.loads(done.stdout))


def state(run: Path) -> dict[str, Any]:
    """Everything in and beside a run, but for what two purges of the same differ in."""
    found: dict[str, Any] = {f"../{name}": sha for name, sha in C.tree(run.parent).items()}
    for path in (run / "audit").glob("?????.json"):
        record = json.loads(path.read_text())
        found[f"../run/audit/{path.name}"] = {key: value for key, value in record.items() if key not in OWN}
        files = f"../run/audit/{path.stem}.files.parquet"
        found[files] = [row for row in C.rows(run.parent / files[3:]) if not row["path"].endswith(".html")]
    version = json.loads((run / "tokens/VERSION.json").read_text())
    if told := version.pop("audit", None):  # of an entry that has its own id and time
        last = (run / "audit" / f"{told['entry']:05d}.json").read_bytes()
        assert hashlib.sha256(last).hexdigest() == told["sha256"]
    found["../run/tokens/VERSION.json"] = version
    found.pop("../run/consumers.jsonl", None)
    found["../run/report.html"] = re.sub(r"/[\w./-]+/run\b", "RUN", (run / "report.html").read_text())
    return found


def check(run: Path, before: dict[str, Any], after: dict[str, Any], message: str | None) -> bool:
    """All of it is done, or nothing; whether it is done."""
    now = state(run)
    done = json.loads((run / "tokens/VERSION.json").read_text())["version"] == 2
    assert now == (after if done else before)
    if message is not None:
        assert ("it is finished: corpus version 2" if done else "it is undone: corpus version 1") in message
    return done


def gone(run: Path, doc_ids: list[bytes], eot: int) -> None:
    """Nothing of them is in the tokens, the texts or the signatures of the run."""
    for shards in C.scan(run).values():
        for piece in (piece for shard in shards for piece in shard if piece.doc_id in doc_ids):
            assert piece.purged
            assert set(piece.tokens) == {eot}
    for path in (run / "documents").rglob("*.parquet"):
        assert all(row["text"] is None for row in C.rows(path) if row["doc_id"] in doc_ids)
    for path in (run / "signatures").rglob("*.parquet"):
        assert all(row["doc_id"] not in doc_ids for row in C.rows(path))


def sweep(source: Path, tmp_path: Path, **case: Any) -> None:
    found = kills(source, str(tmp_path / "out"), tmp_path / "case.json", **case)
    whole = tmp_path / "out" / "whole" / "run"
    before, after = state(source), state(whole)
    ids = selected(source)
    eot = json.loads((whole / "tokens/VERSION.json").read_text())["encoding"]["eot_id"]
    gone(whole, ids, eot)
    outcomes = set()
    for name, change, died in found["killed"]:
        run = tmp_path / "out" / name / "run"
        assert died or case["where"] == "at any time", (name, change)
        C.scan(run)  # what VERSION.json lists is whole at every moment
        done = check(run, before, after, recover(str(run)))
        if done:
            gone(run, ids, eot)
        outcomes.add(done)
    assert outcomes == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mask"])  # rewrite: below, and everywhere in the long one
def test_killed_in_every_phase(tiny: Path, tmp_path: Path, mode: str) -> None:
    sweep(tiny, tmp_path, mode=mode, where="phases")


@pytest.mark.long
def test_killed_in_some_phases_of_a_purge_that_restores(source: Path, tmp_path: Path) -> None:
    sweep(source, tmp_path, mode="rewrite", duplicates="restore", where="some")
    changes = C.rows(tmp_path / "out/whole/run/tokens/changes.v2.parquet")
    assert {row["action"] for row in changes} == {"purged", "restored"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "duplicates"),
    [("mask", "purge"), pytest.param("rewrite", "purge", marks=pytest.mark.exhaustive), ("rewrite", "restore")],
)
def test_killed_at_every_change(tiny: Path, tmp_path: Path, mode: str, duplicates: str) -> None:
    sweep(tiny, tmp_path, mode=mode, duplicates=duplicates, where="everywhere")


@pytest.mark.long
@pytest.mark.parametrize("mode", [pytest.param("mask", marks=pytest.mark.exhaustive), "rewrite"])
def test_killed_at_any_time(source: Path, tmp_path: Path, mode: str) -> None:
    sweep(source, tmp_path, mode=mode, where="at any time", kills=25, workers=3)


# ---- on a store


@pytest.fixture
def server(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    with s3_server.bucket(port) as server:
        for name, value in server.environment(QUERN_STORE_TIMEOUT_S="20", QUERN_STORE_PATIENCE_S="60").items():
            monkeypatch.setenv(name, value)
        yield server


def fetch(server: s3_server.Server, name: str, folder: Path) -> Path:
    """A copy of what stands below ``name`` of the store, to be looked at; the run in it."""
    shutil.rmtree(folder, ignore_errors=True)
    for key in server.objects():
        if key.startswith(f"{name}/"):
            path = folder / key.removeprefix(f"{name}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(server.read(key))
    return folder / "run"


def sweep_store(source: Path, server: s3_server.Server, tmp_path: Path, **case: Any) -> None:
    found = kills(source, server.url, tmp_path / "case.json", **case)
    shutil.copytree(source.parent, tmp_path / "before" / "case")
    run = fetch(server, "whole", tmp_path / "whole" / "case")
    for folder in ("before", "whole"):  # no trainer reads from a store
        shutil.rmtree(tmp_path / folder / "case" / "train", ignore_errors=True)
    before, after = state(tmp_path / "before/case/run"), state(run)
    ids = selected(source)
    gone(run, ids, json.loads((run / "tokens/VERSION.json").read_text())["encoding"]["eot_id"])
    outcomes = set()
    for name, change, died in found["killed"]:
        assert died, (name, change)
        run = fetch(server, name, tmp_path / "now" / "case")
        C.scan(run)
        message = recover(f"{server.url}/{name}/run")
        run = fetch(server, name, tmp_path / "now" / "case")
        if message is None:  # nothing had begun, or all was done: the lease of the dead is the next one's
            (run / ".lease.json").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "now" / "case" / "train", ignore_errors=True)
        outcomes.add(check(run, before, after, message))
    assert outcomes == {True, False}
    assert server.uploads() == []


@pytest.mark.long
def test_killed_on_a_store_in_some_phases(tiny: Path, server: s3_server.Server, tmp_path: Path) -> None:
    sweep_store(tiny, server, tmp_path, mode="rewrite", where="some")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_killed_on_a_store_in_every_phase(tiny: Path, server: s3_server.Server, tmp_path: Path, mode: str) -> None:
    sweep_store(tiny, server, tmp_path, mode=mode, where="phases")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_killed_on_a_store_at_every_change(tiny: Path, server: s3_server.Server, tmp_path: Path, mode: str) -> None:
    sweep_store(tiny, server, tmp_path, mode=mode, where="everywhere")
