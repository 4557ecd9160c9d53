"""``quern plan calibrate``: figures from readings by hand arithmetic, sources, links of gloo ranks, refusals."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.doctor import calibrate as module
from quern.doctor.calibrate import Reading, profile
from quern.model.config import ModelConfig
from quern.planner.hardware import Hardware, load_hardware
from quern.planner.time.messages import collective, solve
from quern.train.processes.ranks import Ranks
from support.distributed.ranks import run_ranks
from support.train.command_case import refused, said

SHAPES = ("--model", "debug", "--seq-len", "128", "--device", "cpu")
RATE, HOP = 2e9, 5e-5
#: Seconds of a small and a large message of each collective over two ranks, by hand: half of the bytes once over the
#: link and one hop, of an all-reduce twice.
TIMES = [256e-9 + 5e-5, 4.194304e-3 + 5e-5] * 2 + [512e-9 + 10e-5, 8.388608e-3 + 10e-5]


def inject(patch: Callable[[object, str, Any], None], times: list[float], float8: float | None = None) -> None:
    """Readings that are known in place of measured ones; what is timed runs once."""
    took, medians = iter(times), iter([0.001, 0.002, 0.004])  # of attention, sum, SwiGLU

    def seconds(call: Callable[[], object], device: torch.device, count: int) -> float:
        call()
        return 3e-6 if count == 1000 else next(took)

    def median_s(call: Callable[[], object], device: torch.device, budget: float) -> float:
        call()
        return next(medians)

    patch(module, "_seconds", seconds)
    patch(module, "median_s", median_s)
    patch(module, "gemm_ceiling", lambda m, n, k, dtype, device: 4e10 if k == 128 else 8e10)
    patch(module, "float8_ceiling", lambda m, n, k, recipe, device: float8)
    patch(module, "copy_ceiling", lambda device, size: 1e9)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inject(monkeypatch.setattr, [])
    shown = CliRunner().invoke(app, ["plan", "calibrate", str(tmp_path / "own.yaml"), "--like", "a100", *SHAPES])
    assert shown.exit_code == 0, shown.output
    assert "fragmentation: 0.05 (of a100, not measured (assumed))" in shown.output.replace("\n", " ")
    return tmp_path / "own.yaml"


def test_figures_are_the_readings_over_the_best_of_them(written: Path) -> None:
    """Products of ``debug`` (256 wide, FFN 768, 4 heads of 64, 2 of keys) over 128 tokens: in units of 128³ and twice
    that many FLOPs, those that sum over 128 are 2 + 4 + 12 + 12, the others 2 + 4 + 12 + 12."""
    found = load_hardware(str(written))
    assert found.flops == 8e10
    assert found.efficiency.products == pytest.approx(60 / (30 / 4e10 + 30 / 8e10) / 8e10)
    assert found.efficiency.attention == pytest.approx(7 * 128 * 128 * 4 * 64 / 0.001 / 8e10)
    values = 4 * 128 * 768
    assert found.memory_bytes_per_s == 1e9
    assert found.efficiency.memory == pytest.approx(10 * values / (2 * values / 1e9 + 0.006) / 1e9)
    assert found.kernel_s == 3e-6
    assert found.float8_flops is None
    (total,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert found.host_gib == found.memory_gib == pytest.approx(int(total.split()[1]) / 2**20, rel=1e-6)


def test_each_figure_has_a_source_and_others_are_those_of_like(written: Path) -> None:
    found, like = load_hardware(str(written)), load_hardware("a100")
    assert set(found.sources) == set(Hardware.model_fields) - {"title", "devices", "sources"}
    measured = {"flops", "float8_flops", "memory_bytes_per_s", "memory_gib", "host_gib", "kernel_s"}
    for field, source in found.sources.items():
        if field in measured:
            assert source.startswith("measured by quern plan calibrate on 20"), field
            assert f"torch {torch.__version__}: " in source
        elif field != "efficiency":
            assert source == f"of a100, not measured ({like.sources[field]})"
            assert getattr(found, field) == getattr(like, field), field
    assert (found.efficiency.float8, found.efficiency.links) == (like.efficiency.float8, like.efficiency.links)
    assert f"float8, links: of a100, not measured ({like.sources['efficiency']})" in found.sources["efficiency"]
    for shape in ("128×256×768", "sdpa, 128 tokens, 4 heads of 64, 2 of keys", "128×768: copy, sum"):
        assert shape in found.sources["efficiency"]


def test_a_plan_takes_the_profile_that_was_written(written: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = json.loads(
        said(capfd, "plan", "check", "configs/train-125m.yaml", "micro_batch=1", "precision=fp32",
             "compile.enabled=false", "--nproc", 1, "--gpu", written, "--json")
    )  # fmt: skip
    assert told["hardware"].endswith(", measured")
    # 256 sequences of 2,048 tokens, 6 FLOPs for each of 85 M weights in blocks, at 5.3e10 a second at most
    assert told["time"]["seconds"] > 256 * 2048 * 6 * 84.9e6 / 5.4e10


@pytest.mark.slow
def test_a_real_reading_gives_shares_of_at_most_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "local_sizes", lambda shape, tp: {"ffn.w1": (128, 128)})
    out = tmp_path / "own.yaml"
    assert CliRunner().invoke(app, ["plan", "calibrate", str(out), "--like", "h100", *SHAPES]).exit_code == 0
    found = load_hardware(str(out))
    assert all(0 < share <= 1 for share in found.efficiency.model_dump().values())
    assert 1e8 < found.flops < 1e14
    assert 1e-8 < found.kernel_s < 1e-2


def test_a_known_peak_stays_until_more_is_measured() -> None:
    base = load_hardware("h100")
    measured = {"products": Reading(500e12, "p", 600e12), "attention": Reading(400e12, "a", 400e12),
                "float8": Reading(1200e12, "f", 2000e12), "memory": Reading(2e12, "m", 3e12)}  # fmt: skip
    told = profile(base, "h100", measured, "measured", known=True)
    assert told["flops"] == 989e12
    assert told["sources"]["flops"] == f"of h100, not measured ({base.sources['flops']})"
    assert told["efficiency"]["products"] == pytest.approx(500 / 989)
    assert told["efficiency"]["attention"] == pytest.approx(400 / 989)
    assert (told["float8_flops"], told["sources"]["float8_flops"]) == (2000e12, "measured: the highest speed of f")
    assert told["efficiency"]["float8"] == pytest.approx(0.6)
    assert told["efficiency"]["memory"] == pytest.approx(2 / 3.35)
    other = profile(base, "h100", measured, "measured", known=False)
    assert (other["flops"], other["memory_bytes_per_s"]) == (600e12, 3e12)


def test_readings_are_the_median_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()
    instants = iter([0.0, 99.0, *(t for n, took in enumerate([8, 2, 4, 6, 10]) for t in (100.0 * n, 100.0 * n + took))])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(instants))
    assert module._seconds(lambda: calls.append(1), torch.device("cpu"), 4) == 6 / 4
    assert len(calls) == 6 * 4


@pytest.mark.parametrize(("kind", "ways"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_a_link_solves_the_times_of_a_small_and_a_large_message(kind: str, ways: int) -> None:
    """1 GB/s and 10 µs a hop: a ring of four sends three quarters of the bytes, in three hops."""
    small, large = (1000, ways * (0.75e-6 + 30e-6)), (4_000_000, ways * (3e-3 + 30e-6))
    rate, hop = solve(kind, 4, small, large)
    assert (rate, hop) == (pytest.approx(1e9), pytest.approx(1e-5))
    links = {"bytes_per_s": rate / 0.8, "latency_s": hop}
    own = load_hardware("h100").model_dump() | {"inside": links, "node": 4}
    assert own["efficiency"]["links"] == 0.8
    assert collective(Hardware.model_validate(own), kind, large[0], 4, 1) == pytest.approx(large[1])


@pytest.mark.parametrize("took", [1e-3, 5e-4])
def test_a_large_message_that_took_no_longer_than_a_small_one_is_refused(took: float) -> None:
    with pytest.raises(module.InputError, match="all_gather of 2 ranks: 16,384 bytes took no longer than 1,024"):
        solve("all_gather", 2, (1024, 1e-3), (16_384, took))


def joined(folder: str, names: list[str]) -> list[str]:
    """On each rank, with a host's name of its own: the profile, and what lies in ``folder`` then."""
    rank = int(os.environ["RANK"])
    inject(setattr, TIMES, 1.6e11)
    socket.gethostname = lambda: names[rank]
    told = module.calibrate(
        os.path.join(folder, "own.yaml"), "h100", ModelConfig(preset="debug").shape(1000), 128, torch.float32,
        Ranks(rank, len(names), torch.device("cpu")),
    )  # fmt: skip
    torch.distributed.barrier()
    return [json.dumps(told, sort_keys=True), *os.listdir(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "measured", "node"), [("aa", "inside", 2), ("ab", "outside", 1)])
