"""What a terminal is shown of errors that quote a file, and of a command that a signal ends."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from quern.cli import main as main_module
from quern.cli.output import columns, ended_by_signals, err_console, reports_errors, say
from quern.errors import InputError, QuernError, ended_by
from support.programs import python

TEXT = "pages/é ü.jsonl: got '\x1b]0;owned\x07\x1b[2J\u202e'"
SHOWN = r"pages/é ü.jsonl: got '\x1b]0;owned\x07\x1b[2J\u202e'"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (InputError(f"{TEXT}\nerror: forged"), rf"error: {SHOWN}\nerror: forged"),
        (QuernError(f"{TEXT}\nrank 0: died"), f"error: {SHOWN}\nrank 0: died"),
        (OSError(errno.ENOENT, "No such file", "a\x1b[2J\nb"), r"error: a\x1b[2J\nb: No such file"),
    ],
)
def test_text_of_files_in_errors_moves_no_cursor(
    error: Exception, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @reports_errors
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err == f"{shown}\n"


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def listeners() -> Iterator[dict[int, Any]]:
    """By signal; whatever a test does, they are there again after it."""
    before = {number: signal.getsignal(number) for number in ENDING}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "code", "shown"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 3, "ended by SIGTERM"),
        (signal.SIGHUP, 3, "ended by SIGHUP"),
    ],
)
def test_a_signal_unwinds_a_command_and_is_one_line(
    number: int, code: int, shown: str, listeners: dict[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    unwound = []

    @ended_by_signals()
    @reports_errors
    def command() -> None:
        try:
            os.kill(os.getpid(), number)
            unwound.append("went on")
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as native code does, which has asked Python in between
        finally:
            for again in (signal.SIGTERM, signal.SIGHUP):  # what they ask for is being done
                os.kill(os.getpid(), again)
            unwound.append("unwound")

    with pytest.raises(typer.Exit) as caught:
        command()
    assert (caught.value.exit_code, unwound, ended_by) == (code, ["unwound"], [])
    assert capsys.readouterr().err == f"{shown}; run the same command again to go on\n"
    assert {number: signal.getsignal(number) for number in ENDING} == listeners


def test_a_signal_that_is_ignored_stays_so(listeners: dict[int, Any]) -> None:
    """As SIGINT of what a shell runs in the background, and SIGHUP under nohup."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    with ended_by_signals():
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
    assert {signal.getsignal(number) for number in ENDING} == {signal.SIG_IGN}


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_another_ctrl_c_ends_the_process_at_once(first: int) -> None:
    program = f"""
import os, signal, threading
from quern.cli.output import columns, ended_by_signals, err_console, reports_errors, say

@ended_by_signals()
@reports_errors
def command():
    try:
        os.kill(os.getpid(), {int(first)})
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()  # for ever, and no handler is run in native code

command()
"""
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted again, ended at once; run the same command again to go on\n"


def test_ctrl_c_before_the_command_has_begun_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        assert name == "quern.cli.data"
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "import_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["quern", "data", "run", "c.yaml"])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_hardly_anything_is_imported_before_ctrl_c_is_one_line() -> None:
    """Python itself tells of one that comes earlier."""
    program = (
        "import sys, quern.cli.main; print({'typer', 'click', 'rich', 'pydantic', 'yaml', 'fsspec'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_nobody_can_take_is_one_line(tmp_path: Path) -> None:
    """Also what is short enough to be written at the very end only; a reader that has gone is no error of ours."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    source = json.dumps([{"name": "a", "kind": "jsonl", "paths": str(tmp_path / "a.jsonl")}])
    (tmp_path / "c.yaml").write_text(f"run_dir: {tmp_path}/run\nsources: {source}\n")
    told = "error: standard output: No space left on device; what the command has done otherwise stands\n"
    for command in (
        ["--version"],
        ["data", "run", str(tmp_path / "c.yaml"), "--dry-run", "--json"],
    ):
        with open("/dev/full", "w") as full:
            found = subprocess.run(
                [python(), "-m", "quern.cli.main", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (found.returncode, found.stderr) == (1, told), command
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(
        [python(), "-m", "quern.cli.main", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")


def test_lines_are_printed_as_they_are_but_for_what_moves_a_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither markup nor names of emoji in a path or URL mean anything, and long lines stay one."""
    text = f"/data/a:x:b/:smile: [bold]run[/] {TEXT} {'long ' * 200}end"
    say(text)
    say("to stderr", err_console())
    told = capsys.readouterr()
    assert told.out == text.replace(TEXT, SHOWN) + "\n"
    assert told.err == "to stderr\n"


def test_a_table_shows_foreign_names_and_every_digit(capsys: pytest.CaptureFixture[str]) -> None:
    table = columns("[red]source", ">tokens", unbroken=[">tokens"])
    table.add_row("a name that is too long for its column", "1,234,567,890")
    Console(width=30).print(table)
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split() == ["[red]source", "tokens"]
    assert rows[0].endswith("1,234,567,890")
    assert len(rows) > 1
