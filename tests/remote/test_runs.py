"""Data runs whose input, output and commits are objects of a store that fails: the bytes of a local run, or one line.

Every object is put with the SHA-256 of its bytes; that it has it shows that it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.data_pipeline import partition
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.engine import InProcess
from quern.data_pipeline.execution.run_directory import open_run
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_run.config import DataRun
from quern.demo import write_site
from quern.errors import QuernError
from quern.remote import lease
from quern.remote.objects import Objects
from quern.remote.retry import Backoff
from quern.tokenize.writing import run as tokens
from support.processes import environment
from support.programs import python
from support.remote.s3_server import Fault, Server

ROOT = Path(__file__).resolve().parents[2]
OFTEN = 10**6
WORDS = ("river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper", "window", "garden", "thunder")


def write_input(base: str) -> None:
    for part in range(3):
        lines = []
        for number in range(part * 24, part * 24 + 24):
            draw = random.Random(number)
            text = " ".join(
                f"The {draw.choice(WORDS)} of {draw.choice(WORDS)} is number {draw.random()}." for _ in range(30)
            )
            lines.append(json.dumps({"id": str(number), "url": f"https://s.example/{number}", "text": text}))
        storage.publish_bytes(storage.join(base, "in", f"{part}.jsonl"), ("\n".join(lines) + "\n").encode())


def settings(base: str) -> DataRun:
    return DataRun.model_validate(
        {
            "run_dir": storage.join(base, "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": storage.join(base, "in", "*.jsonl")}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "tokenize": {"encoding": "trained", "vocab_size": 400, "validation": 0.1, "shard_tokens": 5400},
        }
    )


def run(config: DataRun) -> None:
    partitions = pages.plan_sources(config)
    with open_run(config.run_dir, config.model_dump(mode="json")) as directory:
        with RunProgress(background=False) as progress:
            result = pages.run(config, partitions, InProcess(), progress)
        scratch = storage.join(directory.scratch, "tokens")
        tokens.run(config.run_dir, result.partitions, config.tokenize, config.seed, InProcess(), scratch)
        directory.finish({}, pages.inputs_digest(partitions))


def digests(folder: Path) -> dict[str, str]:
    """File of a local run, but for what names places and times, → SHA-256."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (name := str(path.relative_to(folder))).startswith(("tokens/", "duplicates/"))
    }


def stored(server: Server, below: str = "run/") -> dict[str, str]:
    """As :func:`digests`, of the bucket; every object that is there is whole."""
    found = {}
    for name in server.objects():
        if not name.startswith(below):
            continue
        answer = server.boto.get_object(Bucket=server.bucket, Key=f"runs/one/{name}")
        data = answer["Body"].read()
        assert answer["Metadata"]["sha256"] == hashlib.sha256(data).hexdigest(), name
        if name.removeprefix(below).startswith(("tokens/", "duplicates/")):
            found[name.removeprefix(below)] = hashlib.sha256(data).hexdigest()
    return found


