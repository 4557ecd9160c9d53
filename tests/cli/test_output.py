"""What a terminal is shown of errors that quote a file."""

from __future__ import annotations

import errno

import pytest
import typer

from quern.cli.output import reports_errors
from quern.errors import InputError, QuernError

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
