"""``quern doctor`` as a program: alone, four nodes of which one is stopped, before a training run, on a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from quern.data_pipeline.execution.engine import on_each_machine
from quern.doctor.run import Options, check_cluster
from support.programs import forked, kill, python
from support.train.command_case import quern, refused, write_config
from support.waits import until

pytestmark = pytest.mark.slow

QUICK = ("--repeats", "1", "--device", "cpu")


def test_bad_input_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, world, said in (
        ((), ("0", "2"), "--share: expected a folder or store that all ranks see, as there are several"),
        (("--share", "s", "--id", "../x"), ("0", "2"), "--id: expected a name that can be a folder's, got '../x'"),
        ((), ("2", "2"), "RANK: expected 0 to 1 (WORLD_SIZE is 2), got 2"),
        (("nothere.yaml",), ("0", "1"), "nothere.yaml: no such config file"),
        (("--data", "c.yaml"), ("0", "1"), "--data: expected without CONFIG, which is one of training; give --disk and "
                                           "--store"),
    ):  # fmt: skip
        monkeypatch.setenv("RANK", world[0])
        monkeypatch.setenv("WORLD_SIZE", world[1])
        assert refused("doctor", *arguments) == f"error: {said}"


@pytest.mark.long
def test_a_node_that_hangs_is_named_and_the_others_measure_their_links(tmp_path: Path) -> None:
    """Node 3 is stopped when it has begun; the others wait for it once. Started again it is late."""
    share = tmp_path / "share"

    def rank_of(rank: int, timeout: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python(), "-m", "quern.cli.main", "doctor", *QUICK, "--share", str(share), "--id", "a",
             "--timeout", timeout, "--disk", str(tmp_path), "--json"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                 "MASTER_ADDR": "127.0.0.1", "SLURMD_NODENAME": f"node-{rank}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    ranks = [rank_of(rank, "90") for rank in range(4)]
    try:
        until((share / "doctor-a.0/hello/3.json").exists)
        os.kill(forked(ranks[3]), signal.SIGSTOP)
        outputs = [one.communicate(timeout=300) for one in ranks[:3]]
        assert [one.returncode for one in ranks[:3]] == [1, 1, 1], outputs
        told = json.loads(outputs[0][0])
        assert [out for out, _ in outputs[1:]] == ["", ""]
        assert [(one["code"], one["nodes"]) for one in told["findings"]] == [("silent", ["node-3"])]
        reading = told["readings"][0]
        assert reading["facts"].keys() >= {"quern", "python", "torch", "ray", "compiler"}
        assert reading["devices"][0]["speeds"].keys() == {"product fp32", "copy torch"}
        pairs = {(link["kind"], *link["ranks"]) for link in told["links"] if link["speeds"] and not link["problem"]}
        assert pairs == {("pair", 0, 1), ("pair", 0, 2), ("pair", 1, 2), ("ring", 0, 1, 2)}
        assert [path for path in share.rglob("*") if path.is_file()] == [share / "doctor-a.0/0.json"]
        kill(ranks.pop())
        ranks.append(rank_of(3, "1"))
        assert (
            ranks[3]
            .communicate(timeout=300)[1]
            .endswith(f"error: rank 3: came late, the others have met without it ({share}/doctor-a.0)\n")
        )
        assert ranks[3].returncode == 2
    finally:
        for one in ranks:
            kill(one)


def test_a_run_with_preflight_begins_only_where_nothing_is_found(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    bad = quern("train", config, "preflight=true", "device=cpu", "checkpoint.store=nothere://bucket")
    assert bad.returncode == 2, bad.stderr
    assert "nothere://bucket: write: nothere://bucket/quern-doctor" in bad.stdout
    assert bad.stderr.startswith("error: preflight: quern doctor has named machines (above), and nothing was started")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_ranks_of_a_launcher_check_each_other_before_they_train(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    good = quern("train", config, "preflight=true", "device=cpu", "--nproc", 2)
    assert good.returncode == 0, good.stderr
    assert "local pair" in good.stdout
    assert "no findings: 1 node, 2 ranks" in good.stdout
    assert (tmp_path / "run/run.json").exists()
    assert not [*(tmp_path / "run").glob("doctor*")]


@pytest.mark.long
@pytest.mark.ray
def test_machines_of_a_ray_cluster_are_asked(tmp_path: Path) -> None:
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        options = Options(disks=(str(tmp_path),), store=str(tmp_path / "store"), repeats=1, timeout_s=240)
        result = check_cluster(options)
        assert result.findings == []
        (reading,) = result.readings
        assert (reading.node, reading.devices) == (socket.gethostname(), [])
        assert reading.facts["ray"] == ray.__version__
        assert reading.shown.keys() >= {"cores", "memory", f"store {tmp_path}/store"}
        assert reading.disks[0].path == str(tmp_path)
        ((_, failed),) = on_each_machine("auto", int, ("x",), 60)
        assert isinstance(failed, Exception)
        assert on_each_machine("auto", time.sleep, (60,), 0.1) == [(socket.gethostname(), None)]
    finally:
        ray.shutdown()
