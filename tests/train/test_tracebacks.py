"""Who failed first, in one line; the tracebacks in files."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.errors import HUNG
from quern.train import run_record
from quern.train.supervision import tracebacks
from support.train import run_case as case


def failed(run: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as caught:
        kept = tracebacks.keep(str(run), rank, caught)
    assert kept == str(run / "tracebacks" / f"rank_{rank}.txt")


def told(run: str, codes: list[int | None]) -> str | None:
    failure = tracebacks.first_failure(run, codes)
    return None if failure is None else failure.said


def test_a_death_by_signal_comes_first(tmp_path):
    failed(tmp_path, 0, RuntimeError("Connection closed by peer [127.0.0.1]:4411\nThis may indicate"))
    said = told(str(tmp_path), [1, -9, -6, None])
    assert said == "rank 1 was killed by signal 9 (SIGKILL); there is no checkpoint yet"
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert told(str(tmp_path), [1, 1, -signal.SIGRTMIN - 1]) == (
        f"rank 2 was killed by signal {signal.SIGRTMIN + 1}; newest checkpoint step 10; the same command goes on"
    )


def test_the_traceback_that_was_written_first_is_told(tmp_path):
    failed(tmp_path, 1, ValueError("two\nlines"))
    failed(tmp_path, 0, RuntimeError("Connection closed by peer"))
    file = tmp_path / "tracebacks" / "rank_1.txt"
    said = f"rank 1: ValueError: two; its traceback: {file}; there is no checkpoint yet"
    for codes in ([1, 1], [1, 1, 3], [1, 1, None, 0]):
        assert told(str(tmp_path), codes) == said
    assert "Traceback (most recent call last)" in file.read_text()
    assert told(str(tmp_path), [1, 1, 2]) is None  # that of rank 2 was an error with a line of its own
    tracebacks.clear(str(tmp_path))
    assert told(str(tmp_path), [1, 1]) is None


def test_a_rank_that_is_still_there_while_others_waited_in_vain_is_told(tmp_path):
    failed(tmp_path, 0, RuntimeError("[/src/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"))
    failed(tmp_path, 3, RuntimeError("Connection closed by peer [127.0.0.1]:4411"))
    waited = "and rank 0 waited in vain (RuntimeError: Timed out waiting 3000ms for recv)"
    end = "there is no checkpoint yet"
    assert told(str(tmp_path), [1, None, 0, 1]) == f"rank 1 does not answer, {waited}; {end}"
    # or has followed an alarm, whose teller is gone
    assert told(str(tmp_path), [1, HUNG, 0, 1]) == f"rank 1 does not answer, {waited}; {end}"
    stacks = tmp_path / "tracebacks" / "rank_2.stacks.txt"
    stacks.write_text("Thread")
    assert told(str(tmp_path), [1, None, None, 1]) == (f"ranks 1, 2 do not answer, {waited}; stacks: {stacks}; {end}")
    failed(tmp_path, 3, ValueError("of its own"))
    assert told(str(tmp_path), [1, None, 0, 1]).startswith("rank 0: RuntimeError: ")


def test_a_folder_that_cannot_be_written_loses_no_traceback(tmp_path):
    (tmp_path / "tracebacks").touch()
    assert tracebacks.keep(str(tmp_path), 0, ValueError("x")) is None


def test_a_traceback_is_written_through_no_link(tmp_path):
    (tmp_path / "outside").write_text("stays")
    file = Path(tracebacks.file_of(str(tmp_path), 0))
    file.parent.mkdir()
    file.symlink_to(tmp_path / "outside")
    assert tracebacks.keep(str(tmp_path), 0, ValueError("x")) is None
    assert (tmp_path / "outside").read_text() == "stays"


def test_what_changed_in_a_config_is_told_key_by_key(tmp_path):
    before = case.settings(tmp_path / "run", ["a", "b"])
    assert run_record.changes(before, 3) == []
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(before))
    assert run_record.changes(before, 3) == []
    after = case.settings(tmp_path / "elsewhere/../run", ["a", "c"], optimizer={"lr": 0.02}, resume={"step": "good"})
    assert run_record.changes(after, 0) == [
        "config: data.1.path: b → c",
        "config: optimizer.lr: 0.01 → 0.02",
        "config: resume.step: null → good",
    ]
    (fewer,) = run_record.changes(case.settings(tmp_path / "run", ["a"]), 3)
    assert fewer.startswith("config: data: [{")
    assert fewer.endswith(" … → [{accept_version: null, max_epochs: 100.0, path: a, weight: 3.0}]")


def test_a_longer_run_says_what_becomes_of_its_learning_rate(tmp_path):
    schedule = {"kind": "wsd", "warmup": 5, "decay": 0.25, "final": 0.1}
    before, after = (
        case.settings(tmp_path, ["a"], steps=steps, schedule=schedule, optimizer={"lr": 0.003}) for steps in (60, 80)
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(before))
    told = "learning rate: step 59 had 0.00048, step 60 gets 0.003"  # 0.003 (1 - 0.9 · 14/15)
    assert run_record.changes(after, 60) == ["config: steps: 60 → 80", told]
    assert run_record.changes(after, 40) == ["config: steps: 60 → 80"]


def test_a_traceback_of_an_earlier_start_is_not_this_ones(tmp_path):
    failed(tmp_path, 0, ValueError("old"))
    later = time.time()
    assert tracebacks.first_failure(str(tmp_path), [1, 0], later) is None
    failed(tmp_path, 0, ValueError("new"))
    assert "new" in tracebacks.first_failure(str(tmp_path), [1, 0], later).said


TIMED_OUT, CLOSED = TimeoutError("timed out after 600 s"), RuntimeError("Connection closed by peer [127.0.0.1]:4411")


@pytest.mark.parametrize(
    ("codes", "errors", "expected"),
    [
        pytest.param([1, -9], {0: CLOSED}, (1, True), id="killed"),
        pytest.param([1, -6], {0: CLOSED}, (1, True), id="crashed"),
        pytest.param([1, -6], {0: ValueError("a bug")}, (1, False), id="aborted by a library, of another's error"),
        pytest.param([-9, -9, -9], {}, (0, False), id="all killed, as where the machine's memory ran out"),
        pytest.param([-6, None, -6], {}, (0, False), id="aborts of those that wait"),
        pytest.param([-6, 1], {}, (0, False), id="aborted beside one that has told its error"),
        pytest.param([1, None, None], {0: TIMED_OUT}, (1, False), id="several that hang, by another"),
        pytest.param([1, 1], {1: MemoryError("of the device"), 0: CLOSED}, (1, True), id="an error of its own"),
        pytest.param([1, 1], {0: ValueError("a bug"), 1: ValueError("a bug")}, (0, False), id="what all fail of"),
        pytest.param([1, 0], {0: CLOSED}, (0, False), id="another's end"),
        pytest.param([1, None], {0: TIMED_OUT}, (1, True), id="hangs, by the others"),
        pytest.param([5, 5], {1: "hangs: rank 1 does not answer, and the others wait"}, (1, True), id="hangs"),
        pytest.param(
            [None, 5, 1],
            {2: CLOSED, 0: "hangs: it holds the store, which does not answer"},
            (0, True),
            id="hangs with the store; one fails of another that leaves, and then a third tells it too",
        ),
        pytest.param([5, 5], {0: "hangs: ranks 0 and 1 do not get further than data"}, (0, False), id="several hang"),
        pytest.param([5, 5], {0: "hangs: all ranks are in forward of step 3"}, (0, False), id="all hang"),
    ],
)
def test_whether_a_rank_failed_by_itself(tmp_path, codes, errors, expected):
    for rank, error in errors.items():
        if isinstance(error, str):  # as the watchdog writes it
            (tmp_path / "tracebacks").mkdir(exist_ok=True)
            Path(tracebacks.file_of(str(tmp_path), rank)).write_text(f"{time.time():.6f} {error}\n")
        else:
            failed(tmp_path, rank, error)
    failure = tracebacks.first_failure(str(tmp_path), codes)
    assert (failure.rank, failure.own) == expected
