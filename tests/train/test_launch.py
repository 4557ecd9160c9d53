"""Ranks on this machine: their environments, how one's end becomes that of all, and that none is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quern.train.processes import launch
from support.waits import has_ended, until

pytestmark = pytest.mark.slow


def started(program: str, count: int, folder: Path) -> int | None:
    """The code that ``wait`` says of ``count`` processes, which are all gone then."""
    command = [sys.executable, "-c", program, str(folder)]
    with launch.started(command, launch.environments(count), launch.send) as workers:
        code = launch.wait(workers)
    assert all(worker.returncode is not None for worker in workers)
    return code


def test_every_rank_is_told_its_place(tmp_path: Path) -> None:
    program = (
        "import os, sys; names = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(' '.join(os.environ[n] for n in names))"
    )
    assert started(program, 3, tmp_path) == 0
    places = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [place[:5] for place in places] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert len({place[5] for place in places}) == 1


def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    program = (
        "import glob, os, sys, torch\n"
        "from quern.train.processes.ranks import open_ranks\n"
        "with open_ranks('cpu') as ranks:\n"
        "    assert ranks.sum(torch.ones(1)).item() == 2\n"
        "    links = [os.readlink(link) for link in glob.glob('/proc/self/fd/*') if os.path.islink(link)]\n"
        "    rows = [row.split() for kind in ('tcp', 'tcp6') for row in open(f'/proc/net/{kind}')]\n"
        "    heard = [row[1] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in links]\n"
        "    open(os.path.join(sys.argv[1], str(ranks.rank)), 'w').write(' '.join(heard))\n"
        "    ranks.barrier()\n"
    )
    assert started(program, 2, tmp_path) == 0
    heard = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert heard[0], "rank 0 has a store"
    assert {address.partition(":")[0] for places in heard for address in places} <= {"0100007F"}  # 127.0.0.1


def test_one_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    assert started("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)", 3, tmp_path) == 7


def test_a_failure_elsewhere_ends_those_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with launch.started(command, launch.environments(1), launch.send) as workers:
        assert launch.wait(workers, lambda failed: True) is None
    assert workers[0].returncode == -signal.SIGKILL


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(os.path.join(sys.argv[1], 'child'), 'w').write(str(child.pid)); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with launch.started(command, launch.environments(1), launch.send):
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    until(lambda: has_ended(int((tmp_path / "child").read_text())))


def test_a_death_by_signal_is_told_before_what_failed_of_it() -> None:
    class Ended:
        def __init__(self, code: int) -> None:
            self.returncode = code

        def poll(self) -> int:
            return self.returncode

    assert launch.wait([Ended(1), Ended(-9), Ended(0)]) == -9  # type: ignore[list-item]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 3), (signal.SIGHUP, 3), (signal.SIGUSR1, 0)])
def test_a_signal_reaches_the_workers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The last one is a request, which ends nobody: they end by themselves here."""
    program = (
        "import os, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit({code}))\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close(); time.sleep(600)"
    )

    def send() -> None:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)))
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=send)
    thread.start()
    assert started(program, 2, tmp_path) == code
    thread.join()
    assert signal.getsignal(number) == before


def test_a_hang_up_that_is_ignored_ends_nothing() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch.started([sys.executable, "-c", ""], launch.environments(1), launch.send):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


RANK = (
    "import os, subprocess, sys, time; from quern.train.processes import launch; launch.end_with_launcher()\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "with open(os.path.join(sys.argv[1], os.environ['RANK'] + '.part'), 'w') as file:\n"
    "    file.write(f'{os.getpid()} {child.pid}')\n"
    "os.rename(file.name, file.name[:-5]); time.sleep(600)"
)
OF_A_BENCHMARK = (
    "import os, sys, time; from quern.train.bench import worker\n"
    "def run(spec):\n"
    "    with open(os.path.join(sys.argv[1], os.environ['RANK'] + '.part'), 'w') as file:\n"
    "        file.write(f'{os.getpid()}')\n"
    "    os.rename(file.name, file.name[:-5]); time.sleep(600)\n"
    "worker._run = run; worker.main(sys.argv[1])"
)
OURS = (
    "import sys; from quern.train.processes import launch\n"
    "with launch.started([sys.executable, '-c', *sys.argv[1:]], launch.environments(2), launch.send) as workers:\n"
    "    launch.wait(workers)"
)
TORCHRUN = (
    "import os, subprocess, sys, time\n"
    "for rank in '01': subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True,\n"
    "                                   env={**os.environ, 'RANK': rank, 'TORCHELASTIC_RUN_ID': 'x'})\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize(("launcher", "rank"), [(OURS, RANK), (TORCHRUN, RANK), (OURS, OF_A_BENCHMARK)])
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path, launcher: str, rank: str) -> None:
    """And so does what they have started."""
    (tmp_path / "spec.json").write_text("{}")
    process = subprocess.Popen([sys.executable, "-c", launcher, rank, str(tmp_path)])
    until(lambda: all((tmp_path / str(number)).exists() for number in range(2)))
    process.kill()
    process.wait()
    left = [int(pid) for number in range(2) for pid in (tmp_path / str(number)).read_text().split()]
    assert len(left) >= 2
    try:
        until(lambda: all(map(has_ended, left)))
    finally:
        for pid in left:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
