"""The errors shown to users: invalid input, a run that could not continue, and weights that must be left."""

from collections.abc import Iterator
from contextlib import contextmanager

#: "SIGTERM" or "SIGHUP" while a KeyboardInterrupt ends this process for it; a library may raise one of its own.
ended_by: list[str] = []

#: Exit code of a training run that a signal ended after it had saved a checkpoint.
STOPPED = 3

#: Exit code of a training run in which a rank hung.
HUNG = 5

#: Exit code of a training run that was saved and left, as a GPU of it is failing.
FAILING = 6

#: The file name of an error of standard output.
STDOUT = "standard output"


@contextmanager
def of_stdout() -> Iterator[None]:
    """Name standard output in its write error, since the system gives no name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, STDOUT) from None


class QuernError(Exception):
    """The run failed; the message says what, where and what to do. Exit code 1."""

    exit_code = 1


class InputError(QuernError):
    """An input is wrong: a config, a path, a file's content. Exit code 2.

    The message is one line that names the file, the field or record, the value and the expectation.
    """

    exit_code = 2


class GoBackError(QuernError):
    """The weights are to be left: the next start of the run goes back to an earlier checkpoint. Exit code 4."""

    exit_code = 4


class DeviceError(QuernError):
    """A GPU is failing; the run has been saved. Exit code 6."""

    exit_code = FAILING


def one_line(error: BaseException, chars: int = 300) -> str:
    """The message of an error in one line of at most ``chars`` characters; where it has none, the name of its class."""
    return " ".join(str(error).split())[:chars] or type(error).__name__


def named_line(error: BaseException) -> str:
    """``ValueError: what it says``, the first line of it; the name of the class alone where it says nothing."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's message: Arrow, DuckDB and Ray draw and tell more below it. Where it has no message,
    the name of its class."""
    return (str(error).splitlines() or [type(error).__name__])[0]