def test_two_ranks_write_one_profile_with_their_link(names: str, measured: str, node: int, tmp_path: Path) -> None:
    (told, *files), (_, *others) = run_ranks(joined, 2, str(tmp_path), list(names))
    assert files == others == ["own.yaml"]
    found, like = load_hardware(str(tmp_path / "own.yaml")), load_hardware("h100")
    assert json.loads(told) == yaml.safe_load((tmp_path / "own.yaml").read_text())
    link = getattr(found, measured)
    assert link.bytes_per_s * found.efficiency.links == pytest.approx(RATE)
    assert link.latency_s == pytest.approx(HOP)
    assert f"over 2 ranks: {RATE:.4g} B/s" in found.sources[measured]
    assert found.node == node
    (other,) = {"inside", "outside"} - {measured}
    assert getattr(found, other) == getattr(like, other)
    assert found.float8_flops == 1.6e11
    assert found.efficiency.float8 == pytest.approx(1)


def test_machines_with_unlike_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(module.InputError, match="as many ranks on each machine, got 2, 1"):
        module.links(torch.device("cpu"), ["a", "a", "b"], 0.8)


@pytest.mark.slow
def test_what_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine\n")
    new = tmp_path / "new.yaml"
    for arguments, complaint in (
        ((there, "--like", "h100"), f"{there}: expected a new file with a name that ends in .yaml"),
        ((tmp_path / "new.json", "--like", "h100"), "new.json: expected a new file with a name that ends in .yaml"),
        ((new,), "--like: expected one of h100, "),
        ((new, "--like", "h101"), "got 'h101'"),
        ((new, "--like", tmp_path / "none.yaml"), "none.yaml: no such"),
        ((new, "--like", "h100", "--model", "nothing"), "--model: preset: "),
    ):
        assert complaint in refused("plan", "calibrate", *arguments, "--device", "cpu")
    assert there.read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there.yaml"]
