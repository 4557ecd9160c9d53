"""A run that is ended at work, by a signal or with its Ray, says so in one line, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quern.config import dump_yaml
from quern.data_pipeline.monitoring.run_status import read_status
from quern.data_run.config import DataRun
from support.remote import web_server
from support.remote.web_server import Fault, Web
from support.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.ray]


def children(pid: int) -> dict[str, int]:
    """By name."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in found}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_a_run_that_is_ended_at_work_says_how_and_goes_on(tmp_path: Path) -> None:
    """Its source answers only when all strikes are over, so that each strikes a task at work."""
    with web_server.serve() as web:
        _strike_and_go_on(tmp_path, web)


def _strike_and_go_on(tmp_path: Path, web: Web) -> None:
    lines = [json.dumps({"id": str(n), "text": f"The {n} of the {n * 7} is the {n * n}. " * 4}) for n in range(600)]
    for part in range(3):
        web.files[f"{part}.jsonl"] = ("\n".join(lines[part::3]) + "\n").encode()
    web.faults.append(Fault("hold", times=1 << 30))
    (tmp_path / "c.yaml").write_text(dump_yaml(DataRun.model_validate({
        "run_dir": str(tmp_path / "run"),
        "workers": 1,
        "sources": [{"name": "s", "kind": "jsonl", "paths": [f"{web.url}/{part}.jsonl" for part in range(3)]}],
        "language": {"keep": None, "threshold": 0, "pre_skip": False},
        "quality": {"order": []},
        "tokenize": {"encoding": "trained", "vocab_size": 400},
    })))  # fmt: skip
    command = [sys.executable, "-m", "quern.cli.main", "data", "run", str(tmp_path / "c.yaml")]
    for strike, code, said, state in (
        (signal.SIGTERM, 3, "ended by SIGTERM; run the same command again to go on", "ended by SIGTERM"),
        (signal.SIGINT, 130, "interrupted; run the same command again to go on", "interrupted"),
        ("raylet", 1, "error: the Ray of this run has died on this machine; the same command goes on", "failed"),
    ):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("pages: 3 partitions")
        until(lambda: web.under_way)
        if isinstance(strike, str):
            os.kill(children(process.pid)[strike], signal.SIGKILL)
        else:
            process.send_signal(strike)
        told = process.stderr.read()
        assert (process.wait(), told.splitlines()[-1]) == (code, said), told
        assert "Traceback" not in told
        status = read_status(str(tmp_path / "run"))
        assert (status["status"], status["driver"]["state"]) == ("stopped", state)
    web.let_go.set()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert read_status(str(tmp_path / "run"))["counts"]["pages"] == 600
