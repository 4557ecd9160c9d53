"""A cluster that begins without a CPU for work, scales by itself, and shrinks when the work is done."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quern.data_pipeline.engine import open_engine

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(240)]


def place(x: int) -> tuple[int, str]:
    import time

    import ray

    time.sleep(2)
    return x, str(ray.get_runtime_context().get_node_id())


def cpus() -> float:
    import ray

    return float(ray.cluster_resources().get("CPU", 0))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A head whose autoscaler starts further raylets on this machine, as Ray's own tests of it do."""
    from ray.util import get_node_ip_address

    host = get_node_ip_address()
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    worker = {"resources": {"CPU": 1, "object_store_memory": 80 << 20}, "node_config": {}, "min_workers": 0,
              "max_workers": 2}  # fmt: skip
    provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True,
                "disable_launch_config_check": True, "gcs_address": f"{host}:{port}"}  # fmt: skip
    config = {
        "cluster_name": "fake", "max_workers": 2, "idle_timeout_minutes": 0.05, "upscaling_speed": 100.0, "auth": {},
        "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False,
        "rsync_exclude": [], "rsync_filter": [], "initialization_commands": [], "setup_commands": [],
        "head_setup_commands": [], "worker_setup_commands": [], "head_start_ray_commands": [],
        "worker_start_ray_commands": [], "provider": provider, "head_node_type": "ray.head.default",
        "available_node_types": {
            "worker": worker, "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        },
    }  # fmt: skip
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(config))
    session = Path("/tmp") / f"qs-{secrets.token_hex(3)}"  # sockets have short names or none
    environment = {**os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    environment.pop("RAY_ADDRESS", None)
    with open(tmp_path / "ray.log", "wb") as log:
        head = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}",
             f"--node-ip-address={host}", "--num-cpus=0", "--object-store-memory=80000000",
             "--include-dashboard=false", f"--autoscaling-config={file}", f"--temp-dir={session}", "--block"],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while b"Ray runtime started" not in (tmp_path / "ray.log").read_bytes() and time.monotonic() < deadline:
            time.sleep(0.3)
        yield f"{host}:{port}"
    finally:
        import ray

        ray.shutdown()
        head.terminate()
        head.wait(60)
        shutil.rmtree(session, ignore_errors=True)


def test_machines_come_for_the_work_and_go_after_it(address: str) -> None:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with open_engine(2, address) as engine:
        assert cpus() == 0
        found = dict(engine.map(place, [(x,) for x in range(10)], label="test"))
        assert sorted(found) == list(range(10))
        assert [x for x, _ in (found[index] for index in range(10))] == list(range(10))
        assert len({machine for _, machine in found.values()}) == 2
        assert cpus() == 2
        engine.close()
        deadline = time.monotonic() + 120
        while cpus() and time.monotonic() < deadline:
            time.sleep(1)
        assert cpus() == 0, "given back, though the driver still lives"
