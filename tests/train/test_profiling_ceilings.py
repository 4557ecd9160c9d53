"""Speeds of things done alone: work over the median of its times."""

from __future__ import annotations

import itertools

import pytest
import torch

from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe
from quern.train.profiling import ceilings
from quern.train.profiling import limits as module
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling
from quern.train.profiling.limits import measure
from quern.train.profiling.products import Shape

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Time passes in calls alone: 8 ms, 2 ms and 4 ms in turn."""
    instants = itertools.chain.from_iterable(
        (10.0 * turn, 10.0 * turn + took) for turn, took in enumerate(itertools.cycle([0.008, 0.002, 0.004]))
    )
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(instants))


def test_a_products_speed_is_its_flops_over_the_median(clock):
    assert gemm_ceiling(16, 32, 48, torch.float32, CPU) == pytest.approx(2 * 16 * 32 * 48 / 0.004)


def test_a_copys_speed_counts_reading_and_writing(clock):
    assert copy_ceiling(CPU, size=4096) == pytest.approx(2 * 4096 / 0.004)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_float8_products_speed_is_counted_alike(clock, scaling):
    kernel = available(Recipe(scaling), CPU, torch.bfloat16)  # torch 2.11 has none for the CPU
    expected = pytest.approx(2 * 16 * 32 * 48 / 0.004) if kernel else None
    assert float8_ceiling(16, 32, 48, Recipe(scaling), CPU) == expected


def test_measuring_takes_about_the_time_that_is_given(clock, monkeypatch):
    calls = []
    monkeypatch.setattr(ceilings.statistics, "median", lambda times: calls.append(len(times)) or 1.0)
    gemm_ceiling(16, 16, 16, torch.float32, CPU, seconds=0.0)
    gemm_ceiling(16, 16, 16, torch.float32, CPU, seconds=0.14)
    assert calls == [3, 30]


@pytest.mark.parametrize(
    ("sizes", "scaling"),
    [((256, 256, 256), "blockwise"), ((16, 24, 16), "rowwise"), ((16, 16, 24), "tensorwise")],
    ids=["no such kernel on a CPU", "n", "k"],
)
def test_no_kernel_no_ceiling(sizes, scaling):
    assert float8_ceiling(*sizes, Recipe(scaling), CPU) is None


def test_limits_are_of_single_products_and_the_best_of_the_compute_dtype(monkeypatch):
    monkeypatch.setattr(module, "gemm_ceiling", lambda m, n, k, dtype, device: float(m))
    monkeypatch.setattr(module, "copy_ceiling", lambda device: 7.0)
    monkeypatch.setattr(module, "_BEST", {"cpu": 50})
    plain, wide = Shape(90, 2, 2, 1, "bfloat16", None), Shape(95, 2, 2, 1, "float32", None)
    several, bytes_ = Shape(99, 2, 2, 4, "bfloat16", None), Shape(99, 2, 2, 1, "int8", None)
    limits = measure([plain, wide, several, bytes_], torch.bfloat16, CPU)
    assert limits.shapes == {plain: 90.0, wide: 95.0}
    assert (limits.best, limits.copy) == (90.0, 7.0)
    assert measure([], torch.bfloat16, CPU).best == 50.0
