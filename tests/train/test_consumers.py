"""What a data run knows of the training runs that read from it, and what the ledger says of each attempt."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quern.train.batches.corpus import Corpus
from quern.train.config import TrainConfig
from quern.train.history import consumers
from quern.train.history.consumers import CONSUMERS_FILE, Consumer, announce, read_consumers
from support.train import run_case as case

LINE = {"time": "2026-01-01T00:00:00.000+00:00", "train_run": "/t", "order": "ab", "identities": ["r1/web/1"]}


def lines(run: Path) -> list[str]:
    return (run / CONSUMERS_FILE).read_text().splitlines()


def test_every_data_run_is_told_of_its_own_sources(tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
    paths = {
        "ra/web/1": str(tmp_path / "a" / "tokens" / "web"),
        "rb/web/3": str(tmp_path / "b" / "tokens" / "web"),
        "ra/code/1": str(tmp_path / "a" / "tokens" / "code"),
    }
    announce(str(tmp_path / "train" / ".." / "other"), "f00", paths)
    announce(str(tmp_path / "train"), "f01", {"ra/web/1": paths["ra/web/1"]})
    first, second = read_consumers(str(tmp_path / "a"))
    assert (first.train_run, first.order) == (str(tmp_path / "other"), "f00")
    assert first.identities == ("ra/web/1", "ra/code/1")
    assert (second.train_run, second.order, second.identities) == (str(tmp_path / "train"), "f01", ("ra/web/1",))
    assert first.time <= second.time
    (only,) = read_consumers(str(tmp_path / "b"))
    assert only.identities == ("rb/web/3",)


def test_a_data_run_that_nobody_reads(tmp_path: Path) -> None:
    assert read_consumers(str(tmp_path)) == []


def test_a_torn_line_spoils_neither_the_lines_before_nor_those_after(tmp_path: Path) -> None:
    whole = json.dumps(LINE)
    for cut in (1, 20, len(whole) - 1, len(whole)):
        (tmp_path / CONSUMERS_FILE).write_text(whole + "\n" + whole[:cut])
        told = [Consumer(LINE["time"], "/t", "ab", ("r1/web/1",))]  # type: ignore[arg-type]
        assert read_consumers(str(tmp_path)) == told * (2 if cut == len(whole) else 1)
        announce("/new", "cd", {"r1/web/1": str(tmp_path / "tokens" / "web")})
        assert [consumer.train_run for consumer in read_consumers(str(tmp_path))][-1] == "/new"
        assert len(read_consumers(str(tmp_path))) == (3 if cut == len(whole) else 2)


@pytest.mark.parametrize(
    "line",
    [
        "[]", "3", "null", "{}", "\x00\x00", "[" * 100_000,
        json.dumps(LINE | {"order": 3}), json.dumps(LINE | {"identities": "r1"}),
        json.dumps(LINE | {"identities": [1]}), json.dumps(LINE | {"train_run": "/t\ud800"}),
        json.dumps({k: v for k, v in LINE.items() if k != "time"}),
    ],
)  # fmt: skip
def test_what_is_no_line_is_left_out(tmp_path: Path, line: str) -> None:
    (tmp_path / CONSUMERS_FILE).write_text(f"{line}\n{json.dumps(LINE)}\n")
    assert len(read_consumers(str(tmp_path))) == 1


def test_a_data_run_that_cannot_be_written_is_no_reason_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"r1/web/1": str(tmp_path / "gone" / "tokens" / "web"), "r2/web/1": str(tmp_path / "tokens" / "web")}
    with caplog.at_level(logging.WARNING):
        announce("/t", "ab", paths)
    (record,) = caplog.records
    assert f"{tmp_path / 'gone' / CONSUMERS_FILE}: cannot be written (No such file or directory)" in record.message
    assert len(read_consumers(str(tmp_path))) == 1
    caplog.clear()
    monkeypatch.setattr(consumers.os, "write", lambda descriptor, data: len(data) // 2)
    announce("/t", "ab", {"r2/web/1": paths["r2/web/1"]})
    assert "took only a part of the line" in caplog.text


def test_lines_of_trainers_that_start_at_once_stay_whole(tmp_path: Path) -> None:
    program = (
        "import sys; from quern.train.history.consumers import announce\n"
        "for n in range(100): announce(f'/run{sys.argv[1]}', 'ab' * n, {'r1/web/1': sys.argv[2]})"
    )
    path = str(tmp_path / "tokens" / "web")
    running = [subprocess.Popen([sys.executable, "-c", program, str(n), path]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    found = read_consumers(str(tmp_path))
    for n in range(3):
        assert [c.order for c in found if c.train_run == f"/run{n}"] == ["ab" * m for m in range(100)]


@pytest.mark.slow
def test_a_trainer_says_where_its_tokens_are_how_it_deals_them_and_to_whom_it_listens(tmp_path: Path) -> None:
    paths = case.write_corpus(tmp_path / "data")
    relative = [os.path.relpath(path) for path in paths]
    made: TrainConfig = case.settings(tmp_path / "run", relative, checkpoint={"interval": 2}, micro_batch=4)
    case.live(made, kill_at=3)
    case.live(made.model_copy(update={"micro_batch": 2}))
    ids = Corpus(paths, 32).ids
    start, resume = (entry for entry in case.ledger(tmp_path / "run") if entry["kind"] in ("start", "resume"))
    for entry, micro_batch in ((start, 4), (resume, 2)):
        assert entry["paths"] == dict(zip(ids, paths, strict=True))
        assert (entry["dp"], entry["micro_batch"]) == (1, micro_batch)
    told = read_consumers(str(tmp_path / "data"))
    expected = (str(tmp_path / "run"), start["order"], ids)
    assert [(c.train_run, c.order, c.identities) for c in told] == [expected] * 2
    assert not list(Path(tmp_path / "data").glob("*.tmp"))


@pytest.mark.slow
def test_a_data_run_that_cannot_be_written_to_is_trained_on_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = case.write_corpus(tmp_path / "data")
    (tmp_path / "data" / CONSUMERS_FILE).mkdir()  # root may write anywhere else
    left = case.live(case.settings(tmp_path / "run", paths))
    assert left.complete
    assert "consumers.jsonl: cannot be written (Is a directory)" in caplog.text
