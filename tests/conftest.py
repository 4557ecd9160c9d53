"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("quern", deadline=None, print_blob=True)  # no test depends on how fast the machine is
settings.load_profile("quern")

ROOT = Path(__file__).resolve().parents[1]

#: Files that take longest, in the order in which workers take them: one begun last would end alone.
LONGEST = (
    "test_learns.py", "test_parity.py", "test_pipeline.py", "test_tier_kill.py", "test_same_bytes.py",
    "test_checkpoint_kill.py", "test_runs.py", "test_every_token.py", "test_exact.py", "test_chaos.py",
    "test_real_pages.py", "test_checkpoint_store.py", "test_kill.py", "test_store_faults.py", "test_tiers.py",
    "test_resume.py", "test_resume_reshard.py", "test_checkpoint_reshard.py", "test_saves.py", "test_tier_faults.py",
    "test_duplicates_real_text.py", "test_selftest_cli.py", "test_extract.py", "test_isolation.py", "test_traffic.py",
    "test_train_cli.py", "test_quality.py", "test_language.py", "test_real_duplicates.py", "test_trainer_kill.py",
    "test_stages.py", "test_bench.py", "test_float8_training.py", "test_gpu_precision.py", "test_float8_gather.py",
    "test_host_sync.py", "test_checkpoint_upload.py", "test_transaction.py", "test_saving.py",
    "test_extract_trafilatura.py", "test_docs_purge.py", "test_bench_measure.py", "test_hostile.py", "test_objects.py",
    "test_engine_cluster.py", "test_cadence.py", "test_commands.py", "test_lease.py", "test_plain_equality.py",
    "test_restore_run.py", "test_index_real.py", "test_engine.py", "test_fresh_runs.py", "test_ranges_run.py",
)  # fmt: skip
#: Files whose tests share nothing that is dear: they go one by one to whichever worker is free, after all others.
ONE_BY_ONE = ("test_mutations.py",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-before",
        type=float,
        metavar="TIME",
        help="skip every test whose turn comes after this time, in seconds since 1970 (what `date +%%s` prints)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end = item.config.getoption("--begin-before")
    if getattr(item, "execution_count", 1) > 1:
        return  # a rerun: left out, it would make a crash a skip
    if end is not None and time.time() >= end:
        pytest.skip("not begun: the time for tests was over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which workers take them: the longest, then those with the most tests, then the finest."""
    tests = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, int, int, Path]:
        name = item.path.name
        rank = LONGEST.index(name) if name in LONGEST else len(LONGEST)
        return name in ONE_BY_ONE, rank, -tests[item.path], item.path

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What thousands of collected tests hold stays until the end: no later collection of garbage walks through it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else nanobind lists all it holds as leaked


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but for the files whose tests go one by one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return nodeid if file.endswith(ONE_BY_ONE) else file

    return Files(config, log)


def shared_folder() -> Path | None:
    """The corpus of real pages: beside the checkout, or where QUERN_SHARED points."""
    folder = Path(os.environ.get("QUERN_SHARED") or ROOT.parent / "shared")
    return folder if (folder / "data" / "README.md").exists() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip("the shared corpus of real pages is not beside this checkout")
    return folder


@pytest.fixture
def gpt2_ranks(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPT-2 ranks file; tiktoken finds its own copy without a network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tokenizer" / "tiktoken_cache"))
    return shared / "data" / "tokenizer" / "gpt2.tiktoken"
