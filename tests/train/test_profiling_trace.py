"""What is no trace is refused in words; what is odd in one is named by file and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.train.profiling.account import account
from quern.train.profiling.report import report
from quern.train.profiling.result import of_traces
from quern.train.step.trace import read_trace
from support.train import trace_case as case

GOOD = case.op("aten::mul", 0, 3)


ODD = [None, True, -1, 2**62, 10**400, 1.5, float("nan"), "", "\x1b[31m", [], [[]], [1], ["a"], [[-1, -2], [3, 4]],
       [[10**400, 3], [3, 4]], {}, {"a": 1}]  # fmt: skip


@pytest.mark.long
def test_an_odd_value_anywhere_is_read_or_refused_by_name(tmp_path):
    """Every field of a few events takes every odd value: an account, or one error, never another exception."""
    path = str(tmp_path / "t.json")
    refused = read = 0
    for number in range(len(case.on_a_gpu())):
        for name in [*case.on_a_gpu()[number], "Input Dims", "Input type", "correlation", "stream"]:
            for value in ODD:
                events = json.loads(json.dumps(case.on_a_gpu()))
                where = events[number] if name in events[number] else events[number].setdefault("args", {})
                where[name] = value
                case.write(Path(path), events)
                try:
                    report(of_traces([account(read_trace(path))]))
                    read += 1
                except InputError:
                    refused += 1
    assert read > 100
    assert refused > 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "expected JSON"),
        (b"\x00\xff\xfe", "expected JSON"),
        (b'{"traceEvents": [', "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"\x1f\x8bnot gzip", "expected JSON"),
        (b"[]", "traceEvents: expected a list of events"),
        (b'{"traceEvents": {}}', "traceEvents: expected a list of events"),
        (b'{"traceEvents": []}', "traceEvents: expected events of category cpu_op, found none"),
        (b'{"traceEvents": [7]}', "traceEvents[0]: expected an object, got 7"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, expected):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(InputError) as refused:
        read_trace(str(path))
    assert str(refused.value).startswith(f"{path}: ")
    assert expected in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        read_trace(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": None}, "traceEvents[1].name: expected text, got None"),
        ({"ts": "3"}, "traceEvents[1].ts: expected microseconds, got '3'"),
        ({"ts": float("nan")}, "traceEvents[1].ts: expected microseconds, got nan"),
        ({"ts": 10**30}, "traceEvents[1].ts: expected microseconds, got 1000"),
        ({"dur": float("inf")}, "traceEvents[1].dur: expected microseconds, got inf"),
        ({"dur": -1}, "traceEvents[1].dur: expected microseconds ≥ 0, got -1"),
        ({"dur": True}, "traceEvents[1].dur: expected microseconds, got True"),
        ({"args": []}, "traceEvents[1].args: expected an object, got []"),
        ({"tid": [1]}, "traceEvents[1].tid: expected a number or text, got [1]"),
        ({"name": "aten::mm", "args": {"Input Dims": "4"}}, "traceEvents[1].args.Input Dims: expected a list, got '4'"),
        (
            {"name": "aten::mm", "args": case.sizes([4, 2], [3, 4])},
            "traceEvents[1].args.Input Dims: expected those of aten::mm, got [[4, 2], [3, 4]]",
        ),
        (
            {"name": "aten::mm", "args": {"Input Dims": [[1.5, 2], [2, 3]], "Input type": ["float", "float"]}},
            "traceEvents[1].args.Input Dims: expected lists of integers, got [1.5, 2]",
        ),
        ({"cat": "kernel", "args": {"correlation": "x"}}, "traceEvents[1].args.correlation: expected an integer"),
    ],
)
def test_an_odd_event_is_named(tmp_path, change: dict[str, Any], expected: str):
    path = case.write(tmp_path / "t.json", [GOOD, case.op("aten::mul", 4, 6) | change])
    with pytest.raises(InputError) as refused:
        account(read_trace(path))
    assert str(refused.value).startswith(f"{path}: ")
    assert expected in str(refused.value)


def test_a_rank_that_is_none_is_named(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [GOOD], "distributedInfo": {"rank": -1}}))
    with pytest.raises(InputError, match=r"distributedInfo.rank: expected an integer ≥ 0, got -1"):
        read_trace(str(path))


def test_compressed_is_the_same(tmp_path):
    plain = case.write(tmp_path / "t.json", case.on_a_gpu(), rank=3)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    first, second = read_trace(plain), read_trace(str(tmp_path / "t.json.gz"))
    assert first.rank == second.rank == 3
    assert [event.start for event in first.host] == [event.start for event in second.host]


def test_times_are_whole_nanoseconds_though_they_stand_at_the_machines_own_clock(tmp_path):
    """A clock of 52 days in microseconds has three digits behind the point, and no more."""
    start = 4_458_966_875_322.642
    (event,) = read_trace(case.write(tmp_path / "t.json", [GOOD | {"ts": start, "dur": 249.05}])).host
    assert (event.start, event.stop - event.start) == (4_458_966_875_322_642, 249_050)