def nothing_is_left(server: Server) -> None:
    assert [name for name in server.objects() if "/." in f"/{name}"] == []  # neither scratch nor lease
    assert server.uploads() == []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("local")
    write_input(str(base))
    run(settings(str(base)))
    found = digests(base / "run")
    assert sum(name.endswith(".bin") for name in found) >= 3
    return found


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And short waits for the store."""
    monkeypatch.setattr(partition, "FLUSH_PAGES", 15)
    monkeypatch.setattr(sys.modules[Objects.__module__], "Backoff", partial(Backoff, base_s=0.05, cap_s=0.5))


STORMS = {
    "overload": (0.3, ("SlowDown", "InternalError")),
    "cuts": (0.25, ("cut anywhere", "cut request")),
    "lost answers": (0.25, ("lose answer",)),
    "slow": (0.5, ("slow",)),
    "everything": (0.25, ("SlowDown", "InternalError", "cut anywhere", "cut request", "lose answer", "slow")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "storm",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("cuts", "everything") else pytest.mark.exhaustive)
        for name in STORMS
    ],
)
def test_a_run_on_a_store_in_a_storm_has_the_bytes_of_a_local_one(
    server: Server, expected: dict[str, str], small_parts: None, storm: str
) -> None:
    write_input(server.url)
    server.proxy.storm = STORMS[storm]
    run(settings(server.url))
    server.proxy.storm = (0.0, ())
    assert sum(server.proxy.struck(what) for what in STORMS[storm][1]) > 20
    assert stored(server) == expected
    nothing_is_left(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "skip", [pytest.param(3, marks=pytest.mark.exhaustive), pytest.param(40, marks=pytest.mark.long)]
)
def test_credentials_that_expire_are_one_line_and_the_run_goes_on_with_new_ones(
    server: Server, expected: dict[str, str], small_parts: None, skip: int
) -> None:
    write_input(server.url)
    server.proxy.faults = [Fault("ExpiredToken", method, "one", OFTEN, skip) for method in ("GET", "PUT", "HEAD")]
    with pytest.raises(QuernError, match=rf"{server.url}/.*; renew the credentials") as caught:
        run(settings(server.url))
    assert "\n" not in str(caught.value)
    stored(server)
    server.proxy.faults = []
    run(settings(server.url))
    assert stored(server) == expected
    nothing_is_left(server)


@pytest.mark.slow
def test_a_second_driver_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lease.hold.__wrapped__.__kwdefaults__, "period_s", 0.3)
    config = settings(server.url)
    plain = config.model_dump(mode="json")
    with open_run(config.run_dir, plain):
        with pytest.raises(QuernError, match="another driver is at work"), open_run(config.run_dir, plain):
            pass
        assert "run/.lease.json" in server.objects()
    assert "run/.lease.json" not in server.objects()


@pytest.mark.long
def test_a_wait_for_the_store_is_no_fault_of_the_page(
    server: Server, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page clock is shorter than the storm: in a process of its own, since the clock would end it."""
    write_input(server.url)
    server.proxy.faults = [Fault("SlowDown", "GET", "in/1.jsonl", 4)]
    code = (
        "import sys\n"
        "from remote import test_runs\n"
        "config = test_runs.settings(sys.argv[1])\n"
        "test_runs.run(config.model_copy(update={'isolation': config.isolation.model_copy("
        "update={'page_timeout_s': 1.0})}))\n"
    )
    done = subprocess.run(
        [python(), "-c", code, server.url],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert server.proxy.struck("SlowDown") == 4
    assert stored(server) == expected


KILLED = """
import os, random, signal, sys, time
from remote import test_runs
from quern.data_pipeline import partition

partition.FLUSH_PAGES = 15
base, kills, draw, number = sys.argv[1], int(sys.argv[2]), random.Random(7), 1
plain = test_runs.settings(base)

def begin():
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            test_runs.run(plain.model_copy(update={"run_dir": f"{base}/run{number}"}))
            code = 0
        finally:
            os._exit(code)
    return pid

while kills:
    pid, end, done = begin(), time.monotonic() + draw.uniform(0.1, 7), 0
    while not done and time.monotonic() < end:
        time.sleep(0.01)
        done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        assert status == 0, status
        number += 1
        continue
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    kills -= 1
    print(f"killed {number}", flush=True)
    sys.stdin.readline()
_, status = os.waitpid(begin(), 0)
assert status == 0, status
print(f"done {number}", flush=True)
"""


@pytest.mark.long
def test_twenty_kills_in_a_storm_change_no_byte(server: Server, expected: dict[str, str]) -> None:
    """A driver is killed at random moments; after each kill every object that is there is whole."""
    write_input(server.url)
    server.proxy.storm = (0.1, STORMS["everything"][1])
    driver = subprocess.Popen(
        [python(), "-c", KILLED, server.url, "20"], env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stdout is not None
    kills, runs, leases = 0, 0, 0
    for line in driver.stdout:
        what, number = line.split()
        stored(server, f"run{number}/")
        if what == "done":
            runs = int(number)
            break
        kills += 1
        leases += f"run{number}/.lease.json" in server.objects()
        driver.stdin.write("\n")
        driver.stdin.flush()
    _, errors = driver.communicate()
    assert (driver.returncode, kills) == (0, 20), errors[-3000:]
    server.proxy.storm = (0.0, ())
    for number in range(1, runs + 1):
        assert stored(server, f"run{number}/") == expected
    nothing_is_left(server)
    struck = sum(server.proxy.struck(what) for what in STORMS["everything"][1])
    requests = len(server.proxy.seen)
    print(f"{kills} kills ({leases} left a lease), {runs} runs, {requests} requests, {struck} of them with a fault")


def command(site: Any, base: str, run_dir: str, *overrides: str) -> list[str]:
    paths = json.dumps([f"{base}/{os.path.basename(path)}" for path in site.warcs])
    return [
        python(), "-m", "quern.cli.main", "data", "run", str(ROOT / "configs" / "demo.yaml"),
        f"run_dir={run_dir}", f"sources.0.paths={paths}", "workers=2", "tokenize.shard_tokens=9000",
        f"toxicity.lexicons.en={os.path.abspath(site.lexicon)}", *overrides,
    ]  # fmt: skip


def finish(arguments: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_site(str(tmp_path_factory.mktemp("site")), seed=3, pages=160)


@pytest.fixture(scope="module")
def local(site: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(command(site, os.path.dirname(os.path.abspath(site.warcs[0])), str(folder)), dict(os.environ))
    return {name: sha for name, sha in digests(folder).items() if name.startswith("tokens/")}


def upload(server: Server, site: Any) -> None:
    for path in site.warcs:
        server.write(f"site/{os.path.basename(path)}", Path(path).read_bytes())


@pytest.mark.exhaustive
@pytest.mark.ray
def test_the_command_line_runs_from_a_store_to_a_store(server: Server, site: Any, local: dict[str, str]) -> None:
    upload(server, site)
    server.proxy.storm = (0.1, STORMS["everything"][1])
    finish(command(site, f"{server.url}/site", f"{server.url}/run"), dict(os.environ))
    server.proxy.storm = (0.0, ())
    assert {name: sha for name, sha in stored(server).items() if name.startswith("tokens/")} == local
    nothing_is_left(server)


@pytest.mark.long
@pytest.mark.ray
def test_ranges_of_large_objects_are_read_by_workers_from_a_store(
    server: Server, site: Any, local: dict[str, str]
) -> None:
    upload(server, site)
    server.proxy.storm = (0.05, STORMS["everything"][1])
    finish(command(site, f"{server.url}/site", f"{server.url}/run", "sources.0.split_bytes=8192"), dict(os.environ))
    server.proxy.storm = (0.0, ())
    assert {name: sha for name, sha in stored(server).items() if name.startswith("tokens/")} == local
    nothing_is_left(server)
    commits = [name for name in server.objects() if name.startswith("run/commits/pages/")]
    ranges = [name for name in commits if re.search(r"-\d{15}-\d{15}\.json$", name)]
    assert len(ranges) > 2 * len(site.warcs)
    asked = [seen for seen in server.proxy.seen if "site/" in str(seen) and "GET" in str(seen)]
    assert len(asked) >= len(ranges)
    shown = subprocess.run(
        [python(), "-m", "quern.cli.main", "data", "status", f"{server.url}/run"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "run: complete" in shown.stdout


@pytest.mark.long
@pytest.mark.ray
def test_kills_of_the_command_line_and_storms_change_no_byte(server: Server, site: Any, local: dict[str, str]) -> None:
    """Killed at random moments, on a store that fails; after each kill every object that is there is whole."""
    upload(server, site)
    draw, kills, ends = random.Random(17), 0, 0
    server.proxy.storm = (0.1, STORMS["everything"][1])
    number = 0
    while kills < 4:
        number += 1
        arguments = command(site, f"{server.url}/site", f"{server.url}/run{number}")
        while kills < 4:
            process = subprocess.Popen(
                [sys.executable, *arguments[1:]],
                cwd=ROOT,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                process.wait(draw.uniform(5, 20))
                assert process.returncode == 0
                ends += 1
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                kills += 1
                time.sleep(0.3)
                stored(server, f"run{number}/")
        finish(arguments, dict(os.environ))
        found = stored(server, f"run{number}/")
        assert {name: sha for name, sha in found.items() if name.startswith("tokens/")} == local
        nothing_is_left(server)
    struck = sum(server.proxy.struck(what) for what in STORMS["everything"][1])
    print(f"{kills} kills, {number} runs, {len(server.proxy.seen)} requests, {struck} of them with a fault")
