"""Saves of a run on several ranks: the interval rank 0 chooses, a rank that cannot write, all modes and layouts."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest

from support.train import run_case as CASE

pytestmark = pytest.mark.slow


#: The worst that counts as equal: max |a - b| / max |b| of a tensor.
EQUAL = 1e-10
FSDP2 = {"dp_shard": 2}
TP2 = {"tp": 2, "dp_shard": 1}


@pytest.fixture
def paths(tmp_path):
    return CASE.write_corpus(tmp_path / "data")


def config_for(run: str, paths: list[str], parallel: dict[str, int], **checkpoint: Any) -> Any:
    return CASE.settings(run, paths, precision="fp64", parallel=parallel, checkpoint={"interval": 2, **checkpoint})


def live(run: str, paths: list[str], parallel: dict[str, int], checkpoint: dict[str, Any], stop: bool) -> Any:
    """One life of this rank; with ``stop``, the last rank hears a signal in step 3."""
    import torch.distributed as dist

    stops = stop and dist.get_rank() == dist.get_world_size() - 1
    config = config_for(run, paths, parallel, **checkpoint)
    left = CASE.live(config, stop_at=3 if stops else None, factor=CASE.nan_at_5)
    return left.start.step, left.complete, left.state


def files_of(run: Path) -> dict[str, str]:
    """SHA-256 of the files that hold or place tensors, by checkpoint and name."""
    files = (*run.glob("checkpoints/step_*/*.distcp"), *run.glob("checkpoints/step_*/.metadata"))
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process that is not interrupted, and whose loop stands still while a checkpoint is written."""
    folder = tmp_path_factory.mktemp("whole")
    paths = CASE.write_corpus(folder / "data")
    return (
        folder / "run",
        paths,
        CASE.live(config_for(str(folder / "run"), paths, {}, mode="sync"), factor=CASE.nan_at_5),
    )


@pytest.mark.parametrize(
    "overlap", [pytest.param(True, marks=pytest.mark.exhaustive), pytest.param(False, marks=pytest.mark.long)]
)
def test_written_by_processes_of_shards_read_by_one_and_by_split_tensors(kept_ranks, tmp_path, whole, overlap):
    """A signal to one rank ends the first life after six steps; step 5 is skipped by then."""
    straight, paths, expected = whole
    run = tmp_path / "run"
    first = kept_ranks(live, 2, str(run), paths, FSDP2, {"mode": "process", "overlap": overlap}, True)
    assert [(start, complete) for start, complete, _ in first] == [(0, False)] * 2
    other = tmp_path / "other"
    shutil.copytree(run, other)

    alone = CASE.live(config_for(str(run), paths, {}, mode="process", overlap=overlap), factor=CASE.nan_at_5)
    assert (alone.start.step, alone.complete) == (6, True)
    assert CASE.worst_ratio(alone.state, expected.state) < EQUAL
    split = kept_ranks(live, 2, str(other), paths, TP2, {"mode": "thread", "overlap": overlap}, False)
    for start, complete, state in split:
        assert (start, complete) == (6, True)
        assert CASE.worst_ratio(state, expected.state) < EQUAL
    for folder in (run, other):
        assert CASE.folders(folder) == [f"step_{step:08d}" for step in (2, 4, 6, 8, 9)]
        rows = CASE.rows(folder)
        for step, row in CASE.rows(straight).items():
            assert {**rows[step], "loss": 0, "grad_norm": 0} == {**row, "loss": 0, "grad_norm": 0}
            for name in ("loss", "grad_norm"):
                if name in row and row[name] is not None:
                    assert rows[step][name] == pytest.approx(row[name], rel=EQUAL)


HOW = {
    "sync": {"mode": "sync"},
    "thread": {"mode": "thread"},
    "process": {"mode": "process"},
}


def every_mode(folder: str, paths: list[str], parallel: dict[str, int]) -> dict[str, Any]:
    """The same run by every mode; this rank's state at the end of each."""
    return {how: live(f"{folder}/{how}", paths, parallel, changes, False)[2] for how, changes in HOW.items()}


@pytest.mark.long
@pytest.mark.parametrize("parallel", [FSDP2, TP2], ids=str)
def test_who_writes_changes_no_bit_on_two_ranks(kept_ranks, tmp_path, paths, parallel):
    for states in kept_ranks(every_mode, 2, str(tmp_path), paths, parallel):
        for how, state in states.items():
            assert CASE.differences(state, states["sync"]) == [], how
    expected = files_of(tmp_path / "sync")
    assert len({name.split("/")[1] for name in expected}) == 5
    assert len([name for name in expected if name.endswith(".distcp")]) >= 10
    for how in HOW:
        assert files_of(tmp_path / how) == expected, how
        assert CASE.timeless(tmp_path / how) == CASE.timeless(tmp_path / "sync"), how
        assert CASE.rows(tmp_path / how) == CASE.rows(tmp_path / "sync"), how


def one_rank_is_full(run: str, paths: list[str], mode: str, full_rank: int, steps: list[int]) -> tuple[str, bool]:
    """What this rank's run ends with, and whether it is complete."""
    import torch.distributed as dist

    from quern.train.checkpoint.save.work import Work

    write = Work.write

    def maybe(self: Work, folder: str, fetch: Any = None) -> Any:
        if dist.get_rank() == full_rank and any(f"step_{step:08d}" in folder for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, folder, fetch)

    Work.write = maybe  # type: ignore[method-assign]
    try:
        return "", CASE.live(config_for(run, paths, FSDP2, mode=mode, max_failures=2)).complete
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    finally:
        Work.write = write  # type: ignore[method-assign]


