"""Driving the pages phase: what is planned, redone, forgotten; on any store."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import subprocess
import uuid
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern import filesystem, storage
from quern.cli.main import app
from quern.config import dump_yaml
from quern.data_pipeline import partition
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.execution.engine import InProcess
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.source_chains import named_files
from quern.data_pipeline.stages.toxicity import Toxicity
from quern.data_run.config import DataRun
from quern.errors import InputError
from quern.tokenize.exchange.export import export
from quern.tokenize.writing import run as tokens
from support.data_pipeline import in_process
from support.data_pipeline.digests import pages_hash

NOUNS = [
    *("river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper"),
    *("window", "garden", "thunder", "ribbon", "kettle", "meadow", "anchor"),
]
VERBS = ["watches", "follows", "gathers", "forgets", "borrows", "mends", "carries", "measures", "answers", "hides"]


def text(number: int) -> str:
    """A document of its own sentences."""
    sentences = []
    for line in range(8):
        a = NOUNS[(number * 5 + line) % len(NOUNS)]
        b = NOUNS[(number + line * 3 + 1) % len(NOUNS)]
        sentences.append(f"The {a} {VERBS[(number + line) % len(VERBS)]} the {b} of number {number} and line {line}.")
    return " ".join(sentences)


def write_jsonl(path: str, numbers: range) -> None:
    lines = [json.dumps({"id": str(n), "url": f"https://s.example/{n}", "text": text(n)}) for n in numbers]
    storage.publish_bytes(path, ("\n".join(lines) + "\n").encode())


def config(base: str, **changes: Any) -> DataRun:
    return DataRun.model_validate(
        {
            "run_dir": storage.join(base, "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": storage.join(base, "in", "*.jsonl")}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "tokenize": {"encoding": "trained", "vocab_size": 400, "validation": 0.1, "shard_tokens": 700},
            **changes,
        }
    )


def run(settings: DataRun) -> tuple[pages.PagesResult, tokens.TokensReport]:
    with RunProgress(background=False) as progress:
        result = pages.run(settings, pages.plan_sources(settings), InProcess(), progress)
    report = tokens.run(
        settings.run_dir, result.partitions, settings.tokenize, settings.seed, InProcess(),
        storage.join(settings.run_dir, ".work", "tokens"),
    )  # fmt: skip
    return result, report


def digests(settings: DataRun) -> dict[str, str]:
    root = storage.join(settings.run_dir, "tokens")
    names = storage.list_files(root)
    return {name.split("/tokens/", 1)[1]: hashlib.sha256(storage.read_bytes(name)).hexdigest() for name in names}


@pytest.mark.slow
def test_an_object_store_holds_the_same_run(tmp_path: Path) -> None:
    bases = (str(tmp_path), f"memory:///{uuid.uuid4().hex}")
    found = []
    for base in bases:
        for part in range(3):
            write_jsonl(storage.join(base, "in", f"{part}.jsonl"), range(part * 10, part * 10 + 10))
        settings = config(base)
        _, report = run(settings)
        assert report.sources["s"]["train"].documents + report.sources["s"]["val"].documents == 30
        found.append(digests(settings))
    assert found[0] == found[1]
    assert len([name for name in found[0] if name.endswith(".bin")]) > 2


def test_an_input_that_is_gone_is_forgotten_and_a_changed_one_read_again(tmp_path: Path) -> None:
    base = str(tmp_path)
    for part in range(3):
        write_jsonl(f"{base}/in/{part}.jsonl", range(part * 10, part * 10 + 10))
    run(config(base))
    (tmp_path / "in" / "2.jsonl").unlink()
    write_jsonl(f"{base}/in/1.jsonl", range(100, 105))
    untouched = next((tmp_path / "run" / "verdicts" / "s").glob("0.jsonl*")).stat().st_mtime_ns
    result, report = run(config(base))
    assert len(result.partitions) == 2
    assert report.sources["s"]["train"].documents + report.sources["s"]["val"].documents == 15
    left = [pq.read_table(path) for path in (tmp_path / "run" / "verdicts").rglob("*.parquet")]
    assert sum(table.num_rows for table in left) == 15
    assert next((tmp_path / "run" / "verdicts" / "s").glob("0.jsonl*")).stat().st_mtime_ns == untouched


@pytest.mark.parametrize("lost", ["duplicates/decisions.parquet", "documents/s/*.parquet"])
def test_what_a_commit_vouches_for_is_made_again_when_it_is_gone(tmp_path: Path, lost: str) -> None:
    write_jsonl(str(tmp_path / "in" / "0.jsonl"), range(12))
    settings = config(str(tmp_path))
    run(settings)
    before = digests(settings)
    (path,) = (tmp_path / "run").glob(lost)
    path.unlink()
    run(settings)
    assert path.exists()
    assert digests(settings) == before


def test_a_wrong_setting_found_late_fails_the_run_and_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(str(tmp_path / "in" / "0.jsonl"), range(3))

    def refuse(self: object, page: object) -> None:
        raise InputError("model.bin: no label x")

    monkeypatch.setattr(Toxicity, "__call__", refuse)
    with pytest.raises(InputError, match="no label x"):
        run(config(str(tmp_path)))
    assert not list((tmp_path / "run").rglob("verdicts/**/*.parquet"))


def test_the_config_hash_covers_the_contents_of_named_files(tmp_path: Path) -> None:
    base = str(tmp_path)
    write_jsonl(f"{base}/in/0.jsonl", range(3))
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.txt").write_text("bad.example\n")
    by_glob = config(base, urls={"domains": [f"{base}/lists/*.txt"]})
    before = pages_hash(by_glob)
    assert pages_hash(by_glob) == before
    (tmp_path / "lists" / "a.txt").write_text("worse.example\n")
    assert pages_hash(by_glob) != before
    assert named_files({"x": [f"{base}/lists/*.txt"], "y": {"z": base + "/lists"}, "w": "the"}) == {
        f"{base}/lists/a.txt"
    }


def test_workers_and_places_are_not_in_the_config_hash(tmp_path: Path) -> None:
    base = str(tmp_path)
    write_jsonl(f"{base}/in/0.jsonl", range(3))
    plain = pages_hash(config(base))
    assert pages_hash(config(base, workers=7, run_dir="/elsewhere", isolation={"page_timeout_s": 5})) == plain
    assert pages_hash(config(base, seed=4)) == plain, "pages draw nothing at random"
    assert pages_hash(config(base, pii={"action": "measure"})) != plain


def test_a_complete_run_refuses_other_inputs(tmp_path: Path) -> None:
    base = str(tmp_path)
    write_jsonl(f"{base}/in/0.jsonl", range(3))
    partitions = pages.plan_sources(config(base))
    record = {"inputs": pages.inputs_digest(partitions)}
    pages.check_unchanged(record, partitions, base)
    write_jsonl(f"{base}/in/1.jsonl", range(3, 6))
    with pytest.raises(InputError, match="input files have changed since; give another run_dir"):
        pages.check_unchanged(record, pages.plan_sources(config(base)), base)


def test_a_complete_run_says_what_differs_in_its_inputs_and_how_to_go_on(tmp_path: Path) -> None:
    base = str(tmp_path)
    for name in ("a", "b", "c"):
        write_jsonl(f"{base}/in/{name}.jsonl", range(3))
    partitions = pages.plan_sources(config(base))
    for part in partitions:
        inputs = {file.relative_path: file.fingerprint for file in part.files}
        publish_commit(base, "pages", part.source, part.name, inputs=inputs, config="", outputs={}, counts={})
    record = {"inputs": pages.inputs_digest(partitions)}
    pages.check_unchanged(record, partitions, base)

    def refused(told: str) -> None:
        with pytest.raises(InputError, match=rf"have changed since: {told}; give another run_dir"):
            pages.check_unchanged(record, pages.plan_sources(config(base)), base)

    os.utime(f"{base}/in/a.jsonl", ns=(1, 1))
    with pytest.raises(InputError) as raised:
        pages.check_unchanged(record, pages.plan_sources(config(base)), base)
    told = str(raised.value)
    assert "other modification times and the same sizes: a.jsonl of source s; quern data report" in told
    assert told.endswith(", else give another run_dir")
    subprocess.run(shlex.split(told.partition("(")[2].partition(")")[0]), check=True)
    pages.check_unchanged(record, pages.plan_sources(config(base)), base)
    write_jsonl(f"{base}/in/d.jsonl", range(3))
    refused("d.jsonl of source s is new")
    Path(f"{base}/in/c.jsonl").unlink()
    refused("c.jsonl of source s is missing, and 1 more")
    write_jsonl(f"{base}/in/b.jsonl", range(4))
    refused("b.jsonl of source s is changed, and 2 more")


def test_a_run_without_a_single_kept_page_ends_well(tmp_path: Path) -> None:
    storage.publish_bytes(str(tmp_path / "in" / "0.jsonl"), b'{"text": "", "date": "soon", "url": 5}\nnot json\n')
    settings = config(str(tmp_path), tokenize={"encoding": "trained", "vocab_size": 300})
    result, report = run(settings)
    assert result.duplicates["removed"] == {} or not any(map(any, result.duplicates["removed"].values()))
    assert report.sources["s"]["train"].documents == 0
    (entry,) = map(storage.read_json, storage.list_files(f"{settings.run_dir}/commits/pages"))
    assert (entry["counts"]["unreadable_dates"], entry["counts"]["unreadable_urls"]) == (1, 1)
    assert storage.exists(f"{settings.run_dir}/tokens/VERSION.json")
    with pytest.raises(InputError, match=r"/run: has no documents to export in s$"):
        export(settings.run_dir, "bin", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


class KilledError(BaseException):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, settings: DataRun) -> None:
    """Run until ``name`` of ``module`` is about to be called for the first time."""

    def die(*args: Any, **options: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with pytest.raises(KilledError):
            run(settings)


def test_an_input_that_was_changed_and_changed_back_is_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the other input stand already when the kill comes; the first commit must not vouch for them."""
    base, file = str(tmp_path), tmp_path / "in" / "0.jsonl"
    write_jsonl(str(file), range(10))
    first = file.read_bytes(), file.stat().st_mtime_ns
    run(config(base))
    expected = digests(config(base))
    write_jsonl(str(file), range(50, 60))
    killed_at(monkeypatch, partition, "publish_commit", config(base))
    file.write_bytes(first[0])
    os.utime(file, ns=(first[1], first[1]))
    run(config(base))
    (table,) = [pq.read_table(path) for path in (tmp_path / "run" / "verdicts").rglob("*.parquet")]
    assert table["record_id"].to_pylist() == [str(n) for n in range(10)]
    assert digests(config(base)) == expected


