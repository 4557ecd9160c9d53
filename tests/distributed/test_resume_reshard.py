"""A run that changes its world and its layout on the way, in float64: still the run of one process."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from support.damage import flip
from support.oracles import plain_loop as PLAIN
from support.train import run_case as CASE

pytestmark = pytest.mark.slow


STEPS = 10
#: The worst that counts as equal: max |a - b| / max |b| of a tensor.
EQUAL = 1e-10
#: Windows of the held-out loss, of which two ranks take two at a time.
HELD_OUT = 13
#: Of the figures of experts those that tell whole numbers.
COUNTED = ("counts", "max_over_mean_of_layer")
#: The one that goes by the layout.
OF_RANKS = "max_over_mean_of_ranks"
ROAD = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 1)]

#: Sizes of data parallelism (replicate, shard), or a whole section ``parallel``.
Layout = tuple[int, int] | dict[str, Any]
TP2_FSDP2 = {"tp": 2, "dp_shard": 2}
PP2_FSDP2 = {"pp": 2, "dp_shard": 2}
PP2_TP2_V = {"pp": 2, "tp": 2, "dp_shard": 1, "schedule": "zbv_zero_bubble"}
EP2, EP2_FSDP2, EP2_TP2 = {"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}
SPARSE = {
    "model": {
        "num_layers": 2,
        "moe": {"num_experts": 6, "top_k": 2, "ffn_dim": 12, "first_dense": 1, "bias": True, "shared_ffn_dim": 6},
    },
    "experts": {"bias_rate": 0.05, "balance_loss": 0.1, "balance_over": "global"},
}
#: Enough layers for the two stages a rank of a V-shaped schedule, and micro-batches for all of them.
DEEP = {"model": {"num_layers": 4}, "micro_batch": 1}


def world_of(layout: Layout) -> int:
    parallel = parallel_of(layout)
    return math.prod(parallel.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "pp"))


def parallel_of(layout: Layout) -> dict[str, Any]:
    return layout if isinstance(layout, dict) else {"dp_replicate": layout[0], "dp_shard": layout[1]}


def config_for(run: str, paths: list[str], layout: Layout, **changes: Any) -> Any:
    parallel = parallel_of(layout)
    base = {
        "precision": "fp64", "steps": STEPS, "parallel": parallel, "checkpoint": {"interval": 2},
        "model": {"num_layers": 2}, "micro_batch": 2,
    }  # fmt: skip
    return CASE.settings(run, paths, **(base | changes))


def nan_at_3_and_6(data_step: int) -> float:
    return float("nan") if data_step in (3, 6) else 1.0


def live(run: str, paths: list[str], layout: Layout, kill_at: int | None, changes: dict) -> dict[str, Any]:
    """One life of this rank."""
    config = config_for(run, paths, layout, **changes)
    left = CASE.live(config, kill_at=kill_at, factor=nan_at_3_and_6)
    return {"start": left.start.step, "samples": left.samples, "state": left.state, "complete": left.complete}


def joined(ranks: list[dict[str, Any]]) -> dict[int, list]:
    """The samples of all ranks, by data step; ranks that share tensors or layers read the same ones."""
    steps = ranks[0]["samples"]
    return {step: sorted({sample for rank in ranks for sample in rank["samples"][step]}) for step in steps}


def gathered(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all stages. What several ranks hold, a second copy of the embedding too, is the same bits."""
    whole: dict[str, Any] = {}
    for rank in ranks:
        state = {name.replace("tied.weight", "embed.weight"): tensor for name, tensor in rank["state"].items()}
        if len(state) < len(rank["state"]):
            copies = {name: tensor for name, tensor in rank["state"].items() if "tied.weight" not in name}
            assert CASE.differences(copies, state) == []
        shared = whole.keys() & state.keys()
        assert CASE.differences({n: whole[n] for n in shared}, {n: state[n] for n in shared}) == []
        whole |= state
    return whole


