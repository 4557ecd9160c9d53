"""Runs that cannot be written to."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError, QuernError
from quern.lineage.index import build
from quern.lineage.store import IndexedRun
from support.lineage import runs
from support.programs import python


def test_a_damaged_index_that_cannot_be_removed_is_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only file system "run the same command again" would never end."""
    run = runs.write_run(tmp_path / "run", seed=1, documents=20, files=1)
    IndexedRun(str(run))
    lineage = IndexedRun(str(run))
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


def test_a_run_without_an_index_that_cannot_be_written_to_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.write_run(tmp_path / "run", seed=1, documents=20, files=1)
    expected = IndexedRun(str(run)).documents(range(20)).doc_ids
    shutil.rmtree(run / "lineage")
    make = os.makedirs

    def refuse(path: str, *arguments: Any, **more: Any) -> None:
        if str(path).startswith(str(run)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        make(path, *arguments, **more)

    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(build, "_elsewhere", {})
    capsys.readouterr()
    lineage = IndexedRun(str(run))
    assert lineage.documents(range(20)).doc_ids == expected
    told = capsys.readouterr().err
    assert f"{run}/lineage: cannot be written (Read-only file system), so the index is not kept" in told
    again = IndexedRun(str(run))
    assert (again.built.new, again.built.folder) == (False, lineage.built.folder)
    result = CliRunner().invoke(app, ["lineage", "index", str(run)])
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: {run}: cannot be written to; run this command where it can be\n",
    )
    assert not (run / "lineage").exists()


def test_the_index_of_a_process_goes_with_it(tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run", seed=1, documents=20, files=1)
    code = (
        "import os, errno; from quern.lineage.index import build; first = build._build\n"
        "def refuse(state, folder, documents):\n"
        "    if folder.startswith(state.run): raise OSError(errno.EACCES, 'no', folder)\n"
        "    return first(state, folder, documents)\n"
        "build._build = refuse\n"
        f"state, built = build.open_index({str(run)!r}); assert os.listdir(built.folder); print(built.folder)"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert not os.path.exists(done.stdout.strip())
