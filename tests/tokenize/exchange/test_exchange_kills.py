"""Killed before any change of a file: under the final name stands all or nothing; the next run clears the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.tokenize.exchange.export import export
from quern.tokenize.exchange.ingest import ingest
from quern.tokenize.exchange.staging import staged
from support.exchange.import_case import draw, options, write
from support.lineage import runs


class Dead(BaseException):
    """A process that was killed changes nothing any more: no clean-up either."""


class _Fate:
    """Lets ``left`` changes of files happen, and no other after them; None: all."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.seen = 0
        sys.addaudithook(self._look)  # cannot be taken off again

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if self.left is None or not _changes(event, args):
            return
        if self.seen >= self.left:
            raise Dead
        self.seen += 1

    @contextmanager
    def after(self, changes: int) -> Any:
        self.left, self.seen = changes, 0
        try:
            yield
        finally:
            self.left = None


def _changes(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        _, mode, flags = args
        return bool(set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


@pytest.fixture(scope="module")
def fate() -> _Fate:
    return _Fate()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kill_everywhere(fate: _Fate, folder: Path, work: Callable[[str], object], least: int, every: int = 1) -> None:
    """Before every change, or before every third, say."""
    folder.mkdir()
    work(str(folder / "whole"))
    whole = tree(folder / "whole")
    for changes in range(0, 1000, every):
        beside = folder / str(changes)
        beside.mkdir()
        out = beside / "out"
        try:
            with fate.after(changes):
                work(str(out))
        except Dead:
            if out.exists():  # the change that was not made came after the last one that counts
                assert tree(out) == whole
            else:
                work(str(out))
            assert tree(out) == whole
            assert [path.name for path in beside.iterdir()] == ["out"]
            continue
        assert changes >= least
        assert tree(out) == whole
        return
    raise AssertionError("it never ends")


@pytest.mark.slow
@pytest.mark.parametrize(("format", "every"), [("megatron", 3), pytest.param("datatrove", 1, marks=pytest.mark.long)])
def test_a_killed_export_leaves_nothing_that_is_not_whole(fate: _Fate, tmp_path: Path, format: Any, every: int) -> None:
    run = runs.write_run(tmp_path / "run", documents=30, sources=("web",), shard_tokens=1_000)
    assert 1 < len(list((run / "tokens" / "web").glob("*.bin"))) < 6
    kill_everywhere(fate, tmp_path / "work", lambda out: export(str(run), format, out), 12, every)


@pytest.mark.slow
def test_a_killed_import_leaves_nothing_that_is_not_whole(fate: _Fate, tmp_path: Path, ranks: str) -> None:
    paths = [str(write("megatron", tmp_path / "in", name, draw(seed))) for seed, name in enumerate("ab")]
    given = options(ranks, "megatron", shard_tokens=700)
    kill_everywhere(fate, tmp_path / "work", lambda out: ingest(paths, out, given), least=20)


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    """Neither takes the other for a dead one; the first to end has the name."""
    out = str(tmp_path / "out")

    def both() -> None:
        with staged(out) as one:
            Path(one, "a").write_text("one")
            with staged(out) as two:
                assert Path(one, "a").exists()
                Path(two, "a").write_text("two")

    with pytest.raises(InputError, match="is there already"):
        both()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert Path(out, "a").read_text() == "two"


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    """Only what was staged for the very name is cleared."""
    names = [f".outer.{'0' * 32}.tmp", ".out.tmp", f".out.x.{'0' * 32}.tmp", ".out", f"out.{'0' * 32}.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / f".out.{'0' * 32}.tmp").mkdir()
    with staged(str(tmp_path / "out")):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "out"])