def test_what_was_written_but_not_committed_of_a_gone_input_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tmp_path)
    write_jsonl(f"{base}/in/0.jsonl", range(10))
    killed_at(monkeypatch, partition, "publish_commit", config(base))
    (tmp_path / "in" / "0.jsonl").unlink()
    write_jsonl(f"{base}/in/1.jsonl", range(20, 30))
    run(config(base))
    for folder in ("verdicts", "documents", "signatures", "commits/pages", "commits/tokens"):
        assert len(storage.list_files(f"{base}/run/{folder}")) == 1, folder


def test_duplicates_of_other_pages_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, file = str(tmp_path), tmp_path / "in" / "0.jsonl"
    write_jsonl(str(file), range(4))
    file.write_bytes(file.read_bytes() * 2)
    first = file.read_bytes(), file.stat().st_mtime_ns
    run(config(base))
    expected = pq.read_table(f"{base}/run/duplicates/decisions.parquet")
    assert expected.num_rows == 4
    write_jsonl(str(file), range(50, 60))
    publish = pages.publish_commit
    killed_at(monkeypatch, pages, "publish_commit", config(base))
    assert publish is pages.publish_commit
    file.write_bytes(first[0])
    os.utime(file, ns=(first[1], first[1]))
    run(config(base))
    assert pq.read_table(f"{base}/run/duplicates/decisions.parquet").equals(expected)


