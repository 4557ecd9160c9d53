"""Runs that somebody else has made, whose files tell a purge that is taken up to touch what is not the run's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.errors import InputError
from quern.lineage.purge.apply import finish
from quern.lineage.purge.apply.transaction import purge, recover
from quern.lineage.purge.record import journal
from support.lineage import runs
from support.named_cases import each
from support.purge import corpus_scan as C

from .test_transaction import request, some

pytestmark = pytest.mark.slow

SEED = 21


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("forged") / "run", seed=SEED, documents=80, shard_tokens=3000)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def other(whole: Path, tmp_path: Path) -> Path:
    """Another's run, beside it."""
    return Path(shutil.copytree(whole, tmp_path / "other"))


@pytest.fixture
def cut_off(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A purge of it that ended behind its commit."""
    with monkeypatch.context() as patch:
        patch.setattr(finish, "remember", lambda *given: 1 / 0)
        with pytest.raises(Exception, match="is not at its end"):
            purge(request(run, some(run)))
    return run


def forge(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_stream_is_a_folder_of_the_corpus(run: Path, other: Path) -> None:
    record = json.loads((run / "tokens/VERSION.json").read_text())
    foreign = {**record["sources"]["web"], "shards": []}
    forge(run / "tokens/VERSION.json", sources={**record["sources"], "../../other/tokens/web": foreign})
    (run / ".purge").mkdir()
    files = C.tree(other)
    with pytest.raises(InputError, match=r"VERSION.json: sources: expected the name of a file of the corpus"):
        recover(str(run))
    assert C.tree(other) == files


def test_an_intent_is_one(cut_off: Path) -> None:
    path = cut_off / ".purge/intent.json"
    intact = path.read_text()

    def check(changes: dict[str, Any], field: str) -> None:
        path.write_text(intact)
        forge(path, **changes)
        files = C.tree(cut_off.parent)
        with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {field}: "):
            recover(str(cut_off))
        assert C.tree(cut_off.parent) == files

    each(
        [
            ({"purge_list_name": "../x.parquet"}, "purge_list_name"),
            ({"purge_list_name": "/x.parquet"}, "purge_list_name"),
            ({"purge_list_name": None}, "purge_list_name"),
            ({"before": "1"}, "before"),
            ({"before": 2, "after": 1}, "after"),
            ({"after": 7}, "after"),
            ({"train_runs": [1]}, "train_runs"),
            ({"counts": []}, "counts"),
            ({"similar": 1}, "similar"),
        ],
        check,
    )


@pytest.mark.parametrize("column", ["source", "partition"])
def test_a_condemned_document_is_of_the_run(cut_off: Path, other: Path, column: str) -> None:
    path = cut_off / ".purge/condemned.parquet"
    rows = pq.read_table(path)
    name = {"source": "../../other/documents/web", "partition": "../../../other/documents/web/000"}[column]
    rows = rows.set_column(rows.schema.names.index(column), rows.schema.field(column), [[name] * len(rows)])
    pq.write_table(rows, path)
    files = C.tree(other)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {column}: expected the name of a file"):
        recover(str(cut_off))
    assert C.tree(other) == files


def test_the_condemned_are_a_table_of_them(cut_off: Path) -> None:
    path = cut_off / ".purge/condemned.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["why"]), path)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}: is not of a purge: its columns are "):
        recover(str(cut_off))


def test_nothing_but_pages_is_removed_by_a_note_of_pages(cut_off: Path, tmp_path: Path) -> None:
    mine, train = tmp_path / "mine.txt", tmp_path / "train"
    mine.write_text("of nobody else")
    (train / "forensics").mkdir(parents=True)
    (train / "forensics/notes.txt").write_text("mine too")
    intent = json.loads((cut_off / ".purge/intent.json").read_text())
    forge(cut_off / ".purge/intent.json", train_runs=[str(train)])
    files = {str(mine): "0" * 64, str(train / "forensics/notes.txt"): "0" * 64}
    storage.write_json(str(cut_off / ".purge/pages.json"), {"purge": intent["id"], "files": files})
    recover(str(cut_off))
    assert not journal.is_under_way(str(cut_off))
    assert mine.read_text() == "of nobody else"
    assert (train / "forensics/notes.txt").exists()


def test_tombstones_stay_in_their_list(run: Path) -> None:
    forge(run / "run.json", id="../elsewhere")
    files = C.tree(run)
    with pytest.raises(InputError, match=r"run\.json: id: expected the name of a file"):
        purge(request(run, some(run)))
    assert C.tree(run) == files
    assert not list(run.parent.glob("elsewhere*"))