@pytest.fixture
def paths(tmp_path):
    return CASE.write_corpus(tmp_path / "data")


def close(found: dict[int, dict], expected: dict[int, dict]) -> float:
    """Worst ratio of losses and norms; all else must be equal. Steps that are not finite have nulls."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for step, row in expected.items():
        for name, value in row.items():
            if name == "experts" and value is not None:
                told, own = ({n: v for n, v in one.items() if n != OF_RANKS} for one in (found[step][name], value))
                assert [told.pop(n, None) for n in COUNTED] == [own.pop(n, None) for n in COUNTED], step
                assert told == pytest.approx(own, rel=EQUAL)
            elif name in ("loss", "grad_norm") and value is not None:
                assert found[step][name] is not None
                worst = max(worst, abs(found[step][name] - value) / abs(value))
            else:
                assert found[step][name] == value, (step, name)
    return worst


@pytest.mark.long
@pytest.mark.parametrize("document_mask", [True, False])
def test_single_fsdp_ddp_hsdp_single(kept_ranks, tmp_path, paths, document_mask):
    """Two steps each; steps 3 and 6 are skipped under FSDP2 and HSDP. Sample ids, losses, norms, weights, moments."""
    check_road(kept_ranks, tmp_path, paths, ROAD, {"document_mask": document_mask})


@pytest.mark.parametrize(
    "tied", [pytest.param(True, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.exhaustive)]
)
def test_split_tensors_stages_shards_single(kept_ranks, tmp_path, paths, tied):
    """The same on another road; steps 3 and 6 are skipped in a pipeline and under FSDP2."""
    changes = DEEP | {"model": {**DEEP["model"], "tied_embeddings": tied}}
    check_road(kept_ranks, tmp_path, paths, [TP2_FSDP2, PP2_FSDP2, PP2_TP2_V, (1, 4), (1, 1)], changes)


@pytest.mark.long
def test_single_stages_split_tensors_stages(kept_ranks, tmp_path, paths):
    """Back the other way."""
    check_road(kept_ranks, tmp_path, paths, [(1, 1), PP2_TP2_V, PP2_FSDP2, (1, 4), TP2_FSDP2], DEEP)


@pytest.mark.long
def test_single_experts_dealt_out_single(kept_ranks, tmp_path, paths):
    """Steps 3 and 6 are skipped where experts are dealt out; biases and the last step's loads go with a run."""
    check_road(kept_ranks, tmp_path, paths, [(1, 1), EP2_FSDP2, EP2_TP2, EP2, (1, 1)], SPARSE)


def check_road(kept_ranks, tmp_path, paths, road: list[Layout], changes: dict[str, Any]) -> None:
    straight = CASE.live(config_for(str(tmp_path / "whole"), paths, (1, 1), **changes), factor=nan_at_3_and_6)
    run = str(tmp_path / "run")
    taken: dict = {}
    for number, layout in enumerate(road):
        kill_at = 2 * number + 2 if number < len(road) - 1 else None
        world = world_of(layout)
        if world == 1:
            lives = [live(run, paths, layout, kill_at, changes)]
        else:
            lives = kept_ranks(live, world, run, paths, layout, kill_at, changes)
        assert {life["start"] for life in lives} == {2 * number}
        taken |= joined(lives)
    assert all(life["complete"] for life in lives)
    assert taken == straight.samples
    worst_row = close(CASE.rows(run), CASE.rows(tmp_path / "whole"))
    worst = CASE.worst_ratio(gathered(lives), straight.state)
    print(f"{road}: losses and norms {worst_row:.1e}, weights and moments {worst:.1e}")
    assert max(worst_row, worst) < EQUAL


