"""Tombstones: what a purge list holds after a purge, whoever else writes to it, and which list that is."""

from __future__ import annotations

import json
import random
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA
from quern.data_pipeline.stages.tombstones import PURGE_SCHEMA, read_purge_list
from quern.errors import InputError
from quern.lineage.purge.record.remember import Signatures, purge_list_of, remember, tombstones_name
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA, find_deletion_set
from quern.lineage.purge.selection.select import Wanted
from support.lineage import runs


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """With signatures of what passed all gates."""
    folder = Path(shutil.copytree(pristine, tmp_path / "run"))
    found = runs.listing(seed=4, documents=240, files=6)
    for name, rows in found.verdicts.items():
        own = [sketch(row["doc_id"]) for row in rows if row["stage"] is None]
        path = folder / "signatures" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(own, SIGNATURE_SCHEMA), path, row_group_size=7)
    return folder


def sketch(doc_id: bytes) -> dict[str, Any]:
    """A signature of its own for most documents."""
    draw = random.Random(doc_id)
    if doc_id[0] < 30:
        return {"doc_id": doc_id, "signature": None, "shingles": None}
    shingles = sorted(draw.getrandbits(64) for _ in range(draw.randrange(1, 9)))
    return {"doc_id": doc_id, "signature": [draw.getrandbits(32) for _ in range(128)], "shingles": shingles}


def some(run: Path, seed: int = 0) -> pa.Table:
    draw = random.Random(seed)
    ids = [row["doc_id"] for row in draw.sample(runs.listing(seed=4, documents=240, files=6).rows, 40)]
    return find_deletion_set(str(run), Wanted(doc_ids=frozenset(ids)))


def listed(path: str) -> list[dict[str, Any]]:
    return sorted(pq.read_table(path).to_pylist(), key=lambda row: row["doc_id"])


def test_the_condemned_are_listed_by_id_url_and_text(run: Path, tmp_path: Path) -> None:
    deletion_set = some(run)
    path = remember(str(tmp_path / "list"), tombstones_name("r", 2, deletion_set), deletion_set)
    assert Path(path).parent == tmp_path / "list"
    assert pq.read_schema(path).names == PURGE_SCHEMA.names
    assert listed(path) == deletion_set.select(PURGE_SCHEMA.names).to_pylist()
    found = read_purge_list(str(tmp_path / "list"))
    assert len(found.doc_ids) == len(deletion_set)
    assert found.sketches == ()


def test_signatures_are_listed_of_those_that_have_one(run: Path, tmp_path: Path) -> None:
    deletion_set = some(run)
    path = remember(str(tmp_path / "list"), "r.v2.parquet", deletion_set, Signatures(str(run)))
    rows = deletion_set.to_pylist()
    expected = []
    for row in rows:
        own = sketch(row["doc_id"]) if row["stage"] is None else {"signature": None, "shingles": None}
        expected.append(
            {name: row[name] for name in PURGE_SCHEMA.names} | {k: own[k] for k in ("signature", "shingles")}
        )
    assert listed(path) == expected
    signed = [row for row in expected if row["shingles"]]
    assert 5 < len(signed) < len(expected) - 5
    (sketches,) = read_purge_list(str(tmp_path / "list")).sketches
    assert (sketches.ngram, sketches.num_perm, sketches.seed) == (5, 128, 1)
    assert sorted(map(tuple, sketches.signatures.tolist())) == sorted(tuple(row["signature"]) for row in signed)
    assert len(sketches.shingles) == sum(len(row["shingles"]) for row in signed) == sketches.starts[-1]
    assert (np.diff(sketches.starts) > 0).all()


@pytest.mark.parametrize("similar", [False, True])
def test_the_same_purge_that_is_finished_again_leaves_the_file_as_it_is(
    run: Path, tmp_path: Path, similar: bool
) -> None:
    """Also when the signatures are gone by then."""
    deletion_set = some(run)
    name = tombstones_name("r", 2, deletion_set, similar=similar)
    given = Signatures(str(run)) if similar else None
    path = remember(str(tmp_path / "list"), name, deletion_set, given)
    before = Path(path).read_bytes(), Path(path).stat().st_mtime_ns
    shutil.rmtree(run / "signatures")
    assert remember(str(tmp_path / "list"), name, deletion_set, given) == path
    assert (Path(path).read_bytes(), Path(path).stat().st_mtime_ns) == before
    other = remember(str(tmp_path / "again"), name, deletion_set.take(list(range(len(deletion_set)))[::-1]))
    assert Path(other).name.startswith(Path(path).stem)
    assert [row["doc_id"] for row in listed(other)] == [row["doc_id"] for row in listed(path)]


