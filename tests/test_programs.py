"""Forked programs (``support.programs``) do what Python itself does with the same arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import environment
from support.programs import python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are Python itself")

SCRIPT = """
import atexit, os, sys, threading
atexit.register(print, "the end")
threading.Timer(0.1, print, ["a thread"]).start()
print(__name__, sys.argv, os.getcwd(), os.environ.get("HERE"), sys.stdin.read(), sys.path[0], sys.stdout.isatty())
print("said", file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", SCRIPT, "-x", "3"],
        ["-m", "part.script", "0"],
        ["script.py", "5"],
        ["-u", "script.py", "6"],
        ["-P", "-u", "script.py", "7"],
        ["-I", "-c", SCRIPT, "-x", "3"],
        ["-c", "raise SystemExit('why')"],
        ["-c", "import os; os.kill(os.getpid(), 11)"],
        ["-c", "import os; os._exit(4)"],
        ["-c", "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'exit(9)']).returncode)"],
    ],
)
def test_arguments_folder_environment_streams_and_the_end_are_those_of_python(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "part").mkdir()
    for path in ("script.py", "part/script.py"):
        (tmp_path / path).write_text(SCRIPT)
    expected, found = (
        subprocess.run([executable, *arguments], cwd=tmp_path, env={**os.environ, "HERE": "a"}, input="in",
                       capture_output=True, text=True, check=False)
        for executable in (sys.executable, python())
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


def test_an_error_is_told_as_python_tells_it() -> None:
    done = subprocess.run([python(), "-c", "def f(): 1 / 0\nf()"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("Traceback")
    assert last == "ZeroDivisionError: division by zero"


def test_it_has_the_descriptors_it_is_given_and_no_others(tmp_path: Path) -> None:
    program = "import os, sys; print([n for n in range(int(sys.argv[1]) + 99) if os.path.exists(f'/proc/self/fd/{n}')])"
    program += "; os.write(int(sys.argv[1]), b'written')"
    with (tmp_path / "file").open("w") as file:
        number = file.fileno()
        done = subprocess.run(
            [python(), "-c", program, str(number)], pass_fds=[number], stdout=subprocess.PIPE,
            text=True, check=True,
        )  # fmt: skip
    assert done.stdout == f"{[0, 1, 2, number]}\n"
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.slow
def test_processes_of_multiprocessing_start(tmp_path: Path) -> None:
    """Its servers are handed descriptors, and are forked too where this is its executable."""
    (tmp_path / "work.py").write_text(
        "import multiprocessing, sys\n"
        "def work(n): return n + 1, 'torch' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_executable(sys.executable)\n"
        "    with multiprocessing.get_context('forkserver').Pool(2) as pool: print(pool.map(work, [1, 2]))\n"
    )
    done = subprocess.run([python(), "work.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[(2, True), (3, True)]\n"


WAITS = """
import os, signal, time
def told(number, frame):
    os.write(1, b"told")
    os._exit(8)
signal.signal(signal.SIGTERM, told)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


def gone(process: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_the_program_and_it_never_stays(number: signal.Signals) -> None:
    process = subprocess.Popen([python(), "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    running = int(process.stdout.readline())
    assert running != process.pid
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert (process.returncode, said) == (8, "told")
    else:
        assert process.returncode == -number
    gone(running)


@pytest.mark.long
def test_no_program_outlives_the_tests() -> None:
    code = (
        "import subprocess; from support.programs import python\n"
        f"print(subprocess.Popen([python(), '-c', {WAITS!r}], stdout=subprocess.PIPE).stdout.readline().decode())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, check=True)
    gone(int(done.stdout))


def test_what_a_program_imports_of_quern_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "quern").mkdir()
    (tmp_path / "quern" / "__init__.py").write_text("__version__ = 'another'\n")
    for more, expected in (({"PYTHONPATH": str(tmp_path)}, "another"), ({}, "0.")):
        done = subprocess.run(
            [python(), "-c", "import quern; print(quern.__version__)"],
            env={**os.environ, **more}, cwd="/", stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith(expected)


@pytest.mark.slow
def test_a_program_that_watches_its_parent_ends_with_it_and_not_before() -> None:
    watcher = (
        "import os, sys, time\n"
        "print(os.getpid(), flush=True)\n"
        "for _ in range(5): time.sleep(0.1); assert os.getppid() == int(sys.argv[2])\n"
        "print('there', flush=True)\n"
        "while os.getppid() == int(sys.argv[2]): time.sleep(0.1)"
    )
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([{python()!r}, '-c', {watcher!r}, '--parent', str(os.getpid())])\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        try:
            assert parent.stdout is not None
            number = int(parent.stdout.readline())
            assert parent.stdout.readline() == "there\n"
        finally:
            parent.kill()
        gone(number)
