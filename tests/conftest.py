"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from support.impact import Sources, changed_since
from support.programs import serve_multiprocessing

settings.register_profile("quern", deadline=None, print_blob=True)  # no test depends on how fast the machine is
settings.load_profile("quern")

ROOT = Path(__file__).resolve().parents[1]

#: Seconds a case of each test function takes, of those that take long (``make durations`` writes them anew).
DURATIONS = ROOT / "tests" / "durations.json"
NOTED_S, OTHERS_S = 0.3, 0.03
"""From where on a mean is noted, and what a case of any other function is taken to need."""
#: Files whose tests share nothing that is dear: they go one by one to whichever worker is free, after all others.
ONE_BY_ONE = ("test_mutations.py",)
#: Seconds by case, of this run of pytest.
TAKEN: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-before",
        type=float,
        metavar="TIME",
        help="skip every test whose turn comes after this time, in seconds since 1970 (what `date +%%s` prints)",
    )
    parser.addoption(
        "--changed-since",
        metavar="COMMIT",
        help="only tests that can be broken by what changed since then; all where that cannot be told",
    )
    parser.addoption(
        "--also-quarter", type=int, metavar="N", help="with --changed-since: and the N-th quarter of all others, 0 to 3"
    )
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name} for the tests that run")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    heed_signals()
    serve_multiprocessing()  # ranks are forked from a server that has imported torch
    answer_at_once(config)


def heed_signals() -> None:
    """Take signals as Python does, and so do all programs that are started here: a shell that began pytest in the
    background (``&``, nohup) made it ignore some, and every process inherits that."""
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def answer_at_once(config: pytest.Config) -> None:
    """pytest-rerunfailures asks the first process, before each test, how often it has failed, in two messages, of which
    TCP would keep the second until the first is acknowledged, 40 ms later."""
    line = getattr(getattr(config, "failures_db", None), "sock", None)
    if line is not None and hasattr(config, "workerinput"):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    end = item.config.getoption("--begin-before")
    if getattr(item, "execution_count", 1) > 1:
        return  # a rerun: left out, it would make a crash a skip
    if end is not None and time.time() >= end:
        pytest.skip("not begun: the time for tests was over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that are asked for, in the order in which workers take files: the longest first."""
    commit, quarter = config.getoption("--changed-since"), config.getoption("--also-quarter")
    if commit is not None:
        chosen = set(affected(items, commit))
        if quarter is not None:
            chosen |= {item for item in items if zlib.crc32(item.nodeid.encode()) % 4 == quarter % 4}
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    means: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    seconds: Counter[Path] = Counter()
    for item in items:
        seconds[item.path] += means.get(function_of(item.nodeid), OTHERS_S)  # type: ignore[assignment]
    items.sort(key=lambda item: (item.path.name in ONE_BY_ONE, -seconds[item.path], item.path))


def affected(items: Sequence[pytest.Item], commit: str) -> Sequence[pytest.Item]:
    """Tests that what changed since a commit can break. The mark ``reaches`` tells a case's own files."""
    changed, sources = changed_since(commit, ROOT), Sources(ROOT)
    files = None if changed is None else sources.affected(changed)
    if changed is None or files is None:
        return items
    others = sources.affected(path for path in changed if not path.endswith(".py")) or set()

    def can_break(item: pytest.Item) -> bool:
        own = item.path.relative_to(ROOT).as_posix()
        if not (mark := item.get_closest_marker("reaches")):
            return own in files
        paths = mark.kwargs["files"](**item.callspec.params)
        return own in others or any(path in others or changed & sources.reached(path).keys() for path in paths)

    return [item for item in items if can_break(item)]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TAKEN[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--record-durations") or hasattr(session.config, "workerinput"):
        return
    means: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    cases: defaultdict[str, list[float]] = defaultdict(list)
    for nodeid, seconds in TAKEN.items():
        cases[function_of(nodeid)].append(seconds)
    means |= {name: round(sum(taken) / len(taken), 1) for name, taken in cases.items()}
    noted = {name: mean for name, mean in means.items() if mean >= NOTED_S and stands(name)}
    DURATIONS.write_text(json.dumps(noted, indent=0, sort_keys=True) + "\n")


def stands(function: str) -> bool:
    path, _, name = function.partition("::")
    return (ROOT / path).exists() and f"def {name.rpartition('::')[2]}(" in (ROOT / path).read_text()


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


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Of an S3 server on loopback."""
    from support.remote import s3_server

    with s3_server.serve() as port:
        yield port


@pytest.fixture
def gpt2_ranks(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPT-2 ranks file; tiktoken finds its own copy without a network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tokenizer" / "tiktoken_cache"))
    return shared / "data" / "tokenizer" / "gpt2.tiktoken"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """A trainer that runs in this process sets the level of quern's log, and a later test would see other lines."""
    log = logging.getLogger("quern")
    before = log.level
    yield
    log.setLevel(before)
