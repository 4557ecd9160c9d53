"""How a rank joins and leaves its process group, with stand-ins for CUDA and NCCL, and over gloo."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.errors import InputError
from quern.train.processes import launch
from quern.train.processes.ranks import Ranks, choose_device, open_ranks
from support.distributed.ranks import run_ranks


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many GPUs torch sees, and what ``CUDA_VISIBLE_DEVICES`` says."""

    def see(count: int, visible: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return see


@pytest.mark.parametrize(
    ("count", "visible", "local_rank", "expected"),
    [(8, None, 5, 5), (4, "0,2,4,6", 3, 3), (1, "5", 5, 0), (1, "GPU-8f2c", 3, 0), (1, None, 0, 0)],
)
def test_a_rank_has_its_own_gpu(gpus: Any, count: int, visible: str | None, local_rank: int, expected: int) -> None:
    gpus(count, visible)
    assert choose_device("auto", local_rank) == torch.device("cuda", expected)


@pytest.mark.parametrize(("count", "visible", "local_rank"), [(4, "0,1,2,3", 4), (1, None, 1), (8, None, 8)])
def test_no_two_ranks_share_a_gpu(gpus: Any, count: int, visible: str | None, local_rank: int) -> None:
    gpus(count, visible)
    with pytest.raises(InputError, match=f"local rank {local_rank} has no GPU of its own \\({count} here\\)"):
        choose_device("cuda", local_rank)


def test_ranks_of_our_launcher_share_no_gpu_that_alone_is_visible(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows all of its processes the same ones."""
    gpus(1, "0")
    monkeypatch.setattr(launch, "launched", lambda: True)
    with pytest.raises(InputError, match="local rank 1 has no GPU of its own"):
        choose_device("cuda", 1)


def test_with_spares_the_launcher_says_which_gpu_is_a_ranks(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number: rank 1 here goes on where the last of four is."""
    gpus(4, "0,1,2,3")
    monkeypatch.setenv(launch.GPU, "3")
    assert choose_device("auto", 1) == torch.device("cuda", 3)
    monkeypatch.setenv(launch.GPU, "4")
    with pytest.raises(InputError, match="local rank 4 has no GPU of its own"):
        choose_device("cuda", 1)


@pytest.mark.parametrize("fails", [False, True])
def test_nccl_is_bound_to_the_gpu_and_not_closed_by_a_rank_that_failed(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gpus(8, None)
    called: list[Any] = []
    for name, value in (
        ("RANK", "3"),
        ("LOCAL_RANK", "3"),
        ("WORLD_SIZE", "8"),
        ("MASTER_ADDR", "m"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # put back at the end
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    def set_device(device: torch.device) -> None:
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        called.append(("set_device", device))

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: called.append((backend, how)))
    monkeypatch.setattr(dist, "is_initialized", lambda: len(called) > 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("destroyed"))
    try:
        with open_ranks("auto", 77.0) as ranks:
            assert (ranks.rank, ranks.world, ranks.device) == (3, 8, torch.device("cuda", 3))
            if fails:
                raise KeyError
    except KeyError:
        pass
    how = {"timeout": timedelta(seconds=77), "device_id": torch.device("cuda", 3)}
    expected = [("set_device", torch.device("cuda", 3)), ("cpu:gloo,cuda:nccl", how)]
    assert called == expected + ["destroyed"] * (not fails)


def _late() -> str:
    """Rank 1 comes to a collective too late for the others, in a group that was made before; on all of them."""
    rank = dist.get_rank()
    ranks = Ranks(rank, 2, torch.device("cpu"))
    pair = dist.new_group([0, 1])
    ranks.wait_at_most(0.5)
    try:
        if rank == 1:
            time.sleep(3)
        dist.all_reduce(torch.ones(1), group=pair)
    except RuntimeError as error:
        return str(error)
    return "in time"


def test_every_group_waits_as_long_as_it_is_told() -> None:
    answers = run_ranks(_late, 2, timeout_s=120)
    assert "Timed out waiting 500ms" in answers[0]
