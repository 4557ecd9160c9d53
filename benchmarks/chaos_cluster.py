"""A Ray cluster on this machine whose machines can be lost: each is a raylet with processes of its own.

    with machines(folder) as cluster:                 # a head and one machine more, one CPU each
        run(..., f"ray.address={cluster.address}")
        cluster.kill_machine(); cluster.add_machine()

With ``namespace=True`` the second machine lives in a network namespace of its own, at the end of a virtual cable that
can be pulled; that needs root. Nothing of another Ray on the machine is touched.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ray.util import get_node_ip_address

#: A lost machine is noticed within about ten seconds; Ray's own settings take twice as long.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
}
STORE_BYTES = 100 << 20
START_ATTEMPTS = 3
LOG_CHARACTERS = 4000
HEAD_ADDRESS, OTHER_ADDRESS = "10.213.77.1", "10.213.77.2"


@dataclass
class Machine:
    """One ``ray start --block`` and everything below it."""

    process: subprocess.Popen[bytes]

    def tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def workers(self) -> list[psutil.Process]:
        """Processes that run tasks of the engine."""
        found = []
        for process in self.tree():
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith("ray::_Worker"):
                    found.append(process)
        return found

    def raylet(self) -> psutil.Process | None:
        for process in self.tree():
            with suppress(psutil.Error):
                if process.name() == "raylet":
                    return process
        return None

    def kill(self, *, raylet_alone: bool = False) -> bool:
        """SIGKILL for the raylet, and for all its workers unless they shall find out by themselves."""
        raylet = self.raylet()
        if raylet is None:
            return False
        rest = self.tree()
        with suppress(psutil.NoSuchProcess):
            raylet.kill()
        if not raylet_alone:
            for process in rest:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return True

    def end(self) -> None:
        """Stop it for good."""
        rest = self.tree()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in rest:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class Cluster:
    """A head and other machines."""

    folder: Path
    address: str
    environment: dict[str, str]
    head: Machine
    cable: Cable | None = None
    others: list[Machine] = field(default_factory=list)

    def add_machine(self) -> Machine:
        """Another machine with one CPU joins; on a busy computer Ray may give up, and is asked again."""
        own = ["--address", self.address]
        inside = []
        if self.cable is not None:
            own += ["--node-ip-address", OTHER_ADDRESS]
            inside = ["ip", "netns", "exec", self.cable.namespace]
        for _ in range(START_ATTEMPTS):
            up = _num_up(self.folder)
            machine = Machine(_ray_start(self.folder, own, self.environment, inside))
            if _has_come_up(self.folder, up, machine):
                self.others.append(machine)
                return machine
            machine.end()
        raise SystemExit(_no_ray(self.folder))

    def workers(self) -> list[psutil.Process]:
        return [worker for machine in (self.head, *self.others) for worker in machine.workers()]


@dataclass
class Cable:
    """A network namespace and the virtual cable to it."""

    namespace: str
    near: str

    def plug(self, state: str) -> None:
        """``up`` or ``down``."""
        _ip("link", "set", self.near, state)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def _cable() -> Iterator[Cable]:
    if os.geteuid() != 0:
        raise SystemExit("link: needs root, for network namespaces")
    tag = secrets.token_hex(3)
    cable = Cable(f"quern-{tag}", f"qn{tag}a")
    far = f"qn{tag}b"
    _ip("netns", "add", cable.namespace)
    try:
        _ip("link", "add", cable.near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", cable.namespace)
        _ip("addr", "add", f"{HEAD_ADDRESS}/30", "dev", cable.near)
        _ip("link", "set", cable.near, "up")
        for command in (["addr", "add", f"{OTHER_ADDRESS}/30", "dev", far], ["link", "set", far, "up"],
                        ["link", "set", "lo", "up"]):  # fmt: skip
            _ip("netns", "exec", cable.namespace, "ip", *command)
        yield cable
    finally:
        _ip("netns", "delete", cable.namespace)
        subprocess.run(["ip", "link", "delete", cable.near], capture_output=True, check=False)


def _ends_with_its_parent() -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: also when the parent is killed, no Ray is left


def _ray_start(
    folder: Path, own: list[str], environment: dict[str, str], inside: list[str] | None = None
) -> subprocess.Popen[bytes]:
    ray = Path(sys.executable).with_name("ray")
    command = [
        *(inside or []), str(ray), "start", *own, "--num-cpus=1", f"--object-store-memory={STORE_BYTES}",
        "--disable-usage-stats", "--block",
    ]  # fmt: skip
    with open(folder / "ray.log", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=_ends_with_its_parent)


def _head(folder: Path, host: str, session: Path, environment: dict[str, str], cable: Cable | None) -> Cluster:
    """A cluster of its head alone; Ray is asked again, at another port, when it gives up on a busy computer."""
    for attempt in range(START_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]  # another process may take it before Ray does
        own = ["--head", f"--port={port}", f"--node-ip-address={host}", "--include-dashboard=false",
               f"--temp-dir={session}-{attempt}"]  # fmt: skip
        up = _num_up(folder)
        head = Machine(_ray_start(folder, own, environment))
        if _has_come_up(folder, up, head):
            return Cluster(folder, f"{host}:{port}", environment, head, cable)
        head.end()
    raise SystemExit(_no_ray(folder))


@contextmanager
def machines(
    folder: Path, *, namespace: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster of two, with ``environment`` besides this process's own; all of it ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    session = Path("/tmp") / f"qc-{secrets.token_hex(3)}"  # sockets have short names or none
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    full = {**os.environ, **HEALTH, **secret, **(environment or {})}
    full.pop("RAY_ADDRESS", None)
    with _cable() if namespace else _nothing() as cable:
        host = HEAD_ADDRESS if cable is not None else get_node_ip_address()  # a driver takes 127.0.0.1 for this
        cluster = _head(folder, host, session, full, cable)
        try:
            cluster.add_machine()
            yield cluster
        finally:
            for machine in (*cluster.others, cluster.head):
                machine.end()
            for attempt in range(START_ATTEMPTS):
                shutil.rmtree(f"{session}-{attempt}", ignore_errors=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _num_up(folder: Path) -> int:
    """Machines of which Ray has said that they are up."""
    log = folder / "ray.log"
    return log.read_bytes().count(b"Ray runtime started") if log.exists() else 0


def _no_ray(folder: Path) -> str:
    said = (folder / "ray.log").read_text(errors="replace")[-LOG_CHARACTERS:]
    return f"no Ray came up in {START_ATTEMPTS} attempts; it said last:\n{said}"


def _has_come_up(folder: Path, before: int, machine: Machine, patience_s: float = 90) -> bool:
    began = time.monotonic()
    while time.monotonic() - began < patience_s and machine.process.poll() is None:
        if _num_up(folder) > before:
            return True
        time.sleep(0.2)
    return False


def pick(processes: list[psutil.Process], count: int, draw: random.Random) -> list[psutil.Process]:
    return draw.sample(processes, min(count, len(processes)))