@pytest.mark.slow
def test_a_run_without_room_says_so_leaves_nothing_half_written_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each phase; a worker that was killed at its work has left a file, too."""
    for part in range(2):
        write_jsonl(str(tmp_path / "in" / f"{part}.jsonl"), range(part * 10, part * 10 + 10))
    settings = config(str(tmp_path))
    (tmp_path / "c.yaml").write_text(dump_yaml(settings))
    run_dir, write_out = Path(settings.run_dir), filesystem._write_out

    def command(*arguments: str) -> Any:
        with in_process.engine():
            return CliRunner().invoke(app, ["data", *arguments])

    for place in ("documents/s", "duplicates", "tokens/s"):

        def full(file: IO[bytes], place: str = place) -> None:
            if os.path.dirname(file.name) == str(run_dir / place):
                Path(f"{run_dir}/{place}/.killed.{'0' * 32}.tmp").touch()
                raise OSError(errno.ENOSPC, "No space left on device")
            write_out(file)

        with monkeypatch.context() as patch:
            patch.setattr(filesystem, "_write_out", full)
            ended = command("run", str(tmp_path / "c.yaml"))
        assert ended.exit_code == 1, ended.output
        *_, last = ended.stderr.splitlines()
        assert last.startswith(f"error: {run_dir}/{place}/"), ended.stderr
        assert ": No space left on device (" in last
        assert "Traceback" not in ended.stderr
        assert not list(run_dir.rglob("*.tmp"))
        assert last.removeprefix("error: ") in command("status", str(run_dir)).output
    assert command("run", str(tmp_path / "c.yaml")).exit_code == 0
    expected = config(str(tmp_path), run_dir=str(tmp_path / "undisturbed"))
    run(expected)
    assert digests(settings) == digests(expected)
