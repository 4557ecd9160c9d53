"""Shared by all commands: one-line errors, exit codes, and one JSON document on stdout if requested."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import typer
from rich.console import Console, JustifyMethod, OverflowMethod
from rich.table import Table
from rich.text import Text

from quern.errors import STDOUT, InputError, QuernError, ended_by, of_stdout
from quern.train.processes.launch import ending_signals, leave_lost_terminal

__all__ = [
    "JSON", "columns", "ended_by_signals", "err_console", "json_stdout", "out_console", "plain", "plain_line",
    "reports_errors", "say",
]  # fmt: skip

#: Controls but tab and newline, what turns the direction of writing, and halves of characters, which no output takes.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

JSON = typer.Option(False, "--json", help="Print one JSON document on stdout and nothing else.")


def out_console() -> Console:
    """A console on stdout, for results."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def err_console() -> Console:
    """A console on stderr, for everything that is not the result."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def columns(*names: str, unbroken: Collection[str] = (), title: str | None = None) -> Table:
    """A table without lines. A name that begins with ``>`` is of figures, to the right; cells fold but below those
    names that are in ``unbroken``."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in names:
        figures, said = name.startswith(">"), Text(plain(name.removeprefix(">")))
        justify: JustifyMethod = "right" if figures else "left"
        overflow: OverflowMethod = "ellipsis" if name in unbroken else "fold"
        table.add_column(said, justify=justify, overflow=overflow, no_wrap=name in unbroken)
    return table


def say(text: str, console: Console | None = None) -> None:
    """Print lines whose words may be a page's or another's file's, on stdout or what ``console`` is on."""
    (console or out_console()).print(plain(text), markup=False, emoji=False, soft_wrap=True)


def plain(text: str) -> str:
    """A page's text made safe for a terminal: characters that would move its cursor or colour it become ``\\x1b``."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def plain_line(text: str, chars: int | None = None) -> str:
    """:func:`plain`, in one line, and of at most ``chars`` characters of the text."""
    cut = text if chars is None or len(text) <= chars else f"{text[:chars]}…"
    return plain(cut.replace("\n", "\\n").replace("\t", "\\t"))


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A bad input or a failed run ends in one line on stderr and the right exit code, never in a traceback. The help is
    the docstring, whose paragraphs are as wide as the terminal and not as the source."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except QuernError as error:
            # a bad input is one line, whatever it quotes; of a failed run there may be more to say
            told = plain_line(str(error)) if isinstance(error, InputError) else plain(str(error))
            print(f"error: {told}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:
            if error.filename in (None, STDOUT):
                raise
            print(f"error: {plain_line(f'{error.filename}: {error.strerror}')}", file=sys.stderr)
            raise typer.Exit(QuernError.exit_code) from None
        except KeyboardInterrupt:
            how, code = (f"ended by {ended_by[0]}", 3) if ended_by else ("interrupted", 130)  # 3: as of training
            print(f"{how}; run the same command again to go on", file=sys.stderr)
            raise typer.Exit(code) from None

    wrapped.__doc__ = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
    return wrapped


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block as Ctrl-C does, and stand in ``ended_by``. Then another Ctrl-C ends the
    process at once, also out of native code, and the others change nothing: what they ask for is being done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, frame: FrameType | None) -> None:
        for other in before:
            signal.signal(other, (lambda *_: None) if other == signal.SIGINT else signal.SIG_IGN)
        if number == signal.SIGHUP:
            leave_lost_terminal()
        if number != signal.SIGINT:
            ended_by.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in ending_signals() if signal.getsignal(n) != signal.SIG_IGN}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    listener = threading.Thread(target=_end_at_once, args=(reader, before.keys()), name="signals", daemon=True)
    listener.start()
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for number in before:
            signal.signal(number, heard)
        yield
    finally:
        ended_by.clear()
        signal.set_wakeup_fd(others)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        listener.join()
        os.close(reader)


def _end_at_once(pipe: int, ending: Collection[int]) -> None:
    """At a SIGINT behind another signal; Python tells their numbers here at once, its handlers wait for native code."""
    begun = False
    while numbers := os.read(pipe, 1):
        if begun and numbers[0] == signal.SIGINT:
            cursor = b"\x1b[?25h" if os.isatty(2) else b""
            os.write(2, cursor + b"interrupted again, ended at once; run the same command again to go on\n")
            os._exit(130)
        begun |= numbers[0] in ending


@contextmanager
def json_stdout(active: bool) -> Iterator[Callable[[Any], None]]:
    """Yields ``emit(value)``. While active, file descriptor 1 is stderr's, so that what native code and child
    processes print cannot reach stdout; ``emit`` writes to the real one.
    """
    if not active:
        yield lambda value: None
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)

    def emit(value: Any) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, default=str) + "\n"
        data = text.encode("utf-8", "backslashreplace")  # half a character stands as \\udc80, which JSON knows too
        while data:
            with of_stdout():
                data = data[os.write(real, data) :]

    try:
        yield emit
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)