@pytest.mark.parametrize(("mode", "full_rank"), [("thread", 1), pytest.param("sync", 0, marks=pytest.mark.long)])
def test_a_rank_that_cannot_write_fails_the_save_of_all(kept_ranks, tmp_path, paths, mode, full_rank):
    why = f"rank {full_rank}: No space left on device"
    goes_on, ends = tmp_path / "goes on", tmp_path / "ends"
    assert kept_ranks(one_rank_is_full, 2, str(goes_on), paths, mode, full_rank, [4]) == [("", True)] * 2
    failed = [(entry["step"], entry["why"]) for entry in CASE.ledger(goes_on) if entry["kind"] == "checkpoint_failed"]
    assert failed == [(4, why)]
    assert CASE.folders(goes_on) == [f"step_{step:08d}" for step in (2, 6, 8, 9)]

    found = kept_ranks(one_rank_is_full, 2, str(ends), paths, mode, full_rank, [4, 6])
    newest = ends / "checkpoints" / "step_00000002"
    told = f"{why}; 2 saves in a row failed (checkpoint.max_failures 2), and the newest checkpoint is {newest}"
    assert found == [(f"QuernError: {told}", False)] * 2
    assert [e["step"] for e in CASE.ledger(ends) if e["kind"] == "checkpoint_failed"] == [4, 6]


def announced(run: str, paths: list[str], full: bool) -> tuple[str, list[Any]]:
    """What this rank's run ends with, and what it was told at each save: the step, the ledger's size, what is to stay.

    ``full``: the ledger takes no line of the save after step 4.
    """
    from quern.train.checkpoint.save.async_save import AsyncSave
    from quern.train.history.ledger import Ledger

    begin, append = AsyncSave.begin, Ledger.append
    begun: list[Any] = []

    def begins(self: AsyncSave, step: int, state: Any, position: Any, keep: Any = None, last: bool = False) -> None:
        begun.append((step, position.ledger_offset, sorted(keep.steps)))
        begin(self, step, state, position, keep, last)

    def refuse(self: Ledger, kind: str, **said: Any) -> None:
        if full and kind == "checkpoint" and said["step"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, kind, **said)

    AsyncSave.begin = begins  # type: ignore[method-assign]
    Ledger.append = refuse  # type: ignore[method-assign]
    try:
        CASE.live(config_for(run, paths, FSDP2, mode="thread"))
        return "", begun
    except Exception as error:
        return f"{type(error).__name__}: {error}", begun
    finally:
        AsyncSave.begin, Ledger.append = begin, append  # type: ignore[method-assign]


def test_rank_0_announces_a_save_for_all(kept_ranks, tmp_path, paths):
    """It alone has the ledger: the others are told its size and what is not to be pruned, or why it takes no line."""
    (_, first), (_, second) = kept_ranks(announced, 2, str(tmp_path / "run"), paths, False)
    assert first == second
    assert [step for step, _, _ in first] == [2, 4, 6, 8, 9]
    assert all(steps for _, _, steps in first)
    ledger = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    for step, offset, _ in first:
        line = json.loads(ledger[:offset].splitlines()[-1])
        assert (line["kind"], line["step"]) == ("checkpoint", step)
    found = kept_ranks(announced, 2, str(tmp_path / "full"), paths, True)
    assert [why.split(";")[0] for why, _ in found] == ["QuernError: rank 0: No space left on device"] * 2


def chosen(run: str, paths: list[str]) -> list[int]:
    """After which steps this rank's loop has begun a save. On rank 0 a save takes 20 s and a step 4 s; on the other, by
    its own clock, a thousandth of that."""
    import torch.distributed as dist

    from quern.train import trainer
    from quern.train.checkpoint.save import scheduler
    from quern.train.checkpoint.save.async_save import AsyncSave

    begun: list[int] = []
    begin = AsyncSave.begin
    now = [0.0]
    factor = 1.0 if dist.get_rank() == 0 else 1e-3

    class Mark:
        def __init__(self, device: Any) -> None:
            self.at = now[0]

        def wait(self) -> None: ...

        def since(self, earlier: Mark) -> float:
            return self.at - earlier.at

    def begins(self: AsyncSave, step: int, *arguments: Any) -> None:
        begun.append(step)
        begin(self, step, *arguments)
        now[0] += 20 * factor

    def step(data_step: int) -> float:
        now[0] += 4 * factor
        return 1.0

    before = scheduler.time, trainer.Mark, begin  # type: ignore[attr-defined]
    scheduler.time = types.SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[attr-defined]
    trainer.Mark = Mark  # type: ignore[misc]
    AsyncSave.begin = begins  # type: ignore[method-assign, assignment]
    auto = {"interval": "auto", "mtbf_hours": 70 / 3600, "mode": "sync"}
    try:
        CASE.live(CASE.settings(run, paths, steps=30, parallel=FSDP2, checkpoint=auto), factor=step)
    finally:
        scheduler.time, trainer.Mark, AsyncSave.begin = before  # type: ignore[attr-defined, misc, method-assign]
    return begun


def test_ranks_follow_the_interval_that_rank_0_has_chosen(kept_ranks, tmp_path, paths):
    """By Daly's model (2006, equation 9) once the first save has ended; before, a step is assumed to take 60 s and a
    save 10 s, which makes 1 step."""
    interval = min(range(1, 31), key=lambda steps: math.expm1((4 * steps + 20) / 70) / steps)
    assert 5 < interval < 15
    found = kept_ranks(chosen, 2, str(tmp_path / "run"), paths)
    expected = [1, *range(1 + interval, 30, interval), 30]
    assert found == [expected] * 2
    newest = tmp_path / "run" / "checkpoints" / "step_00000030" / "manifest.json"
    scalars = json.loads(newest.read_text())["scalars"]
    assert [scalars[f"cadence.cost.{place}"] for place in range(len(expected) - 1)] == [20.0] * (len(expected) - 1)
