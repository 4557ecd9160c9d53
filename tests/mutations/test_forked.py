"""What runs the faults ends with its process, and hands over only what it knows."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import util
from pathlib import Path
from types import ModuleType

import pytest

from support.waits import has_ended

FORKED = Path(__file__).parent / "forked.py"


@pytest.fixture
def forked() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forked", FORKED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def goes_on(process: int) -> bool:
    return not has_ended(process)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_it_runs_ends_with_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "quern").mkdir()
    (tmp_path / "quern" / "__init__.py").touch()
    (tmp_path / "test_long.py").write_text(
        "import os, pathlib, time\ndef test_long():\n"
        "    pathlib.Path('part').write_text(str(os.getpid()))\n"
        "    os.rename('part', 'pid')\n    time.sleep(600)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-P", FORKED], cwd=tmp_path, env=kept | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        told = {"arguments": ["test_long.py", "-p", "no:cacheprovider"], "said": "said.txt", "limit_s": 500}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        while not (tmp_path / "pid").exists():
            assert process.poll() is None, (tmp_path / "said.txt").read_text()
            time.sleep(0.05)
        running = int((tmp_path / "pid").read_text())
        assert goes_on(running)
        process.send_signal(number)
        process.wait(60)
        deadline = time.monotonic() + 60
        while goes_on(running) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not goes_on(running)
    finally:
        process.kill()
        process.communicate()


def test_a_server_with_more_descriptors_than_it_names_starts_as_it_always_does(
    forked: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def start(*arguments: object) -> int:
        started.append(arguments)
        return 7

    monkeypatch.setattr(util, "spawnv_passfds", start)
    forked.lend_a_server_of_ranks()
    given = (b"python", ["python", "-c", f"{forked.SERVER}; main(3, 4, [], authkey_r=5)"], [3, 4, 5])
    assert util.spawnv_passfds(*given) == 7
    assert started == [given]
