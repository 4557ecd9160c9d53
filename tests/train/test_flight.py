"""What ranks leave in ``RUN/debug``, and what ``quern train debug`` makes of it: of real ranks of gloo, one of which
does not come, and of dumps written here in the form of NCCL's."""

from __future__ import annotations

import glob
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.train.debug import recorder
from quern.train.debug.report import report
from support.distributed.ranks import run_ranks
from support.waits import until


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Any:
    """What ``quern train debug`` prints, and its exit code. Its imports are none of the ranks'."""
    from typer.testing import CliRunner

    from quern.cli.main import app

    def call(*arguments: str) -> tuple[str, str, int]:
        result = CliRunner().invoke(app, ["train", "debug", *arguments])
        return capfd.readouterr().out + result.stdout, result.stderr, result.exit_code

    return call


def failing(run: str) -> None:
    """When all are asked for what they have recorded, rank 2 has not called the last collective of the whole group, a
    reduction of five numbers; it does so behind that, so that nothing waits for a time-out. Groups of pairs call one
    of their own before."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(3))
    dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2), group=pairs[rank // 2])
    dist.all_reduce(torch.ones(4))
    if rank == 2:
        recorder.keep(run, rank, ZeroDivisionError("by this rank"))
        until(lambda: len(glob.glob(f"{run}/debug/*.json")) == 4)
    last = dist.all_reduce(torch.ones(5), async_op=True)
    if rank != 2:
        recorder.keep(run, rank, RuntimeError("Timed out waiting"))
    last.wait()


@pytest.mark.slow
def test_the_collective_that_a_rank_of_gloo_did_not_reach_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    run_ranks(failing, 4, str(tmp_path))
    (tmp_path / "tracebacks").mkdir()
    (tmp_path / "tracebacks" / "rank_2.txt").write_text("Traceback")
    text, errors, code = said(str(tmp_path), "--json")
    assert (code, errors) == (0, "")
    found = json.loads(text)
    groups = {tuple(group["ranks"]): group for group in found["groups"]}
    assert sorted(groups) == [(0, 1), (0, 1, 2, 3), (2, 3)]
    whole = groups[0, 1, 2, 3]
    assert (whole["last_completed"]["kind"], whole["last_completed"]["input_sizes"]) == ("all_reduce", [[4]])
    missing = whole["first_missing"]
    assert (missing["kind"], missing["input_sizes"], missing["state"]) == ("all_reduce", [[5]], "scheduled")
    assert (missing["arrived"], missing["missing"]) == ([0, 1, 3], [2])
    lines = Path(__file__).read_text().splitlines()
    place = lines.index("    last = dist.all_reduce(torch.ones(5), async_op=True)") + 1
    called = lines.index("    dist.all_reduce(torch.ones(4))") + 1
    assert missing["frames"][0].endswith(f"test_flight.py:{place} in failing")
    assert missing["last_of_missing"]["2"]["frames"][0].endswith(f"test_flight.py:{called} in failing")
    for pair in ((0, 1), (2, 3)):
        assert groups[pair]["first_missing"] is groups[pair]["not_ended"] is None
        assert groups[pair]["last_completed"]["output_sizes"] == [[2, 2]]
    errors_of = {rank["rank"]: rank["error"] for rank in found["ranks"]}
    assert errors_of[2] == "ZeroDivisionError: by this rank"
    assert found["tracebacks"] == [str(tmp_path / "tracebacks" / "rank_2.txt")]
    plain, _, _ = said(str(tmp_path))
    assert f"not reached by ranks 2: all_reduce number {missing['number']} (scheduled, [[5]] → [[5]] Float)" in plain
    assert "there: ranks 0–1, 3" in plain


def stuck_in_a_pair(run: str) -> None:
    """Rank 3 waits for rank 2 in their pair, and has called another pair's collective behind that, which has ended.
    Rank 2 leaves its pair in place of a rank that dies; its record is written before, in which the pair is at one."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
    others = [dist.new_group(ranks, group_desc="dp") for ranks in ([0, 2], [1, 3])]
    pair, other = pairs[rank // 2], others[rank % 2]
    dist.all_reduce(torch.ones(2), group=pair)
    dist.all_reduce(torch.ones(3), group=other)
    if rank == 2:
        dist.all_reduce(torch.ones(5), group=other)
        recorder.keep(run, rank, ZeroDivisionError("by this rank"))
        dist.destroy_process_group(pair)
        return
    first = dist.all_reduce(torch.ones(4), group=pair, async_op=True)
    dist.all_reduce(torch.ones(5), group=other)
    ends: BaseException = ZeroDivisionError("by this rank too")
    try:
        first.wait()
    except RuntimeError as error:
        ends = error
    assert isinstance(ends, RuntimeError) == (rank == 3)
    recorder.keep(run, rank, ends)


@pytest.mark.slow
def test_a_rank_that_waits_in_one_group_stands_there_whatever_it_called_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    run_ranks(stuck_in_a_pair, 4, str(tmp_path))
    groups = {tuple(group["ranks"]): group for group in report(str(tmp_path))["groups"]}
    assert sorted(groups) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    missing = groups[2, 3]["first_missing"]
    assert (missing["number"], missing["input_sizes"], missing["state"]) == (2, [[4]], "failed")
    assert (missing["arrived"], missing["missing"]) == ([3], [2])
    assert groups[2, 3]["last_completed"]["input_sizes"] == [[2]]
    assert missing["last_of_missing"]["2"]["input_sizes"] == [[5]]
    assert groups[1, 3]["last_completed"]["input_sizes"] == [[5]]
    assert groups[1, 3]["not_ended"] is groups[1, 3]["first_missing"] is None


def of_gloo(run: Path, rank: int, error: str | None, calls: list[tuple[str, int]], first: int = 0) -> None:
    """Calls as (group, number) in their order, all of them marked alike; one with a negative number is under way."""
    groups = {"tp": "[2, 3]", "dp": "[1, 3]", "all": "[0, 1, 2, 3]"}
    entries = [
        entry(abs(number), "all_reduce", "scheduled", 1)
        | {"profiling_name": "gloo:all_reduce", "retired": number > 0, "record_id": order}
        | {"process_group": (group, group)}
        for order, (group, number) in enumerate(calls, first)
    ]
    (run / "debug").mkdir(exist_ok=True)
    text = json.dumps({
        "pg_config": {name: {"name": name, "desc": name, "ranks": ranks} for name, ranks in groups.items()},
        "entries": entries, "error": error,
    })  # fmt: skip
    (run / "debug" / f"flight_gloo_rank_{rank}.json").write_text(text)


def ends(run: Path, name: str) -> tuple[int | None, int | None, list[int] | None]:
    """Of a group: the number of its last call that ended, of one that did not, and who is missing in which."""
    (group,) = (group for group in report(str(run))["groups"] if group["group"] == name)
    last, pending, missing = group["last_completed"], group["not_ended"], group["first_missing"]
    return last and last["number"], pending and pending["number"], missing and missing["missing"]


VAIN = "RuntimeError: Connection closed by peer"


def test_without_the_other_members_record_the_newest_call_with_it_has_failed(tmp_path: Path) -> None:
    """Rank 2 was killed. Rank 3's last with it is of the pair, though the other pair has called since."""
    of_gloo(tmp_path, 3, VAIN, [("all", 1), ("tp", 1), ("dp", 1)])
    of_gloo(tmp_path, 1, None, [("all", 1), ("dp", 1)])
    assert ends(tmp_path, "tp") == (None, 1, None)
    assert ends(tmp_path, "dp") == (1, None, None)
    assert ends(tmp_path, "all") == (1, None, None)


def test_with_all_records_at_one_the_newest_call_has_failed(tmp_path: Path) -> None:
    for rank in range(4):
        of_gloo(tmp_path, rank, VAIN, [("all", 1), ("tp" if rank > 1 else "x", 1), ("all", 2)])
    assert ends(tmp_path, "tp") == (1, None, None)
    assert ends(tmp_path, "all") == (1, 2, None)


def test_a_call_that_another_member_is_still_in_has_failed(tmp_path: Path) -> None:
    of_gloo(tmp_path, 3, VAIN, [("tp", 1), ("tp", 2), ("dp", 1)])
    of_gloo(tmp_path, 2, "ValueError: of its own", [("tp", 1), ("tp", -2)])
    of_gloo(tmp_path, 1, None, [("dp", 1)])
    assert ends(tmp_path, "tp") == (1, 2, None)
    assert ends(tmp_path, "dp") == (1, None, None)


def test_a_call_that_has_left_anothers_record_is_no_sign_of_it(tmp_path: Path) -> None:
    """Rank 1 has made so many calls that the pair's first is forgotten, and rank 3 failed in its newest."""
    of_gloo(tmp_path, 3, VAIN, [("dp", 1), ("tp", 1)])
    of_gloo(tmp_path, 2, VAIN, [("tp", 1)])
    of_gloo(tmp_path, 1, None, [("all", 9)], first=2000)
    assert ends(tmp_path, "dp")[0] == 1
    assert ends(tmp_path, "tp") == (None, 1, None)


def test_a_late_rank_stands_in_the_oldest_call_that_has_not_ended(tmp_path: Path) -> None:
    """Rank 3 has not come to the fourth of all: it is in the pair's second, behind which it has called another."""
    of_gloo(tmp_path, 3, None, [("all", 3), ("tp", 1), ("tp", -2), ("dp", -1)])
    of_gloo(tmp_path, 1, None, [("all", 3), ("all", -4)])
    found = next(group for group in report(str(tmp_path))["groups"] if group["group"] == "all")
    assert found["first_missing"]["missing"] == [3]
    standing = found["first_missing"]["last_of_missing"]["3"]
    assert (standing["group"], standing["number"]) == ("tp", 2)


def entry(number: int, kind: str, state: str, size: int, *, pair: bool = False) -> dict[str, Any]:
    """As torch 2.10 of CUDA writes it (``DumpPickler`` of FlightRecorderDetail.hpp)."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 9},
            {"name": "work", "filename": "/home/a.py", "line": 100 + number},
        ],
        "record_id": number, "pg_id": 0, "process_group": ("7", "dp"), "collective_seq_id": 0 if pair else number,
        "p2p_seq_id": number if pair else 0, "op_id": number, "profiling_name": f"nccl:{kind}", "time_created_ns": 1,
        "input_sizes": ((size,),), "input_dtypes": ["BFloat16"], "output_sizes": ((size,),),
        "output_dtypes": ["BFloat16"], "state": state, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 600000, "is_p2p": pair,
    }  # fmt: skip


def of_nccl(run: Path, rank: int, entries: list[dict[str, Any]], ranks: str = "[0, 1, 2]") -> Path:
    folder = run / "debug"
    folder.mkdir(exist_ok=True)
    file = folder / f"flight_nccl_rank_{rank}"
    groups = {"7": {"name": "7", "desc": "dp", "ranks": ranks}}
    file.write_bytes(pickle.dumps({"version": "2.10", "pg_config": groups, "entries": entries}, protocol=2))
    return file


def begun(number: int, state: str = "completed") -> list[dict[str, Any]]:
    """Entries from 5 on: older ones have left the buffer."""
    return [entry(n, "all_reduce", "completed", n) for n in range(5, number)] + [
        entry(number, "all_reduce", state, number)
    ]


def test_nccls_dumps_tell_who_is_missing(tmp_path: Path) -> None:
    of_nccl(tmp_path, 0, begun(9, "started"))
    of_nccl(tmp_path, 1, [*begun(8), entry(9, "send", "scheduled", 4, pair=True)])
    of_nccl(tmp_path, 2, begun(9, "scheduled"))
    found = report(str(tmp_path))
    (group,) = found["groups"]
    assert (group["group"], group["description"], group["backend"], group["ranks"]) == ("7", "dp", "nccl", [0, 1, 2])
    assert group["last_completed"]["number"] == 8
    missing = group["first_missing"]
    assert (missing["number"], missing["arrived"], missing["missing"]) == (9, [0, 2], [1])
    assert missing["frames"] == ["/home/a.py:109 in work"]
    (waits,) = found["waiting"]
    assert (waits["rank"], waits["kind"], waits["frames"]) == (1, "send", ["/home/a.py:109 in work"])


def test_a_collective_that_all_reached_and_that_did_not_end(tmp_path: Path) -> None:
    for rank, state in enumerate(("completed", "started", "started")):
        of_nccl(tmp_path, rank, begun(9, state))
    (group,) = report(str(tmp_path))["groups"]
    assert group["last_completed"]["number"] == 8
    assert (group["not_ended"]["number"], group["not_ended"]["arrived"]) == (9, [0, 1, 2])
    assert group["first_missing"] is None


def test_ranks_that_call_different_collectives_and_one_without_a_dump(tmp_path: Path) -> None:
    of_nccl(tmp_path, 0, [*begun(5), entry(6, "all_gather", "started", 6)])
    of_nccl(tmp_path, 1, begun(6, "started"))
    (group,) = report(str(tmp_path))["groups"]
    assert group["without_dump"] == [2]
    assert group["different"] == {"number": 6, "kinds": {"0": "all_gather", "1": "all_reduce"}}


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("harm", ["cut", "code", "shape", "json"])
def test_a_damaged_dump_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any, harm: str
) -> None:
    monkeypatch.chdir(tmp_path)
    of_nccl(tmp_path, 0, begun(9))
    file = of_nccl(tmp_path, 1, begun(9))
    whole = file.read_bytes()
    file.write_bytes(
        {"cut": whole[:-40], "code": pickle.dumps(_Harm()), "shape": pickle.dumps([1]), "json": b'{"entries": 3'}[harm]
    )
    text, errors, code = said(str(tmp_path))
    assert code == 1
    assert "ended on all: all_reduce number 9" in text
    assert errors.startswith(f"error: {file}: the flight recorder's dump is damaged: ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "harm").exists()


def test_the_call_of_which_a_rank_of_gloo_failed_has_not_ended(tmp_path: Path) -> None:
    """gloo marks it as it marks those that ended well."""
    (tmp_path / "debug").mkdir()
    for rank, error in enumerate(("RuntimeError: Timed out waiting 3000ms", "ValueError: of its own")):
        own = {"profiling_name": "gloo:barrier", "retired": True}
        entries = [entry(n, "barrier", "scheduled", 1) | own for n in (1, 2)]
        groups = {"7": {"name": "7", "desc": "dp", "ranks": "[0, 1, 2]"}}
        text = json.dumps({"pg_config": groups, "entries": entries, "error": error})
        (tmp_path / "debug" / f"flight_gloo_rank_{rank}.json").write_text(text)
    (group,) = report(str(tmp_path))["groups"]
    assert (group["last_completed"]["number"], group["not_ended"]["number"]) == (1, 2)
    assert group["without_dump"] == [2]


def test_a_rank_is_not_missing_where_its_record_is(tmp_path: Path, said: Any) -> None:
    """Rank 0 has written gloo's record too; NCCL's watchdog, which wrote that of the others, knows nothing of gloo."""
    for rank in range(3):
        of_nccl(tmp_path, rank, begun(9))
    gloo = [entry(3000, "all_reduce", "completed", 4) | {"profiling_name": "gloo:all_reduce"}]
    groups = {"7": {"name": "7", "desc": "dp", "ranks": "[0, 1, 2]"}}
    (tmp_path / "debug" / "flight_gloo_rank_0.json").write_text(json.dumps({"pg_config": groups, "entries": gloo}))
    by_backend = {group["backend"]: group for group in report(str(tmp_path))["groups"]}
    assert by_backend["gloo"]["first_missing"] is by_backend["nccl"]["first_missing"] is None
    assert by_backend["gloo"]["without_dump"] == [1, 2]
    assert said(str(tmp_path))[2] == 0


def test_calls_that_have_left_the_record_are_not_missing(tmp_path: Path, said: Any) -> None:
    """Rank 1's calls of this group are gone; rank 2 has called none after the sixth, and the seventh is nobody's."""
    of_nccl(tmp_path, 0, [entry(n, "all_reduce", "completed", n) for n in (8, 9)])
    file = of_nccl(tmp_path, 1, [entry(20, "all_reduce", "completed", 1) | {"process_group": ("8", "tp")}])
    assert file.exists()
    of_nccl(tmp_path, 2, begun(6))
    (whole,) = (group for group in report(str(tmp_path))["groups"] if group["group"] == "7")
    assert whole["without_dump"] == [1]
    assert (whole["first_missing"]["number"], whole["first_missing"]["missing"]) == (8, [2])
    text, _, code = said(str(tmp_path))
    assert code == 0
    assert "not reached by ranks 2: all_reduce number 8" in text


def test_a_run_that_did_not_fail_is_refused(tmp_path: Path, said: Any) -> None:
    text, errors, code = said(str(tmp_path))
    assert (text, code) == ("", 2)
    assert errors.startswith(f"error: {tmp_path}: expected the folder of a run that failed")


def test_a_start_sets_what_the_user_has_not_and_keeps_files_of_the_one_before(tmp_path: Path) -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    recorder.begin(str(tmp_path), environment)
    assert not (tmp_path / "debug").exists()
    recorder.set_aside(str(tmp_path), 1, 4, cuda=True)
    assert environment == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/debug/flight_nccl_rank_",
    }
    names = ["flight_nccl_rank_1", "flight_gloo_rank_5.json", "memory_rank1.pickle", "flight_nccl_rank_2", "notes"]
    for name in names:
        (tmp_path / "debug" / name).write_text(name)
    recorder.set_aside(str(tmp_path), 1, 4, cuda=False)
    assert sorted(os.listdir(tmp_path / "debug")) == ["before", "flight_nccl_rank_2", "notes"]
    assert sorted(os.listdir(tmp_path / "debug" / "before")) == sorted(names[:3])


def test_without_a_new_file_those_of_the_start_before_are_read(tmp_path: Path) -> None:
    of_nccl(tmp_path, 0, begun(9))
    recorder.set_aside(str(tmp_path), 0, 1, cuda=False)
    found = report(str(tmp_path))
    assert found["folder"] == str(tmp_path / "debug" / "before")
    assert found["groups"][0]["last_completed"]["number"] == 9
