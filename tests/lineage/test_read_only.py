"""Runs that cannot be written to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from quern.errors import InputError, QuernError
from quern.lineage.store import Lineage
from support.lineage import runs


def test_a_damaged_index_that_cannot_be_removed_is_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only file system "run the same command again" would never end."""
    run = runs.write_run(tmp_path / "run", seed=1, documents=20, files=1)
    Lineage(str(run))
    lineage = Lineage(str(run))
    for path in (run / "lineage").glob("segment_*/by_doc.high"):
        data = path.read_bytes()
        path.write_bytes(bytes(255 - byte for byte in data))

    def refuse(path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(
        QuernError, match=r"cannot be built anew: .*index\.json cannot be removed \(Read-only"
    ) as caught:
        lineage.find(doc=b"x" * 16)
    assert "again" not in str(caught.value)
    assert not isinstance(caught.value, InputError)
    monkeypatch.undo()
    with pytest.raises(QuernError, match="run the same command again"):
        lineage.find(doc=b"x" * 16)
