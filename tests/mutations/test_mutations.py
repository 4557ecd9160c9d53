"""The tests tested: every fault of index.yaml is put into a copy of quern, and the tests named for it fail.

They must fail by an assertion of the comparison, or by a refusal that did not come; not by an import, a missing test or
a rank that died: a fault that stops the program needs no oracle. That the same tests pass without the fault is what the
rest of the suite says.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest
import yaml

from mutations.faults import Change, applied
from quern.parallel.local import PRELOAD

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "index.yaml").read_text())
TIMEOUT_S = 200
"""Of one run, which takes seconds."""
MORE = (
    "fsspec", "hypothesis", "pyarrow.compute", "pyarrow.parquet", "pydantic.fields", "pydantic.functional_validators",
    "pydantic.main", "torch.nn.attention.varlen", "yaml",
)  # fmt: skip
"""What is imported once besides torch and pytest."""


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the pytest around it; quern is imported from ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def copied(folder: Path, *parts: str) -> Path:
    folder.mkdir()
    for part in parts:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def node_of(name: str) -> str:
    """``test_parity.py::test_x[case]`` → the same with its folder: the one file of that name that has the test."""
    file, _, test = name.partition("::")
    function = f"def {test.partition('[')[0].rpartition('::')[2]}("
    found = [path for path in (ROOT / "tests").rglob(file) if function in path.read_text()]
    assert len(found) == 1, f"{name} stands in {len(found)} files; write its entry of index.yaml anew"
    return f"{found[0].relative_to(ROOT)}::{test}"


def changed(name: str, folder: Path) -> dict[Path, str]:
    return applied([Change.of(change) for change in INDEX[name]["changes"]], folder / "quern")


@pytest.mark.slow
def test_every_fault_can_still_be_made(tmp_path: Path) -> None:
    for name in INDEX:
        for path, text in changed(name, ROOT).items():
            compile(text, str(path), "exec")


@pytest.mark.long
def test_named_tests_are_not_among_those_left_out() -> None:
    """What a fault must fail passes without it: those tests run in the suite, and are not of the exhaustive ones."""
    nodes = {node_of(name) for entry in INDEX.values() for name in entry["caught_by"]}
    options = [
        "--collect-only", "-o", "addopts=--import-mode=importlib -q", "-m", "not exhaustive", "-p", "no:cacheprovider",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *nodes],
        cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert nodes == {line for line in done.stdout.splitlines() if "::" in line}


class Runner:
    """Runs the tests of a copy of quern and its tests as they are at the time; see ``forked.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder = copied(folder, "quern", "tests")
        # By their sources' hashes: files that are changed and changed back within a second are told apart.
        assert compileall.compile_dir(folder / "quern", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        cached = {name: value for name, value in environment(folder).items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", HERE / "forked.py", *PRELOAD, *MORE],
            cwd=folder, env=cached, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: str, said: Path) -> int | None:
        """pytest's exit code, None where it took too long; ``said``: the file for what it says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = {"arguments": arguments, "said": str(said), "limit_s": TIMEOUT_S}
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, f"forked.py has ended, with code {self._process.poll()}"
        code: int | None = json.loads(line)["code"]
        return code

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        assert self._process.wait(TIMEOUT_S) == 0


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(tmp_path_factory.mktemp("faults") / "copy")
    yield made
    made.close()


@contextlib.contextmanager
def written(texts: Mapping[Path, str]) -> Iterator[None]:
    """Files with other texts, until it is left."""
    before = {path: path.read_text() for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


@pytest.fixture
def faulty(request: pytest.FixtureRequest, runner: Runner) -> Iterator[Runner]:
    with written(changed(request.getfixturevalue("name"), runner.folder)):
        yield runner


def files_of(name: str) -> list[str]:
    """What decides whether a fault is seen: the files that it changes, the tests that are to see it, and these."""
    changes = [path.relative_to(ROOT).as_posix() for path in changed(name, ROOT)]
    tests = [node_of(node).partition("::")[0] for node in INDEX[name]["caught_by"]]
    return [*changes, *tests, *(f"tests/mutations/{file}" for file in ("test_mutations.py", "forked.py", "faults.py"))]


@pytest.mark.reaches(files=files_of)
@pytest.mark.long
@pytest.mark.parametrize("name", INDEX)
def test_a_fault_is_seen(name: str, faulty: Runner, tmp_path: Path) -> None:
    nodes = [node_of(node) for node in INDEX[name]["caught_by"]]
    result, said = tmp_path / "result.xml", tmp_path / "said.txt"
    options = ("-p", "no:cacheprovider", f"--basetemp={tmp_path / 'run'}", f"--junitxml={result}")
    code = faulty.run(*options, *nodes, said=said)
    assert code == pytest.ExitCode.TESTS_FAILED, f"{name} was not seen\n{said.read_text()}"
    cases = list(ElementTree.parse(result).iter("testcase"))
    assert len(cases) == len(nodes)
    for case in cases:
        (problem,) = [child for child in case if child.tag in ("failure", "error", "skipped")]
        told = problem.get("message", "")
        print(f"{name}: {case.get('name')}: {told}")
        assert problem.tag == "failure"
        by_assertion = re.match(r"AssertionError\b|assert |Failed: DID NOT RAISE ", told)
        assert by_assertion, f"{name} was not seen by an assertion: {told}"
