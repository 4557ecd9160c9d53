"""Tables of runs, ours and others', and what is wrong in one, by file, run and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.mixtures.laws.tables import read_runs

OURS = "run,seed,share:web,share:code,loss:web,loss:code\n0000,1,0.25,0.75,2.5,1\n0001,1,1.0,0.0,2.0,3\n"
SHARES = ",run,index,web,code\n0,a,0,0.25,0.75\n1,b,1,1.0,0.0\n"
LOSSES = ",run,index,x,y,z\n0,b,0,1.0,2.0,6.5\n1,a,1,3.0,4.0,8.5\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"ours.csv": OURS, "shares.csv": SHARES, "losses.csv": LOSSES}.items():
        Path(name).write_text(text)


@pytest.mark.usefixtures("write")
def test_a_table_of_ours() -> None:
    runs = read_runs(["ours.csv"], "run")
    assert runs.sources == ("web", "code")
    np.testing.assert_array_equal(runs.mixtures, [[0.25, 0.75], [1, 0]])
    assert {name: list(own) for name, own in runs.losses.items()} == {"web": [2.5, 2.0], "code": [1.0, 3.0]}
    named = read_runs(["ours.csv"], "run", ["code", "web"])
    assert named.sources == ("code", "web")
    np.testing.assert_array_equal(named.mixtures, [[0.75, 0.25], [0, 1]])


@pytest.mark.usefixtures("write")
def test_two_tables_are_joined_by_run_and_columns_averaged_by_family() -> None:
    for ending in (".csv", ".parquet"):
        if ending == ".parquet":
            columns = {"run": ["b", "a"], "x": [1.0, 3.0], "y": [2.0, 4.0], "z": [6.5, 8.5]}
            pq.write_table(pa.table(columns), "losses.parquet")
        runs = read_runs(["shares.csv", "losses" + ending], "run", families={"low": ["x", "y"], "high": ["z"]})
        assert runs.sources == ("web", "code")  # floats; index is a number, and no share
        np.testing.assert_array_equal(runs.mixtures, [[0.25, 0.75], [1, 0]])
        assert {name: list(own) for name, own in runs.losses.items()} == {"low": [3.5, 1.5], "high": [8.5, 6.5]}
    runs = read_runs(["shares.csv", "losses.csv"], "run", ["code", "web"])
    np.testing.assert_array_equal(runs.mixtures, [[0.75, 0.25], [0, 1]])
    assert list(runs.losses) == ["x", "y", "z"]


@pytest.mark.usefixtures("write")
def test_shares_that_were_rounded_are_scaled() -> None:
    Path("ours.csv").write_text(OURS.replace("0.25,0.75", "0.249,0.748"))
    np.testing.assert_allclose(read_runs(["ours.csv"], "run").mixtures.sum(axis=1), 1.0, rtol=1e-15)


@pytest.mark.usefixtures("write")
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ours.csv", OURS.replace("0.25", "0.45"), "ours.csv: row 1: expected shares ≥ 0 that add up to 1, got 1.2 in"),
        ("ours.csv", OURS.replace("1.0,0.0", "1.5,-0.5"), "ours.csv: row 2: expected shares ≥ 0 that add up to 1"),
        ("ours.csv", OURS.replace("2.0,3", ",3"), "ours.csv: row 2: loss:web: expected a number, got None"),
        ("ours.csv", OURS.replace("2.0,3", "-inf,3"), "ours.csv: row 2: loss:web: expected a number, got -inf"),
        ("ours.csv", OURS.replace("2.0,3", "low,3"), "ours.csv: row 1: loss:web: expected a number, got '2.5'"),
        ("ours.csv", OURS.replace("share:", ""), "expected columns share:NAME and loss:NAME, or a table of each kind"),
        ("ours.csv", "a,b\n1\n", "ours.csv: not a CSV table"),
        ("shares.csv", SHARES.replace("1,b,1", "1,c,1"), "shares.csv and losses.csv: run b is in one alone"),
        ("losses.csv", LOSSES + "2,c,2,1.0,1.0,1.0\n", "shares.csv and losses.csv: run c is in one alone"),
        ("shares.csv", SHARES.replace("1,b,1", "1,a,1"), "shares.csv: run: 'a' is there twice; expected each run once"),
        ("losses.csv", LOSSES.replace("run", "id"), "losses.csv: has no column 'run'; expected the one with the names"),
        ("losses.csv", LOSSES.replace("2.0", "inf"), "losses.csv: b: y: expected a number, got inf"),
        ("losses.csv", LOSSES.replace(",z", ",y"), "losses.csv: has 2 columns 'y', expected one"),
    ],
)
def test_what_is_wrong_in_a_table_is_said(name: str, text: str, expected: str) -> None:
    Path(name).write_text(text)
    with pytest.raises(InputError) as caught:
        read_runs(["ours.csv"] if name == "ours.csv" else ["shares.csv", "losses.csv"], "run")
    assert expected in str(caught.value)


@pytest.mark.usefixtures("write")
def test_columns_that_are_not_there_are_said() -> None:
    with pytest.raises(InputError, match=r"losses.csv: has no column 'w'"):
        read_runs(["shares.csv", "losses.csv"], "run", families={"low": ["w"]})
    with pytest.raises(InputError, match=r"none.csv: no such file"):
        read_runs(["none.csv"], "run")