@pytest.mark.parametrize(
    "layout",
    [
        (1, 2),
        *(pytest.param(e, marks=pytest.mark.long) for e in (
            (2, 1), (2, 2), TP2_FSDP2, PP2_TP2_V, PP2_FSDP2, EP2,
        )),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_layout_resumes_bit_for_bit(kept_ranks, tmp_path, paths, layout):
    """In float32, on every rank."""
    more = {} if isinstance(layout, tuple) else SPARSE if "ep" in layout else DEEP
    changes = {"precision": "fp32", "checkpoint": {"interval": 3}} | more
    world = world_of(layout)
    straight = kept_ranks(live, world, str(tmp_path / "whole"), paths, layout, None, changes)
    run = str(tmp_path / "run")
    first = kept_ranks(live, world, run, paths, layout, 5, changes)
    second = kept_ranks(live, world, run, paths, layout, None, changes)
    assert {life["start"] for life in second} == {3}
    for rank in range(world):
        assert first[rank]["samples"] | second[rank]["samples"] == straight[rank]["samples"]
        assert CASE.differences(second[rank]["state"], straight[rank]["state"]) == []
    assert CASE.rows(run) == CASE.rows(tmp_path / "whole")
    biases = [value for name, value in straight[0]["state"].items() if name.endswith("ffn.bias")]
    assert (more is SPARSE) == any(bias.abs().max() > 0 for bias in biases)


def measure(run: str, paths: list[str], layout: Layout) -> None:
    config = config_for(run, paths, layout, steps=3, micro_batch=2, validation={"interval": 1, "windows": HELD_OUT})
    CASE.live(config)


@pytest.mark.long
def test_the_held_out_loss_over_two_ranks(kept_ranks, tmp_path):
    """An odd number of windows: the last batch of both ranks is filled up with what does not count. Where tensors or
    layers are split, both see the same targets, which count once."""
    rng = random.Random(4)
    made = {
        name: CASE.CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(size)] for _ in range(2)], purged=0.1)
        for name, size in {"web": 60, "web.val": 9}.items()
    }
    paths = CASE.CORPORA.write_run(tmp_path / "data", made)[:1]
    stream = [token for shard in made["web.val"] for doc in shard for token in doc.tokens]
    assert PLAIN.num_windows(stream, 32) > HELD_OUT
    for number, layout in enumerate([(1, 2), (2, 1), {"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1}]):
        run = str(tmp_path / f"run{number}")
        kept_ranks(measure, 2, run, paths, layout)
        weights = weights_of(f"{run}/checkpoints/step_00000003")
        shape = config_for(run, paths, (1, 2)).model.shape(CASE.CORPORA.VOCAB_SIZE)
        spans, start = [], 0
        for doc in (doc for shard in made["web.val"] for doc in shard):
            spans.append((start, len(doc.tokens), doc.purged))
            start += len(doc.tokens)
        total, targets = 0.0, 0
        for index in range(HELD_OUT):
            window = PLAIN.window(stream, spans, index, 32, True)
            batch = PLAIN.Batch([window.tokens], [window.targets], [window.positions], [window.documents])
            total += PLAIN.token_losses(weights, shape, batch).sum().item()
            targets += sum(target != PLAIN.IGNORE for target in window.targets)
        found = CASE.rows(run)[-3]
        assert found["tokens"] == targets
        assert math.isclose(found["loss"], total / targets, rel_tol=EQUAL)


def weights_of(path: str) -> dict[str, Any]:
    """The checkpoint's weights, read by torch's own reader."""
    import pickle

    import torch
    import torch.distributed.checkpoint as dcp

    with open(os.path.join(path, ".metadata"), "rb") as file:
        stored = pickle.load(file).state_dict_metadata
    tensors = {
        name: torch.empty(value.size, dtype=value.properties.dtype)
        for name, value in stored.items()
        if name.startswith("model.")
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def refused(run: str, paths: list[str]) -> list[str]:
    """What this rank says of a damaged shard, and of a damaged ledger."""
    said = []
    try:
        CASE.live(config_for(run, paths, (1, 2)))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        CASE.live(config_for(run, paths, (1, 2), verify_shards=False))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


def test_all_ranks_refuse_together(kept_ranks, tmp_path, paths):
    """Each rank verifies its share of the files, and rank 0 alone opens the ledger: both say what one has found."""
    shard = Path(paths[1], "shard_00001.bin")
    flip(shard, 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.jsonl").write_text("nonsense\n{}\n")
    found = kept_ranks(refused, 2, str(tmp_path / "run"), paths)
    for said in found:
        assert said[0].startswith(f"InputError: {shard}: is damaged")
        assert said[1].startswith("QuernError: rank 0: ")
        assert "ledger.jsonl: line 1 is damaged" in said[1]


def stop(run: str, paths: list[str], stop_rank: int) -> tuple[list, dict]:
    """One rank alone hears a signal in step 2."""
    import torch.distributed as dist

    config = config_for(run, paths, (1, 2), checkpoint={"interval": 0})
    left = CASE.live(config, stop_at=2 if dist.get_rank() == stop_rank else None)
    return sorted(left.samples), {"complete": left.complete, "by": left.stopped_by}


def test_a_signal_to_one_rank_stops_all_at_one_step(kept_ranks, tmp_path, paths):
    for stop_rank in (0, 1):
        run = tmp_path / f"run{stop_rank}"
        found = kept_ranks(stop, 2, str(run), paths, stop_rank)
        assert [steps for steps, _ in found] == [[0, 1, 2, 3, 4]] * 2
        other = "signal to another rank"
        assert [by["by"] for _, by in found] == ["SIGTERM" if rank == stop_rank else other for rank in range(2)]
        assert CASE.ledger(run)[-1]["step"] == 5
        assert not any(by["complete"] for _, by in found)
    assert live(str(run), paths, (1, 1), None, {})["start"] == 5


def fails_on_one(run: str, paths: list[str], rank: int, name: str) -> str:
    """``name`` of the setup fails on one rank: a node whose disk is not mounted, or is full."""
    import torch.distributed as dist

    import quern.train.setup as setup

    def failing(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device", "/a/disk")

    found = getattr(setup, name)
    if dist.get_rank() == rank:
        setattr(setup, name, failing)
    try:
        CASE.live(config_for(run, paths, (1, 2)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(setup, name, found)
    return "nothing"


def test_what_fails_on_one_rank_ends_all(kept_ranks, tmp_path):
    """And none waits in the next collective for one that has gone."""
    paths = CASE.write_corpus(tmp_path / "data", {"web": 60, "code": 25, "web.val": 9})[:2]
    for rank, name in [(1, "open_corpus"), (1, "open_held_out"), (1, "open_loader"), (1, "Validator"), (0, "Metrics")]:
        found = kept_ranks(fails_on_one, 2, str(tmp_path / name), paths, rank, name)
        assert found == [f"QuernError: rank {rank}: /a/disk: No space left on device"] * 2, name


def measured(run: str, paths: list[str], keep: bool, interval: int) -> dict[str, Any]:
    parallel = {"dp_replicate": 1, "dp_shard": 2, "reshard_after_forward": keep}
    changes = {"precision": "bf16", "steps": 3, "parallel": parallel, "validation": {"interval": interval}}
    return CASE.live(CASE.settings(run, paths, checkpoint={"interval": 1}, **changes)).state


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_weights_that_stay_gathered_after_a_held_out_loss_are_saved_and_go_on(kept_ranks, tmp_path, reshard):
    """Without a backward pass nothing reshards them; the checkpoint that follows holds the FP32 masters."""
    paths = CASE.write_corpus(tmp_path / "data", {"web": 60, "code": 25, "web.val": 9})[:2]
    often = kept_ranks(measured, 2, str(tmp_path / "often"), paths, reshard, 1)
    never = kept_ranks(measured, 2, str(tmp_path / "never"), paths, reshard, 0)
    assert CASE.differences(often[0], never[0]) == []
    resumed = kept_ranks(measured, 2, str(tmp_path / "often"), paths, reshard, 1)
    assert CASE.differences(resumed[0], never[0]) == []
