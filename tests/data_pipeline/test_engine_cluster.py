"""The engine on a cluster that is not as it would like it: few CPUs, little memory, another folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def last_line(code: str, folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, cwd=folder,
        check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.long
def test_more_workers_than_the_cluster_has_room_for_do_not_hang_the_run(tmp_path: Path) -> None:
    code = (
        "import ray\n"
        "from quern.data_pipeline.execution.engine import open_engine\n"
        "ray.init('local', num_cpus=1, include_dashboard=False, logging_level='error')\n"
        "with open_engine(3) as engine:\n"
        "    results = dict(engine.map(abs, [(-x,) for x in range(6)], label='test'))\n"
        "    results |= {-k: v for k, v in engine.map(abs, [(1,), (2,)], label='test')}\n"
        "print(sorted(results.items()))\n"
    )
    expected = sorted({**{x: x for x in range(6)}, 0: 1, -1: 2}.items())
    assert last_line(code, tmp_path) == str(expected)


@pytest.mark.long
def test_relative_paths_are_the_drivers_also_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    code = (
        "import os, ray\n"
        "from quern.data_pipeline.execution.engine import open_engine\n"
        "ray.init('local', num_cpus=1, include_dashboard=False, logging_level='error')\n"
        "os.chdir('elsewhere')\n"
        "with open_engine(1) as engine:\n"
        "    print(dict(engine.map(os.getcwd, [()], label='test'))[0])\n"
    )
    assert last_line(code, tmp_path) == str(tmp_path / "elsewhere")


@pytest.mark.long
def test_without_an_address_no_other_cluster_is_used(tmp_path: Path) -> None:
    code = (
        "from quern.data_pipeline.execution.engine import open_engine\n"
        "with open_engine(1) as engine:\n"
        "    print(dict(engine.map(abs, [(-7,)], label='test'))[0])\n"
    )
    assert last_line(code, tmp_path, RAY_ADDRESS="127.0.0.1:1") == "7"


@pytest.mark.long
def test_a_worker_that_the_memory_monitor_ends_is_a_death_like_any_other(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from quern.data_pipeline.execution.engine import open_engine\n"
        "def task(seconds):\n"
        "    time.sleep(seconds)\n"
        "    return seconds\n"
        "deaths = []\n"
        "def on_death(index, task, death):\n"
        "    deaths.append(index)\n"
        "    return (0,)\n"
        "with open_engine(1) as engine:\n"
        "    results = dict(engine.map(task, [(60,)], label='test', on_death=on_death))\n"
        "print(results, bool(deaths))\n"
    )
    env = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "2000"}
    assert last_line(code, tmp_path, **env) == "{0: 0} True"


def test_an_address_that_is_none_is_an_input_error(tmp_path: Path) -> None:
    code = (
        "from quern.data_pipeline.execution.engine import open_engine\n"
        "from quern.errors import InputError\n"
        "try:\n"
        "    with open_engine(1, 'garbage'):\n"
        "        pass\n"
        "except InputError as error:\n"
        "    print(error)\n"
    )
    assert last_line(code, tmp_path).startswith("ray.address: expected \"auto\" or host:port, got 'garbage'")
