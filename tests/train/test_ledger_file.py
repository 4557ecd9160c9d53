"""The ledger as a file: synced line by line, cut at any byte, damaged, read by others while it grows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quern.errors import QuernError
from quern.mixtures.order import Order
from quern.train.history.ledger import Ledger, read_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def small(path: Path) -> list[dict[str, Any]]:
    with Ledger(path) as ledger:
        ledger.append("start", step=0, data_step=0, order="a")
        ledger.append("spike", step=4, source="Größe", loss=math.nan, z=[math.inf, 1.5], inner={"x": -math.inf})
        ledger.append("end", step=9)
        return list(ledger.entries)


def test_lines_come_back_as_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    entries = small(path)
    stripped = [{k: v for k, v in entry.items() if k != "time"} for entry in entries]
    assert stripped == [
        {"kind": "start", "step": 0, "data_step": 0, "order": "a"},
        {"kind": "spike", "step": 4, "source": "Größe", "loss": None, "z": [None, 1.5], "inner": {"x": None}},
        {"kind": "end", "step": 9},
    ]
    assert all(entry["time"].endswith("+00:00") for entry in entries)
    assert read_ledger(path) == entries == [json.loads(line) for line in path.read_text().splitlines()]
    with Ledger(path) as ledger:
        assert (ledger.entries, ledger.offset) == (entries, path.stat().st_size)
    assert read_ledger(path) == entries


@pytest.mark.parametrize("tail", [b"", b"\n", b"\0\0\0\n", b"7\n", b'{"kind": "end", "step": 9}', b"\xff\xfe"])
def test_only_a_torn_last_line_is_cut(path: Path, tail: bytes) -> None:
    entries = small(path)
    whole = path.read_bytes()
    torn = whole + tail
    path.write_bytes(torn)
    assert read_ledger(path) == entries
    assert path.read_bytes() == torn  # a reader changes nothing
    with Ledger(path) as ledger:
        assert ledger.entries == entries
        assert path.read_bytes() == whole
        ledger.append("end", step=10)
    assert [entry["step"] for entry in read_ledger(path)] == [0, 4, 9, 10]


def test_a_ledger_cut_at_any_byte_keeps_its_whole_lines(path: Path) -> None:
    entries = small(path)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        number, kept = whole[:cut].count(b"\n"), whole[:cut].rfind(b"\n") + 1
        with Ledger(path) as ledger:
            assert (ledger.entries, ledger.offset) == (entries[:number], kept)
            ledger.append("stopped", step=1, signal=15)
        assert [e["kind"] for e in read_ledger(path)][-1] == "stopped"
        for stop in (kept, kept + 1):  # a stop within the next line leaves that line out
            assert read_ledger(path, stop) == entries[:number]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"kind": "en', "line 2 is damaged: expected a JSON object"),
        (b"[1]", "line 2 is damaged: expected a JSON object"),
        (b"", "line 2 is damaged: expected a JSON object"),
        (b'{"step": 1}', "line 2: kind: expected text, got None"),
        (
            b'{"kind": "resume", "step": -1, "data_step": 0, "order": "a"}',
            "line 2: resume.step: expected an integer ≥ 0",
        ),
        (b'{"kind": "resume", "step": 1, "data_step": true, "order": "a"}', "line 2: resume.data_step: expected"),
        (b'{"kind": "end", "step": 100000000000000000000000}', "line 2: end.step: expected an integer"),
        (b"[" * 100_000, "line 2 is damaged: expected a JSON object"),
        (b'{"kind": "resume", "step": 1, "data_step": 1}', "line 2: resume.order: expected text, got None"),
        (b'{"kind": "order", "hash": "a", "spec": 1}', "line 2: order.spec: expected a mapping, got 1"),
    ],
)
def test_a_damaged_line_is_named(path: Path, line: bytes, message: str) -> None:
    small(path)
    lines = path.read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], line, *lines[1:]])
    path.write_bytes(damaged)
    for opening in (Ledger, read_ledger):
        with pytest.raises(QuernError) as caught:
            opening(path)
        assert str(caught.value).startswith(f"{path}: {message}")
    assert path.read_bytes() == damaged


def test_a_damaged_line_before_a_torn_one_is_not_cut(path: Path) -> None:
    small(path)
    with open(path, "ab") as file:  # the line was whole once, for the next one was begun
        file.write(b'\0\0\n{"kind": "e')
    with pytest.raises(QuernError, match="line 4 is damaged"):
        Ledger(path)


def test_a_line_that_could_not_be_read_back_is_not_written(path: Path) -> None:
    with Ledger(path) as ledger:
        for kind, fields in (("start", {"step": 0, "data_step": 0}), ("skipped", {"step": -1, "data_step": 0})):
            with pytest.raises(ValueError, match=f"{kind}.(order|step): expected"):
                ledger.append(kind, **fields)
        with pytest.raises(ValueError, match="expected one of start, resume, rollback, got 'jump'"):
            ledger.move("jump", 0, 0, Order((1,), (4,), 1))
        assert ledger.entries == []
    with pytest.raises(ValueError, match="closed"):
        ledger.append("end", step=1)
    ledger.close()
    assert (path).read_bytes() == b""


def test_every_line_and_the_files_name_are_synced(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []

    def record(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", record)
    with Ledger(path) as ledger:
        assert [name for name, _ in synced] == [str(tmp_path)]
        for step in range(3):
            ledger.append("end", step=step)
            assert synced[-1] == (str(path), ledger.offset) == (str(path), path.stat().st_size)


def test_a_full_disk_leaves_the_ledger_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(path)
    whole = path.read_bytes()
    real = os.write
    with Ledger(path) as ledger:
        calls = iter([3, OSError(28, "No space left on device")])

        def half(descriptor: int, data: bytes) -> int:
            answer = next(calls)
            if isinstance(answer, OSError):
                raise answer
            return real(descriptor, data[:answer])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(
            QuernError, match=r"/ledger\.jsonl: No space left on device \(.* are free on /.*; make room"
        ):
            ledger.append("end", step=10)
        assert path.read_bytes() == whole
        monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
        ledger.append("end", step=11)  # in many pieces
    assert [entry["step"] for entry in read_ledger(path)] == [0, 4, 9, 11]


def test_a_checkpoints_offset_beyond_the_file_is_an_error(tmp_path: Path, path: Path) -> None:
    entries = small(path)
    assert read_ledger(path, path.stat().st_size) == entries
    with pytest.raises(QuernError, match=r"expected at least .* lines are lost"):
        read_ledger(path, path.stat().st_size + 1)
    with pytest.raises(QuernError, match=r"gone\.jsonl: cannot be read"):
        read_ledger(tmp_path / "gone.jsonl")


WRITER = """
import sys
from quern.train.history.ledger import Ledger
with Ledger(sys.argv[1]) as ledger:
    for step in range(400):
        if step % 100 == 99:
            sys.stdin.readline()
        ledger.append("spike", step=step, text="x" * (step * 37 % 5000))
"""


@pytest.mark.slow
def test_another_process_reads_while_it_grows(path: Path) -> None:
    path.touch()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, text=True)
    lengths = set()
    try:
        while writer.poll() is None:
            steps = [entry["step"] for entry in read_ledger(path)]
            assert steps == list(range(len(steps)))
            if len(steps) % 100 == 99 and len(steps) not in lengths:
                writer.stdin.write("\n")  # it goes on
                writer.stdin.flush()
            lengths.add(len(steps))
            time.sleep(0.001)
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
    assert writer.returncode == 0
    assert len(read_ledger(path)) == 400
    assert {99, 199, 299, 399} <= lengths
