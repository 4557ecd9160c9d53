"""A step's loss by source, and its figures by rank, against sums in float64 and counts by hand."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quern.errors import InputError
from quern.mixtures.order import Order, Phase
from quern.model.loss import IGNORE
from quern.parallel.context.inputs import Inputs
from quern.train.batches.held_out import open_held_out
from quern.train.processes.ranks import Ranks
from quern.train.step import by_rank, figures
from quern.train.step.by_rank import RankFigures
from quern.train.step.by_source import SourceLosses
from quern.train.step.validation import Validator
from support.distributed.ranks import run_ranks
from support.train import run_case as case

CPU = torch.device("cpu")
NO_UNITS = torch.nn.Linear(1, 1)


def batch_of(rng: random.Random, micro_batches: int, rows: int, length: int, sources: int) -> tuple[Any, Any]:
    """A rank's share of a step with random targets, sources and losses."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    inputs, losses = [], {}
    for number in range(micro_batches):
        targets = torch.randint(0, 50, (rows, length), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORE
        nats = torch.rand(rows, length, generator=generator, dtype=torch.float64) * 9
        nats[targets == IGNORE] = 0
        inputs.append(Inputs(targets, targets, None, None))
        losses[number] = nats
    given = torch.tensor([rng.randrange(sources) for _ in range(micro_batches * rows)])
    return SimpleNamespace(micro_batches=tuple(inputs), sources_S=given, valid_tokens=0), losses


def test_losses_by_source_are_those_of_a_loop_over_tokens() -> None:
    rng = random.Random(3)
    own, like = (
        SourceLosses(["web", "code", "books", "never"], Order([1] * 4, [9] * 4, 0)),
        torch.zeros(1, dtype=torch.float64),
    )
    parts = [batch_of(rng, 3, 2, 7, 3) for _ in range(4)]  # four ranks
    nats, targets = [0.0] * 4, [0] * 4
    for batch, losses in parts:
        for number, inputs in enumerate(batch.micro_batches):
            for row in range(2):
                source = int(batch.sources_S[2 * number + row])
                for target, loss in zip(inputs.targets_BL[row].tolist(), losses[number][row].tolist(), strict=True):
                    nats[source] += loss
                    targets[source] += target != IGNORE
    summed = torch.zeros(8, dtype=torch.float64)
    for batch, losses in parts:
        batch.valid_tokens = sum(targets)
        summed += own.of_this_rank(batch, losses, like)
    summed += own.of_this_rank(parts[0][0], None, like)  # a rank whose losses another one counts
    found = own.read(summed.tolist())
    assert found == pytest.approx({n: nats[k] / targets[k] for k, n in enumerate(["web", "code", "books"])}, rel=1e-12)


def test_a_loss_that_is_not_finite_stays_with_its_source() -> None:
    batch, losses = batch_of(random.Random(5), 1, 2, 5, 1)
    batch.sources_S, batch.valid_tokens = torch.tensor([0, 1]), 10
    losses[0][0, 0] = math.nan
    own = SourceLosses(["a", "b"], Order([1, 1], [9, 9], 0))
    found = own.read(own.of_this_rank(batch, losses, torch.zeros(1)).tolist())
    assert math.isnan(found["a"])
    expected = float(losses[0][1].sum() / (batch.micro_batches[0].targets_BL[1] != IGNORE).sum())
    assert found["b"] == pytest.approx(expected, rel=1e-6)
    batch.valid_tokens = 0  # a step that is skipped, as nothing in it is a target
    batch.micro_batches[0].targets_BL[:] = IGNORE
    losses[0].zero_()
    assert own.read(own.of_this_rank(batch, losses, torch.zeros(1)).tolist()) == {}


def test_shares_of_sources_are_those_of_a_count_of_all_samples() -> None:
    phases = [Phase(5, (1, 0, 2), 6), Phase(9, (0, 1, 0), 3)]
    order = Order([3, 1, 0], [40, 30, 20], 2, phases, global_batch=8)
    own = SourceLosses(["a", "b", "c"], order)
    seen, planned = Counter[int](), np.zeros(3)
    for step in range(12):
        sources = order.batch(step)[0].tolist()
        seen.update(sources)
        weights = np.array([3, 1, 0] if step < 5 else [1, 0, 2] if step < 9 else [0, 1, 0])
        planned += len(sources) * weights / weights.sum()
        found = own.shares(step)
        assert found["read_by_source"] == {name: seen[n] / seen.total() for n, name in enumerate("abc")}
        assert found["planned_by_source"] == pytest.approx(dict(zip("abc", planned / seen.total(), strict=True)))
    assert SourceLosses(["a"], Order([1], [9], 0)).shares(3) == {}


def test_what_is_behind_the_figures_comes_back_from_them() -> None:
    mine = figures.of_this_rank(torch.tensor([2.0, 1.5]), torch.float64, stop=3, asked=1, links=True)
    rest = {name: torch.tensor(float(n)) for n, name in enumerate(figures.Figures._fields[7:])}
    found, behind = figures.unpack(figures.pack(torch.cat((mine, torch.tensor([7.0, 8.0]).double())), **rest))
    assert (found.objective, found.loss, found.stop, found.asked, found.links) == (2.0, 1.5, 3, 1, 1)
    assert (found.norm, found.scale) == (0, 7)
    assert behind == [7.0, 8.0]


# --- ranks -----------------------------------------------------------------------------------------------------------


class Clock:
    """Marks by hand."""

    now = 0.0

    def __init__(self, device: torch.device) -> None:
        self.at = Clock.now

    def since(self, earlier: Clock) -> float:
        return self.at - earlier.at


@pytest.mark.parametrize("world", [2, 5, 12])
def test_every_rank_is_known_after_its_turn(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five slots: twelve ranks take three turns."""
    monkeypatch.setattr(by_rank, "SLOTS", 5)
    monkeypatch.setattr(by_rank, "Mark", Clock)
    monkeypatch.setattr(by_rank, "memory_gib", lambda device: 4.0)
    everyone = [RankFigures(Ranks(rank, world, CPU), NO_UNITS) for rank in range(world)]
    work = np.random.default_rng(7).permutation(world) + 1.0
    wait = [0.25] * world
    wait[0] = 2.0 * world  # it is slow by waiting
    turns = -(-world // 5)
    for step in range(turns):
        total = torch.zeros(4 * min(5, world), dtype=torch.float64)
        for rank, own in enumerate(everyone):
            own.begin()
            for part in (0.5, 1.0):  # of two micro-batches the last one counts
                Clock.now = work[rank] * part
                own.worked()
            Clock.now = 0.0
            own.settle(wait[rank])
            total += own.of_this_rank(step, total)
        known = everyone[0].read(step, total.tolist())
        seen = min(world, 5 * (step + 1))
        assert known["ranks"]["work_s"] == {
            "min": min(work[:seen]), "median": float(np.median(work[:seen])), "max": max(work[:seen]),
        }  # fmt: skip
    assert known["slowest_rank"] == 0
    assert known["ranks"]["data_wait_s"] == {"min": 0.25, "median": float(np.median(wait)), "max": 2.0 * world}
    assert known["ranks"]["memory_gib"] == {"min": 4.0, "median": 4.0, "max": 4.0}


def test_ten_thousand_ranks_send_no_more_than_a_thousand() -> None:
    own = RankFigures(Ranks(9_999, 10_000, CPU), NO_UNITS)
    assert own.of_this_rank(0, torch.zeros(1)).numel() == 4 * 1024
    assert RankFigures(Ranks(0, 1, CPU), NO_UNITS).of_this_rank(0, torch.zeros(1)).numel() == 0
    assert RankFigures(Ranks(0, 1, CPU), NO_UNITS).read(0, []) == {}


def slow_rank(run: str, paths: list[str], parallel: dict[str, int]) -> None:
    import time

    from quern.parallel.accumulation import Accumulation
    from quern.train.processes.ranks import open_ranks

    run_forward = Accumulation._run
    with open_ranks("cpu") as ranks:
        slow = ranks.rank == 1

        def slowly(self: Any, inputs: Any) -> Any:
            time.sleep(0.3 if slow else 0)
            return run_forward(self, inputs)

        Accumulation._run = slowly  # type: ignore[method-assign]
        case.live(case.settings(run, paths, parallel=parallel, micro_batch=2, steps=5))


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{"dp_replicate": 2, "dp_shard": 1}, {"dp_shard": 2}])
def test_a_rank_whose_forward_takes_longer_is_named(tmp_path: Path, parallel: dict[str, int]) -> None:
    """The step itself takes both ranks as long: the faster one waits for gradients, under FSDP2 for weights too."""
    paths = case.write_corpus(tmp_path / "data")
    run_ranks(slow_rank, 2, str(tmp_path / "run"), paths, parallel)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows[2:]:
        assert row["slowest_rank"] == 1
        assert row["ranks"]["work_s"]["max"] > 0.3  # it slept 0.3 s a micro-batch


# --- held-out sets ---------------------------------------------------------------------------------------------------


def test_sets_are_validated_by_name_beside_the_sources(tmp_path: Path) -> None:
    class Summing:
        counts = True

        def forward(self, inputs: Any) -> torch.Tensor:
            kept = [one.targets_BL[one.targets_BL != IGNORE].double() for one in inputs]
            return torch.tensor([0.0, sum(float(one.sum()) for one in kept)], dtype=torch.float64)

    web = case.write_corpus(tmp_path / "a", {"web": 20, "web.val": 20}, run_id="a")[0]
    books, wiki = case.write_corpus(tmp_path / "b", {"books": 30, "wiki": 25}, seed=2, run_id="b")

    def run(paths: list[str], **sets: str) -> dict[str, Any]:
        given = [{"name": name, "path": path} for name, path in sets.items()]
        validation = {"windows": None, **({"sets": given} if given else {})}
        config = case.settings(tmp_path / "run", paths, validation=validation, document_mask=False)
        return Validator(config, open_held_out(config), Ranks(0, 1, CPU), 0, 1, str(tmp_path)).run(Summing())

    found = run([web], loss=books, other=wiki)
    assert found["sources"] == run([web])["sources"]
    assert (found["loss"], found["tokens"]) == (run([web])["loss"], run([web])["tokens"])
    targets = np.concatenate([np.fromfile(path, "<u2")[1:] for path in sorted(Path(wiki).glob("shard_*.bin"))])
    assert found["sets"].keys() == {"loss", "other"}
    assert found["sets"]["other"]["tokens"] == pytest.approx(len(targets), abs=33)
    alone = run([wiki], only=books)
    assert (alone["loss"], alone["sources"]) == (found["sets"]["loss"]["loss"], {})


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        ("books", "none", r"validation.sets.0.path: .*none"),
        ("web", "books", r"validation.sets.0.name: expected another than those of the sources of data, got 'web'"),
        ("books", "web", r"validation.sets.0.path: .*is the same data as"),
        ("books", "web.val", r"validation.sets: .* is given twice, or is held out of a source"),
    ],
)
def test_a_set_that_cannot_be_one_is_refused(name: str, place: str, message: str, tmp_path: Path) -> None:
    web = case.write_corpus(tmp_path / "a", {"web": 20, "web.val": 20, "books": 20})[0]
    path = str(Path(web).parent / place)
    config = case.settings(tmp_path / "run", [web], validation={"sets": [{"name": name, "path": path}]})
    with pytest.raises(InputError, match=message) as caught:
        open_held_out(config)
    assert "\n" not in str(caught.value)
