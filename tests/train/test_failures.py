"""One of four ranks fails while a run trains: all end within seconds, and one line names the rank and the cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.train.debug.report import report
from support.programs import python
from support.train import run_case as case

pytestmark = pytest.mark.slow

RANKS = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
#: Put into the place of ``quern.train.trainer.Trainer.clip`` in rank 2, in its third step.
FAULTS = {
    "raises": "raise ZeroDivisionError('by this rank')",
    "out of memory": "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
    "killed": "os.kill(os.getpid(), 9)",
    "hangs": "time.sleep(600)",
    "crashes": "import ctypes; ctypes.string_at(0)",
}
PROGRAM = """
import os, sys, time, torch
from quern.train import __main__ as program
from quern.train.trainer import Trainer
from quern.train.processes import launch

plain = Trainer.clip

def clip(self, step):
    if step == 2 and self.ranks.rank == 2:
        {fault}
    return plain(self, step)

Trainer.clip = clip
launch.end_with_launcher()
program.leave(program.main(sys.argv[1:]))
"""


#: ``quern train --nproc 4``, with the program above in place of ``quern.train``.
LAUNCHER = """
import sys
from quern.cli.train import ranks
from quern.train.init_from import load_run_config

python, program, config = sys.argv[1:]
ranks.module = lambda *_: [python, program, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], 4, 0))
"""


def long(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raises", r"rank 2: ZeroDivisionError: by this rank; its traceback: RUN/tracebacks/rank_2\.txt; "),
        long("out of memory", r"rank 2: OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB; its trace"),
        long("killed", r"rank 2 was killed by signal 9 \(SIGKILL\); "),
        ("crashes", r"rank 2 was killed by signal 11 \(SIGSEGV\); "),
        long(
            "hangs",
            r"rank 2 does not answer, and rank [013] waited in vain \(RuntimeError: Timed out waiting 3000ms.*; "
            r"stacks: RUN/tracebacks/rank_2\.stacks\.txt; there is no checkpoint yet",
        ),
    ],
)
def test_all_ranks_end_and_the_one_that_failed_is_named(tmp_path: Path, fault: str, told: str) -> None:
    """Long before a collective would have waited long enough, but where a rank hangs: then that is what ends it."""
    paths = case.write_corpus(tmp_path / "data")
    run = tmp_path / "run"
    comm = {"timeout_s": 3.0} if fault == "hangs" else {}
    config = case.settings(run, paths, steps=1000, global_batch=4, micro_batch=1, comm=comm)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(fault=FAULTS[fault]))
    own = sys.executable if fault == "hangs" else python()  # a forked one gets no signal that is meant for it
    command = [python(), "-c", LAUNCHER, own, str(program), str(tmp_path / "config.yaml")]
    environment = {name: value for name, value in os.environ.items() if name not in RANKS} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert re.match("error: " + told.replace("RUN", re.escape(str(run))), line), done.stderr
    if fault == "killed":
        assert "Traceback (most recent call last)" in (run / "tracebacks" / "rank_0.txt").read_text()
    if fault == "raises":
        missing, *_ = (group["first_missing"] for group in report(str(run))["groups"] if group["first_missing"])
        assert missing["missing"] == [2]
        assert {*missing["arrived"]} <= {0, 1, 3}
        assert any(" in clip" in frame for frame in missing["frames"])
    if fault in ("hangs", "crashes"):
        assert "in clip\n" in (run / "tracebacks" / "rank_2.stacks.txt").read_text()
