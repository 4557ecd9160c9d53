"""How long a run of four ranks takes from the death of one to its next step, and where that time goes.

    python benchmarks/restart_training.py [--rounds 5]

A small model trains over gloo on this machine's CPU; rank 2 is killed (SIGKILL) in mid-run. In turns: ``quern train
--max-restarts`` without spares, the same with ``--spares 1``, and torchrun ``--max-restarts`` of the same program,
``quern.train`` with a line to a file where a part ends. A part ends when the slowest rank has ended it. The ranks pause
before the kill until those that wait are ready, which the measured time does not hold. Of torchrun it is seen from
outside when the new processes begin, not what it does before that. Prints medians, and the ratio to torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

RANKS, VICTIM, PAUSE = 4, 2, 14
PARTS = (
    "noticed", "survivors ended", "back-off", "processes there", "group formed", "model built and loaded", "first step",
)  # fmt: skip
MODES = ("without spares", "--spares 1", "torchrun")


def mark(folder: str, what: str, **facts: Any) -> None:
    with open(os.path.join(folder, "marks"), "a") as file:
        file.write(json.dumps({"what": what, "time": time.time(), "pid": os.getpid(), **facts}) + "\n")


def marks(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "marks")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rank(folder: str, config: str) -> None:
    """``python -m quern.train CONFIG``, with marks."""
    mark(folder, "begins")
    from functools import partial

    from quern.train import __main__ as program
    from quern.train.processes import launch, waiting

    waiting.wait(partial(program.prepare, [config]), partial(program.open_spare, [config]))
    launch.end_with_launcher()
    number = int(os.environ["RANK"])
    from quern.train import setup
    from quern.train.processes import ranks
    from quern.train.trainer import Trainer

    def marked(name: str, plain: Any) -> Any:
        @contextmanager
        def opened(*given: Any, **how: Any) -> Any:
            mark(folder, f"{name} opens", rank=number)
            with plain(*given, **how) as own:
                mark(folder, f"{name} open", rank=number)
                yield own

        return opened

    def step(self: Trainer, number_of_step: int) -> None:
        while number_of_step == PAUSE and not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)
        plain(self, number_of_step)
        mark(folder, "step", rank=number, step=number_of_step)

    ranks.open_ranks = marked("group", ranks.open_ranks)
    setup.open_trainer = marked("trainer", setup.open_trainer)
    plain, Trainer.train_step = Trainer.train_step, step  # type: ignore[method-assign]
    program.leave(program.main([config]))


def supervise(folder: str, config: str, spares: int) -> None:
    """``quern train CONFIG --nproc 4 --max-restarts 3 --spares …``, with marks."""
    from quern.cli.train import ranks
    from quern.train.init_from import load_run_config
    from quern.train.processes import launch
    from quern.train.processes.waiting import WaitingProcesses
    from quern.train.supervision.restarts import Restarts

    wait, keep, wait_s, started = launch.wait, WaitingProcesses.keep, Restarts.wait_s, launch.started

    def waits(workers: Any, has_failed: Callable[[bool], bool] = bool) -> int | None:
        def seen(failed: bool) -> bool:
            if failed:
                mark(folder, "noticed")
            return has_failed(failed)

        return wait(workers, seen)

    def keeps(self: WaitingProcesses, *given: Any) -> None:
        def tell() -> None:
            while not all(own.ready for own in self._waiting):
                time.sleep(0.05)
            mark(folder, "all wait")

        keep(self, *given)
        threading.Thread(target=tell, daemon=True).start()

    def decides(self: Restarts, attempt: Any) -> float | None:
        mark(folder, "ended")
        return wait_s(self, attempt)

    def starts(*given: Any, **how: Any) -> Any:
        mark(folder, "starts")
        return started(*given, **how)

    launch.wait, launch.started = waits, starts
    WaitingProcesses.keep, Restarts.wait_s = keeps, decides  # type: ignore[method-assign]
    ranks.module = lambda *_: [sys.executable, __file__, "rank", folder, config]  # type: ignore[attr-defined]
    sys.exit(ranks.supervise(load_run_config(config, ()), config, [], RANKS, 3, None, spares))


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 600
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the run has ended with {process.poll()}, or goes on no more")
        time.sleep(0.02)


def measure(mode: str, folder: str, config: str) -> dict[str, float]:
    """Seconds of each part, and in all."""
    own, environment = [sys.executable, __file__], dict(os.environ)
    if mode == "torchrun":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else ranks meet the addresses of those before them
        many = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3"]
        command = [sys.executable, "-m", "torch.distributed.run", *many, __file__, "rank", folder, config]
    else:
        command = [*own, "supervise", folder, config, "1" if "spares 1" in mode else "0"]
    with open(os.path.join(folder, "log"), "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:

        def at(step: int, after: float = 0.0) -> list[dict[str, Any]]:
            return [m for m in marks(folder) if m["what"] == "step" and m["step"] >= step and m["time"] > after]

        until(lambda: len(at(PAUSE - 1)) == RANKS, process)
        if "spares 1" in mode:
            until(lambda: any(m["what"] == "all wait" for m in marks(folder)), process)
        time.sleep(1.0)
        Path(folder, "go").touch()
        until(lambda: len(at(PAUSE + 3)) >= RANKS, process)
        killed = time.time()
        os.kill(next(m["pid"] for m in marks(folder) if m.get("rank") == VICTIM), signal.SIGKILL)
        until(lambda: {m["rank"] for m in at(0, killed + 0.5)} >= {*range(RANKS)} and _parts(folder, killed), process)
        return _parts(folder, killed)
    finally:
        process.kill()
        process.wait()
        pids = {m["pid"] for m in marks(folder)}
        while any(Path(f"/proc/{pid}").exists() for pid in pids):  # they end with the launcher
            time.sleep(0.1)


def _parts(folder: str, killed: float) -> dict[str, float]:
    """Nothing while a rank has not ended its first step."""
    later = [m for m in marks(folder) if m["time"] > killed]

    def ends(what: str, by: Callable[[list[float]], float]) -> float:
        return by([m["time"] for m in later if m["what"] == what])

    new = {m["pid"] for m in later if m["what"] == "group opens"}
    steps = [min([m["time"] for m in later if m["what"] == "step" and m["pid"] == pid], default=0.0) for pid in new]
    if len(new) < RANKS or not all(steps):
        return {}
    known = any(m["what"] == "ended" for m in later)
    starts = ends("starts" if known else "begins", min)
    seen = [ends("noticed", min), ends("ended", min)] if known else [killed, killed]
    times = [killed, *seen, starts, ends("group opens", max), ends("group open", max), ends("trainer open", max)]
    times.append(max(steps))
    parts = dict(zip(PARTS, (b - a for a, b in pairwise(times)), strict=True))
    return {**parts, "in all": times[-1] - killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from quern.config import dump_yaml
    from support.train import run_case as case

    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="restart-") as name:
        paths = case.write_corpus(Path(name, "data"), {"web": 4000, "code": 1500})
        for number in range(given.rounds):
            for mode in MODES:
                folder = Path(name, f"{number}-{MODES.index(mode)}")
                folder.mkdir()
                settings = case.settings(
                    folder / "run", paths, steps=100_000, global_batch=8, micro_batch=2,
                    model={"num_layers": 4, "dim": 128}, checkpoint={"interval": 5, "keep_last": 2},
                    data=[{"path": path, "max_epochs": 1_000_000} for path in paths],
                )  # fmt: skip
                (folder / "config.yaml").write_text(dump_yaml(settings))
                found[mode].append(measure(mode, str(folder), str(folder / "config.yaml")))
                parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found[mode][-1].items())
                print(f"round {number}, {mode}: {parts}", file=sys.stderr, flush=True)
    medians = {mode: {part: median(own[part] for own in found[mode]) for part in found[mode][0]} for mode in MODES}
    print("| seconds, median of " + f"{given.rounds} | " + " | ".join(MODES) + " |\n|---|" + "---:|" * len(MODES))
    for part in (*PARTS, "in all"):
        cells = [f"{medians[mode][part]:.2f}" for mode in MODES]
        if part in PARTS[:2]:  # what is seen of torchrun begins with the new processes
            cells[2] = "in back-off"
        print(f"| {part} | " + " | ".join(cells) + " |")
    ratios = [f"{medians[mode]['in all'] / medians['torchrun']['in all']:.2f}" for mode in MODES]
    print("| over torchrun's | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    elif sys.argv[1:2] == ["supervise"]:
        supervise(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
