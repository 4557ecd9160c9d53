"""What a step loses, in seconds, by hand; and that every line of a profile has its place in the report."""

from __future__ import annotations

import pytest

from quern.errors import InputError
from quern.train.profiling.account import account
from quern.train.profiling.losses import Limits, Setting, losses
from quern.train.profiling.products import Shape
from quern.train.profiling.report import report
from quern.train.profiling.result import describe_rank, of_traces
from quern.train.step.trace import read_trace
from support.train import trace_case as case

SHAPE = Shape(64, 16, 32, 1, "bfloat16", None)
SPEED = 2 * 64 * 16 * 32 / 30e-6
"""Of the one product of :func:`trace_case.on_a_gpu`, in 30 µs."""


@pytest.fixture
def found(tmp_path):
    return account(read_trace(case.write(tmp_path / "t.json", case.on_a_gpu())))


def test_losses_of_two_steps_in_seconds_of_one(found):
    limits = Limits({SHAPE: 2 * SPEED}, best=8 * SPEED, copy=1e12)
    told = {loss.what: loss for loss in losses(found, limits, Setting(False, "full", repeated=0.5))}
    assert {what: round(loss.seconds * 1e6, 6) for what, loss in told.items()} == {
        "exposed all-gather (88% of it is hidden)": 2.5,
        "exposed reduce-scatter (60% of it is hidden)": 5,
        "GEMM 64×16×32 bfloat16 at 50% of its own ceiling": 7.5,
        "GEMM 64×16×32 bfloat16, whose own ceiling is 25% of the best product": 5.625,
        "element-wise operations, norms, casts and copies": 17.5,
        "the loss without its products": 2.5,
        "optimizer, clipping and the guard": 15,
        "waiting for data and transfers": 5,
        "the device waits for the host": 10.5,
        "nothing at work on host or device": 2,
        "products computed again (50% of all; the attention and the rest of it come on top)": 7.5,
    }
    seconds = [loss.seconds for loss in told.values()]
    assert seconds == sorted(seconds, reverse=True)
    assert told["optimizer, clipping and the guard"].share == pytest.approx(30 / 165)
    assert "compile.enabled=true" in told["element-wise operations, norms, casts and copies"].remedy


def test_what_cannot_be_known_is_no_loss(found):
    told = [loss.what for loss in losses(found, Limits(), Setting())]
    assert not [what for what in told if "GEMM" in what or "again" in what]
    faster = Limits({SHAPE: SPEED / 2}, best=SPEED / 2)
    assert not [loss for loss in losses(found, faster, Setting(True, "none", 0.5)) if "GEMM" in loss.what]


def test_a_compiled_run_is_not_told_to_compile(found):
    assert not [loss for loss in losses(found, Limits(), Setting(compiled=True)) if "=true" in loss.remedy]


def test_speeds_of_products(found):
    (product,) = describe_rank(found, Limits({SHAPE: 2 * SPEED}, best=8 * SPEED), Setting())["products"]
    assert product["tflops"] == pytest.approx(SPEED / 1e12)
    assert (product["of_ceiling"], product["of_best"]) == (pytest.approx(0.5), pytest.approx(0.125))
    assert (product["s"], product["count"]) == (pytest.approx(15e-6), 0.5)


def test_a_report_has_every_class_and_the_three_largest(found):
    text = report(of_traces([found]))
    for line in (
        "GEMM",
        "attention",
        "loss",
        "optimizer",
        "element-wise",
        "communication, exposed",
        "data wait",
        "host",
    ):
        assert f"\n{line}" in text
    assert "100.0%" in text
    told = [line[3:].split(":")[0] for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")]
    assert told == [loss.what for loss in losses(found, Limits(), Setting())[:3]]


def test_two_traces_of_one_rank_are_refused(found):
    with pytest.raises(InputError, match="expected one trace a rank, got 2 of rank 0"):
        of_traces([found, found])
