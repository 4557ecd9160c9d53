"""The same bytes after any interruption, damage or change of mind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quern.tokenize.encoding import TokenizeConfig
from quern.tokenize.shard_format import ShardWriter
from quern.tokenize.writing import merge
from quern.tokenize.writing import run as run_module
from quern.tokenize.writing import sorted_runs as runs

pytestmark = pytest.mark.slow


def test_a_run_killed_between_any_two_tasks_ends_with_the_same_bytes(
    tokenize: Callable, mortal: type, small: Callable, config: TokenizeConfig, token_files: Callable, tmp_path: Path
) -> None:
    tokenize(tmp_path / "whole", small(tmp_path / "whole", 2), config)
    expected = token_files(tmp_path / "whole")
    run_dir = tmp_path / "killed"
    names = small(run_dir, 2)
    for tasks in range(100):
        try:
            tokenize(run_dir, names, config, mortal(tasks))
            break
        except KeyboardInterrupt:
            assert "VERSION.json" not in token_files(run_dir)
            if tasks % 3 == 0:
                shutil.rmtree(run_dir / ".work", ignore_errors=True)
    else:
        pytest.fail("never ended")
    assert tasks > 10
    assert token_files(run_dir) == expected


@pytest.mark.parametrize(
    ("target", "name", "calls"),
    [
        (ShardWriter, "add", 2),
        (ShardWriter, "finish", 3),
        (run_module, "_publish", 1),
        (run_module, "publish_commit", 1),
    ],
)
def test_a_process_killed_in_the_middle_of_a_write_is_made_good(
    tokenize: Callable,
    small: Callable,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
    target: Any,
    name: str,
    calls: int,
) -> None:
    tokenize(tmp_path / "whole", small(tmp_path / "whole", 2), config)
    run_dir = tmp_path / "killed"
    names = small(run_dir, 2)
    child = os.fork()
    if child == 0:  # no pytest machinery in the child: it dies by its own hand, or reports that it did not
        try:
            original, left = getattr(target, name), [calls]

            def deadly(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(target, name, deadly)
            tokenize(run_dir, names, config)
        finally:
            os._exit(3)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    tokenize(run_dir, names, config)
    assert token_files(run_dir) == token_files(tmp_path / "whole")


def test_finished_partitions_and_shards_are_not_done_again(
    tokenize: Callable,
    mortal: type,
    small: Callable,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = small(tmp_path, 3)
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path, names, config, mortal(1 + 4 + 2))  # one choice, six partitions: two are left
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "commits" / "tokens").rglob("*.json")}
    assert len(done) == 6
    read: list[str] = []
    original = runs.chosen_documents
    monkeypatch.setattr(runs, "chosen_documents", lambda *a: read.append(a[2]) or original(*a))
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path, names, config, mortal(1 + 6 + 1 + 3))
    assert read == []
    written: list[int] = []
    original_writer = merge.ShardWriter
    monkeypatch.setattr(merge, "ShardWriter", lambda *a: written.append(a[1]) or original_writer(*a))
    tokenize(tmp_path, names, config)
    total = sum(name.endswith(".bin") for name in token_files(tmp_path))
    assert len(written) == total - 3
    assert read == []


@pytest.mark.parametrize("damage", ["delete", "flip", "truncate"])
@pytest.mark.parametrize("name", ["web/shard_00001.bin", "web.val/shard_00000.spans.parquet", "books/manifest.json"])
def test_a_damaged_file_is_made_again_and_the_others_stay(
    tokenize: Callable,
    small: Callable,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
    damage: str,
    name: str,
) -> None:
    names = small(tmp_path, 2)
    tokenize(tmp_path, names, config)
    expected = token_files(tmp_path)
    inode = (tmp_path / "tokens" / "web" / "shard_00000.bin").stat().st_ino
    path = tmp_path / "tokens" / name
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data[:-3] if damage == "truncate" else bytes([data[0] ^ 1]) + data[1:])
    tokenize(tmp_path, names, config)
    assert token_files(tmp_path) == expected
    assert (tmp_path / "tokens" / "web" / "shard_00000.bin").stat().st_ino == inode


def test_a_finished_run_is_left_alone(
    tokenize: Callable, small: Callable, config: TokenizeConfig, tmp_path: Path
) -> None:
    names = small(tmp_path, 2)
    report = tokenize(tmp_path, names, config)
    stamps = {p: p.stat().st_ino for p in tmp_path.rglob("*") if p.is_file()}
    assert tokenize(tmp_path, names, config) == report
    assert {p: p.stat().st_ino for p in tmp_path.rglob("*") if p.is_file()} == stamps


@pytest.mark.parametrize("change", [{"shard_tokens": 2_000}, {"validation": 0.0}, {"shard_tokens": 200}])
def test_another_config_leaves_nothing_of_the_first(
    tokenize: Callable, small: Callable, config: TokenizeConfig, token_files: Callable, tmp_path: Path, change: dict
) -> None:
    other = config.model_copy(update=change)
    names = small(tmp_path / "a", 2)
    tokenize(tmp_path / "a", names, config)
    tokenize(tmp_path / "a", names, other)
    tokenize(tmp_path / "b", small(tmp_path / "b", 2), other)
    assert token_files(tmp_path / "a") == token_files(tmp_path / "b")


def test_the_old_version_is_gone_before_other_tokens_are_written(
    tokenize: Callable, mortal: type, small: Callable, config: TokenizeConfig, token_files: Callable, tmp_path: Path
) -> None:
    names = small(tmp_path, 1)
    tokenize(tmp_path, names, config)
    for tasks in (0, 8):
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path, names, config.model_copy(update={"shard_tokens": 200}), mortal(tasks))
        assert "VERSION.json" not in token_files(tmp_path)


def test_other_duplicate_decisions_are_seen(
    tokenize: Callable, make_run: Callable, make_doc: type, config: TokenizeConfig, tmp_path: Path
) -> None:
    docs = [make_doc(bytes([n]) * 16, "the") for n in range(50)]
    for removed in ([], [docs[3].doc_id], []):
        report = tokenize(tmp_path, make_run(tmp_path, {("web", "p"): docs}, removed), config)
        counts = report.sources["web"]
        assert counts["train"].documents + counts["val"].documents == 50 - len(removed)


def test_decisions_that_changed_after_a_crash_reach_the_tokens(
    tokenize: Callable,
    mortal: type,
    make_run: Callable,
    make_doc: type,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
) -> None:
    partitions = {("web", f"p{i}"): [make_doc(bytes([n]) * 16, "the") for n in range(i, 60, 2)] for i in range(2)}
    names = make_run(tmp_path / "a", partitions, [b"\1" * 16])
    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "a", names, config, mortal(4))  # one choice, two partitions, one stretch of the order
    removed = [b"\2" * 16, b"\5" * 16]
    tokenize(tmp_path / "a", make_run(tmp_path / "a", partitions, removed), config)
    tokenize(tmp_path / "b", make_run(tmp_path / "b", partitions, removed), config)
    assert token_files(tmp_path / "a") == token_files(tmp_path / "b")
