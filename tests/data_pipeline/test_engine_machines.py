"""The engine on several machines: one is lost, one comes, one does not see the run's folder; what Ray is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from quern.data_pipeline.execution import engine as engine_module
from quern.data_pipeline.execution.engine import Death, RayPool, open_engine
from quern.data_pipeline.execution.fence import Fence
from quern.errors import QuernError

pytestmark = [pytest.mark.slow, pytest.mark.ray]

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}


def here(x: int) -> tuple[int, str]:
    import ray

    return x, str(ray.get_runtime_context().get_node_id())


def wait_there(folder: str, x: int) -> tuple[int, str]:
    """Task 0 sleeps the first time it is tried, until its machine is gone."""
    import time

    import ray

    node = str(ray.get_runtime_context().get_node_id())
    mark = Path(folder) / f"begun-{x}"
    if x == 0 and not mark.exists():
        mark.write_text(node)
        time.sleep(120)
    return x, node


def much(size: int) -> bytes:
    return bytes(size)


@pytest.fixture(scope="module")
def cluster() -> Any:
    import ray
    import ray.cloudpickle
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 << 20, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, logging_level="error", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.long
def test_what_is_in_flight_never_fills_the_object_store(cluster: Any) -> None:
    """400 MB of results through a store of 100 MB: they go as they are read, and nothing goes to a disk."""
    from ray._private.internal_api import memory_summary

    address = cluster.address
    with open_engine(1) as engine:
        sizes = [len(result) for _, result in engine.map(much, [(8 << 20,)] * 50, label="test")]
        assert sizes == [8 << 20] * 50
        said = memory_summary(address, stats_only=True)
    assert "Spilled" not in said, said


@pytest.mark.long
def test_a_machine_that_comes_later_is_used_and_one_that_goes_is_no_task_s_fault(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "REGROW_S", 0.5)
    pool = RayPool(None)
    try:
        assert pool.num_workers == 1
        node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        cluster.wait_for_nodes()
        deaths: list[tuple[int, bool]] = []
        killed = False

        def on_death(index: int, task: tuple[Any, ...], death: Death) -> tuple[Any, ...]:
            deaths.append((index, death.lost_machine))
            assert death.ask(abs, -1) is None
            return task

        # Task 0 begins on one machine and waits there for ever, so the others run on the other.
        results = pool.map(wait_there, [(str(tmp_path), x) for x in range(8)], label="test", on_death=on_death)
        found = {}
        for index, (x, where) in results:
            found[index] = (x, where)
            if not killed and (tmp_path / "begun-0").exists() and pool.counts()["up"] == 2:
                victim = (tmp_path / "begun-0").read_text()
                if victim != node.node_id:
                    pytest.skip("the waiting task came to the head, which cannot be lost")
                assert pool.num_workers == 2
                cluster.remove_node(node, allow_graceful=False)
                killed = True
        assert killed
        assert [found[index][0] for index in range(8)] == list(range(8))
        assert found[0][1] != node.node_id
        assert deaths == [(0, True)]
    finally:
        pool.close()


@pytest.mark.long
def test_a_worker_that_does_not_see_the_run_says_so(cluster: Any, tmp_path: Path) -> None:
    fence = Fence.claim(str(tmp_path / "fence.json"))
    with open_engine(1, fence=fence) as engine:
        assert dict(engine.map(abs, [(-1,)], label="test")) == {0: 1}
        (tmp_path / "fence.json").unlink()
        with pytest.raises(QuernError, match="every machine of the cluster must see the run's folder"):
            dict(engine.map(abs, [(-1,)], label="test"))
        Fence.claim(str(tmp_path / "fence.json"))
        with pytest.raises(QuernError, match="another works here now"):
            dict(engine.map(abs, [(-1,)], label="test"))


@pytest.mark.long
def test_the_autoscaler_is_asked_for_what_there_is_work_for_and_it_is_given_back(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.autoscaler.sdk as sdk

    asked: list[int] = []
    real = sdk.request_resources

    def request_resources(num_cpus: int) -> None:
        real(num_cpus=num_cpus)
        asked.append(num_cpus)

    monkeypatch.setattr(sdk, "request_resources", request_resources)
    pool = RayPool(5, autoscaled=True)
    try:
        assert asked == []
        assert len(dict(pool.map(abs, [(-x,) for x in range(3)], label="test"))) == 3
        assert asked == [3, 0], "never for more than there are tasks"
        asked.clear()
        results = pool.map(abs, [(-x,) for x in range(9)], label="test")
        next(results)
        assert asked == [5]
        results.close()
        assert asked == [5, 0], "also when the map is left early"
    finally:
        pool.close()
    asked.clear()
    with open_engine(2) as engine:
        dict(engine.map(abs, [(-1,)], label="test"))
    assert asked == [], "a Ray of this process's own has no autoscaler"
