"""What stands in several places of the repository is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import quern

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def classified() -> list[str]:
    found = (re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"])
    return [match[1] for match in found if match]


def torch_range() -> tuple[int, int]:
    """The minor versions of torch 2 that are taken: the first, and the last."""
    (wanted,) = (line for line in PROJECT["dependencies"] if re.match(r"torch\b", line))
    match = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", wanted)
    assert match, wanted
    return int(match[1]), int(match[2]) - 1


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= citation.keys()
    assert citation["version"] == quern.__version__
    assert citation["license"] == PROJECT["license"]


def test_the_fast_tests_run_on_every_python_and_on_both_ends_of_torch() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test-fast"]["strategy"]["matrix"]
    assert matrix["python"] == classified()
    first, last = torch_range()
    assert [entry["torch"] for entry in matrix["include"]] == [f"2.{first}.0", f"2.{last}.0"]
    readme = (ROOT / "README.md").read_text()
    assert f"Python {classified()[0]} to {classified()[-1]}, torch 2.{first} to 2.{last}" in readme


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_read_and_no_more_and_names_what_it_uses(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    assert all("timeout-minutes" in job and "permissions" not in job for job in workflow["jobs"].values())
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", name)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_makes_what_there_is_to_make(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for step in steps(read(path)):
        for target, given in re.findall(r"\bmake ([\w-]+)((?: [A-Z_]+=\S*)*)", step.get("run", "")):
            assert re.search(rf"(?m)^(?:{target}:|TESTS *:=.* {target}(?: |$))", makefile), target
            for name in re.findall(r" ([A-Z_]+)=", given):
                assert re.search(rf"(?m)^{name} +\?=", makefile), name


def test_types_are_of_the_package() -> None:
    assert (ROOT / "quern" / "py.typed").read_bytes() == b""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data["quern"]
