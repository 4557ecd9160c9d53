"""Same inputs and config, same bytes: any number of workers, any order of inputs, any hash seed, any kill."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quern.demo import write_site
from quern.errors import InputError
from support.data_pipeline.in_process import run_recipe

ROOT = Path(__file__).resolve().parents[1]


def command(run_dir: Path, paths: list[str], workers: int, recipe: str, *overrides: str) -> list[str]:
    return [
        sys.executable, "-m", "quern.cli.main", "data", "run", str(ROOT / "configs" / recipe),
        *settings(run_dir, paths, workers), *overrides,
    ]  # fmt: skip


def settings(run_dir: Path, paths: list[str], workers: int) -> list[str]:
    return [
        f"run_dir={run_dir}", f"sources.0.paths={json.dumps(paths)}", f"workers={workers}",
        "tokenize.shard_tokens=200000",
    ]  # fmt: skip


def environment(shared: Path | None, hash_seed: str = "random") -> dict[str, str]:
    extra = {"PYTHONHASHSEED": hash_seed}
    if shared is not None:
        extra["TIKTOKEN_CACHE_DIR"] = str(shared / "data" / "tokenizer" / "tiktoken_cache")
    return {**os.environ, **extra}


def run(arguments: list[str], env: dict[str, str]) -> None:
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def tokens(run_dir: Path) -> dict[str, str]:
    """File below tokens/ → digest of its bytes."""
    files = [path for path in sorted((run_dir / "tokens").rglob("*")) if path.is_file()]
    assert any(path.suffix == ".bin" and path.stat().st_size for path in files)
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def counters(run_dir: Path) -> dict[str, Any]:
    stats = json.loads((run_dir / "stats.json").read_text())
    del stats["timing"]
    return stats


def decisions(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "duplicates" / "decisions.parquet").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """(WARC files, overrides) of a small sample site."""
    site = write_site(str(tmp_path_factory.mktemp("sample") / "site"), seed=3, pages=160)
    return [str(Path(path).resolve()) for path in site.warcs], [
        f"toxicity.lexicons.en={Path(site.lexicon).resolve()}", "tokenize.shard_tokens=9000",
        "language.keep=[en,de,es,ru]",  # spaCy takes seconds to load French, in every worker
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(sample: tuple[list[str], list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run over the sample of one worker: this process, whose hash seed is any."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_recipe("demo.yaml", *overrides_of(folder, sample, 1))
    return folder


def arguments_of(folder: Path, sample: tuple[list[str], list[str]], workers: int) -> list[str]:
    paths, overrides = sample
    return command(folder, paths, workers, "demo.yaml", *overrides)


def overrides_of(folder: Path, sample: tuple[list[str], list[str]], workers: int) -> list[str]:
    paths, overrides = sample
    return [*settings(folder, paths, workers), *overrides]


#: Moments of a run to be killed at: so many files there are, plus a little.
MOMENTS = (
    (".work/markers-*/*/*", 1),
    ("commits/pages/*/*.json", 1),
    ("commits/pages/*/*.json", 3),
    ("commits/duplicates/*/*.json", 1),
    ("commits/tokens/*/*.json", 1),
    ("commits/shards/*/*.json", 1),
    ("tokens/VERSION.json", 1),
)


def kill_until_done(arguments: list[str], env: dict[str, str], run_dir: Path, draw: random.Random) -> int:
    """Start the driver and kill -9 it at each moment in turn, then let it end; return the number of kills."""
    kills = 0
    for pattern, count in MOMENTS:
        process = subprocess.Popen(arguments, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and sum(1 for _ in run_dir.glob(pattern)) < count:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.3))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        time.sleep(0.2)
    run(arguments, env)
    return kills


@pytest.mark.slow
def test_workers_input_order_and_hash_seed_change_no_byte_of_the_sample(
    sample: tuple[list[str], list[str]], whole: Path, tmp_path: Path
) -> None:
    paths, overrides = sample
    run(arguments_of(tmp_path / "b", (paths[::-1], overrides), 2), environment(None, "2"))
    assert len([name for name in tokens(whole) if name.endswith(".bin")]) > 3
    assert tokens(whole) == tokens(tmp_path / "b")
    assert decisions(whole) == decisions(tmp_path / "b")
    assert counters(whole) == counters(tmp_path / "b")


@pytest.mark.slow
def test_a_complete_run_is_left_as_it_is(sample: tuple[list[str], list[str]], whole: Path) -> None:
    overrides = overrides_of(whole, sample, 2)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    run_recipe("demo.yaml", *overrides)
    after = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    before.pop(whole / ".lock"), after.pop(whole / ".lock")
    assert before == after
    assert not (whole / ".work").exists()

    with pytest.raises(InputError, match=r"language\.threshold is 0\.65 there and 0\.9 here"):
        run_recipe("demo.yaml", *overrides, "language.threshold=0.9")

    path = sample[0][0]
    stood = os.stat(path)
    os.utime(path, ns=(1, 1))
    try:
        with pytest.raises(InputError, match="other modification times and the same sizes"):
            run_recipe("demo.yaml", *overrides)
    finally:
        os.utime(path, ns=(stood.st_atime_ns, stood.st_mtime_ns))


@pytest.mark.long
def test_kills_of_the_driver_change_no_byte_and_no_counter_of_the_sample(
    sample: tuple[list[str], list[str]], whole: Path, tmp_path: Path
) -> None:
    killed = arguments_of(tmp_path / "killed", sample, 2)
    assert kill_until_done(killed, environment(None), tmp_path / "killed", random.Random(7)) >= 4
    assert tokens(tmp_path / "killed") == tokens(whole)
    assert counters(tmp_path / "killed") == counters(whole)


@pytest.mark.shared
@pytest.mark.parametrize(
    "every", [pytest.param(6, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_workers_order_hash_seed_and_kills_change_no_byte_of_real_pages(
    shared: Path, tmp_path: Path, every: int
) -> None:
    """On every sixth file, or on all of them."""
    paths = sorted(str(path) for path in (shared / "data" / "warc").glob("*.warc.gz"))[::every]
    assert len(paths) == 12 // every
    run(command(tmp_path / "one", paths, 1, "fineweb-en.yaml"), environment(shared, "1"))
    whole = tokens(tmp_path / "one")
    draw = random.Random(11)
    for workers in (2, 4):
        draw.shuffle(paths)
        folder = tmp_path / str(workers)
        run(command(folder, paths, workers, "fineweb-en.yaml"), environment(shared, str(workers)))
        assert tokens(folder) == whole, f"{workers} workers"
        assert counters(folder) == counters(tmp_path / "one")
    killed = command(tmp_path / "killed", paths, 2, "fineweb-en.yaml")
    assert kill_until_done(killed, environment(shared, "5"), tmp_path / "killed", draw) >= 4
    assert tokens(tmp_path / "killed") == whole
    assert counters(tmp_path / "killed") == counters(tmp_path / "one")
