"""What the GPU suite says it needs is what it needs: all of it runs where nothing else can be imported."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wheels

ROOT = Path(__file__).resolve().parents[2]
#: Together they are all parts; apart, so that two of them can run beside each other.
GROUPS = (
    "products float8 attention loss optimizer", "casts syncs selftest memory", "train suspicions checkpoint experts",
)  # fmt: skip

HIDING = """
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] in HIDDEN else found(name, path, target)
)
"""


def test_a_missing_wheel_is_named_with_its_version_and_parts(tmp_path: Path) -> None:
    there = {"torch", "numpy", "yaml", "fsspec", "typing_extensions", "annotated_types", "typing_inspection"}
    parts = ["attention", "train", "syncs"]
    found = wheels.missing(parts, lambda name: object() if name in there else None)
    assert found == {"pydantic": parts, "pydantic_core": parts, "pyarrow": ["train", "syncs"]}
    pins = tmp_path / "constraints.txt"
    pins.write_text("pydantic==2.7.1\npydantic-core==2.18.2\nother==1\n")
    text = wheels.missing_text(found, parts, pins)
    assert "lacks 3 of the wheels" in text
    assert "  pydantic==2.7.1  (all parts)" in text
    assert "  pyarrow  (train, syncs)" in text
    assert "--dest wheels pydantic==2.7.1 pydantic_core==2.18.2 pyarrow" in text
    alone = wheels.missing(parts, lambda name: None if name == "pyarrow" else object())
    assert "run without them: --part attention\n" in wheels.missing_text(alone, parts, pins)
    assert wheels.missing(parts, lambda name: object()) == {}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hidden() -> set[str]:
    """Modules that are installed here, and not on a machine that has torch and what is asked for."""
    wanted = {normal(name) for name in wheels.TRAINING.values()}
    required, seen = {"torch"}, set[str]()
    while required - seen:  # torch's own requirements, and theirs
        name = min(required - seen)
        seen.add(name)
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        required |= {normal(re.split(r"[\s;<>=!~\[(]", text)[0]) for text in texts if "extra ==" not in text}
    wanted |= required
    of = importlib.metadata.packages_distributions()
    return {module for module, names in of.items() if not (wanted | {"quern"}) & {normal(name) for name in names}}


@pytest.mark.long
@pytest.mark.parametrize("parts", GROUPS)
def test_every_part_runs_where_nothing_else_is_installed(parts: str, tmp_path: Path) -> None:
    unseen = hidden()
    assert {"transformers", "typer", "psutil", "ray", "zstandard"} <= unseen
    assert not {"torch", "numpy", "pydantic", "pyarrow", "sympy"} & unseen
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sitecustomize.py").write_text(f"HIDDEN = {unseen!r}{HIDING}")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu" / "suite.py"), "--device", "cpu", "--small", "--out",
         str(tmp_path / "out"), "--part", *parts.split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "modules")}, cwd=tmp_path, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for part in parts.split():
        assert f"### {part}\n" in done.stdout or f"| {part} |" in done.stdout
    lines = [line for line in done.stdout.splitlines() if "| skipped |" in line]
    assert all("needs CUDA" in line or "transformers is not installed" in line for line in lines)
    assert "figures say nothing" in done.stdout


def test_the_groups_are_all_parts() -> None:
    assert sorted(" ".join(GROUPS).split()) == sorted(wheels.NEEDS)