def test_a_purge_that_was_cut_off_while_it_wrote_leaves_nothing(run: Path, tmp_path: Path) -> None:
    deletion_set = some(run)
    for damaged in (run / "signatures").rglob("*.parquet"):
        damaged.write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"part-.*cannot be read"):
        remember(str(tmp_path / "list"), "r.v2.parquet", deletion_set, Signatures(str(run)))
    assert list((tmp_path / "list").iterdir()) == []


@pytest.mark.slow
def test_other_purges_never_take_the_same_name(run: Path, tmp_path: Path) -> None:
    """Of two copies of one run, of the same version, at the same time; also when both were given the same name."""
    tables = [some(run, seed) for seed in range(6)]
    names = {tombstones_name("r", 2, table, similar=similar) for table in tables for similar in (False, True)}
    names |= {tombstones_name("s", 2, tables[0]), tombstones_name("r", 3, tables[0])}
    assert len(names) == 14
    folder = str(tmp_path / "list")
    threads = [
        threading.Thread(target=remember, args=(folder, tombstones_name("r", 2, table), table)) for table in tables
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {row["doc_id"] for table in tables for row in table.to_pylist()}
    assert len(list((tmp_path / "list").iterdir())) == 6
    assert len(read_purge_list(folder).doc_ids) == len(expected)
    paths = {remember(str(tmp_path / "named"), "r.v2.parquet", table) for table in tables}
    assert len(paths) == 6
    assert {remember(str(tmp_path / "named"), "r.v2.parquet", table) for table in tables} == paths


def test_a_list_on_a_store(run: Path) -> None:
    folder = f"memory:///{uuid.uuid4().hex}/list"
    deletion_set = some(run)
    path = remember(folder, tombstones_name("r", 2, deletion_set), deletion_set)
    assert remember(folder, tombstones_name("r", 2, deletion_set), deletion_set) == path
    assert storage.list_files(folder) == [path]
    assert len(read_purge_list(folder).doc_ids) == len(deletion_set)


def test_nothing_condemned_is_an_empty_list(tmp_path: Path) -> None:
    path = remember(str(tmp_path / "list"), "r.v1.parquet", DELETION_SET_SCHEMA.empty_table())
    assert pq.read_metadata(path).num_rows == 0
    assert len(read_purge_list(str(tmp_path / "list")).doc_ids) == 0


def test_a_list_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"file.*: expected a folder"):
            remember(str(folder), "r.v2.parquet", some(run))
        with pytest.raises(InputError, match=r"(single file|expected a folder)"):
            purge_list_of(str(run), str(folder))


# ---- which list


def configured(run: Path, **config: Any) -> str:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "config": {**record["config"], **config}}))
    return str(run)


def test_the_list_is_the_given_one_the_runs_own_or_one_beside_it(run: Path, tmp_path: Path) -> None:
    assert purge_list_of(f"{run}/")[0] == f"{run}.purge-list"
    own = tmp_path / "own"
    own.mkdir()
    configured(run, purge_list=str(own))
    assert purge_list_of(str(run)) == (str(own), "the run's own purge_list")
    assert purge_list_of(str(run), f"{tmp_path}/other/") == (f"{tmp_path}/other", "as given")


def test_a_list_that_would_not_do_is_refused(run: Path, tmp_path: Path) -> None:
    single = tmp_path / "single.parquet"
    pq.write_table(PURGE_SCHEMA.empty_table(), single)
    for given, config, says in (
        (str(single), None, "single file.*--purge-list FOLDER"),
        (str(tmp_path / "to-be.parquet"), None, "single file"),
        (None, str(single), "single file"),
        (None, str(tmp_path / "gone"), r"its purge_list .*gone is not there"),
        (str(run / "list"), None, "would go with the run"),
        (str(run), None, "would go with the run"),
        (str(tmp_path / "x" / ".." / "run" / "list"), None, "would go with the run"),
    ):
        configured(run, purge_list=config)
        with pytest.raises(InputError, match=says):
            purge_list_of(str(run), given)


def test_a_run_without_signatures_has_none_to_give(run: Path) -> None:
    configured(run, duplicates={"near": False})
    with pytest.raises(InputError, match=r"--similar: the run made no signatures \(duplicates.near is false\)"):
        Signatures(str(run))
