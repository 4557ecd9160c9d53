"""The tests tested: every patch beside this file puts a fault into a copy of quern, and the tests named for it fail.

They must fail by an assertion of the comparison, or by a refusal that did not come; not by an import, a missing test or
a rank that died: a fault that stops the program needs no oracle. That the same tests pass without the patch is what the
rest of the suite says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INDEX: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "index.yaml").read_text())
TIMEOUT_S = 200
"""Of one run; about 8 s on an idle machine."""

#: Runs pytest on the copy it stands in, and on no other quern that is installed.
START = """
import pathlib, sys
import pytest, quern
assert pathlib.Path(quern.__file__).resolve().is_relative_to(pathlib.Path.cwd().resolve()), quern.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the pytest around it, and git takes ``folder`` for no part of a repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    outside = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent), "PYTHONPATH": str(folder)}
    return {**kept, **outside, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def copied(folder: Path, *parts: str) -> Path:
    folder.mkdir()
    for part in parts:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def apply(patch: Path, folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", *options, str(patch)], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{patch.name} does not fit any more; write it anew\n{done.stderr}"


def test_every_patch_stands_in_the_index_and_still_applies(tmp_path: Path) -> None:
    assert sorted(path.stem for path in HERE.glob("*.patch")) == sorted(INDEX)
    folder = copied(tmp_path / "copy", "quern")
    for name in INDEX:
        apply(HERE / f"{name}.patch", folder, "--check")


@pytest.mark.slow
def test_named_tests_are_not_among_those_left_out() -> None:
    """What a patch must fail passes without it: those tests run in the suite, and are not of the long ones."""
    nodes = {node for entry in INDEX.values() for node in entry["caught_by"]}
    options = [
        "--collect-only",
        "-o",
        "addopts=--import-mode=importlib -q",
        "-m",
        "not long and not exhaustive",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *nodes],
        cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert nodes == {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.long
@pytest.mark.parametrize("name", INDEX)
def test_a_fault_is_seen(name: str, tmp_path: Path) -> None:
    nodes = INDEX[name]["caught_by"]
    folder = copied(tmp_path / "copy", "quern", "tests")
    apply(HERE / f"{name}.patch", folder)
    result = tmp_path / "result.xml"
    done = subprocess.run(
        [sys.executable, "-c", START, "-q", "-p", "no:cacheprovider", f"--junitxml={result}", *nodes],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{name} was not seen\n{done.stdout}{done.stderr}"
    cases = list(ElementTree.parse(result).iter("testcase"))
    assert len(cases) == len(nodes)
    for case in cases:
        (problem,) = [child for child in case if child.tag in ("failure", "error", "skipped")]
        said = problem.get("message", "")
        print(f"{name}: {case.get('name')}: {said}")
        assert problem.tag == "failure"
        by_assertion = re.match(r"AssertionError\b|assert |Failed: DID NOT RAISE ", said)
        assert by_assertion, f"{name} was not seen by an assertion: {said}"
