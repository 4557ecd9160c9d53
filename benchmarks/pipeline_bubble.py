"""How long the ranks of a pipeline wait: measured, simulated, and by formula, for every schedule.

    python benchmarks/pipeline_bubble.py [--pp 2 4] [--micro-batches 4 8 16] [--unit-ms 20] [--rounds 2] [--json]

Ranks are processes of this machine, joined by gloo, and run the training loop's own pipeline. Their stages do not
compute, they sleep: a forward one unit, the gradients of its input and of its weights one unit each. So two cores show
any number of ranks without taking time from each other, and stages are of equal cost, which is what the simulation and
the formulas assume. A rank waits whenever it does not sleep, so what is measured beyond the simulation is the cost of
sending and of torch's runtime; a sleep that lasts longer than it should counts as waiting too. The step ends when the
last rank's gradients are there. The least share of the rounds is printed, for noise only adds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quern.parallel.context.inputs import Inputs
from quern.parallel.local import LocalRanks
from quern.parallel.pipeline import Pipeline, Stage
from quern.parallel.planning.bubble import bubble
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches

DIM = 4


def closed_form(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> float | None:
    """The share of a step in which a rank waits, by formula; None without one, or where its conditions are not met.

    ``w / (w + 3 v M)`` for S ranks, v stages on each and M micro-batches, where w is what a rank waits, in units of a
    stage's forward. Whole backwards: 3 (S - 1), which for one stage a rank is (S - 1) / (S - 1 + M) (Huang et al.
    2019, GPipe, section 2.3), and else v times less of the step (Narayanan et al. 2021, section 2.2; Lamy-Poirier
    2022, section 4.1). Where gradients of weights fill the wait: S - 1 (Qi et al. 2023, Zero Bubble, tables 1 and 2,
    at equal times). DualPipeV's own figure is for forwards that run beside backwards, which is not simulated.
    """
    least = {"interleaved_1f1b": pp, "looped_bfs": pp, "interleaved_zero_bubble": pp, "zbv_zero_bubble": 2 * pp - 1}
    if schedule == "dualpipe_v" or num_micro_batches < least.get(schedule, 1):
        return None
    wait = (1 if SCHEDULES[schedule].splits_backward else 3) * (pp - 1)
    return wait / (wait + 3 * stages_per_rank * num_micro_batches)


class Clock:
    """Sleeps, and knows how many units it has slept."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s, self.units = unit_s, 0

    def sleep(self) -> None:
        time.sleep(self.unit_s)
        self.units += 1


class SlowGradient(torch.autograd.Function):
    """The identity, whose backward takes a unit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.sleep()
        return gradient.contiguous(), None  # that of a sum has strides of 0, and is sent


class SleepingStage(nn.Module):
    """One path through the graph to its input, one to its weights, so that each can be asked for alone."""

    def __init__(self, clock: Clock, last: bool) -> None:
        super().__init__()
        self.shape = SimpleNamespace(dim=DIM)
        self.clock, self.last = clock, last
        self.weight = nn.Parameter(torch.zeros(DIM))
        self.embedding = nn.Parameter(torch.zeros(1, 1, DIM))

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor,
        positions_BL: Tensor | None,
        documents: Any = None,
        hidden_BLD: Tensor | None = None,
    ) -> Any:
        self.clock.sleep()
        x_BLD = self.embedding if hidden_BLD is None else hidden_BLD
        out_BLD = SlowGradient.apply(x_BLD, self.clock) + SlowGradient.apply(self.weight, self.clock)
        return (out_BLD.sum(), torch.zeros(1)) if self.last else out_BLD


def measure(schedule: str, pp: int, numbers: list[int], unit_s: float, rounds: int) -> dict[int, float]:
    """On a rank: number of micro-batches → the share of a step in which ranks wait. Collective."""
    rank, clock = dist.get_rank(), Clock(unit_s)
    mesh = build_mesh(MeshPlan(pp=pp), "cpu")
    layout = Layout(torch.float32, mesh.plan, schedule=schedule)
    stages = [Stage(index, range(index, index + 1)) for index in layout.stages_of(rank)]
    parts: list[Any] = [SleepingStage(clock, stage.index == layout.num_stages - 1) for stage in stages]
    pipeline = Pipeline(parts, stages, mesh, layout, torch.device("cpu"))
    token = torch.zeros(1, 1, dtype=torch.long)
    shares: dict[int, float] = {}
    for number in numbers:
        inputs = [Inputs(token, token, None, None)] * number
        for turn in range(rounds + 1):
            dist.barrier()
            clock.units, start = 0, time.perf_counter()
            pipeline.forward_backward(inputs, lambda objective: objective)
            dist.barrier()
            seconds = time.perf_counter() - start
            times = torch.tensor([clock.units * unit_s, seconds], dtype=torch.float64)
            dist.all_reduce(times)
            if turn:  # the first one connects the ranks
                shares[number] = min(shares.get(number, 1.0), 1 - (times[0] / times[1]).item())
    return shares


def table(pps: list[int], numbers: list[int], unit_s: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each schedule, number of ranks and number of micro-batches that go together."""
    rows = []
    for pp in pps:
        with LocalRanks(pp, timeout_s=600) as ranks:
            for schedule, kind in SCHEDULES.items():
                v = kind.stages_per_rank or 2
                fitting = [number for number in numbers if check_micro_batches(schedule, pp, pp * v, number) is None]
                found = ranks.call(measure, schedule, pp, fitting, unit_s, rounds)[0]
                rows += [
                    {
                        "schedule": schedule, "pp": pp, "micro_batches": number, "measured": found[number],
                        "simulated": bubble(schedule, pp, v, number), "formula": closed_form(schedule, pp, v, number),
                    }
                    for number in fitting
                ]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--unit-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = table(args.pp, args.micro_batches, args.unit_ms / 1e3, args.rounds)
    if args.json:
        json.dump({"unit_ms": args.unit_ms, "rows": rows}, sys.stdout)
        print()
        return
    print(f"share of a step in which a rank waits; a unit is {args.unit_ms:g} ms; torch {torch.__version__}")
    print(f"  {'schedule':24} {'pp':>3} {'micro-batches':>13} {'measured':>9} {'simulated':>9} {'formula':>8}")
    for row in rows:
        formula = "" if row["formula"] is None else f"{row['formula']:8.1%}"
        print(
            f"  {row['schedule']:24} {row['pp']:3} {row['micro_batches']:13} {row['measured']:9.1%} "
            f"{row['simulated']:9.1%} {formula}"
        )
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
