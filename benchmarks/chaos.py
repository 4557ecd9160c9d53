"""Kills what a data run stands on, at random moments, and compares what comes out with an undisturbed run.

    python benchmarks/chaos.py driver|worker|machine|link|store [--count N] [--seed S] [--folder DIR] [--json FILE]

driver   kill -9 of the driver, then the same command again at once, while its old workers may still be there
worker   kill -9 of one worker process or two
machine  kill -9 of a raylet, alone or with all its processes, on a cluster of two; a new machine joins
link     the second machine is in a network namespace of its own and its cable is pulled: it works on, unheard (root)
store    input, output and commits are objects of an S3 server; every connection to it is reset, new ones are refused
         for up to OUTAGE_S; it struck if a request was under way or a connection refused

Runs are of the demo's sample site with little else but the road itself, a flush every few pages. Tokens, verdicts,
decisions and every counter must be those of the undisturbed run. A kill that came when there was nothing to strike is
not counted. Exit status 1: something differed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from chaos_cluster import Cluster, machines, pick  # noqa: E402
from chaos_store import Store, store  # noqa: E402

KINDS = ("driver", "worker", "machine", "link", "store")
FLUSH_PAGES = 4
#: Strikes before a run is left to end.
STRIKES_A_RUN = {"driver": 3, "store": 3}
OUTAGE_S = 8.0
RUN_LIMIT_S = 240

RECIPE = """
run_dir: set-by-the-command
sources: [{name: sample, kind: warc, paths: set-by-the-command}]
extract: {engine: resiliparse}
language: {keep: [en], threshold: 0.5, pre_skip: 0.2}
quality: {order: [c4]}
tokenize: {encoding: trained, vocab_size: 400, validation: 0.1, shard_tokens: 20000}
"""


@dataclass
class Report:
    """What happened."""

    kind: str
    struck: int = 0
    missed: int = 0
    runs: int = 0
    differing: list[str] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "phases": dict(self.phases), "seconds": round(self.seconds, 1)}


class Site:
    """The inputs, the recipe and the runs, in a folder or a store."""

    def __init__(self, folder: Path, pages: int, store: Store | None) -> None:
        from quern.demo import write_site

        self.folder, self.store = folder, store
        site = write_site(str(folder / "site"), seed=3, pages=pages)
        self.warcs = [str(Path(path).resolve()) for path in site.warcs]
        if store is not None:
            for path in site.warcs:
                store.put(f"in/{Path(path).name}", Path(path).read_bytes())
            self.warcs = [f"{store.url}/in/{Path(path).name}" for path in site.warcs]
        self.recipe = folder / "chaos.yaml"
        self.recipe.write_text(RECIPE)

    def start(self, name: str, cluster: Cluster) -> subprocess.Popen[bytes]:
        """The driver."""
        base = self.folder if self.store is None else self.store.url
        command = [
            sys.executable, str(HERE / "chaos.py"), "drive", "data", "run", str(self.recipe),
            f"run_dir={base}/{name}", f"sources.0.paths={json.dumps(self.warcs)}", f"ray.address={cluster.address}",
            "workers=2",
        ]  # fmt: skip
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment)

    def finish(self, driver: subprocess.Popen[bytes], name: str) -> None:
        code = driver.wait(RUN_LIMIT_S)
        if code != 0:
            raise SystemExit(f"the run ended with {code}:\n{(self.folder / f'{name}.log').read_text()[-4000:]}")

    def read(self, run: str, name: str) -> bytes:
        if self.store is None:
            return (self.folder / run / name).read_bytes()
        return self.store.get(f"{run}/{name}") or b""

    def result(self, run: str) -> dict[str, Any]:
        """Everything that must not depend on what was struck."""
        folders = ("tokens", "verdicts", "documents", "signatures", "duplicates")
        if self.store is None:
            paths = [path for name in folders for path in sorted((self.folder / run / name).rglob("*"))]
            found = {
                str(path.relative_to(self.folder / run)): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in paths
                if path.is_file()
            }
        else:
            found = self.store.files(f"{run}/")
            if left := [*self.store.uploads(), *(name for name in found if "/." in f"/{name}")]:
                raise SystemExit(f"left over in the store: {left}")
        stats = json.loads(self.read(run, "stats.json"))
        del stats["timing"]
        files: dict[str, Any] = {name: digest for name, digest in found.items() if name.split("/")[0] in folders}
        return {**files, **{f"stats.{key}": value for key, value in stats.items()}}

    def remove(self, run: str) -> None:
        if self.store is None:
            shutil.rmtree(self.folder / run)
        else:
            self.store.remove(f"{run}/")

    def status(self, run: str) -> dict[str, Any]:
        """What the run last said of itself; empty when it has not, or is just saying it."""
        with suppress(OSError, ValueError):
            said: dict[str, Any] = json.loads(self.read(run, "status.json"))
            return said
        return {}

    def phase(self, run: str) -> str:
        """The phase that the driver last spoke of."""
        said = self.status(run)
        if not said:
            return "starting"
        if said["phase"]:
            return str(said["phase"]["name"])
        return f"after {said['past'][-1]['name']}" if said["past"] else "starting"


def await_target(kind: str, site: Site, run: str, driver: subprocess.Popen[bytes], cluster: Cluster) -> None:
    """Return when there is something to strike, or the run is over."""
    while driver.poll() is None and site.status(run).get("driver", {}).get("pid") != driver.pid:
        time.sleep(0.02)
    while kind not in ("driver", "store") and driver.poll() is None:
        if cluster.workers() if kind == "worker" else cluster.others[-1].workers():
            return
        time.sleep(0.05)


def undisturbed(kind: str, site: Site, cluster: Cluster) -> tuple[dict[str, Any], float]:
    """What comes out, and for how many seconds there is something to strike."""
    found = []
    for number in range(2):  # the first warms the machine up
        run = f"whole-{number}"
        driver = site.start(run, cluster)
        await_target(kind, site, run, driver, cluster)
        began = time.monotonic()
        site.finish(driver, run)
        found.append((site.result(run), time.monotonic() - began))
    if found[0][0] != found[1][0]:
        raise SystemExit("two undisturbed runs differ")
    return found[1]


def strike_workers(cluster: Cluster, draw: random.Random) -> bool:
    struck = False
    for process in pick(cluster.workers(), draw.choice((1, 1, 2)), draw):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            struck = True
    return struck


def strike_machine(cluster: Cluster, draw: random.Random) -> bool:
    victim = cluster.others[-1]
    return bool(victim.workers()) and victim.kill(raylet_alone=draw.random() < 0.5)


def strike_link(cluster: Cluster, draw: random.Random) -> bool:
    if not cluster.others[-1].workers() or cluster.cable is None:
        return False
    cluster.cable.plug("down")
    return True


STRIKES: dict[str, Callable[[Cluster, random.Random], bool]] = {
    "worker": strike_workers, "machine": strike_machine, "link": strike_link,
}  # fmt: skip


def strike(
    kind: str,
    site: Site,
    run: str,
    driver: subprocess.Popen[bytes],
    cluster: Cluster,
    within_s: float,
    draw: random.Random,
) -> str | None:
    """At a random moment; the phase that was struck, None where there was nothing to strike."""
    time.sleep(draw.uniform(0, within_s))
    phase = site.phase(run)
    if driver.poll() is not None:
        return None
    if kind == "driver":
        driver.kill()
        driver.wait()
        return phase
    if site.store is not None:
        connection, seconds = site.store.connection, draw.choice((0.0, draw.uniform(0, OUTAGE_S)))
        refused = connection.refused
        severed = connection.cut(seconds)
        time.sleep(seconds)
        return phase if severed or connection.refused > refused else None
    return phase if STRIKES[kind](cluster, draw) else None


def trial(
    kind: str, site: Site, run: str, cluster: Cluster, length_s: float, draw: random.Random, report: Report
) -> None:
    """One disturbed run."""
    struck = False
    driver = None
    strikes = STRIKES_A_RUN.get(kind, 1)
    within_s = length_s / strikes if kind == "store" else length_s  # a driver begins anew after each
    for _ in range(strikes):
        if driver is None or kind == "driver":
            driver = site.start(run, cluster)
            await_target(kind, site, run, driver, cluster)
        phase = strike(kind, site, run, driver, cluster, within_s, draw)
        if phase is None:
            report.missed += 1
        else:
            report.struck += 1
            report.phases.update([phase])
            struck = True
        if driver.poll() is not None and (kind != "driver" or driver.returncode == 0):
            break
    assert driver is not None
    if kind == "driver" and driver.poll() is not None and driver.returncode != 0:
        driver = site.start(run, cluster)
    site.finish(driver, run)  # one that was not killed has to come through
    if struck and kind == "link" and cluster.cable is not None:
        cluster.cable.plug("up")
    if struck and kind in ("machine", "link"):
        cluster.others.pop().end()
        cluster.add_machine()


def chaos(kind: str, count: int, seed: int, folder: Path, pages: int = 160) -> Report:
    """Strike ``count`` times; every run is compared as soon as it has ended."""
    draw = random.Random(f"{kind} {seed}")
    report = Report(kind)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with store() if kind == "store" else nullcontext() as made:
        site = Site(folder, pages, made)
        environment = made.environment if made is not None else {}
        with machines(folder, namespace=kind == "link", environment=environment) as cluster:
            expected, length_s = undisturbed(kind, site, cluster)
            print(f"undisturbed: {length_s:.1f} s, {len(expected)} files and counters", file=sys.stderr, flush=True)
            while report.struck < count and report.missed < 3 * count + 3:
                before, run = report.struck, f"{kind}-{report.runs}"
                trial(kind, site, run, cluster, length_s, draw, report)
                found = site.result(run)
                names = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
                report.differing += [f"{run}: {name}" for name in names]
                report.runs += 1
                report.seconds = time.monotonic() - began
                print(f"{kind}: {report.struck}/{count} struck ({report.struck - before} in this run), "
                      f"{'same bytes' if not names else f'DIFFERS: {names}'}, {report.seconds:.0f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
                if not names:
                    site.remove(run)
    return report


def drive(arguments: list[str]) -> None:
    """quern itself, with a flush every few pages."""
    from quern.cli.main import main as quern
    from quern.data_pipeline import run

    run.process_partition = in_small_parts  # type: ignore[assignment]
    sys.argv = ["quern", *arguments]
    quern()


def in_small_parts(task: Any) -> Any:
    from quern.data_pipeline import partition

    partition.FLUSH_PAGES = FLUSH_PAGES
    return partition.process_partition(task)


def main() -> None:
    if sys.argv[1:2] == ["drive"]:
        drive(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=20, help="strikes (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=160, help="pages of the sample site")
    parser.add_argument("--folder", type=Path, help="where to work; default is a temporary folder")
    parser.add_argument("--json", type=Path, help="write the report here too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quern-chaos-") as temporary:
        report = chaos(args.kind, args.count, args.seed, args.folder or Path(temporary), args.pages)
    said = report.to_dict()
    if args.json is not None:
        args.json.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    print(f"{report.kind}: {report.struck} strikes in {report.runs} runs ({said['phases']}), "
          f"{report.missed} missed, {len(report.differing)} differences, {report.seconds:.0f} s")  # fmt: skip
    if report.differing or report.struck < args.count:
        print("\n".join(report.differing), file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
