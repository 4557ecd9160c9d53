"""Killed before any change of a file: never a version whose files are not its own, and in the end the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.tokenize.encoding import TokenizeConfig


class Dead(BaseException):
    """A process that was killed changes nothing any more: no clean-up either."""


class Fate:
    """Lets a number of changes of files happen, and no other after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, changes: int) -> None:
        self.left = changes
        self.replace, self.unlink, self.remove_tree = os.replace, os.unlink, storage.remove_tree
        monkeypatch.setattr(os, "replace", self._one(self.replace))
        monkeypatch.setattr(os, "unlink", self._one(self.unlink))
        monkeypatch.setattr(storage, "remove_tree", self._remove_tree)

    def _one(self, change: Callable[..., None]) -> Callable[..., None]:
        def changed(*args: Any, **kwargs: Any) -> None:
            if self.left == 0:
                raise Dead
            self.left -= 1
            change(*args, **kwargs)

        return changed

    def _remove_tree(self, path: str) -> None:
        """A tree goes file by file; the last change may leave half of it."""
        if not os.path.exists(path):
            return
        if self.left == 0:
            raise Dead
        self.left -= 1
        if self.left == 0 and os.path.isdir(path):
            files = sorted(p for p in Path(path).rglob("*") if p.is_file())
            for file in files[::2]:
                self.unlink(file)
            raise Dead
        self.remove_tree(path)


def check_version(run_dir: Path) -> None:
    """If there is a version, every file it names is there with its bytes."""
    root = run_dir / "tokens"
    if not (root / "VERSION.json").exists():
        return
    version = json.loads((root / "VERSION.json").read_text())
    named = {version["encoding"]["ranks"]: version["encoding"]["sha256"]}
    for entry in version["sources"].values():
        named[entry["manifest"]] = entry["sha256"]
        for shard in entry["shards"]:
            named |= {shard["bin"]: shard["sha256"], shard["spans"]: shard["spans_sha256"]}
    for name, sha256 in named.items():
        assert hashlib.sha256((root / name).read_bytes()).hexdigest() == sha256, name


#: Of a kill before every sixth change each case has others; all of them in the long ones.
SOME = ((None, "trained", 0, 6), ("other shards", "given", 1, 6), ("other documents", "trained", 2, 6))
ALL = ((None, "given"), ("other shards", "trained"), ("other documents", "given"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "encoding", "first", "every"),
    [*SOME, *(pytest.param(*case, 0, 1, marks=pytest.mark.long) for case in ALL)],
)
def test_a_kill_before_any_change_of_a_file_leaves_no_false_version_and_the_same_bytes(
    tokenize: Callable, make_run: Callable, make_doc: type, config: TokenizeConfig, token_files: Callable,
    tmp_path: Path, encoding: str, before: str | None, first: int, every: int,
) -> None:  # fmt: skip
    """``before``: what a complete corpus that stands there was made from."""
    if encoding == "trained":
        config = TokenizeConfig(encoding="trained", vocab_size=270, shard_tokens=90, validation=0.3)
    else:
        config = config.model_copy(update={"shard_tokens": 90, "validation": 0.3})
    docs = [make_doc(bytes([17 * n]) * 16, "the inner an other one " * (n % 4)) for n in range(12)]
    now = {("web", "p"): docs[:7], ("web", "q"): docs[7:]}
    removed = [docs[2].doc_id]
    tokenize(tmp_path / "whole", make_run(tmp_path / "whole", now, removed), config)
    expected = token_files(tmp_path / "whole")
    assert sum(name.endswith(".bin") for name in expected) >= 3

    stands = tmp_path / "before"
    if before == "other shards":
        tokenize(stands, make_run(stands, now, removed), config.model_copy(update={"shard_tokens": 30}))
    elif before == "other documents":
        tokenize(stands, make_run(stands, {**now, ("books", "b"): [make_doc(b"b" * 16, "an inn")]}), config)

    for changes in range(first, 200, every):
        run_dir = tmp_path / str(changes)
        if before is not None:
            shutil.copytree(stands, run_dir)
        names = make_run(run_dir, now, removed)
        with pytest.MonkeyPatch.context() as patch:
            fate = Fate(patch, changes)
            try:
                tokenize(run_dir, names, config)
                ended = True
            except Dead:
                ended = False
        check_version(run_dir)
        tokenize(run_dir, names, config)
        assert {name: data for name, data in token_files(run_dir).items() if not name.endswith(".tmp")} == expected
        assert not (run_dir / ".work" / "tokens").exists()
        if ended and fate.left > 0:
            break
    else:
        pytest.fail("never ended")
    assert changes > 20
